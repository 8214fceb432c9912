"""Remat policies: saved activations and their place, FLOPs, collectives, unchanged values.

fp32 tolerance of gradients: 64 ulps of a leaf's largest element after three steps of SGD. The
recomputed forward pass runs the same operations in the same order, but XLA fuses them differently.
"""

import dataclasses
import functools
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from one_device import MERGES, trained
from problems import ODD_GPT, Problem, compare, gpt_problem, train_plain, train_zero

import zero_jax
from zero_jax import Remat
from zero_jax.plan.operations import device_part
from zero_jax.remat import policies, recompute
from zero_jax.tracing import layer_detection

TX = optax.sgd(1e-1)
ULPS = 64
WIDTH, ROWS, DEPTH = 16, 24, 5
LOOP = 4  # layers in the loop of six
WIDE, BUCKET = dataclasses.replace(ODD_GPT, layers=4, width=32), 2**12
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def plain_problem():
    """A list of layers, all of whose leaves are read before the first is used."""

    def make():
        keys = jax.random.split(jax.random.key(0), DEPTH)
        return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4, "b": jnp.ones(WIDTH)} for k in keys]

    def loss(params, x):
        for p in params:
            x = x + jnp.tanh(checkpoint_name(x @ p["w"] + p["b"], "h"))
        return jnp.mean(x**2)

    return Problem(make, loss, X)


def scanned_problem():
    """Six scanned layers, each with its own key, and a count in the carry."""

    def make():
        w = jax.random.normal(jax.random.key(0), (6, WIDTH, WIDTH)) / 4
        return {"w": w, "b": jnp.ones((6, WIDTH))}

    def loss(params, x):
        def layer(carry, given):
            (x, count), (p, key) = carry, given
            h = checkpoint_name(x @ p["w"] + p["b"], "h")
            noise = jax.random.normal(key, (WIDTH,))
            return (x + jnp.tanh(h + 0.1 * noise), count + 1), jnp.mean(x**2)

        keys = jax.random.split(jax.random.key(3), 6)
        (x, count), sizes = jax.lax.scan(layer, (x, 0), (params, keys))
        return jnp.mean(x**2) / count + 1e-3 * jnp.mean(sizes)

    return Problem(make, loss, X)


def seven_layers(reverse=True):
    """A prime number of layers has groups of three, three and one."""

    def loss(params, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w), jnp.mean(x))  # noqa: E731
        x, sizes = jax.lax.scan(layer, x, params, reverse=reverse)
        return jnp.mean(x**2) + jnp.mean(sizes * jnp.arange(7))

    return Problem(lambda: jax.random.normal(jax.random.key(0), (7, WIDTH, WIDTH)) / 4, loss, X)


def padded_problem():
    """The padding is a constant that the backward pass reads."""

    def loss(params, x):
        layer = lambda x, w: (jnp.pad(jnp.tanh(x @ w), ((0, 3), (0, 0)))[: len(x)], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    return Problem(lambda: jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / 4, loss, X)


MAKERS = {"plain": plain_problem, "scanned": scanned_problem, "gpt": gpt_problem}
MAKERS |= {"seven": functools.partial(seven_layers, False), "seven reversed": seven_layers}
MAKERS["padded"] = padded_problem
MAKERS["wide gpt"] = functools.partial(gpt_problem, WIDE)
problem = functools.cache(lambda name: MAKERS[name]())
plain = functools.cache(lambda name: train_plain(problem(name), TX, 3))

CASES = [
    ("plain", 2, "block_sqrt"), ("plain", 3, "block@host"), ("seven", 3, "block_sqrt"),
    ("seven reversed", 2, "block_sqrt"), ("padded", 3, "none"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("plain", 1, "names:h"), ("plain", 3, "dots"), ("gpt", 3, "block@host"),
        ("scanned", 1, "block_sqrt"), ("scanned", 2, "dots"), ("wide gpt", 3, "block_sqrt"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stage", "remat"), CASES)
def test_no_policy_changes_a_value(name, stage, remat):
    more = {"bucket_bytes": BUCKET} if name == "wide gpt" else {}
    found = train_zero(problem(name), TX, 3, 4, stage=stage, remat=remat, **more)
    compare(found, plain(name), ULPS)


# XLA's CPU compiler takes the barriers out and merges equal operations outside of loops: unrolled
# layers are below. A layer runs forward `again` times, at stage 3 its weights are gathered
# `gathers` times, both on average over six layers. The last layer is gathered once. The first and
# the last run outside of the loop; so do both layers of each of the three groups of `block_sqrt`.
COMPILED = [("dots", 3, 0, 11 / 6), ("block@host", 2, 4 / 6 if MERGES else 1, None)]
COMPILED += [("block_sqrt", 3, *((1, 2) if MERGES else (3 / 2, 5 / 2)))]
COMPILED += [("names@host:h@host", 3, 0, 11 / 6)]


@pytest.mark.parametrize(("remat", "stage", "again", "gathers"), COMPILED)
def test_a_compiled_step_has_the_flops_collectives_and_values(remat, stage, again, gathers):
    seen, params, audit = trained(problem("scanned"), 4, TX, 3, stage=stage, remat=remat)
    # The batch has no gradient: without groups its product is not there.
    products = (3 + again) * 6 - (remat != "block_sqrt")
    assert audit.flops == pytest.approx(products * 2 * (ROWS // 4) * WIDTH * WIDTH)
    if gathers is not None:
        # Biases, 1 of 17, are not gathered again where the sum that they are a part of is kept.
        words = {k: v / (6 * 17 * WIDTH) for k, v in audit.sent_elements.items()}
        assert words["all-gather"] == pytest.approx(gathers, abs=0.06)
        assert words["reduce-scatter"] == pytest.approx(1, abs=0.05)
    compare((seen[:, 0], params), plain("scanned"), ULPS)


# Programs of unrolled layers, compiled for H100: memory, host memory and FLOPs.

BF16 = jnp.bfloat16
D, B, T, N = 512, 8, 256, 8
LAYERS = 6
CARRY = B * T * D * 2  # bytes of a layer's input, bf16
FORWARD = 2 * B * T * D * 4 * D  # FLOPs of one of the two products of a layer


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            h = nn.LayerNorm(dtype=x.dtype)(x)
            h = nn.gelu(nn.Dense(4 * D, dtype=x.dtype)(h))
            x = x + nn.Dense(D, dtype=x.dtype)(h)
        return nn.Dense(16, dtype=x.dtype)(x)


@functools.cache
def unrolled(policy, stage=3, rows=B):
    model = Unrolled()
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage, precision="bf16", remat=policy)
    params = zero.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, T, D))))

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))

    batch = jax.ShapeDtypeStruct((N * rows, T, D), BF16)
    return zero.plan(loss, zero.optimizer(optax.sgd(0.1)), params, batch, target="h100")


@pytest.mark.compile
def test_unrolled_layers_keep_their_inputs_and_run_forward_again():
    none, block, sqrt, host = (
        unrolled(policy).compiled for policy in ("none", "block", "block_sqrt", "block@host")
    )
    # Without the second product of each, which nothing in the layer reads.
    assert block.flops - none.flops == LAYERS * FORWARD
    # Groups of two: as groups all but each one's last layer, then as layers.
    assert sqrt.flops - none.flops == LAYERS // 2 * 2 * FORWARD + LAYERS * FORWARD
    # `none` keeps of each layer its input, the norm, both sides of the GELU: 10 inputs or more.
    assert none.temp_bytes - block.temp_bytes > LAYERS * 8 * CARRY
    # The first layer's input is the batch: an argument, and on the device.
    predicted = unrolled("block@host").predicted.host
    assert host.host_bytes == predicted == (LAYERS - 1) * CARRY
    assert host.uncounted == (), "room in host memory is no library call"


@pytest.mark.compile
def test_scanned_layers_keep_their_inputs_in_host_memory():
    """Six of eight layers are in the loop. XLA compiles none that joins two saved inputs."""

    def loss(params, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jnp.square(jax.lax.scan(layer, 2 * x, params)[0].astype(jnp.float32)))

    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), 3, precision="bf16", remat="block@host")
    params = zero.eval_shape(lambda: jnp.ones((8, D, D)))
    batch = jax.ShapeDtypeStruct((N * B, T, D), BF16)
    plan = zero.plan(loss, zero.optimizer(optax.sgd(0.1)), params, batch, target="h100")
    assert plan.compiled.host_bytes == plan.predicted.host == 8 * CARRY


@pytest.mark.compile
@pytest.mark.parametrize(("stage", "policy"), [(2, "none"), (3, "block")])
def test_full_gradients_of_unrolled_layers_do_not_stay_alive(stage, policy, monkeypatch):
    """With one row a device weights are larger than activations: two layers' worth is held."""
    plan = unrolled(policy, stage, rows=1)
    layer = 4 * 8 * D * D  # a layer's gradient, fp32
    copy = 2 * LAYERS * 8 * D * D if stage == 2 else 0
    held = plan.compiled.temp_bytes - copy
    assert held < LAYERS * layer
    monkeypatch.setattr(layer_detection, "runs_of", lambda jaxpr, forms: [])
    # Leaves outside of layers are summed at once, too.
    monkeypatch.setattr(recompute, "together", lambda tree: tree)
    unknown = unrolled.__wrapped__(policy, stage, rows=1)
    assert unknown.compiled.temp_bytes - copy > held + layer // 4, "or this shows little"


# Saved activations, in traces.


def step_of(p, remat, stage=3, **settings):
    """A traced step on four devices."""
    p = problem(p) if isinstance(p, str) else p
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), stage, remat=remat, **settings)
    params, tx = zero.eval_shape(p.make), zero.optimizer(TX)
    batch = jax.ShapeDtypeStruct(p.batch.shape, p.batch.dtype)
    return zero.train_step(p.loss, tx).trace(params, tx.init(params), batch)


def stacks(jaxpr):
    """Types of the values that forward loops over layers hand to the backward pass."""
    found = []
    for eqn in device_part(jaxpr).eqns:
        if eqn.primitive.name == "scan" and "transpose(" not in str(eqn.source_info.name_stack):
            # Of rank 3 or more: not the loss and the sizes that the loop returns.
            found += [v.aval for v in eqn.outvars if v.aval.ndim > 2]
    return found


SHARE = (
    4,
    ROWS // 4,
    WIDTH,
)  # of a value kept by the four layers in the loop, on one of four devices
GROUPS = (3, *SHARE[1:])
KEPT = [  # policy, stage, shapes, and which are on the host
    ("block", 3, [SHARE], [0]), ("names:h", 0, [SHARE, SHARE], [0, 0]),
    ("dots", 3, [SHARE, SHARE], [0, 0]), ("block_sqrt", 0, [GROUPS], [0]),
    ("block@host", 3, [SHARE], [1]), ("names:h@host", 3, [SHARE, SHARE], [0, 1]),
    ("names@host:h", 0, [SHARE, SHARE], [1, 0]), ("block_sqrt@host", 0, [GROUPS], [1]),
]  # fmt: skip


@pytest.mark.parametrize(("remat", "stage", "shapes", "on_host"), KEPT)
def test_scanned_layers_keep_what_the_policy_says(remat, stage, shapes, on_host):
    found = stacks(step_of("scanned", remat, stage).jaxpr)
    assert [v.shape for v in found] == shapes
    assert [v.memory_space == jax.memory.Space.Host for v in found] == on_host


def test_a_value_that_the_model_axis_does_not_divide_is_padded_and_restored():
    x = jnp.arange(15.0).reshape(5, 3)
    place = policies.parse("block@partitioned").inputs

    def there_and_back(x):
        kept = place.put(x)
        assert kept.shape == (4,)
        return place.fetch(kept, x)

    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}
    assert (jax.shard_map(there_and_back, mesh=mesh, **specs)(x) == x).all()


# JAX's own policies: the same values are saved as by `jax.checkpoint`.

KNOWN = jax.checkpoint_policies
POLICIES = {
    **{name: getattr(KNOWN, name) for name in (
        "everything_saveable", "nothing_saveable", "dots_saveable",
        "dots_with_no_batch_dims_saveable")},
    **{name: getattr(KNOWN, name)("up") for name in (
        "save_anything_except_these_names", "save_any_names_but_these", "save_only_these_names")},
    "offload_dots": KNOWN.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "offload_names": KNOWN.save_and_offload_only_these_names(
        names_which_can_be_saved=["up"], names_which_can_be_offloaded=["mixed"],
        offload_src="device", offload_dst="pinned_host"),
    "both": KNOWN.save_from_both_policies(
        KNOWN.save_only_these_names("up"), KNOWN.save_only_these_names("mixed")),
    "a callable": lambda prim, *_, **params: prim.name == "tanh"}  # fmt: skip


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k = nn.Dense(WIDTH, name="q")(x), nn.Dense(WIDTH, name="k")(x)
        mixed = checkpoint_name(jnp.tanh(q @ k.mT) @ x, "mixed")
        up = checkpoint_name(nn.Dense(2 * WIDTH, name="up")(x + mixed), "up")
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(up)), None


def flax_layers(layers, name=None):
    """Layers; with a policy, each is checkpointed by Flax."""
    layer = Layer if name is None else nn.remat(Layer, prevent_cse=False, policy=POLICIES[name])
    scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": layers}
    model, x = nn.scan(layer, **scan)(), jax.random.normal(jax.random.key(1), (ROWS, 4, WIDTH))
    loss = lambda params, x: jnp.mean(model.apply(params, x, None)[0] ** 2)  # noqa: E731
    return Problem(lambda: model.init(jax.random.key(0), x[:1], None), loss, x)


def saved(jaxpr):
    """Shape, dtype and place of the values that the forward loop hands to the backward pass.

    Without a weight's broadcast, which has no rows: zero_jax makes it of the gathered weight.
    """
    eqn = next(e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == LOOP)
    reads = {a for e in jaxpr.eqns for a in e.invars if not hasattr(a, "val")}
    avals = [v.aval for v in eqn.outvars if v in reads or v in jaxpr.outvars]
    kept = [a for a in avals if a.ndim > 2 and a.shape[0] == LOOP and a.shape[1] > 1]
    return sorted((a.shape, str(a.dtype), str(a.memory_space)) for a in kept)


def by_zero_jax(p, remat, stage=3):
    return saved(device_part(step_of(p, remat, stage).jaxpr))


def by_jax(name):
    p = flax_layers(LOOP, name)
    grad = jax.value_and_grad(p.loss)
    return saved(jax.make_jaxpr(grad)(jax.eval_shape(p.make), p.batch[: ROWS // 4]).jaxpr)


USUAL = {"dots_with_no_batch_dims_saveable", "save_any_names_but_these", "offload_names"}
MARKED = [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in POLICIES]


@pytest.mark.parametrize("name", MARKED)
def test_saved_values_are_those_of_jax_checkpoint(name):
    assert by_zero_jax(flax_layers(LOOP + 2), POLICIES[name]) == by_jax(name)


def test_a_checkpoint_of_the_model_saves_the_same():
    assert by_zero_jax(flax_layers(LOOP + 2, "a callable"), "none", 0) == by_jax("a callable")


# Unsupported policies raise errors that name them.

# A mesh, and its only device, without host memory.
MEMORY = types.SimpleNamespace(kind="device")
BARE = types.SimpleNamespace(axis_names=("data",), addressable_memories=lambda: [MEMORY])
BARE.local_devices = [BARE]


def zero(remat, **options):
    return lambda: zero_jax.Zero(zero_jax.make_mesh(), remat=remat, **options)


def marked(mark, scanned):
    """A weight is marked by the name."""

    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(x @ checkpoint_name(mark(w), "weight")), None)  # noqa: E731
        if scanned:
            return jnp.mean(jax.lax.scan(layer, x, params)[0])
        return jnp.mean(functools.reduce(lambda x, w: layer(x, w)[0], params, x))

    stack = jnp.zeros((4, WIDTH, WIDTH))
    p = Problem(lambda: stack if scanned else list(stack), loss, X)
    return lambda: step_of(p, "names:weight")


REFUSALS = [
    ("remat`='blok'.*'block'", zero("blok")), ("'hosst'.*'host'", zero("block@hosst")),
    *((f"remat`='{re.escape(text)}'", zero(text)) for text in (
        "dots@host", "names", "block:h", "names:", "names:a,a@host", "names:a@partitioned+host")),
    ("block@partitioned.*data.*model=2", zero("block@partitioned")),
    ("activations.*remat`='none'", zero("none", offload="activations")),
    ("block@host.*device", lambda: policies.check("block@host", BARE)),
    *(("'g'.*: h", lambda name=name: step_of(name, "names:h,g")) for name in ("plain", "scanned")),
    *(("'weight'", marked(mark, scanned)) for mark, scanned in (
        (lambda w: w, False), (lambda w: w.T, True), (lambda w: w @ w.T, False))),
    ("activations.*remat", zero(KNOWN.dots_saveable, offload="activations")),
    ("'hots'.*'host'", lambda: Remat("block", "hots")), ("policy", lambda: Remat("jax")),
    ("comma", lambda: Remat("names", names={"a,b": "host"})),
    ("no @", lambda: Remat("names", names=["a@host"])), (r"remat`=\['block'", zero(["block"])),
    ("decides both", lambda: Remat("jax", "host", policy=KNOWN.dots_saveable)),
    ("policy", lambda: Remat("dots", policy=KNOWN.dots_saveable))]  # fmt: skip


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_remat_refusals(named, call):
    with pytest.raises(ValueError, match=named):
        call()


SPELLED = [(Remat("block", "host"), "block@host"), (Remat("block_sqrt"), "block_sqrt@device"),
           (Remat("block", "partitioned+host"), "block@partitioned+host"),
           (Remat("names", names={"a": "host", "b": "device"}), "names:a@host, b"),
           (Remat("names", names=["a", "b"]), "names:a,b"),
           (Remat("names", "host", [("a", "partitioned")]), "names@host:a@partitioned"),
           (Remat("jax", policy=KNOWN.dots_saveable), KNOWN.dots_saveable)]  # fmt: skip


@pytest.mark.parametrize(("policy", "text"), SPELLED)
def test_a_policy_equals_its_text(policy, text):
    assert policies.parse(text) == policies.parse(policy) == policy
    mesh = zero_jax.abstract_mesh(4, model=2)
    ours, theirs = (zero_jax.Zero(mesh, "auto", remat=own) for own in (policy, text))
    assert ours.config.remat == theirs.config.remat == (policy if callable(text) else str(policy))
    policies.check("block", BARE)  # needs no host memory
