"""Adapters by trace: parity with plain optax, an unchanged base; blocks of int8 and nf4."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import Problem, train_plain, zero_on

import zero_jax
from zero_jax.adapters.lora import Lora
from zero_jax.adapters.matrix import Dims
from zero_jax.adapters.quantised import BOUNDS, KINDS, NF4, Quantised, quantise
from zero_jax.hlo import aot, targets
from zero_jax.models import decoder, gpt
from zero_jax.plan.text_model import TextModel

DECODER = decoder.DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=10, hidden=72,
                                vocab=48, seq=16, qkv_bias=True, qk_norm=True)  # fmt: skip
GPT = gpt.GPTConfig(layers=2, width=32, heads=4, vocab=48, seq=16)
ROWS = jax.random.randint(jax.random.key(1), (24, 13), 0, 48)
KEY = jax.random.key(0)


def check_parity(loss, make, frozen, batch, tx, n, stage, remat="none"):
    """Compares with plain optax, which trains the adapters alone, and the base with its bits."""
    start = jax.jit(make)(KEY)
    plain = Problem(lambda: start["lora"], lambda x, rows: loss(start | {"lora": x}, rows), batch)
    wanted, _ = train_plain(plain, tx, 3)
    assert wanted[-1] < wanted[0]
    zero = zero_on(n, stage, frozen=frozen, remat=remat)
    params = zero.init(make, KEY)
    before, tx = zero.unshard(params)["base"], zero.optimizer(tx)
    opt_state, step, losses = tx.init(params), zero.train_step(loss, tx), []
    for _ in range(3):
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses, wanted, rtol=5e-6)
    for base in (before, zero.unshard(params)["base"]):
        for found, want in zip(*map(jax.tree.leaves, (base, start["base"])), strict=True):
            np.testing.assert_array_equal(found, want)
    return params, opt_state


MORE = [("nf4", 3, 3, "block"), ("bf16", 8, 3, "none"), ("fp32", 4, 2, "block"),
        ("nf4", 5, 0, "block"), ("int8", 6, 3, "block"), ("bf16", 7, 1, "block")]  # fmt: skip
CASES = [pytest.param(b, "all-linear", *more, marks=pytest.mark.slow) for b, *more in MORE]
CASES += [pytest.param("nf4", ["attn/q/", "mlp/"], 2, 3, "none", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("base", "targets", "n", "stage", "remat"), CASES)
def test_losses_are_those_of_one_device_and_the_base_stays(base, targets, n, stage, remat):
    model = TextModel(DECODER, Lora(rank=3, base=base, targets=targets))
    case = model.loss, model.make, model.frozen, ROWS[: 24 // n * n], optax.adamw(1e-2), n, stage
    params, opt_state = check_parity(*case, remat)
    trained = sum(x.size for x in jax.tree.leaves(zero_jax.unpad(params["lora"])))
    held = sum(x.size for x in jax.tree.leaves(zero_jax.unpad(opt_state)) if x.ndim)
    assert held == 2 * trained, "two moments of the adapters alone"


def linen_in_boxes():
    dense = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, None)))
    boxed, x = nn.Sequential([dense, nn.tanh, nn.Dense(5)]), jnp.zeros((8, 64))
    return lambda key: boxed.init(key, x), lambda p, x: jnp.mean((boxed.apply(p, x) - 1) ** 2)


def stack_that_is_sliced():
    def make(key):
        return {"stack": jax.random.normal(key, (3, 64, 64)) / 8, "last": jnp.full((64, 2), 0.05)}

    def loss(params, x):
        h = functools.reduce(lambda x, at: jnp.tanh(x @ params["stack"][at]), range(3), x)
        return jnp.mean((h @ params["last"]) ** 2)

    return make, loss


@pytest.mark.parametrize("model", [linen_in_boxes, stack_that_is_sliced])
def test_models_of_other_libraries(model):
    (make, loss), x = model(), jax.random.normal(KEY, (8, 64))
    adapted = Lora(rank=2, base="nf4").adapt(loss, jax.eval_shape(make, KEY), x)
    check_parity(adapted.loss, adapted.init(make), adapted.frozen, x, optax.sgd(0.1), 4, 3)


def test_targets_are_the_matrices_that_the_model_only_multiplies_with():
    blocks = [f"blocks/attn/{name}/kernel" for name in ("q", "k", "v", "out")]
    blocks += [f"blocks/mlp/{name}/kernel" for name in ("gate", "up", "down")]
    assert set(TextModel(DECODER, Lora()).adapted.multiplied) == set(blocks)
    # The embedding is looked up too, the head is in a function with a gradient of its own.
    names = ("attn/qkv", "attn/proj", "mlp/up", "mlp/down")
    assert set(TextModel(GPT, Lora()).adapted.targets) == {f"blocks/{n}/kernel" for n in names}
    # Some targets leave the rest quantised, without adapters.
    some = TextModel(DECODER, Lora(rank=2, targets=["attn/q/", "attn/v/"], base="nf4"))
    params = jax.eval_shape(some.make)
    assert sorted(params["lora"]) == [blocks[0], blocks[2]]
    leaves = jax.tree.leaves(params["base"], is_leaf=lambda x: isinstance(x, Quantised))
    assert sum(isinstance(x, Quantised) for x in leaves) == 7


def test_gradients_of_a_and_b_are_those_of_the_sum():
    """In models of plain functions, with matrices of any orientation and rank."""
    shapes = {"heads": (16, 3, 4), "back": (3, 4, 16)}  # (D, N, H), in einsum; two dims are summed
    shapes |= {"torch": (6, 16), "experts": (2, 6, 5)}  # (out, in); batched
    keys = zip(jax.random.split(KEY, 4), shapes.items(), strict=True)
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in keys}

    def loss(params, x):
        y = jnp.einsum("bd,dnh->bnh", x, params["heads"])
        y = jnp.einsum("bnh,nhd->bd", jnp.tanh(y), params["back"])
        z = jnp.tanh(params["torch"] @ y.T)
        return jnp.mean(jnp.einsum("ebi,eio->ebo", jnp.stack([z.T, -z.T]), params["experts"]) ** 2)

    x = jax.random.normal(KEY, (8, 16))
    adapted = Lora(rank=2, base="fp32").adapt(loss, params, x)
    dims = {"back": ((-3, -2), (-1,)), "experts": ((-2,), (-1,))}
    dims |= {"heads": ((-3,), (-2, -1)), "torch": ((-1,), (-2,))}
    assert adapted.multiplied == {name: Dims(*each) for name, each in dims.items()}
    lora = jax.tree.map(lambda a: jax.random.normal(KEY, a.shape) / 5, adapted.new(params))

    found = lambda lora: adapted.loss({"base": params, "lora": lora}, x)  # noqa: E731
    wanted = lambda lora: loss(adapted.merged({"base": params, "lora": lora}), x)  # noqa: E731
    (value, grads), (exact, want) = (jax.jit(jax.value_and_grad(f))(lora) for f in (found, wanted))
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        # Sums round by the largest elements, in another order with jax 0.12.
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6 * max(1, np.abs(b).max()))


def test_vectors_that_are_multiplied_are_no_matrices_and_casts_round_the_whole_sum():
    params = {"w": jnp.full((64, 4), 1.7), "v": jnp.ones(64), "s": jnp.ones(4)}
    params["m"], x = jnp.ones((64, 4)), jnp.ones((2, 64))

    def loss(params, x):
        y = jnp.einsum("bd,d->bd", x @ params["w"], params["s"])
        z = x @ params["w"].astype(jnp.int8).astype(jnp.float32)
        return jnp.sum(y) + jnp.sum(x @ params["v"]) + jnp.sum(z) + jnp.sum(x @ params["m"])

    adapted = Lora(rank=1, base="fp32").adapt(loss, params, x)
    assert adapted.targets == ["m"]
    given = {"base": params, "lora": adapted.new(params)}
    np.testing.assert_allclose(adapted.loss(given, x), loss(params, x), rtol=1e-6)


def test_a_stop_gradient_of_a_matrix_stops_that_of_its_adapter():
    params, x = {"w": jnp.ones((4, 4))}, jnp.ones((2, 4))

    def loss(params, x):
        return jnp.sum(x @ jax.lax.stop_gradient(params["w"])) + jnp.sum(x @ params["w"])

    adapted = Lora(rank=1, base="fp32").adapt(loss, params, x)
    lora = {"w": {"a": jnp.ones((4, 1)), "b": jnp.ones((1, 4))}}
    grads = jax.grad(lambda lora: adapted.loss({"base": params, "lora": lora}, x))(lora)
    np.testing.assert_allclose(grads["w"]["b"], 2.0 * 8)  # s = 2; once, not twice
    assert (adapted.lora.scale, Lora(rank=4, alpha=7.0).scale) == (2, 7 / 4)


def test_layers_keep_no_opened_matrix():
    """The residuals of a layer's products are packed codes, in the body of its loop."""
    model = TextModel(DECODER, Lora(rank=2, base="nf4"))

    def backward(params, rows):
        return jax.vjp(lambda x: model.loss(params | {"lora": x}, rows)[0], params["lora"])

    rows = jax.ShapeDtypeStruct((2, 13), jnp.int32)
    _, kept = jax.eval_shape(backward, jax.eval_shape(model.make), rows)
    shapes = {x.shape for x in jax.tree.leaves(kept) if jnp.issubdtype(x.dtype, jnp.floating)}
    matrices = {(2, *dims) for dims in ((32, 40), (32, 20), (40, 32), (32, 72), (72, 32))}
    assert shapes and not shapes & matrices


def a_loop_that_carries_its_matrix():
    def loss(params, x):
        layer = lambda carry, w: ((jnp.tanh(carry[0] @ w), w), None)  # noqa: E731
        return sum(map(jnp.sum, jax.lax.scan(layer, (x, jnp.zeros((4, 4))), params["w"])[0]))

    return Lora(targets="w").adapt(loss, {"w": jnp.ones((3, 4, 4))}, jnp.ones((2, 4)))


REFUSALS = [
    ("rank`=0", lambda: Lora(rank=0)), ("base.*'nf5'", lambda: Lora(base="nf5")),
    (r"targets`=\[\]", lambda: Lora(targets=[])),
    ("targets`=.*''", lambda: Lora(targets=["attn/q", ""])),
    ("'attn/qq'", lambda: TextModel(DECODER, Lora(targets="attn/qq")).adapted),
    ("embed/embedding", lambda: TextModel(DECODER, Lora(targets=["embed"])).adapted),
    (r"'\('", lambda: TextModel(DECODER, Lora(targets="(")).adapted),
    ("targets`='w'", a_loop_that_carries_its_matrix),
    ("targets`='all-linear'",
     lambda: Lora().adapt(lambda p, x: jnp.sum(x @ p), jnp.ones(4), jnp.ones((2, 4))))]  # fmt: skip


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_it_is_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()


# Blocks of int8 and nf4.

SHAPES = [((3, 130, 5), -2), ((7, 33), -1), ((2, 3, 64, 4), -3)]


def numbers(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) / 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values_are_within_their_bounds_and_numpy_and_jax_make_the_same_bits(kind, shape, dim):
    x = numbers(shape)
    packed, compiled = quantise(x, kind, dim), jax.jit(lambda x: quantise(x, kind, dim))(x)
    for ours, theirs in zip(jax.tree.leaves(packed), jax.tree.leaves(compiled), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert packed.shape == shape
    rows, at = shape[dim], dim % x.ndim
    starts = np.arange(0, rows, 64)
    largest = np.repeat(np.maximum.reduceat(abs(x), starts, at), np.diff([*starts, rows]), at)
    assert (abs(np.asarray(packed.open(jnp.float32)) - x) <= BOUNDS[kind] * largest).all()


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.25), ("nf4", 4.25)])
def test_bits_of_a_parameter_zeros_and_no_rows(kind, bits):
    packed = quantise(numbers((256, 96)), kind, -2)
    assert 8 * (packed.codes.nbytes + packed.scales.nbytes) == bits * 256 * 96
    assert isinstance(jax.tree.map(lambda x: x, packed), Quantised)
    assert not np.asarray(quantise(np.zeros((70, 2), np.float32), kind, -2).open("float32")).any()
    empty = quantise(np.zeros((3, 0, 5), np.float32), kind, -2)
    assert empty.shape == (3, 0, 5) and empty.open(jnp.float32).shape == (3, 0, 5)


def test_nf4_is_the_table_of_qlora_and_holds_its_values_exactly():
    # Appendix E of arXiv:2305.14314: 16 values, symmetric ends, an exact zero, 8 above it.
    assert len(NF4) == 16 and NF4[0] == -1 and NF4[-1] == 1 and NF4[7] == 0
    assert (np.diff(NF4) > 0).all()
    x = np.concatenate([np.tile(NF4, 4), 8 * np.tile(NF4, 4)])[:, None]
    packed = quantise(x, "nf4", -2)
    np.testing.assert_array_equal(packed.open(jnp.float32), x)
    # Rows 0 to 31 of a block are the low halves of its bytes, which another block does not change.
    np.testing.assert_array_equal(packed.codes[:32, 0] & 15, np.tile(np.arange(16), 2))
    x[64:] *= 3
    np.testing.assert_array_equal(quantise(x, "nf4", -2).codes[:32], packed.codes[:32])


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # as the arguments of a step are
@pytest.mark.parametrize("kind", KINDS)
def test_programs_for_gpus_round_the_scale_that_codes_are_made_with(kind):
    """XLA for GPUs keeps a number in fp32 where it is cast to bf16 and back."""
    mesh = zero_jax.abstract_mesh(1)
    x = jax.ShapeDtypeStruct((256, 96), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))

    def parts(x):
        packed = quantise(x, kind, -2)
        return packed.codes, packed.scales

    program = aot.compile_for(targets.target("h100"), parts, (x,), mesh).program
    kernels = [{i.kind for i in c.instructions.values()} for c in program.computations.values()]
    of_codes = [kinds for kinds in kernels if kinds & {"divide", "compare"}]
    assert of_codes and all("reduce-precision" in kinds for kinds in of_codes)
