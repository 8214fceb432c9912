"""Updates on assigned devices equal those of one device, and send each matrix twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from problems import ulps

import zero_jax
from zero_jax.hlo import collectives
from zero_jax.matrix_updates.exchange import assign
from zero_jax.matrix_updates.regions import ShardedProgram
from zero_jax.matrix_updates.units import units
from zero_jax.plan import planning

SHAPES = {"alone": (8, 16), "odd": (17, 9), "up": (5, 12, 8), "down": (5, 8, 12)}
SHAPES |= {"experts": (2, 3, 6, 5), "vector": (13,), "scalar": ()}
SPECS = {"up": jax.sharding.PartitionSpec(None, None, "model")}
TWO = {"rows": (12, 8), "columns": (7, 10)}
# Products are summed in another order, and three to five iterations each multiply the difference.
ULPS = 64
pytestmark = pytest.mark.filterwarnings("error")  # also JAX's about jaxprs without debug info


def muon(**options):
    """Transforms every matrix, stacked along all dims but the last two."""

    def dims(x):
        return contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if x.ndim > 1 else None

    of_tree = functools.partial(jax.tree.map, dims)
    return contrib.muon(1e-2, muon_weight_dimension_numbers=of_tree, **options)


def orthogonal(x, turns=3):
    """Newton and Schulz without a loop of JAX's: the operations are written out."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(turns):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def by_hand(x):
    stacked = jax.vmap(orthogonal)(x) if x.ndim == 3 else x
    return -1e-2 * (orthogonal(x) if x.ndim == 2 else stacked)


def root(a):
    values, vectors = jnp.linalg.eigh(a)
    return (vectors * jnp.maximum(values, 1e-4) ** -0.25) @ vectors.T


def shampoo():
    """Transforms matrices alone, with a state of its rows and one of its columns."""
    init = lambda params: {n: tuple(map(jnp.eye, x.shape)) for n, x in params.items()}  # noqa: E731

    def update(grads, state, params=None):
        pairs = [(name, x, *state[name]) for name, x in grads.items()]
        new = {name: (rows + x @ x.T, columns + x.T @ x) for name, x, rows, columns in pairs}
        return {n: -1e-2 * root(new[n][0]) @ x @ root(new[n][1]) for n, x in grads.items()}, new

    return optax.GradientTransformation(init, update)


def tree(shapes, seed):
    keys = iter(jax.random.split(jax.random.key(seed), len(shapes)))
    return {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}


def two_steps(tx, shapes, zero=None, jit=jax.jit):
    """Parameters and state after two updates; plain optax without `zero`."""
    tx = tx if zero is None else zero.optimizer(tx)
    place = (lambda x: x) if zero is None else zero.shard
    params = place(tree(shapes, 0))
    state = tx.init(params)

    @jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in (1, 2):
        params, state = update(place(tree(shapes, seed)), state, params)
    state = state if zero is None else state.inner
    return jax.tree.leaves(zero_jax.unpad((params, state)))


def zero_of(n, stage=3, sizes=None, **settings):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:n], **sizes or {})
    return zero_jax.Zero(mesh, stage, param_specs=SPECS if sizes else None, **settings)


def exchanges(tx, shapes, n=4):
    given = jax.eval_shape(lambda: tree(shapes, 0))
    return planning.assigned(zero_of(n).config, tx, given).exchanges


def without_state(fn):
    return optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (fn(g), s))


some = lambda *names: {name: SHAPES[name] for name in names}  # noqa: E731
of_each = lambda fn: without_state(lambda g: jax.tree.map(fn, g))  # noqa: E731
gram = lambda x: x @ jnp.swapaxes(x, 1, 2)  # noqa: E731
FACTORS = jnp.arange(1.0, 6.0)[:, None, None]  # for the first, second ... of each leaf


def other_constants(grads):
    """A constant of an inner function does not show in the text of a trace."""
    out = {}
    for name, x in grads.items():
        turn = jax.jit(lambda y, by=CONSTANTS[name]: (y @ y.T @ by) @ y / 50)
        out[name] = jax.lax.fori_loop(0, 2, lambda _, y, turn=turn: turn(y), x)
    return out


# Not of NumPy: it has no operators that JAX would trace.
CONSTANTS = {name: np.asarray(x) for name, x in tree({"a": (8, 8), "b": (8, 8)}, 0).items()}
ALIKE, STACKS = {"a": (8, 6), "b": (8, 6)}, {"a": (5, 8, 6), "b": (5, 8, 6)}
SCHATTEN = {"preconditioning": "schatten", "adaptive": True}
DION = {"ns_coeffs": "dion", "mu_dtype": jnp.bfloat16, "consistent_rms": 0.2}
EVERY_SECOND = optax.MultiSteps(muon(), 2).gradient_transformation()
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), muon(), optax.clip_by_global_norm(0.1))
MESHES = {"replicas": {"sizes": {"replica": 2, "model": 2}, "secondary_shards": True},
          "model axis": {"sizes": {"data": 1, "model": 2, "data_axis": "fsdp"}}}  # fmt: skip
EQUAL = {
    "muon": (muon(), SHAPES, 3), "aol": (muon(preconditioning="aol"), some("odd", "vector"), 4),
    "schatten, adaptive": (muon(**SCHATTEN), some("odd", "vector"), 8),
    "dion, bf16": (muon(**DION), some("odd", "vector"), 4),
    "MultiSteps": (optax.MultiSteps(muon(), 2), some("odd", "down", "scalar"), 5),
    "branches": (optax.apply_if_finite(EVERY_SECOND, 3), some("odd", "up", "scalar"), 4),
    "apply_if_finite": (optax.apply_if_finite(muon(), 3), some("up", "vector"), 3),
    "between clips": (CLIPPED, some("odd", "up", "vector"), 4),
    "by hand": (of_each(by_hand), some("odd", "up"), 3), "shampoo": (shampoo(), TWO, 4),
    "galore": (contrib.galore(1e-2, rank=3, update_proj_gap=2), TWO, 3),
    "one kind": (of_each(lambda x: gram(x) * FACTORS @ x * 1e-3), STACKS, 4),
    "other constants": (without_state(other_constants), ALIKE, 4),
    "replicas": (muon(), some("odd", "up", "vector"), 8),
    "model axis": (muon(), some("odd", "up", "vector"), 2),
    "outside of jit": (muon(), some("odd"), 2)}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_updates_equal_those_of_one_device(name):
    (tx, shapes, n), jit = EQUAL[name], (lambda f: f) if name == "outside of jit" else jax.jit
    with jax.default_matmul_precision("highest"):
        got = two_steps(tx, shapes, zero_of(n, **MESHES.get(name, {})), jit)
        want = two_steps(tx, shapes)
    # An eigendecomposition or SVD of nearly equal values is far more sensitive.
    tolerance = 2048 if shapes is TWO else ULPS
    assert ulps(got, want) < tolerance


cube = lambda x: x @ x.T @ x * 1e-3  # noqa: E731
powers = lambda x: jax.lax.while_loop(lambda y: jnp.max(jnp.abs(y)) > 0.5, cube, x)  # noqa: E731
over_leaves = lambda g: jax.lax.fori_loop(0, 3, lambda _, t: jax.tree.map(cube, t), g)  # noqa: E731
SQUARE = {name: (16, 16) for name in "abcdef"}
STACK = {"stack": (5, 8, 6)}
LEFT_TO_XLA = {
    "norms": (of_each(lambda x: x / jnp.sqrt(jnp.vdot(x, x))), SHAPES),
    "vectors": (of_each(lambda x: x - jnp.outer(x @ x[0], x[0])), SQUARE),
    "one loop over many leaves": (without_state(over_leaves), SQUARE),
    "a stack that is one": (of_each(lambda x: jax.lax.map(by_hand, x)), STACK),
    "a while loop for all": (of_each(jax.vmap(powers)), STACK),
    "prodigy": (contrib.prodigy(), SHAPES), "lbfgs": (optax.lbfgs(linesearch=None), SHAPES),
    "adamw": (optax.adamw(1e-2), SHAPES), "lamb": (optax.lamb(1e-2), SHAPES),
    "adafactor": (optax.adafactor(1e-2), SHAPES)}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_TO_XLA)
def test_updates_that_need_no_exchange_are_left_as_they_are(name):
    """Where less is sent without one, or one device would work on many matrices at once."""
    tx, shapes = LEFT_TO_XLA[name]
    assert exchanges(tx, shapes) == []


def test_effects_of_an_update_are_kept():
    def update(grads):
        jax.debug.callback(lambda: None)
        return jax.tree.map(by_hand, grads)

    tx = zero_of(4).optimizer(without_state(update))
    params = zero_of(4).eval_shape(lambda: tree(some("odd"), 0))
    text = str(jax.make_jaxpr(jax.jit(tx.update))(params, tx.init(params), params))
    assert text.count("debug_callback[") == 1 and "all_to_all" in text


def test_loads_of_devices():
    """The dearest matrix makes the difference at most, and dear ones are assigned first."""
    kinds = [(36, 206), (36, 481), (36, 618), (36, 618), (1, 40)]
    for count in (1, 2, 3, 5, 8, 64):
        counts = np.array(assign(kinds, count))
        assert counts.sum(0).tolist() == [total for total, _ in kinds]
        loads = counts @ [cost for _, cost in kinds]
        assert loads.max() - loads.min() <= 618
        assert loads.max() / loads.mean() < 1.15
    assert assign([(2, 5)], 3) == [(1,), (1,), (0,)]
    shapes = {**{f"small{i}": (8, 8) for i in range(4)}, "a": (40, 40), "b": (40, 40)}
    (one,) = exchanges(of_each(lambda x: jnp.linalg.svd(x)[0]), shapes, 2)
    assert sorted(kind.counts for kind in one.kinds) == [(1, 1), (2, 2)]


def test_each_matrix_is_sent_twice_and_never_gathered():
    """Two all-to-alls of rows as long as the longest; the vectors' Adam sends nothing."""
    n, shapes = 3, {"up": (8, 48, 24), "down": (8, 24, 48), "head": (24, 47), "vector": (48,)}
    wrapped = zero_of(n).optimizer(muon())
    params = zero_of(n).eval_shape(lambda: tree(shapes, 0))
    compiled = jax.jit(wrapped.update).lower(params, wrapped.init(params), params).compile()
    found = [c for c in collectives.collectives(compiled.as_text()) if c.elements > 256]
    assert [c.kind for c in found] == ["all-to-all"] * 2
    (one,) = exchanges(muon(), shapes, n)
    assert sum(c.sent_elements for c in found) == one.sent
    matrices = 2 * 8 * 48 * 24 + 24 * 47
    assert 2 * matrices / n <= one.sent < 2.5 * matrices / n + 4 * 48 * 24


def found(fn, *args, dims):
    return list(ShardedProgram(jax.make_jaxpr(fn)(*args), [(d,) for d in dims]).regions())


def test_a_product_needs_full_matrices_where_a_device_lacks_something():
    x, stack = jnp.ones((8, 8)), jnp.ones((4, 8, 8))
    for dims in [(0, None), (None, 1), (0, 1), (1, 0), (0, 0), (1, None)]:
        assert bool(found(jnp.matmul, x, x, dims=dims)) == (dims not in [(0, None), (None, 1)])
    assert not found(jnp.matmul, stack, stack, dims=[0, 0]), "along the stack"


ROWS = jax.random.normal(jax.random.key(0), (5, 6, 8))
ONE_BY_ONE = {
    "iteration": jax.vmap(orthogonal),
    "decomposition": lambda x: jax.vmap(root)(gram(x)),
    "factors": lambda x: (gram(x) * FACTORS) @ x @ jnp.eye(8),
    "reshaped": lambda x: (gram(x).sum(1).reshape(5, 6, 1) * x).reshape(5, 48).reshape(5, 8, 6) @ x,
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: gram(y) @ y / 50, x),
    "branching": lambda x: jax.lax.cond(len(x) > 3, lambda g: g @ g, lambda g: g, gram(x)) @ x,
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_by_one_equals_all_at_once(name):
    (region,) = found(ONE_BY_ONE[name], ROWS, dims=[1])
    one = units(region)
    assert (one.count, [v.aval.shape for v in region.sharded]) == (5, [ROWS.shape])
    keys = jax.random.split(jax.random.key(1), len(region.replicated))
    pairs = zip(region.replicated, keys, strict=True)
    same = [jax.random.uniform(k, v.aval.shape, minval=0.5).astype(v.aval.dtype) for v, k in pairs]
    want = jax.extend.core.jaxpr_as_fun(region.closed)(ROWS, *same)
    run = jax.jit(lambda at, x: jax.extend.core.jaxpr_as_fun(one.one)(at, x, *same))
    for at in (0, 4):
        for x, y, stack in zip(run(at, ROWS[at : at + 1]), want, one.stacks[1], strict=True):
            np.testing.assert_allclose(x, jnp.take(y, jnp.array([at]), stack), rtol=2e-5, atol=1e-5)


def test_operations_across_matrices_are_not_taken_apart():
    summed = lambda x: gram(x) @ x.sum(0)  # noqa: E731
    cumulative = lambda x: jnp.cumsum(gram(x), 0) @ x  # noqa: E731
    reshaped = lambda x: gram(x).reshape(30, 6).reshape(5, 6, 6) @ x  # noqa: E731
    for at, fn in enumerate((summed, cumulative, reshaped)):
        assert all(units(region).count == 1 for region in found(fn, ROWS, dims=[1])), at
