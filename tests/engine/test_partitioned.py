"""`partitioned`: elementwise optimizers inside `shard_map` equal optax on one device."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zero_jax.engine.partitioned import partition_specs, partitioned
from zero_jax.engine.shard_proof import require_elementwise
from zero_jax.hlo import auditor
from zero_jax.sharding import paths
from zero_jax.sharding.cuts import Splitter

P = PartitionSpec
ROWS = np.linspace(-0.3, 1.0, 24, dtype=np.float32)  # divisible by every N below
ADAM, SGD = optax.adamw(1e-2), optax.sgd(1.0)
CLIP = optax.clip_by_global_norm(1.0)


def mesh_of(n):
    return jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))


def odd_params(dtype=jnp.float32):
    shapes = {"scalar": (), "three": (3,), "w": (10, 7), "v": (17, 5), "none": (0,)}
    counts = {name: np.arange(math.prod(s)).reshape(s) for name, s in shapes.items()}
    return {name: jnp.asarray(np.cos(count), dtype) for name, count in counts.items()}


def loss(params, rows):
    """A mean over rows, with gradients of both signs and of the size of one."""

    def one(row):
        waves = [jnp.sin(x * row + jnp.arange(x.size).reshape(x.shape)) for x in leaves]
        return sum(jnp.sum(w) for w in waves)

    leaves = jax.tree.leaves(params)
    return jnp.mean(jax.vmap(one)(rows))


def own_grads(params, rows):
    return jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), rows)


def averaged_grads(params, rows):
    return jax.lax.pmean(jax.grad(loss)(params, rows), "data")


class Run:
    """Init and step of `partitioned(tx)` over N devices, as a user would write them."""

    def __init__(self, tx, params, n, stage=2, grads=own_grads):
        self.mesh, self.tx = mesh_of(n), partitioned(tx, stage=stage)
        self.specs, self.grads = partition_specs(tx, params, n), grads
        self.init = jax.jit(self.mapped(self.tx.init, P(), self.specs))
        specs = (P(), self.specs)
        self.step = jax.jit(self.mapped(self.local_step, (*specs, P("data")), specs))
        self.rows = jax.device_put(ROWS, NamedSharding(self.mesh, P("data")))

    def mapped(self, fn, in_specs, out_specs):
        kinds = dict(mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.shard_map(fn, check_vma=self.grads is not averaged_grads, **kinds)

    def local_step(self, params, state, rows):
        updates, state = self.tx.update(self.grads(params, rows), state, params)
        return optax.apply_updates(params, updates), state

    def trained(self, params, steps):
        state = self.init(params)
        for _ in range(steps):
            params, state = self.step(params, state, self.rows)
        return params, state


def assert_equal_to_plain_optax(got, tx, params, steps):
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params, ROWS), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    for (name, a), (_, b) in zip(paths.named_leaves(got), paths.named_leaves(params), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        # Sums over devices have another order: a few roundings of values up to one in each step.
        bound = steps * (2.0**-7 if a.dtype == jnp.bfloat16 else 1e-7)
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=name)


def masked_and_accumulated():
    def decayed(params):
        return {name: name == "w" for name in params}

    def label(params):
        return {name: "still" if name == "three" else "moving" for name in params}

    moving = optax.adamw(1e-2, weight_decay=0.1, mask=decayed)
    tx = optax.partition({"moving": moving, "still": optax.set_to_zero()}, label)
    return optax.MultiSteps(tx, 2)


@pytest.mark.parametrize(
    ("tx", "n", "stage", "dtype", "grads"),
    [
        (ADAM, 1, 2, "float32", own_grads),
        (ADAM, 2, 1, "float32", averaged_grads),
        (masked_and_accumulated(), 3, 2, "float32", own_grads),
        (ADAM, 8, 2, "bfloat16", own_grads),
    ],
)
def test_steps_equal_plain_optax(tx, n, stage, dtype, grads):
    start = odd_params(dtype)
    params, state = Run(tx, start, n, stage, grads).trained(start, 4)
    assert_equal_to_plain_optax(params, tx, start, 4)
    if n == 8:
        assert {x.dtype for x in jax.tree.leaves((state[0].mu, state[0].nu))} == {jnp.dtype(dtype)}
        # Two moments per parameter, padded; small leaves are not sharded. Then the counter.
        pieces = {"scalar": 1, "three": 3, "w": 10 * 1, "v": 3 * 5, "none": 0}
        held = collections.Counter()
        for piece in itertools.chain(*(x.addressable_shards for x in jax.tree.leaves(state))):
            held[piece.device] += piece.data.nbytes
        assert held == dict.fromkeys(jax.devices(), 2 * 2 * sum(pieces.values()) + 4)


def test_init_and_ten_steps_run_under_jit_and_scan():
    run = Run(ADAM, odd_params(), 3)

    def train(params, rows):
        def body(carry, _):
            return run.local_step(*carry, rows), None

        return jax.lax.scan(body, (params, run.tx.init(params)), None, length=10)[0]

    mapped = run.mapped(train, (P(), P("data")), (P(), run.specs))
    params, state = jax.jit(mapped)(odd_params(), run.rows)
    assert_equal_to_plain_optax(params, ADAM, odd_params(), 10)
    assert state[0].mu["v"].shape == (18, 5)  # (17, 5) with padding


def test_init_runs_without_jit_and_under_a_mesh_that_is_set():
    run = Run(optax.sgd(1e-2, momentum=0.9), {"w": jnp.ones((4, 3))}, 2)
    with jax.set_mesh(run.mesh):
        state = run.mapped(run.tx.init, P(), run.specs)({"w": jnp.ones((4, 3))})
    np.testing.assert_array_equal(state[0].trace["w"], np.zeros((4, 3)))


@pytest.mark.parametrize(("stage", "barriers"), [(1, 1), (2, 0)])
def test_update_sends_two_elements_per_parameter(stage, barriers):
    """Stage 1 holds every gradient until the last is computed."""
    params = {"a": jnp.ones((16, 6)), "b": jnp.ones((24,))}
    run = Run(SGD, params, 8, stage)
    lowered = run.step.lower(params, jax.eval_shape(run.init, params), run.rows)
    assert lowered.as_text().count("optimization_barrier") == barriers
    sent = [(c.kind, c.words) for c in auditor.collectives(lowered.compile())]
    assert {kind for kind, _ in sent} == {"reduce-scatter", "all-gather"}
    assert sum(words for _, words in sent) == 2 * (16 * 6 + 24)


def test_a_dim_of_one_is_sharded_like_any_other():
    """Of (3, 1, 1) over 2 devices the second has padding only."""
    start = {"w": jnp.arange(3.0).reshape(3, 1, 1)}
    params, state = Run(ADAM, start, 2).trained(start, 1)
    assert state[0].mu["w"].shape == (3, 2, 1)
    assert_equal_to_plain_optax(params, ADAM, start, 1)


def by_rows(updates, params=None):
    return jax.tree.map(lambda u: u / jnp.linalg.norm(u, axis=1, keepdims=True), updates)


def check(tx, shape, n):
    params = {"w": jax.ShapeDtypeStruct(shape, "float32")}
    require_elementwise(tx, params, Splitter(n)(params))


def run_once(tx, n, **settings):
    return Run(tx, odd_params(), n, **settings).trained(odd_params(), 1)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("stage=0", lambda: partitioned(SGD, stage=0)),
        ("stage='2'", lambda: partitioned(SGD, stage="2")),
        ("axis_name='data'", lambda: partitioned(SGD).init({})),
        ("axis_name='data'", lambda: partitioned(SGD).update({}, ())),
        ("tx", lambda: partition_specs(partitioned(SGD), odd_params(), 2)),
        ("clip_by_global_norm", lambda: run_once(CLIP, 1)),  # one device may be many tomorrow
        ("clip_by_global_norm", lambda: check(CLIP, (3, 1, 1), 2)),
        # The gradient by replicated parameters is a sum over devices.
        ("none.*'data'", lambda: run_once(SGD, 2, grads=jax.grad(loss))),
        (r"stateless\(by_rows\)", lambda: check(optax.stateless(by_rows), (6, 8), 8)),
    ],
)
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_norm_of_rows_is_accepted_where_rows_are_not_sharded():
    check(optax.stateless(by_rows), (8, 6), 8)
