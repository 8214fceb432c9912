"""How a split over `model` spreads through a traced program: each rule, with known answers."""

import jax
import jax.numpy as jnp
import pytest

from zero_jax import abstract_mesh
from zero_jax.plan.flat_trace import flatten, spread

M = 4  # the size of the model axis
SHAPE = (2, 8, 12, 16)


def split_after(fn, dim, shape=SHAPE):
    """The split dim of `fn(x)`, x being split along `dim`."""
    flat = flatten(jax.make_jaxpr(fn)(jnp.ones(shape)), [dim], M)
    return flat.results[0].split


RULES = [
    (lambda x: jnp.tanh(x) * 2 + 1, 2, 2),
    (lambda x: x + jnp.ones((2, 8, 1, 16)), 2, 2),
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
    (lambda x: x @ jnp.ones((16, 5)), 2, 2),
    (lambda x: x @ jnp.ones((16, 5)), 3, None),  # summed over, then summed over devices
    (lambda x: jnp.ones((5, 2)) @ x.reshape(2, -1), 1, 1),
    (lambda x: jnp.einsum("bhqk,bhkd->bhqd", x, jnp.ones((2, 8, 16, 5))), 1, 1),
    (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], 2, 2),
    (lambda x: jax.lax.map(lambda row: row + 1, x), 2, 2),
    (lambda x: jax.jit(lambda y: y - 1)(x), 2, 2),
    (lambda x: x[jnp.array([0, 1, 0])], 0, None),  # rows of an embedding, summed over devices
]


@pytest.mark.parametrize(("fn", "dim", "want"), RULES)
def test_a_split_spreads(fn, dim, want):
    assert split_after(fn, dim) == want


def test_a_value_counts_as_what_one_device_has_of_it():
    flat = flatten(jax.make_jaxpr(lambda x: x * 2)(jnp.ones(SHAPE)), [2], M)
    assert flat.results[0].bytes * M == flat.results[0].full_bytes == 4 * 2 * 8 * 12 * 16


def test_a_loop_that_starts_whole_and_becomes_split_is_split():
    def grow(w):
        return jax.lax.scan(lambda c, x: (c + x, None), jnp.zeros(8), w)[0]

    flat = flatten(jax.make_jaxpr(grow)(jnp.ones((3, 8))), [1], M)
    assert flat.results[0].split == 0
    (loop,) = [o for o in flat.operations if o.name == "scan"]
    assert {value.split for value in loop.bodies[0].flat.outputs} == {0}


def test_a_part_that_is_manual_over_model_sees_pieces():
    mesh = abstract_mesh(2, model=M)
    spec = jax.sharding.PartitionSpec(None, "model")

    def f(x):
        return jax.shard_map(
            lambda piece: jnp.sin(piece @ jnp.ones((2, 2))),
            in_specs=spec,
            out_specs=spec,
            axis_names={"model"},
            check_vma=False,
        )(x)

    with jax.sharding.use_abstract_mesh(mesh):
        flat = flatten(jax.make_jaxpr(f)(jnp.ones((6, 8))), [None], M)
    (product,) = [o for o in flat.operations if o.name == "dot_general"]
    assert product.outputs[0].shape == (6, 2)
    assert flat.results[0].split == 1
    assert flat.inputs[0].split == 1, "what is handed in pieces is split"


def test_a_spec_says_what_a_constraint_splits():
    mesh = abstract_mesh(2, model=M)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, spec))(jnp.ones((6, 8)))
    assert spread(traced.eqns[0], [0]) == [1]
