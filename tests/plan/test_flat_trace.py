"""Traces as the planner reads them: calls written out, loops kept, splits over `model` spread."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax
from zero_jax.plan import flat_trace, forecast
from zero_jax.plan.flat_trace import flatten, spread


def flat_of(f, *args):
    return flatten(jax.make_jaxpr(f)(*args))


def names(flat):
    return [operation.name for operation in flat.operations]


def test_calls_are_written_out_and_loops_are_not():
    @jax.custom_vjp
    def inner(x):
        return jnp.sin(x)

    inner.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    def f(x):
        y = jax.checkpoint(jax.jit(lambda x: jnp.cos(inner(x))))(x)
        return jax.lax.scan(lambda c, _: (jnp.exp(c), None), y, None, length=3)[0]

    flat = flat_of(f, jnp.ones((2, 3)))
    assert names(flat) == ["sin", "cos", "scan"]
    (body,) = flat.operations[-1].bodies
    assert names(body.flat) == ["exp"]
    assert [v.bytes for v in (*flat.inputs, *flat.outputs)] == [2 * 3 * 4] * 2
    assert flat.operations[0].inputs == flat.inputs


def test_a_loop_hands_slices_to_its_body_and_no_literals():
    def f(ws, x):
        return jax.lax.scan(lambda h, w: (h @ w + 0.0, None), x, ws)[0]

    flat = flat_of(f, jnp.ones((5, 3, 3)), jnp.ones((2, 3)))
    (body,) = flat.operations[0].bodies
    shapes = {(mine.shape, theirs.shape) for mine, theirs in body.given}
    assert shapes == {((3, 3), (5, 3, 3)), ((2, 3), (2, 3))}
    assert {theirs for _, theirs in body.given} == set(flat.inputs)
    sums = lambda x: jax.lax.scan(lambda h, row: (h + jnp.sum(row), None), 0.0, x)[0]  # noqa: E731
    (loop,) = flat_of(sums, jnp.ones((5, 3))).operations
    assert [theirs.shape for _, theirs in loop.bodies[0].given] == [(5, 3)]


def test_each_branch_is_a_body_and_what_nobody_reads_is_left_out():
    def f(x):
        _ = jnp.sin(jnp.cos(x))
        return jax.lax.cond(x[0] > 0, jnp.sin, lambda x: jnp.cos(jnp.exp(x)) + 2.0, x)

    flat = flat_of(f, jnp.ones(3))
    branch = flat.operations[-1]
    assert branch.name == "cond" and "sin" not in names(flat)
    assert sorted(names(body.flat) for body in branch.bodies) == [["exp", "cos", "add"], ["sin"]]
    assert [[t.shape for _, t in body.given] for body in branch.bodies] == [[(3,)], [(3,)]]
    adds = [o for body in branch.bodies for o in body.flat.operations if o.name == "add"]
    assert [len(o.inputs) for o in adds] == [1], "a literal is no value"


def test_the_backward_pass_is_marked():
    def f(x, w):
        return jnp.sum(jnp.sin(x @ w))

    flat = flat_of(jax.grad(f, 1), jnp.ones((2, 3)), jnp.ones((3, 4)))
    found = {back: {o.name for o in flat.operations if o.backward == back} for back in (0, 1)}
    assert {"dot_general", "cos"} <= found[0] and "dot_general" in found[1]


def test_the_part_of_one_device_is_found_under_calls():
    spec = PartitionSpec("data")
    mapped = jax.shard_map(jnp.sin, mesh=zero_jax.make_mesh(), in_specs=spec, out_specs=spec)
    jaxpr = jax.make_jaxpr(jax.jit(jax.jit(mapped)))(jnp.ones((16, 3)))
    flat = flatten(flat_trace.device_part(jaxpr))
    assert (names(flat), [v.shape for v in flat.inputs]) == (["sin"], [(2, 3)])
    with pytest.raises(ValueError, match="shard_map"):
        forecast.forecast(jax.make_jaxpr(jax.jit(jnp.sin))(jnp.ones(3)), 1)


def test_arrays_that_a_loss_closes_over_are_no_parameters():
    """shard_map puts them before its inputs; the terms of the parameters stay what they were."""
    mask = jnp.arange(16.0)

    def planned(closed):
        def loss(params, x):
            y = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]
            return jnp.mean((y * mask if closed else y) ** 2)

        zero = zero_jax.Zero(zero_jax.abstract_mesh(4), 3, remat="block")
        params = zero.abstract(lambda: {"w": jnp.zeros((6, 16, 16))})
        batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        terms = zero.plan(loss, optax.sgd(0.1), params, batch).predicted.terms
        return [terms[name] for name in ("copy", "saved", "gradients")]

    assert planned(True) == planned(False)


# A split over a model axis of 4: of x before, of the result after.

M = 4
SHAPE = (2, 8, 12, 16)
ONES = jnp.ones
# fmt: off
RULES = [
    (lambda x: jnp.tanh(x) * 2 + 1, 2, 2),
    (lambda x: x + ONES((2, 8, 1, 16)), 2, 2),
    (lambda x: x.transpose(2, 0, 3, 1), 2, 0),
    (lambda x: x.reshape(2, 8, 12 * 16), 2, 2),
    (lambda x: x.reshape(2, 8, 4, 3, 16), 2, 2),
    (lambda x: x.reshape(16, 12, 16), 2, 1),
    (lambda x: x.reshape(16, 12, 16), 1, None),  # the split dim is no longer in one piece
    (lambda x: x.sum((0, 3)), 2, 1),
    (lambda x: x.max(2), 2, None),
    (lambda x: x[:, :5], 2, 2),
    (lambda x: x[:, :, :5], 2, None),
    (lambda x: x[:, 3], 2, 1),
    (lambda x: jnp.unstack(x, axis=1)[0], 2, 1),
    (lambda x: jnp.stack([x, x], axis=1), 2, 3),
    (lambda x: jnp.concatenate([x, x], axis=0), 2, 2),
    (lambda x: jnp.broadcast_to(x, (3, *SHAPE)), 2, 3),
    (lambda x: x @ ONES((16, 5)), 2, 2),
    (lambda x: x @ ONES((16, 5)), 3, None),  # summed over, then summed over devices
    (lambda x: ONES((5, 2)) @ x.reshape(2, -1), 1, 1),
    (lambda x: jnp.einsum("bhqk,bhkd->bhqd", x, ONES((2, 8, 16, 5))), 1, 1),
    (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], 2, 2),
    (lambda x: jax.lax.map(lambda row: row + 1, x), 2, 2),
    (lambda x: jax.jit(lambda y: y - 1)(x), 2, 2),
    (lambda x: x[jnp.array([0, 1, 0])], 0, None),  # rows of an embedding, summed over devices
]
# fmt: on


@pytest.mark.parametrize(("fn", "dim", "want"), RULES)
def test_a_split_spreads(fn, dim, want):
    (value,) = flatten(jax.make_jaxpr(fn)(ONES(SHAPE)), [dim], M).results
    assert value.split == want
    assert value.bytes * (1 if want is None else M) == value.full_bytes


def test_a_loop_that_starts_whole_and_becomes_split_is_split():
    def grow(w):
        return jax.lax.scan(lambda c, x: (c + x, None), jnp.zeros(8), w)[0]

    flat = flatten(jax.make_jaxpr(grow)(ONES((3, 8))), [1], M)
    assert flat.results[0].split == 0
    (loop,) = [o for o in flat.operations if o.name == "scan"]
    assert {value.split for value in loop.bodies[0].flat.outputs} == {0}


def test_parts_that_are_manual_over_model_see_pieces_and_constraints_split():
    mesh, spec = zero_jax.abstract_mesh(2, model=M), PartitionSpec(None, "model")

    def product(piece):
        return jnp.sin(piece @ ONES((2, 2)))

    def f(x):
        return jax.shard_map(
            product, in_specs=spec, out_specs=spec, axis_names={"model"}, check_vma=False
        )(x)

    with jax.sharding.use_abstract_mesh(mesh):
        flat = flatten(jax.make_jaxpr(f)(ONES((6, 8))), [None], M)
    (dot,) = [o for o in flat.operations if o.name == "dot_general"]
    assert dot.outputs[0].shape == (6, 2)
    assert (flat.inputs[0].split, flat.results[0].split) == (1, 1), "what is handed in pieces too"

    sharding = NamedSharding(mesh, spec)
    constrained = lambda x: jax.lax.with_sharding_constraint(x, sharding)  # noqa: E731
    assert spread(jax.make_jaxpr(constrained)(ONES((6, 8))).eqns[0], [0]) == [1]
