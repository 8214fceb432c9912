"""Updates by owners equal those of one device, and send each matrix twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from problems import ulps
from transformations import by_hand, muon, shampoo, without_state

import zero_jax
from zero_jax.hlo import traffic
from zero_jax.owners import update as owners
from zero_jax.plan import update_forecast
from zero_jax.sharding.cuts import state_splits

SHAPES = {
    "alone": (8, 16),
    "odd": (17, 9),
    "up": (5, 12, 8),
    "down": (5, 8, 12),
    "experts": (2, 3, 6, 5),
    "vector": (13,),
    "scalar": (),
}
SPECS = {"up": jax.sharding.PartitionSpec(None, None, "model")}
TWO = {"rows": (12, 8), "columns": (7, 10)}
# Products are summed in another order, and three to five iterations each multiply the difference.
ULPS = 64


def tree(shapes, seed):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {n: jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}


def two_steps(tx, shapes, zero=None):
    """Parameters and state after two updates with given gradients; of plain optax without zero."""
    params = tree(shapes, 0)
    tx = tx if zero is None else zero.optimizer(tx)
    place = (lambda x: x) if zero is None else zero.shard
    params = place(params)
    state = tx.init(params)

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in (1, 2):
        params, state = update(place(tree(shapes, seed)), state, params)
    if zero is None:
        return params, jax.tree.leaves(state)
    return zero_jax.logical(params), jax.tree.leaves(zero_jax.logical(state.inner))


def zero_of(n, **settings):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), 3, **settings)


def assert_equal(tx, shapes, zero, tolerance=ULPS):
    with jax.default_matmul_precision("highest"):
        got, want = two_steps(tx, shapes, zero), two_steps(tx, shapes)
    assert ulps(got[0], want[0]) < tolerance
    assert ulps(got[1], want[1]) < tolerance


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_muon_is_exact_at_every_n(n):
    assert_equal(muon(), SHAPES, zero_of(n))


@pytest.mark.parametrize(
    "options",
    [
        {"preconditioning": "aol"},
        {"preconditioning": "schatten"},
        {"ns_coeffs": "dion"},
        {"adaptive": True},
        {"mu_dtype": jnp.bfloat16, "consistent_rms": 0.2},
    ],
    ids=str,
)
def test_every_kind_of_muon_is(options):
    shapes = {k: v for k, v in SHAPES.items() if k != "experts"}
    assert_equal(muon(**options), shapes, zero_of(4))


@pytest.mark.parametrize(
    ("tx", "shapes"),
    [
        (without_state(lambda g: jax.tree.map(by_hand, g)), {k: SHAPES[k] for k in ("odd", "up")}),
        (shampoo(), TWO),
        (contrib.galore(1e-2, rank=3, update_proj_gap=2), TWO),
        (optax.MultiSteps(muon(), 2), SHAPES),
        (optax.apply_if_finite(muon(), 3), {k: SHAPES[k] for k in ("up", "vector")}),
        (
            optax.chain(optax.clip_by_global_norm(0.5), muon(), optax.clip_by_global_norm(0.1)),
            SHAPES,
        ),
    ],
    ids=["by hand", "shampoo", "galore", "MultiSteps", "apply_if_finite", "between clips"],
)
@pytest.mark.parametrize("n", [3, 4])
def test_others_of_that_form_are(tx, shapes, n):
    # An eigendecomposition or SVD of nearly equal values is far more sensitive.
    assert_equal(tx, shapes, zero_of(n), 2048)


def test_matrices_of_one_kind_have_the_factors_of_their_own_place():
    """Two leaves of the same shape are one kind; a factor is for the first, second ... of each."""
    factors = jnp.arange(1.0, 6.0)[:, None, None]

    def one(x):
        return (x @ jnp.swapaxes(x, 1, 2) * factors) @ x * 1e-3

    shapes = {"a": (5, 8, 6), "b": (5, 8, 6)}
    tx = without_state(lambda g: jax.tree.map(one, g))
    given = jax.eval_shape(lambda: tree(shapes, 0))
    (found,) = update_forecast.exchanges(zero_of(4).settings, tx, given)
    assert [sum(kind.counts) for kind in found.kinds] == [10]
    assert_equal(tx, shapes, zero_of(4))


def test_matrices_with_other_constants_are_another_kind():
    """A constant of an inner function does not show in the text of a trace."""

    def turned(by):
        turn = jax.jit(lambda y: (y @ y.T @ by) @ y / 50)
        return lambda x: jax.lax.fori_loop(0, 2, lambda _, y: turn(y), x)

    # Not of NumPy: it has no operators that JAX would trace.
    fns = {n: turned(np.asarray(tree({"x": (8, 8)}, s)["x"])) for s, n in enumerate("ab")}
    shapes = {"a": (8, 6), "b": (8, 6)}
    tx = without_state(lambda g: {name: fns[name](x) for name, x in g.items()})
    given = jax.eval_shape(lambda: tree(shapes, 0))
    (found,) = update_forecast.exchanges(zero_of(4).settings, tx, given)
    assert [sum(kind.counts) for kind in found.kinds] == [1, 1]
    assert_equal(tx, shapes, zero_of(4))


def powers(x):
    """A while loop whose test is of each matrix."""
    return jax.lax.while_loop(lambda y: jnp.max(jnp.abs(y)) > 0.5, lambda y: y @ y.T @ y * 1e-3, x)


def over_leaves(grads):
    """One loop over all leaves."""
    return jax.lax.fori_loop(0, 3, lambda _, t: jax.tree.map(lambda x: x @ x.T @ x / 99, t), grads)


SQUARE = {name: (16, 16) for name in "abcdef"}
STACK = {"stack": (5, 8, 6)}
LEFT_TO_XLA = {
    "norms": (lambda g: jax.tree.map(lambda x: x / jnp.sqrt(jnp.vdot(x, x)), g), SHAPES),
    "vectors": (lambda g: jax.tree.map(lambda x: x - jnp.outer(x @ x[0], x[0]), g), SQUARE),
    "one loop over many leaves": (over_leaves, SQUARE),
    "a stack that is one": (lambda g: jax.tree.map(lambda x: jax.lax.map(by_hand, x), g), STACK),
    "a while loop for all": (lambda g: jax.tree.map(jax.vmap(powers), g), STACK),
}


@pytest.mark.parametrize("name", LEFT_TO_XLA)
def test_what_gains_nothing_by_owners_is_left_to_xla(name):
    """Where less is sent without them, or one of them would work on the whole of many matrices."""
    fn, shapes = LEFT_TO_XLA[name]
    shapes = {k: v for k, v in shapes.items() if 0 not in v}
    zero, tx = zero_of(4), without_state(fn)
    given = jax.eval_shape(lambda: tree(shapes, 0))
    assert update_forecast.exchanges(zero.settings, tx, given) == []
    assert_equal(tx, shapes, zero)


@pytest.mark.parametrize(
    "tx", [contrib.prodigy(), contrib.dadapt_adamw(), contrib.momo(), optax.lbfgs(linesearch=None)]
)
def test_optimizers_with_products_of_vectors_are(tx):
    zero = zero_of(4)
    params = zero.abstract(lambda: tree(SHAPES, 0))
    given = jax.eval_shape(lambda: tree(SHAPES, 0))
    assert update_forecast.exchanges(zero.settings, tx, given) == []
    wrapped = zero.optimizer(tx)
    jax.eval_shape(
        jax.jit(lambda *a: wrapped.update(*a, value=1.0)), params, wrapped.init(params), params
    )


def test_in_a_mesh_that_is_set_and_outside_of_jit():
    zero, shapes = zero_of(4), {"up": SHAPES["up"], "odd": SHAPES["odd"]}
    with jax.set_mesh(zero.mesh):
        assert_equal(muon(), shapes, zero)
    with jax.default_matmul_precision("highest"):
        for mesh in (zero.mesh, zero_jax.make_mesh(replica=2)):
            own = zero_jax.Zero(mesh, 3)
            params, grads = (own.shard(tree(shapes, seed)) for seed in (0, 1))
            tx = own.optimizer(muon())
            eager, _ = tx.update(grads, tx.init(params), params)
            jitted, _ = jax.jit(tx.update)(grads, tx.init(params), params)
            assert ulps(zero_jax.logical(eager), zero_jax.logical(jitted)) < ULPS


def test_an_axis_of_another_name_over_which_nothing_is_cut():
    mesh = zero_jax.make_mesh(1, data_axis="fsdp", model=2, devices=jax.devices()[:2])
    assert_equal(muon(), SHAPES, zero_jax.Zero(mesh, 3, model_specs=SPECS))


def test_branches_within_branches_have_owners_too():
    inside = optax.MultiSteps(muon(), 2).gradient_transformation()

    def step(grads, state, params):
        return inside.update(grads, state, params)

    def skip(grads, state, params):
        return jax.tree.map(jnp.zeros_like, grads), state

    def update(grads, state, params=None):
        good = jnp.isfinite(grads["scalar"])
        return jax.lax.cond(good, step, skip, grads, state, params)

    tx = optax.GradientTransformation(inside.init, update)
    given = jax.eval_shape(lambda: tree(SHAPES, 0))
    assert len(update_forecast.exchanges(zero_of(4).settings, tx, given)) == 1
    assert_equal(tx, SHAPES, zero_of(4))


def test_what_an_update_tells_is_told():
    """As jax.debug.callback beside what owners compute."""

    def update(grads):
        jax.debug.callback(lambda: None)
        return jax.tree.map(by_hand, grads)

    tx = zero_of(4).optimizer(without_state(update))
    params = zero_of(4).abstract(lambda: tree({"odd": SHAPES["odd"]}, 0))
    text = str(jax.make_jaxpr(jax.jit(tx.update))(params, tx.init(params), params))
    assert text.count("debug_callback[") == 1 and "all_to_all" in text


def test_dear_decompositions_are_dealt_out_before_cheap_ones():
    shapes = {**{f"small{i}": (8, 8) for i in range(4)}, "a": (40, 40), "b": (40, 40)}
    tx = without_state(lambda g: jax.tree.map(lambda x: jnp.linalg.svd(x)[0], g))
    given = jax.eval_shape(lambda: tree(shapes, 0))
    (one,) = update_forecast.exchanges(zero_of(2).settings, tx, given)
    assert sorted(kind.counts for kind in one.kinds) == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"model": 2}, {"model_specs": SPECS}),
        ({"replica": 2}, {}),
        ({"replica": 2}, {"hierarchical": True}),
        ({"replica": 2, "model": 2}, {"hierarchical": True, "model_specs": SPECS}),
    ],
    ids=str,
)
def test_on_every_mesh(sizes, settings):
    assert_equal(muon(), SHAPES, zero_jax.Zero(zero_jax.make_mesh(**sizes), 3, **settings))


def audited(tx, shapes, zero):
    """The collectives of an update as it is compiled."""
    wrapped = zero.optimizer(tx)
    params = zero.abstract(lambda: tree(shapes, 0))
    compiled = jax.jit(wrapped.update).lower(params, wrapped.init(params), params).compile()
    return [c for c in traffic.collectives(compiled.as_text()) if c.elements > 256]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_each_matrix_is_sent_twice_and_gathered_by_nobody(n):
    """Two all-to-alls of rows as long as the longest owner's; the vectors' Adam sends nothing."""
    shapes = {"up": (8, 48, 24), "down": (8, 24, 48), "head": (24, 47), "vector": (48,)}
    zero = zero_of(n)
    found = audited(muon(), shapes, zero)
    assert [c.kind for c in found] == ["all-to-all"] * 2
    given = jax.eval_shape(lambda: tree(shapes, 0))
    (one,) = update_forecast.exchanges(zero.settings, muon(), given)
    assert sum(c.words for c in found) == one.sent
    matrices = 2 * 8 * 48 * 24 + 24 * 47
    assert 2 * matrices / n <= one.sent < 2.5 * matrices / n + 4 * 48 * 24


@pytest.mark.parametrize("tx", [optax.adamw(1e-2), optax.lamb(1e-2), optax.adafactor(1e-2)])
def test_what_needs_no_matrices_is_left_as_it_is(tx):
    """The very operations of the transformation, none of them run by this library."""
    zero = zero_of(4)
    given = jax.eval_shape(lambda: tree(SHAPES, 0))
    assert update_forecast.exchanges(zero.settings, tx, given) == []
    state = jax.eval_shape(tx.init, given)
    cuts = zero.splits(given)
    own = [*cuts, *state_splits(state, given, cuts), *cuts]

    def by_owners(g, s, p):
        return owners.run(tx.update, (g, s, p), own, zero.mesh)

    made, want = (jax.make_jaxpr(f)(given, state, given) for f in (by_owners, tx.update))
    assert str(made) == str(want)


def test_at_stage_0_every_device_has_whole_matrices():
    zero = zero_jax.Zero(zero_jax.make_mesh(), 0)
    assert audited(muon(), SHAPES, zero) == []
