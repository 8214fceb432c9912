"""Traces as the planner reads them: calls written out, loops kept, what nobody reads left out."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from test_forecast import N

import zero_jax
from zero_jax.plan import flat_trace, forecast


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

    flat = flat_trace.flatten(jax.make_jaxpr(f)(jnp.ones((2, 3))))
    assert names(flat) == ["sin", "cos", "scan"]
    (body,) = flat.operations[-1].bodies
    assert names(body.flat) == ["exp"]
    assert [v.bytes for v in (*flat.inputs, *flat.outputs)] == [2 * 3 * 4] * 2
    assert flat.operations[0].inputs == flat.inputs


def test_a_loop_hands_slices_to_its_body():
    def f(ws, x):
        return jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0]

    flat = flat_trace.flatten(jax.make_jaxpr(f)(jnp.ones((5, 3, 3)), jnp.ones((2, 3))))
    (body,) = flat.operations[0].bodies
    shapes = {(mine.shape, theirs.shape) for mine, theirs in body.given}
    assert shapes == {((3, 3), (5, 3, 3)), ((2, 3), (2, 3))}
    assert {theirs for _, theirs in body.given} == set(flat.inputs)


def test_literals_are_handed_to_no_body():
    def f(x):
        return jax.lax.scan(lambda h, row: (h + jnp.sum(row), None), 0.0, x)[0]

    (loop,) = (o for o in flat_trace.flatten(jax.make_jaxpr(f)(jnp.ones((5, 3)))).operations)
    assert [theirs.shape for _, theirs in loop.bodies[0].given] == [(5, 3)]


def test_each_branch_is_a_body():
    def f(x):
        return jax.lax.cond(x[0] > 0, jnp.sin, lambda x: jnp.cos(jnp.exp(x)), x)

    branch = flat_trace.flatten(jax.make_jaxpr(f)(jnp.ones(3))).operations[-1]
    assert branch.name == "cond"
    assert sorted(names(body.flat) for body in branch.bodies) == [["exp", "cos"], ["sin"]]
    assert [[t.shape for _, t in body.given] for body in branch.bodies] == [[(3,)], [(3,)]]


def test_what_nobody_reads_is_left_out():
    def f(x):
        _ = jnp.sin(jnp.cos(x))
        return jnp.exp(x) + 2.0

    flat = flat_trace.flatten(jax.make_jaxpr(f)(jnp.ones(3)))
    assert names(flat) == ["exp", "add"]
    assert [len(o.inputs) for o in flat.operations] == [1, 1], "a literal is no value"


def test_the_backward_pass_is_marked():
    def f(x, w):
        return jnp.sum(jnp.sin(x @ w))

    flat = flat_trace.flatten(jax.make_jaxpr(jax.grad(f, 1))(jnp.ones((2, 3)), jnp.ones((3, 4))))
    found = {backward: [] for backward in (False, True)}
    for operation in flat.operations:
        found[operation.backward].append(operation.name)
    assert "dot_general" in found[False] and "cos" in found[False]
    assert "dot_general" in found[True]


def test_the_part_of_one_device_is_found_under_calls():
    mesh = zero_jax.make_mesh()
    spec = PartitionSpec("data")
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    jaxpr = jax.make_jaxpr(jax.jit(jax.jit(mapped)))(jnp.ones((N * 2, 3)))
    flat = flat_trace.flatten(flat_trace.device_part(jaxpr))
    assert names(flat) == ["sin"]
    assert [v.shape for v in flat.inputs] == [(2, 3)]


def test_a_function_without_shard_map_is_refused():
    with pytest.raises(ValueError, match="no shard_map in it: give one made by zero.train_step"):
        forecast.forecast(jax.make_jaxpr(jax.jit(jnp.sin))(jnp.ones(3)), 1)


@pytest.mark.parametrize("stage", [1, 3])
def test_arrays_that_a_loss_closes_over_are_no_parameters(stage):
    """shard_map puts them before its inputs; the terms of the parameters stay what they were."""
    mask = jnp.arange(16.0)

    def planned(closed):
        def loss(params, x):
            def layer(x, w):
                return jnp.tanh(x @ w), None

            y = jax.lax.scan(layer, x, params["w"])[0]
            return jnp.mean((y * mask if closed else y) ** 2)

        zero = zero_jax.Zero(zero_jax.abstract_mesh(4), stage, remat="block")
        params = zero.abstract(lambda: {"w": jnp.zeros((6, 16, 16))})
        batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        return zero.plan(loss, optax.sgd(0.1), params, batch).predicted.terms

    plain, closed = planned(False), planned(True)
    assert {k: closed[k] for k in ("copy", "saved", "gradients")} == {
        k: plain[k] for k in ("copy", "saved", "gradients")
    }
