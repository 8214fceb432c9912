"""Models and losses of others: derivatives inside and outside, annotations, libraries."""

import functools
import inspect
import re

import equinox as eqx
import equinox.internal as eqxi
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from one_device import Case, check_gradients, check_parity, zero_on
from problems import ulps

import zero_jax

ROWS, D = 16, 8
X = jax.random.normal(jax.random.key(1), (ROWS, D))
IDS = 2 * jnp.arange(ROWS)
DOTS = jax.checkpoint_policies.dots_saveable
TABLE = np.linspace(0.5, 1.5, 4, dtype=np.float32)
SCALE = {"temperature": jnp.float32(0.7), "weight": jnp.float32(0.4)}
# The table has so many rows that a device is sent those it reads.
SHAPES = {"scanned": (2, D, D), "unrolled": (2, D, D), "table": (5 * D, D), "bias": (2, D)}
KEYS = jax.random.split(jax.random.key(0), len(SHAPES))
START = {n: jax.random.normal(k, SHAPES[n]) / 3 for n, k in zip(SHAPES, KEYS, strict=True)}
START["frozen"] = jnp.eye(D) + START["scanned"][1]


def with_vjp(fn, kept, backward):
    """With a function of residues and cotangents; the residues are a function of the arguments."""
    own = jax.custom_vjp(fn)
    own.defvjp(lambda *args: (fn(*args), kept(*args)), backward)
    return own


def of_product(scale):
    """The derivatives of a product whose cotangent is scaled."""

    def backward(kept, ct):
        x, w = kept
        ct = ct * scale(x @ w)
        return ct @ w.T, x.T @ ct

    return backward


turned = with_vjp(lambda x, w: jnp.sin(x @ w), lambda *args: args, of_product(jnp.cos))


def errors(params, batch, scale):
    """Layers in a scan, layers with gradients of their own, and layers with a policy."""
    x, ids = batch
    x = lax.cond(params["bias"][0, 0] < 9, jnp.matmul, lambda x, w: x, x, params["unrolled"][0])
    x = turned(x, params["scanned"][0]) + params["table"][ids]
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["scanned"])[0]
    for w, bias in zip(params["unrolled"], params["bias"], strict=True):
        x = turned(x, w) + bias
    layer = jax.checkpoint(lambda x, w, bias: jnp.tanh(x @ w + bias), policy=DOTS)
    for w, bias in zip(params["scanned"], params["bias"], strict=True):
        x = layer(x, w, bias)
    return jnp.sum((x @ params["frozen"] * scale["temperature"] - 1.0) ** 2, axis=1)


def mean(params, batch, scale):
    return jnp.mean(errors(params, batch, scale))


def weighted(params, batch, scale):
    constant = lax.stop_gradient(jax.nn.sigmoid(params["bias"][0, 0]))
    weights = jax.nn.sigmoid(scale["weight"] * batch[0][:, 0]) + constant
    return zero_jax.Weighted(jnp.sum(errors(params, batch, scale) * weights), jnp.sum(weights))


def near(found, wanted, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-6


def derivatives(evaluate, grad_fn, params):
    """Derivatives of a loss and of its gradients, by parameters, batch and extra argument."""

    def value(params, x, scale):
        return evaluate(params, (x, IDS), scale)[0]

    def slopes(params, x, scale):
        loss, grads = grad_fn(params, (x, IDS), scale)
        return loss + sum(jnp.sum(jnp.sin(g) ** 2) for g in jax.tree.leaves(grads))

    fns = [jax.grad(fn, (0, 1, 2)) for fn in (value, slopes)]
    return jax.jit(lambda *args: [fn(*args) for fn in fns])(params, X, SCALE)


# Rounding to int8 has no derivatives: they are those of the values before it.
INT8 = zero_jax.Precision(param_comm_dtype="int8", grad_comm_dtype="int8")
RUNS = [(weighted, {"remat": "block"})]
RUNS += [pytest.param(mean, {"precision": INT8}, marks=pytest.mark.slow)]
RUNS += [pytest.param(mean, {"stage": 1, "grad_accum_steps": 2}, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("loss", "settings"), RUNS)
def test_derivatives_by_everything(loss, settings):
    zero = zero_on(frozen="frozen", **settings)

    def alone(params, batch, scale):
        def objective(trained):
            out = loss({**params, **trained}, batch, scale)
            return out.sum / out.weight if loss is weighted else out

        return jax.value_and_grad(objective)({n: x for n, x in params.items() if n != "frozen"})

    ours = derivatives(zero.evaluate(loss), zero.value_and_grad(loss), zero.shard(START))
    for found, want in zip(ours, derivatives(alone, alone, START), strict=True):
        near((zero.unshard(found[0]), *found[1:]), want, 0.1 if "precision" in settings else 1e-3)


def test_captured_arrays_and_steps():
    """A captured array under trace has a derivative; keys and counts beside it have none."""
    zero, tx = zero_on(), optax.sgd(0.1)
    params, key = zero.shard(START), jax.random.key(3)

    def ours(scale):
        def loss(params, batch, key, count):
            metric = jnp.sqrt(scale["weight"] * 0)  # its derivative is infinite
            return mean(params, batch, scale) + jax.random.uniform(key, ()) * 0 + count, metric

        return zero.value_and_grad(loss, has_aux=True)(params, (X, IDS), key, 1)[0][0]

    def stepped(scale):
        own = zero.optimizer(tx)
        step = zero.train_step(mean, own).function
        return jnp.sum(step(params, own.init(params), (X, IDS), scale)[0]["unrolled"] ** 2)

    def stepped_alone(scale):
        grads = jax.grad(mean)(START, (X, IDS), scale)
        return jnp.sum((START["unrolled"] - 0.1 * grads["unrolled"]) ** 2)

    def both(*fns):
        return jax.jit(lambda scale: [jax.grad(fn)(scale) for fn in fns])(SCALE)

    wanted = both(lambda scale: mean(START, (X, IDS), scale), stepped_alone)
    near(both(ours, stepped), wanted)
    near(jax.grad(ours)(SCALE), wanted[0])


straight_through = with_vjp(lambda x: (x > 0) * 1.0, lambda x: None, lambda _, c: (c,))
# Ignores w and gives it a gradient, as scalers of an auxiliary loss do.
injected = with_vjp(
    lambda x, w: x + 1, lambda x, w: w, lambda w, c: (c, jnp.ones_like(w) * jnp.mean(c))
)
of_table = of_product(lambda _: TABLE)
closing_over = with_vjp(lambda x, w: (x @ w) * TABLE, lambda *args: args, of_table)


def gated(w, y, done):
    return jnp.where(done, y, jnp.tanh(y @ w))


gated_vjp = with_vjp(
    gated, lambda w, y, done: (w, y), lambda kept, c: (kept[1].T @ c, c @ kept[0].T, None)
)
gated_jvp = jax.custom_jvp(gated)
gated_jvp.defjvp(lambda primals, tangents: (gated(*primals), tangents[1] @ primals[0]))


def with_unused_metric(x, w, b):
    """The derivative of the metric is infinite; it comes from a branch in a loop."""

    def body(x, _):
        one = lambda x: (x @ w, jnp.sqrt(jnp.abs(x - x)).sum())  # noqa: E731
        x, metric = lax.cond(x.mean() > 0, one, lambda x: (x + b, x.sum()), x)
        return jnp.tanh(x), metric

    return lax.scan(body, x, None, length=2)[0]


LAYER = {
    "straight through": lambda x, w, b: x @ straight_through(w) / 4 + x @ w + b,
    "straight through activations": lambda x, w, b: straight_through(x @ w + b) - 0.5,
    "injected": lambda x, w, b: injected(jnp.tanh(x @ w), b),
    "closing over": lambda x, w, b: jnp.tanh(closing_over(x, w) + b),
    "on the host": lambda x, w, b: jnp.tanh(x @ w + b + jax.pure_callback(
        lambda b: 2 * np.asarray(b), jax.ShapeDtypeStruct((4,), "f4"), lax.stop_gradient(b))),
    "unused metric": with_unused_metric,
    # A carry with a number of each kind, which JAX wraps, and one that NumPy has wrapped.
    "bool in scan": lambda x, w, b: lax.scan(lambda c, _: ((gated(w, *c[:2]), *c[1:]), None), (
        x + b, False, 1, 2.0, 1j, np.bool_(True)), None, length=2)[0][0],
    # Each layer takes a `bool`, and returns one for the next and one for the stack.
    "bool in layers": lambda x, w, b: lax.scan(jax.checkpoint(
        lambda c, w: ((gated(w, *c), False), True)), (x + b, False), jnp.stack([w, w.T]))[0][0],
    "bool in cond": lambda x, w, b: lax.cond(
        jnp.sum(w) > 1e9, lambda w, y, done: y, gated, w, x + b, False),
    "bool in custom_vjp": lambda x, w, b: gated_vjp(w, x + b, b.astype(int)),
    "bool in custom_jvp": lambda x, w, b: gated_jvp(w, x + b, False),
    "bool in checkpoint": lambda x, w, b: jax.checkpoint(gated)(w, x + b, False),
    "bool as a result": lambda x, w, b: b + gated(w, *jax.checkpoint(
        lambda w, y: (jnp.tanh(y @ w), False), policy=DOTS)(w, x))}  # fmt: skip


@pytest.mark.parametrize(
    ("count", "stage", "remat"), [(3, 3, "block"), (1, 0, "none"), (1, 3, "none")]
)
def test_gradients_are_those_of_jax(count, stage, remat):
    """The loss is a mean over devices of that of their two rows each."""
    keys = jax.random.split(jax.random.key(0), 3)[-count:]
    layers = [(jax.random.normal(key, (4, 4)) / 2, jnp.full(4, 0.1)) for key in keys]

    def one(layer, params, x):
        for w, b in params:
            x = layer(x, w, b)
        return jnp.mean(x**2)

    def loss(params, x):
        return sum(one(layer, params[name], x) for name, layer in LAYER.items())

    def mean(params, x):
        return jnp.mean(jax.vmap(lambda x: loss(params, x))(x.reshape(4, 2, 4)))

    params, settings = dict.fromkeys(LAYER, layers), {"stage": stage, "remat": remat}
    want = check_gradients(loss, params, X[:8, :4], 4, 1e-5, mean, **settings)
    for name, leaves in want.items():
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(leaves)) > 1e-4, name


# Sharding annotations in a loss change no value; one that JAX does not take is an error.

W = START["scanned"][0]
AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2
MESHES = {1: {"data": 4}, 2: {"data": 2, "model": 2}}
SPECS = {1: {}, 2: {"param_specs": {".*": P(None, "model")}}}


def fsdp(devices=4, types=AUTO):
    mesh = jax.make_mesh((devices, 1), ("fsdp", "tensor"), types, devices=jax.devices()[:devices])
    return NamedSharding(mesh, P("fsdp"))


def rows(x, devices=4):
    return lax.with_sharding_constraint(x, fsdp(devices))


def named(x, mesh=None):
    with nn.logical_axis_rules((("batch", "fsdp"), ("embed", "tensor"))):
        return nn.with_logical_constraint(x, ("batch", "embed"), mesh=mesh)


def nested(x):
    """In the bodies of a layer, of a loop and of a branch; of two meshes in one operation."""
    x = jax.checkpoint(lambda x: rows(jnp.sin(x)))(x)
    x = lax.scan(lambda c, _: (rows(c) + rows(c, 1), None), x, None, length=2)[0]
    return lax.cond(jnp.sum(x) < 1e9, rows, jnp.sin, x)


def looped(kind):
    """Equinox compares types of arrays, which in a `shard_map` have the mesh in them."""

    def loop(x, w):
        step = lambda c: (jnp.tanh(c[0] @ w), c[1] + 1)  # noqa: E731
        start = x, jnp.asarray(0)
        return eqxi.while_loop(lambda c: c[1] < 2, step, start, max_steps=4, kind=kind)[0]

    return loop, lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w)


def same(x, *_):
    return x


# Functions of activations and their parameter: with annotations, and without.
FORMS = {
    "four devices": (lambda x, w: rows(x), same), "one device": (lambda x, w: rows(x, 1), same),
    "rows over data": (lambda x, w: lax.with_sharding_constraint(
        x, NamedSharding(zero_on().mesh, P("data"))), same),
    "logical, a mesh": (lambda x, w: named(x, fsdp().mesh), same),
    "logical, no mesh": (lambda x, w: named(x), same),
    "device_put": (lambda x, w: jax.device_put(x, fsdp()), same),
    "jit": (lambda x, w: jax.jit(jnp.sin, in_shardings=fsdp())(x), lambda x, w: jnp.sin(x)),
    "nested": (lambda x, w: nested(x), lambda x, w: 4 * jnp.sin(x)),
    "checkpointed loop": looped("checkpointed"), "bounded loop": looped("bounded")}  # fmt: skip
# A mesh with a model axis is visible to Flax, whose rules then have to name its axes.
VISIBLE = ["four devices", "logical, a mesh", "nested"]
UNSUPPORTED = {
    "with_sharding_constraint": lambda x: lax.with_sharding_constraint(x, P("data")),
    "reshard": lambda x: jax.sharding.reshard(x, fsdp(types=EXPLICIT)),
    "explicit_axes": lambda x: jax.sharding.explicit_axes(jnp.sin, in_sharding=P("fsdp"))(x),
    "out_sharding=": lambda x: jnp.einsum("ab,bc", x, jnp.ones((8, 8)), out_sharding=P("fsdp")),
    "shard_map": lambda x: jax.shard_map(
        jnp.sin, mesh=fsdp().mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(x),
    "device_put": lambda x: jax.device_put(x[:3], fsdp())}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "model", "names"), [(0, 1, FORMS), (3, 1, FORMS), (3, 2, VISIBLE)]
)
def test_annotations_change_no_value(stage, model, names):
    def loss(which, params, x):
        hidden = [(FORMS[name][which], jnp.tanh(x @ params[name]), params[name]) for name in names]
        return sum(jnp.mean(form(h, w) ** 2) for form, h, w in hidden)

    ours, plain = (functools.partial(loss, which) for which in (0, 1))
    settings = SPECS[model] | {"stage": stage, "plain": plain}
    check_gradients(ours, dict.fromkeys(names, W), X, MESHES[model], **settings)


def differentiated(fun, model=1):
    zero = zero_on(MESHES[model], **SPECS[model])
    loss = lambda p, x: jnp.mean(fun(jnp.tanh(x @ p["w"])) ** 2)  # noqa: E731
    return jax.jit(zero.value_and_grad(loss)).lower(zero.eval_shape(lambda: {"w": W}), X).as_text()


@pytest.mark.parametrize("spec", [P(None, "model"), P("data", "model")])
def test_annotations_over_the_model_axis_stay(spec):
    own, name = NamedSharding(zero_on(MESHES[2]).mesh, spec), "sharding_constraint"
    with_own = differentiated(lambda x: lax.with_sharding_constraint(x, own), 2)
    assert with_own.count(name) > differentiated(same, 2).count(name)


# A mesh with a model axis is no mesh with explicit axes: JAX says so at the next operation.
LINES = [(name, n) for name in UNSUPPORTED for n in (1, 2) if (name, n) != ("reshard", 2)]


@pytest.mark.parametrize(("name", "model"), LINES)
def test_an_unsupported_annotation_names_its_line(name, model):
    first = inspect.getsourcelines(UNSUPPORTED[name])[1]
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        differentiated(UNSUPPORTED[name], model)
    file, line = str(caught.value).split(": ")[0].rsplit(":", 1)
    assert file == __file__ and first <= int(line) <= first + 1


def test_other_errors_beside_annotations_stay():
    with pytest.raises(ValueError, match="Incompatible shapes"):
        differentiated(lambda x: rows(x) + jnp.ones(5))
    with pytest.raises(TypeError, match="dot_general"):
        differentiated(lambda x: rows(x) @ jnp.ones((3, 3)))


# Unchanged models: Equinox, Haiku, linen, NNX, plain functions.

TENS, KEY, WIDTH = jax.random.normal(jax.random.key(1), (24, 10)), jax.random.key(0), 10


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None


class Linen(nn.Module):
    """Scanned layers, perhaps with remat; attention with named dims, a norm of weights, a
    convolution, computed parameters. (Biases of keys have a true gradient of zero.)"""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        doubled = lambda variables: jax.tree.map(lambda w: w + jnp.flip(w, 0), variables)  # noqa: E731
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x = nn.scan(layer, **kinds, length=4)()(x, None)[0]
        x = jnp.stack([x, jnp.sin(x), x * x, jnp.cos(3 * x)], 1)  # four vectors for each row
        dense = nn.map_variables(nn.Dense, "params", doubled, init=True)
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None, None))
        x = x + nn.MultiHeadDotProductAttention(2, kernel_init=boxed, use_bias=False)(x)
        x = nn.tanh(nn.WeightNorm(nn.Dense(WIDTH))(x))
        return dense(5)(nn.tanh(dense(WIDTH)(nn.Conv(3, (3,))(x))))


def haiku_forward(x):
    for _ in range(2):
        x = x + jnp.tanh(hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x)))
    return hk.Linear(3)(x)


def of_equinox():
    def make(inverse=False):
        layers = [eqx.nn.LayerNorm(10), eqx.nn.MLP(10, 10, 12, 1, key=KEY)]
        return eqx.filter(eqx.nn.Sequential(layers), eqx.is_array, inverse=inverse)

    static = make(inverse=True)
    return make, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


def leaves():
    w = jax.random.normal(KEY, (5, 10, 10))
    layers = {"w": w[1:], "b": jnp.ones((4, 10))}
    return {"w": w[0, :, :7], "layers": layers, "gain": jnp.arange(4.0)[:, None]}


def scans(params, x):
    """Layers, and one gain a layer, which looks like a plain matrix."""
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"] + w["b"]), None), x, params["layers"])
    return lax.scan(lambda x, gain: (x + gain * jnp.tanh(x), None), x[:, :4], params["gain"])[0]


def uses(params, x):
    """Tied weights, rows, slices, operands on both sides, a jitted function, a derivative."""
    w, rows = params["w"], list(params["w"])
    flat = jax.jit(lambda p: jax.tree.map(jnp.ravel, p))(params)
    penalty = sum(jnp.sum(q**2) / q.size for q in jax.tree.leaves(flat))
    slope = jax.grad(lambda p: jnp.mean(x @ p["w"] ** 2))(params)["w"]
    tied = jnp.mean((jnp.tanh(jnp.dot(x, w)) @ w.T - x) ** 2)
    return tied + penalty + jnp.vdot(slope, w) + jnp.mean(2 * w[1:3] + 1) + rows[3][0]


def together(remat):
    """All models in one loss, each with its own parameters."""
    haiku = hk.without_apply_rng(hk.transform(haiku_forward))
    modules = [(lambda m=m: m.init(KEY, TENS[:1]), m.apply) for m in (Linen(remat), haiku)]
    models = [*modules, of_equinox(), (leaves, scans)]

    def loss(params, x):
        pairs = zip(models, params, strict=False)
        return sum(jnp.mean(apply(p, x) ** 2) for (_, apply), p in pairs) + uses(params[-1], x)

    return Case(lambda: [*(make() for make, _ in models), leaves()], loss, TENS)


SLOW = pytest.param(0, 3, 3, "block", marks=pytest.mark.slow)


@pytest.mark.parametrize(("own", "n", "stage", "remat"), [SLOW, (1, 4, 1, "dots")])
def test_models_train_as_on_one_device(own, n, stage, remat):
    """With remat of the models or not. Not Adam: it makes steps of the rounding of a bias."""
    check_parity(together(own), {"data": n}, optax.sgd(1e-2), 3, stage=stage, remat=remat)


@pytest.mark.parametrize(("stage", "jit"), [(2, nnx.jit), (3, lambda step: step)])
def test_an_optimizer_of_nnx_updates_a_module_in_place(stage, jit):
    up, down = (nnx.Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in ((10, 33), (33, 1)))
    zero, plain, tx = zero_on(4, stage), nnx.Sequential(up, nnx.relu, down), optax.sgd(0.1, 0.9)
    graphdef, start = nnx.split(plain)
    model = nnx.merge(graphdef, zero.shard(start))

    def loss(params, x):
        return jnp.mean((nnx.merge(graphdef, params)(x) - 1) ** 2)

    def trained(model, tx, grad_fn, jit):
        def step(model, optimizer):
            value, grads = grad_fn(nnx.state(model, nnx.Param), TENS)
            optimizer.update(model, grads)
            return value

        optimizer, step = nnx.Optimizer(model, tx, wrt=nnx.Param), jit(step)
        return [step(model, optimizer) for _ in range(3)], nnx.state(optimizer)

    wanted, _ = trained(plain, tx, jax.value_and_grad(loss), nnx.jit)
    losses, state = trained(model, zero.optimizer(tx), zero.value_and_grad(loss), jit)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert ulps(zero.unshard(nnx.state(model)), nnx.state(plain)) < 256
    moments = [x for x in jax.tree.leaves(state) if x.size > 1]
    assert moments and all(x.sharding.shard_shape(x.shape) != x.shape for x in moments)


def test_a_loss_sees_full_leaves_in_the_compute_dtype_and_may_cast_and_return_them():
    def loss(params, x):
        w, ids = params["w"], params["ids"]
        assert (w.shape, w.size, w.dtype, ids.dtype) == ((10, 16), 160, jnp.bfloat16, jnp.int32)
        return jnp.mean(x @ w.astype(jnp.bfloat16)) + jnp.sum(ids), w.T

    w = np.ones((10, 16), np.float32) * np.arange(10, dtype=np.float32)[:, None]
    zero = zero_on(8, precision="bf16")
    params = zero.shard({"w": w, "ids": jnp.arange(16)})
    (value, aux), _ = zero.value_and_grad(loss, has_aux=True)(params, jnp.ones((8, 10)))
    assert float(value) == 45 + 120
    np.testing.assert_array_equal(aux, w.T)


def test_dropout_keys_differ_between_devices_and_micro_batches():
    """With the key folded per part, N x k parts give the same masks on any number of devices."""
    same_rows, w = jnp.ones((8, 10)), {"w": jax.random.normal(KEY, (10, 4))}

    def loss(params, x, key):
        kept = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})
        return jnp.mean((kept @ params["w"]) ** 2)

    values = []
    for n, k in ((8, 1), (2, 4), (1, 8)):
        zero = zero_on(n, grad_accum_steps=k)
        run = functools.partial(zero.value_and_grad(loss), zero.shard(w), same_rows)
        values.append(float(run(jax.random.key(7))[0]))
        assert values[-1] != float(run(jax.random.key(8))[0])
    np.testing.assert_allclose(values, values[0], rtol=1e-6)
    # One mask for all rows would give the same loss on each: the mean of 8 differs from it.
    one = loss(w, same_rows[:1], jax.random.fold_in(jax.random.key(7), 0))
    assert abs(float(one) - values[0]) > 1e-3


# Operations of libraries on a leaf of (4, 8) over three devices: sharded along 8, with padding.
OPERATIONS = {
    "rfft": lambda w: jnp.abs(jnp.fft.rfft(w)),
    "rfft of the transpose": lambda w: jnp.abs(jnp.fft.rfft(w.T)),
    "fft2": lambda w: jnp.abs(jnp.fft.fft2(w)),
    "convolution": lambda w: jnp.fft.irfft(jnp.fft.rfft(w) * jnp.fft.rfft(jnp.tanh(w))),
    "vmap": lambda w: jnp.abs(jax.vmap(jnp.fft.fft)(w)),
    "remat": jax.checkpoint(lambda w: jnp.abs(jnp.fft.fft(w))),
    "scan": lambda w: jax.lax.map(lambda x: jnp.abs(jnp.fft.rfft(x * w)).sum(), jnp.ones((2, 1))),
    "cond": lambda w: jax.lax.cond(
        w[0, 0] > 9, jnp.sum, lambda w: jnp.abs(jnp.fft.fft(w)).sum(), w),
    "qr": lambda w: jnp.abs(jnp.linalg.qr(w.T)[1]),
    "svd": lambda w: jnp.linalg.svd(w, compute_uv=False),
    "eigh": lambda w: jnp.linalg.eigh(w.T @ w + jnp.diag(jnp.arange(8.0)))[0],
    "cholesky": lambda w: jnp.linalg.cholesky(w @ w.T + jnp.eye(4)),
    "solve": lambda w: jnp.linalg.solve(w @ w.T + jnp.eye(4), w),
    "sort": lambda w: jnp.sort(w, axis=0) * jnp.arange(4.0)[:, None],
    "top_k": lambda w: jax.lax.top_k(w, 3)[0],
    "conv": lambda w: jnp.convolve(w[0], w[1])}  # fmt: skip


def test_gradients_of_operations_of_libraries_are_those_of_one_device():
    def loss(params, x):
        return sum(jnp.mean(OPERATIONS[name](w) ** 2) for name, w in params.items()) * x.mean()

    w = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8)), jnp.float32)
    check_gradients(loss, dict.fromkeys(OPERATIONS, w), jnp.ones((12, 4)), {"data": 3})
