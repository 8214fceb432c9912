"""Transformations of optax: elementwise ones inside `shard_map`, and others in steps of `Zero`."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib
from problems import zero_on

import zero_jax
from zero_jax.engine.elementwise_check import require_elementwise
from zero_jax.engine.partitioned import partition_specs, partitioned
from zero_jax.hlo import auditor
from zero_jax.sharding import paths
from zero_jax.sharding.layout import Partitioner

ROWS = np.linspace(-0.3, 1.0, 24, dtype=np.float32)  # divisible by every N below
ADAM, SGD, CLIP = optax.adamw(1e-2), optax.sgd(1.0), optax.clip_by_global_norm(1.0)


def odd_params(dtype=jnp.float32):
    shapes = {"scalar": (), "three": (3,), "w": (10, 7), "v": (17, 5), "none": (0,)}
    counts = {name: np.arange(math.prod(s)).reshape(s) for name, s in shapes.items()}
    return {name: jnp.asarray(np.cos(count), dtype) for name, count in counts.items()}


def loss(params, rows):
    """A mean over rows, with gradients of both signs and of the size of one."""
    leaves = [(x, jnp.arange(x.size).reshape(x.shape)) for x in jax.tree.leaves(params)]
    return jnp.mean(jax.vmap(lambda row: sum(jnp.sin(x * row + n).sum() for x, n in leaves))(rows))


def own_grads(params, rows):
    return jax.grad(loss)(lax.pcast(params, "data", to="varying"), rows)


def averaged_grads(params, rows):
    return lax.pmean(jax.grad(loss)(params, rows), "data")


class Run:
    """Init and step of `partitioned(tx)` over N devices, as a user would write them."""

    def __init__(self, tx, params, n, stage=2, grads=own_grads):
        self.mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
        self.tx, self.grads = partitioned(tx, stage=stage), grads
        specs, known = (P(), partition_specs(tx, params, n)), grads is not averaged_grads
        mapped = functools.partial(jax.shard_map, mesh=self.mesh, check_vma=known)
        self.init = mapped(self.tx.init, in_specs=P(), out_specs=specs[1])
        step = mapped(self.local_step, in_specs=(*specs, P("data")), out_specs=specs)
        self.step = jax.jit(step)
        self.rows = jax.device_put(ROWS, NamedSharding(self.mesh, P("data")))

    def local_step(self, params, state, rows):
        updates, state = self.tx.update(self.grads(params, rows), state, params)
        return optax.apply_updates(params, updates), state

    def trained(self, params, steps):
        state = jax.jit(self.init)(params)
        for _ in range(steps):
            params, state = self.step(params, state, self.rows)
        return params, state


def run(value_and_grad, tx, params, named=lambda *_: {}, part=lambda params: params, steps=3):
    """Parameters and state after steps; `named` are arguments of the update by name."""

    def step(params, state, number):
        value, grads = value_and_grad(part(params), X)
        updates, state = tx.update(grads, state, params, **named(value, grads, number))
        return optax.apply_updates(params, updates), state

    state, step = tx.init(params), jax.jit(step)
    for number in range(steps):
        params, state = step(params, state, number)
    return params, state


def assert_equal_to_plain_optax(got, tx, params, steps):
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    want, _ = run(jax.value_and_grad(lambda p, _: loss(p, ROWS)), tx, params, steps=steps)
    for (name, a), (_, b) in zip(paths.named_leaves(got), paths.named_leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        # Sums over devices have another order: a few roundings of values up to one in each step.
        bound = steps * (2.0**-7 if a.dtype == jnp.bfloat16 else 1e-7)
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=name)


def decayed(params):
    return {name: name == "w" for name in params}


LABELS = {name: "still" if name == "three" else "moving" for name in odd_params()}
MOVING = optax.adamw(1e-2, weight_decay=0.1, mask=decayed)
PARTS = optax.partition({"moving": MOVING, "still": optax.set_to_zero()}, LABELS)
RUNS = [(ADAM, 1, own_grads), (ADAM, 2, averaged_grads), (optax.MultiSteps(PARTS, 2), 3, own_grads)]


@pytest.mark.parametrize(("tx", "n", "grads"), [*RUNS, (ADAM, 8, own_grads)])
def test_steps_equal_plain_optax(tx, n, grads):
    dtype, stage = "bfloat16" if n == 8 else "float32", 1 if grads is averaged_grads else 2
    start = odd_params(dtype)
    params, state = Run(tx, start, n, stage, grads).trained(start, 4)
    assert_equal_to_plain_optax(params, tx, start, 4)
    if n == 8:
        assert {x.dtype for x in jax.tree.leaves((state[0].mu, state[0].nu))} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(("stage", "barriers"), [(1, 1), (2, 0)])
def test_update_sends_two_elements_per_parameter(stage, barriers):
    """Stage 1 holds every gradient until the last is computed."""
    params = {"a": jnp.ones((16, 6)), "b": jnp.ones((24,))}
    run = Run(SGD, params, 8, stage)
    lowered = run.step.lower(params, jax.eval_shape(run.init, params), run.rows)
    assert lowered.as_text().count("optimization_barrier") == barriers
    sent = [(c.kind, c.sent_elements) for c in auditor.collectives(lowered.compile())]
    assert {kind for kind, _ in sent} == {"reduce-scatter", "all-gather"}
    assert sum(words for _, words in sent) == 2 * (16 * 6 + 24)


def test_a_dim_of_one_is_sharded_like_any_other_and_init_runs_without_jit():
    """Of (3, 1, 1) over 2 devices the second has padding only."""
    start = {"w": jnp.arange(3.0).reshape(3, 1, 1)}
    run = Run(ADAM, start, 2)
    params, state = run.trained(start, 1)
    assert_equal_to_plain_optax(params, ADAM, start, 1)
    with jax.set_mesh(run.mesh):
        begun = run.init(start)
    assert begun[0].mu["w"].shape == state[0].mu["w"].shape == (3, 2, 1)
    np.testing.assert_array_equal(begun[0].mu["w"], np.zeros((3, 2, 1)))
    # A norm of rows is accepted where rows are not sharded.
    require(optax.stateless(by_rows), array(8, 6), 8)


def by_rows(updates, params=None):
    return jax.tree.map(lambda u: u / jnp.linalg.norm(u, axis=1, keepdims=True), updates)


def require(tx, tree, n):
    require_elementwise(tx, tree, Partitioner(n)(tree))


def array(*shape):
    return {"w": jax.ShapeDtypeStruct(shape, "float32")}


REFUSED = [
    ("stage`=0", lambda: partitioned(SGD, stage=0)),
    ("stage`='2'", lambda: partitioned(SGD, stage="2")),
    ("axis_name`='data'", lambda: partitioned(SGD).init({})),
    ("axis_name`='data'", lambda: partitioned(SGD).update({}, ())),
    ("tx", lambda: partition_specs(partitioned(SGD), odd_params(), 2)),
    # One device may be many tomorrow.
    ("clip_by_global_norm", lambda: Run(CLIP, odd_params(), 1).trained(odd_params(), 1)),
    ("clip_by_global_norm", lambda: require(CLIP, array(3, 1, 1), 2)),
    # The gradient by replicated parameters is a sum over devices.
    ("none.*'data'",
     lambda: Run(SGD, odd_params(), 2, grads=jax.grad(loss)).trained(odd_params(), 1)),
    (r"by_rows \(in stateless\)", lambda: require(optax.stateless(by_rows), array(6, 8), 8)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def of_leaves(fn, name="of_leaf"):
    """A transformation of each leaf alone."""
    update = lambda updates, params=None: jax.tree.map(fn, updates)  # noqa: E731
    update.__code__ = update.__code__.replace(co_qualname=f"{name}.<locals>.update")
    return optax.stateless(update)


# fmt: off
WARM = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)
NAMES = "adam adamw adabelief adamax adagrad rmsprop adadelta adan amsgrad lion nadamw radam yogi"
ACCEPTED = [*(getattr(optax, name)(1e-3) for name in NAMES.split()), contrib.ademamix(1e-3),
    contrib.adopt(1e-3), contrib.schedule_free_adamw(1e-3),
    of_leaves(lambda u: lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, u.T).T),
    of_leaves(lambda u: (u.reshape(*u.shape, 1) * 2).reshape(u.shape)),
    optax.sgd(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True), optax.adamw(1e-3, mask=decayed),
    optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    optax.chain(optax.clip(1.0), optax.adamw(WARM)), optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    optax.inject_hyperparams(optax.adamw)(learning_rate=WARM),
    optax.MultiSteps(optax.adam(1e-3), 8).gradient_transformation(),
]
# Not elementwise in `init` alone.
NORM = optax.GradientTransformation(optax.tree.norm, lambda grads, state, _=None: (grads, state))
LONG = optax.MultiSteps(optax.chain(CLIP, optax.sgd(0.1)), 8).gradient_transformation()
OTHERS = [(culprit, getattr(optax, name)(1e-3)) for culprit, name in {
    "scale_by_trust_ratio": "lamb", "scale_by_novograd": "novograd", "scale_by_sm3": "sm3",
    "scale_by_factored_rms": "adafactor", "clip_by_block_rms": "clip_by_block_rms"}.items()]
# The transformation that is to blame, and the one that it is in.
UNSUPPORTED = OTHERS + [(name, of_leaves(fn, name)) for name, fn in {
    "by_size": lambda u: u / u.size, "by_power": lambda u: u ** u.shape[0],
    "by_first": lambda u: u * u.ravel()[0], "by_sort": lambda u: jnp.sort(u, axis=0),
    "by_cumsum": lambda u: jnp.cumsum(u, 0), "by_index": lambda u: u * jnp.arange(len(u))[:, None],
    "by_loop": lambda u: lax.fori_loop(0, 2, lambda _, x: x / x.max(), u),
    "by_branch": lambda u: lax.cond(u.sum() > 0, jnp.sin, jnp.cos, u)}.items()] + [
    ("clip_by_global_norm", optax.chain(optax.adam(1e-3), CLIP)), ("clip_by_global_norm", LONG),
    ("clip_by_global_norm", optax.masked(CLIP, decayed)), ("scale_by_muon", contrib.muon(1e-3)),
    ("adaptive_grad_clip", optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1))),
    ("scale_by_zoom_linesearch", optax.lbfgs(1e-3, memory_size=1)), ("reduce_sum", NORM),
    ("scale_by_galore", contrib.galore(1e-3)), ("add_noise", optax.noisy_sgd(1e-3, key=0)),
    ("inject_hyperparams", optax.inject_hyperparams(optax.lamb)(1e-3)),
    ("apply_if_finite", optax.apply_if_finite(optax.sgd(0.1), 3)),
]
# fmt: on
ONE = array(300, 140)  # large enough to be factored
LARGE = ONE | {"b": jax.ShapeDtypeStruct((9,), "float32")}
ODD = jax.eval_shape(odd_params)  # some leaves are padded, some not split


@pytest.mark.parametrize(("culprit", "tx"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_an_error_names_the_transformation_that_is_not_elementwise(culprit, tx):
    with pytest.raises(ValueError, match=r"zero\.optimizer") as caught:
        require(tx, ONE, 2)
    assert culprit in str(caught.value)
    # Labels that depend on the rank, and scalars that it can't run on, hide the culprit.
    for tree, shards in ((LARGE, 2), (ODD, 8)):
        with pytest.raises(ValueError, match=r"zero\.optimizer"):
            require(tx, tree, shards)


@pytest.mark.parametrize("tx", ACCEPTED)
def test_an_elementwise_transformation_runs_on_shards(tx):
    """The specs fit, and no state leaf changes its type in two steps."""
    for tree, shards in ((ONE, 8), (LARGE, 2), (ODD, 8)):
        require(tx, tree, shards)
    run = Run(tx, ODD, 2)
    params, state = jax.eval_shape(functools.partial(run.trained, steps=2), ODD)
    assert (params, state) == (ODD, jax.eval_shape(run.init, ODD))


# Transformations with `Zero`: `run` is a user's step, `packaged` is `Zero.train_step`, which passes
# the loss as `value`, and arrays by name. Both are compared with optax on one device.

# Four devices do not divide 63: that leaf is padded.
START = {"w": jnp.linspace(-1, 1, 8 * 63).reshape(8, 63), "b": jnp.ones(3), "s": jnp.float32(0.5)}
X = jnp.linspace(0.5, 1.5, 4 * 8).reshape(4, 8)


def linear(params, x):
    """Its gradient is the same in every step."""
    return jnp.mean(x @ params["w"]) + jnp.mean(params["b"]) + params["s"]


def curved(params, x):
    errors = jnp.tanh(x @ params["w"]) - 0.5
    return jnp.mean(errors**2) + jnp.mean((params["b"] - params["s"]) ** 2)


def near(found, wanted, atol=2e-6):
    """Sums over devices are in another order."""
    compare = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=atol)
    jax.tree.map(compare, zero_jax.unpad(found), wanted)


LINEAR, CURVED = jax.value_and_grad(linear), jax.value_and_grad(curved)


def packaged(zero, tx, loss, batches=(X, X, X), named=lambda number: {}):
    params, tx = zero.shard(START), zero.optimizer(tx)
    state, step = tx.init(params), zero.train_step(loss, tx)
    for number, batch in enumerate(batches):
        params, state, _ = step(params, state, batch, **named(number))
    return params, state


MONITORED = [{"stage": 0}, {"skip_nonfinite": False}, {"offload": "optimizer"}]


@pytest.mark.parametrize("settings", [*MONITORED, {"optimizer_state_dtype": "8bit"}])
def test_measurements_of_a_monitor_are_those_of_optax(settings):
    measures = {"norm": optax.tree.norm, "mean": optax.measure_with_ema(optax.tree.norm, 0.9)}
    after = optax.clip_by_global_norm(0.01), optax.adam(0.1)
    tx = optax.chain(optax.monitor(measures), *after)
    params, wanted = run(LINEAR, tx, START)
    found, state = packaged(zero_on(**settings), tx, linear)
    if "optimizer_state_dtype" not in settings:
        near(found, params)
    for name in ("norm", "mean"):
        np.testing.assert_allclose(*(optax.tree.get(s, name) for s in (state, wanted)), rtol=1e-5)


def meaned(grads, state, params=None):
    """Takes the initial state's factor; later ones take a mean of old and new."""
    if "mean" in state:
        grads = jax.tree.map(lambda old, new: 0.5 * (old + new), state["mean"], grads)
    mean = optax.tree.scale(state.get("factor", 1.0), grads)
    return jax.tree.map(jnp.negative, mean), {"mean": mean}


def test_a_first_update_unlike_later_ones_is_unsupported():
    for first in ({"factor": jnp.float32(3)}, {}):
        tx = zero_on().optimizer(optax.GradientTransformation(lambda _, s=first: s, meaned))
        with pytest.raises(ValueError, match=r"`tx`.*structure.*gains .*'mean'.*'b'.*return all"):
            tx.init(START)


def scaled(grads, state, params=None, *, factor, offsets, value, **_):
    return jax.tree.map(lambda g, o: -factor * (g + value * o), grads, offsets), state


def test_arrays_by_name_reach_the_transformation():
    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scaled)
    offsets = zero_on().shard(START)  # padded where parameters are
    named = lambda number: {"factor": 0.1 * number, "offsets": offsets}  # noqa: E731
    wanted = lambda value, _, n: {"factor": 0.1 * n, "offsets": START, "value": value}  # noqa: E731
    found = packaged(zero_on(), tx, curved, named=named)[0]
    near(found, run(CURVED, tx, START, wanted)[0])
    # A wrapped state has the attributes of its own.
    tx, average = contrib.schedule_free_sgd(0.3), contrib.schedule_free_eval_params
    params, state = packaged(zero_on(), tx, curved)
    wanted, plain_state = run(CURVED, tx, START)
    near(average(state, params), average(plain_state, wanted))


LBFGS = optax.lbfgs(0.1, memory_size=2)
SAM = contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
LOOKAHEAD = optax.lookahead(optax.adam(0.1), 2, slow_step_size=0.5)
NEEDS = {LBFGS: lambda value, grads, _: {
             "value": value, "grad": grads, "value_fn": lambda params: curved(params, X)},
         SAM: lambda *_: {"grad_fn": lambda params, _: jax.grad(curved)(params, X)},
         LOOKAHEAD: lambda *_: {}}  # fmt: skip


@pytest.mark.parametrize(("tx", "stage"), [(LBFGS, 3), (SAM, 2), (LOOKAHEAD, 0), (LOOKAHEAD, 3)])
def test_a_users_step_passes_functions_or_parts_of_parameters(tx, stage):
    zero, start, settings = zero_on(stage=stage), START, {"named": NEEDS[tx]}
    if tx is LOOKAHEAD:
        start, settings["part"] = optax.LookaheadParams.init_synced(START), lambda p: p.fast
    found = run(zero.value_and_grad(curved), zero.optimizer(tx), zero.shard(start), **settings)[0]
    near(found, run(CURVED, tx, start, **settings)[0])
