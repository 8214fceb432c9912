"""`partitioned`: optax inside shard_map, exact where it is elementwise, refused where it is not."""

import functools
import re
import sys

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
ROWS = 24  # divisible by every N below
EVERY = [1, 2, 3, 8]
# Sums over devices are taken in another order and nothing else differs: a few fp32 roundings of
# values up to one (6e-8 each) in each of ten steps.
TOLERANCE = 1e-6


def mesh_of(n):
    return jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))


def odd_params(dtype=jnp.float32):
    shapes = {"scalar": (), "three": (3,), "w": (10, 7), "v": (17, 5), "none": (0,)}
    waves = {
        name: np.cos(np.arange(np.prod(s, dtype=int)).reshape(s)) for name, s in shapes.items()
    }
    return {name: jnp.asarray(wave, dtype) for name, wave in waves.items()}


def rows():
    return np.linspace(-0.3, 1.0, ROWS, dtype=np.float32)


def loss(params, rows):
    """A mean over rows, with gradients of both signs and of the size of one."""

    def one(row):
        waves = [jnp.sin(x * row + jnp.arange(x.size).reshape(x.shape)) for x in leaves]
        return sum(jnp.sum(w) for w in waves)

    leaves = jax.tree.leaves(params)
    return jnp.mean(jax.vmap(one)(rows))


def plain(tx, params, steps):
    """The same steps on one device, with optax alone."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params, rows()), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


class Run:
    """Init and step of `partitioned(tx)` over N devices, as a user would write them."""

    def __init__(self, tx, params, n, stage=2, check_vma=True):
        self.mesh, self.tx = mesh_of(n), partitioned(tx, stage=stage)
        self.specs = partition_specs(tx, params, n)
        self.check_vma = check_vma
        self.init = self.mapped(self.tx.init, P(), self.specs)
        self.step = self.mapped(self.local_step, (P(), self.specs, P("data")), (P(), self.specs))
        self.rows = jax.device_put(rows(), NamedSharding(self.mesh, P("data")))

    def mapped(self, fn, in_specs, out_specs):
        kinds = dict(mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(jax.shard_map(fn, check_vma=self.check_vma, **kinds))

    def own_grads(self, params, rows):
        if self.check_vma:
            params = jax.lax.pcast(params, "data", to="varying")
        return jax.grad(loss)(params, rows)

    def local_step(self, params, state, rows):
        updates, state = self.tx.update(self.own_grads(params, rows), state, params)
        return optax.apply_updates(params, updates), state


def assert_close(got, want, tolerance=TOLERANCE):
    for (name, a), (_, b) in zip(paths.named_leaves(got), paths.named_leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=name)


# The same numbers as one device.


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("n", EVERY)
def test_ten_steps_equal_plain_optax(n, stage):
    params = odd_params()
    tx = optax.adamw(1e-2)
    want, _ = reference()
    run = Run(tx, params, n, stage, check_vma=stage == 2)
    state = run.init(params)
    for _ in range(10):
        params, state = run.step(params, state, run.rows)
    assert_close(params, want)


@functools.cache
def reference():
    return plain(optax.adamw(1e-2), odd_params(), 10)


@pytest.mark.parametrize("check_vma", [True, False])
def test_init_and_ten_steps_run_under_jit_and_scan(check_vma):
    run = Run(optax.adamw(1e-2), odd_params(), 3, check_vma=check_vma)

    def train(params, rows):
        def body(carry, _):
            return run.local_step(*carry, rows), None

        return jax.lax.scan(body, (params, run.tx.init(params)), None, length=10)[0]

    params, state = run.mapped(train, (P(), P("data")), (P(), run.specs))(odd_params(), run.rows)
    assert_close(params, reference()[0])
    # At rest the state is that of one device, padded with zeros: (17, 5) over 3 is (18, 5).
    assert state[0].mu["v"].shape == (18, 5)
    np.testing.assert_allclose(state[0].mu["v"][:17], reference()[1][0].mu["v"], atol=TOLERANCE)


def test_init_runs_without_jit_and_under_a_mesh_that_is_set():
    params = {"w": jnp.ones((4, 3))}
    run = Run(optax.sgd(1e-2, momentum=0.9), params, 2)
    init = jax.shard_map(run.tx.init, mesh=run.mesh, in_specs=P(), out_specs=run.specs)
    with jax.set_mesh(run.mesh):
        state = init(params)
    assert_close(state, run.init(params), 0)


def test_masks_labels_and_accumulation_see_the_users_own_tree():
    def decayed(params):
        names = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)
        return jax.tree.map(lambda name, x: x.ndim > 1 and name == "w", names, params)

    def label(params):
        return {name: "still" if name == "three" else "moving" for name in params}

    moving = optax.adamw(1e-2, weight_decay=0.1, mask=decayed)
    tx = optax.MultiSteps(
        optax.partition({"moving": moving, "still": optax.set_to_zero()}, label), 2
    ).gradient_transformation()
    run, params = Run(tx, odd_params(), 3), odd_params()
    state = run.init(params)
    for _ in range(4):
        params, state = run.step(params, state, run.rows)
    assert_close(params, plain(tx, odd_params(), 4)[0])


def test_bf16_parameters_keep_their_dtype_through_state_and_updates():
    params = odd_params(jnp.bfloat16)
    run = Run(optax.adam(1e-2), params, 3)
    state = run.init(params)
    for _ in range(2):
        params, state = run.step(params, state, run.rows)
    for leaf in jax.tree.leaves((params, state[0].mu, state[0].nu)):
        assert leaf.dtype == jnp.bfloat16
    # One bf16 rounding of values up to one is 2**-8; two per step.
    assert_close(params, plain(optax.adam(1e-2), odd_params(jnp.bfloat16), 2)[0], 4 * 2.0**-8)


# What it costs.


def test_every_device_keeps_one_nth_of_the_state():
    n, params = 8, odd_params()
    state = Run(optax.adam(1e-2), params, n).init(params)
    # Adam: two fp32 moments per parameter, padded as the layout says; whole for the small leaves.
    pieces = {"scalar": 1, "three": 3, "w": 10 * 1, "v": 3 * 5, "none": 0}
    held = {device: 0 for device in jax.devices()}
    for leaf in jax.tree.leaves(state):
        for piece in leaf.addressable_shards:
            held[piece.device] += piece.data.nbytes
    assert set(held.values()) == {2 * 4 * sum(pieces.values()) + 4}  # + 4: the step counter


@pytest.mark.parametrize("stage", [1, 2])
def test_update_sends_two_words_per_parameter(stage):
    params = {"a": jnp.ones((16, 6)), "b": jnp.ones((24,))}
    run = Run(optax.adam(1e-2), params, 8, stage)
    compiled = run.step.lower(params, jax.eval_shape(run.init, params), run.rows).compile()
    sent = [(c.kind, c.words) for c in auditor.collectives(compiled)]
    assert {kind for kind, _ in sent} == {"reduce-scatter", "all-gather"}
    assert sum(words for _, words in sent) == 2 * (16 * 6 + 24)


@pytest.mark.parametrize(("stage", "barriers"), [(1, 1), (2, 0)])
def test_stage_1_holds_every_gradient_until_the_last(stage, barriers):
    params = odd_params()
    run = Run(optax.sgd(0.1), params, 2, stage)
    text = run.step.lower(params, jax.eval_shape(run.init, params), run.rows).as_text()
    assert text.count("optimization_barrier") == barriers


# Gradients that are summed already.


def test_summed_gradients_are_refused():
    run = Run(optax.sgd(1.0), odd_params(), 2)
    run.own_grads = jax.grad(loss)  # with respect to replicated parameters
    with pytest.raises(ValueError, match=r"gradient of none is already summed over 'data'.*pcast"):
        run.step.lower(odd_params(), run.init(odd_params()), run.rows)


def test_what_is_refused_would_have_been_n_times_too_large(monkeypatch):
    n, params = 3, odd_params()
    want = jax.tree.map(lambda g: -n * g, jax.grad(loss)(params, rows()))
    module = sys.modules[partitioned.__module__]  # the function hides the module of its name
    monkeypatch.setattr(module, "_refuse_summed", lambda grads, axis: None)
    run = Run(optax.sgd(1.0), params, n)

    def update(params, state, rows):
        return run.tx.update(jax.grad(loss)(params, rows), state, params)[0]

    got = run.mapped(update, (P(), run.specs, P("data")), P())(params, run.init(params), run.rows)
    assert_close(got, want, n * TOLERANCE)


def test_without_vma_gradients_are_this_devices_own():
    """Nothing is summed there, so that nothing needs to be refused, and a pmean does no harm."""
    params = odd_params()
    run = Run(optax.sgd(1.0), params, 3, check_vma=False)
    want = jax.tree.map(lambda g: -g, jax.grad(loss)(params, rows()))
    for reduce in (lambda g: g, functools.partial(jax.lax.pmean, axis_name="data")):

        def update(params, state, rows, reduce=reduce):
            return run.tx.update(reduce(run.own_grads(params, rows)), state, params)[0]

        step = run.mapped(update, (P(), run.specs, P("data")), P())
        assert_close(step(params, run.init(params), run.rows), want)


@pytest.mark.parametrize("n", [1, 2])
def test_init_refuses_at_every_n(n):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(ValueError, match="^clip_by_global_norm is not elementwise"):
        Run(tx, odd_params(), n).init(odd_params())


def test_a_row_norm_is_refused_only_where_rows_are_cut():
    """What is shown is shown for the dims along which the parameters themselves are cut."""

    def by_rows(updates, params=None):
        return jax.tree.map(lambda u: u / jnp.linalg.norm(u, axis=1, keepdims=True), updates)

    tx = optax.stateless(by_rows)
    for shape, refused in (((8, 6), False), ((6, 8), True)):
        params = {"w": jax.ShapeDtypeStruct(shape, "float32")}
        cuts = Splitter(8)(params)
        if refused:
            with pytest.raises(ValueError, match=r"stateless\(by_rows\) is not elementwise"):
                require_elementwise(tx, params, cuts)
        else:
            require_elementwise(tx, params, cuts)


def test_a_dim_of_one_is_cut_like_any_other():
    """Of (3, 1, 1) over 2 devices the second has padding only."""
    params = {"w": jnp.arange(3.0).reshape(3, 1, 1)}
    cuts = Splitter(2)(params)
    assert cuts[0].shard_shape == (3, 1, 1)
    with pytest.raises(ValueError, match="^clip_by_global_norm is not elementwise"):
        require_elementwise(optax.clip_by_global_norm(1.0), params, cuts)
    run = Run(optax.adam(1e-2), params, 2)
    state = run.init(params)
    assert state[0].mu["w"].shape == (3, 2, 1)
    got, _ = run.step(params, state, run.rows)
    assert_close(got, plain(optax.adam(1e-2), params, 1)[0])


# Errors.


@pytest.mark.parametrize("stage", [0, 3, "2"])
def test_other_stages_are_refused(stage):
    with pytest.raises(ValueError, match=re.escape(f"stage={stage!r}") + ".*1 or 2.*Zero"):
        partitioned(optax.sgd(0.1), stage=stage)


def test_outside_shard_map_the_error_says_where_to_go():
    ztx = partitioned(optax.sgd(0.1))
    for call in (lambda: ztx.init({}), lambda: ztx.update({}, ())):
        with pytest.raises(ValueError, match=r"inside jax\.shard_map.*zero\.optimizer"):
            call()


def test_specs_want_the_transformation_that_was_given():
    with pytest.raises(ValueError, match="given to partitioned"):
        partition_specs(partitioned(optax.sgd(0.1)), odd_params(), 2)
