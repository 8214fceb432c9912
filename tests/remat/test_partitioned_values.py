"""What is kept, split over a model axis: gathered once, padded where it must be, same values."""

import jax
import jax.numpy as jnp
import pytest
from problems import ulps
from test_remat import DEPTH, ROWS, ULPS, WIDTH, problem

from zero_jax.engine import rewrite, weights
from zero_jax.hlo import auditor
from zero_jax.jaxpr import equations
from zero_jax.remat import activations, policies


def over_model(name, policy, manual):
    """Gradients on a mesh of 2 x 4, of a loss whose values are whole on the `model` axis."""
    p, auto = problem(name), jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(auto,) * 2)

    def loss(params, batch):
        closed = equations.written_out(jax.make_jaxpr(p.loss)(params, batch))
        held = [
            weights.Weight(weights.whole(x), weights.Form(at, x.ndim, None))
            for at, x in enumerate(jax.tree.leaves(params))
        ]
        return rewrite.run(closed, [*held, batch], policies.parse(policy), 2.0**30)[0]

    def step(params, batch):
        return jax.tree.map(lambda g: jax.lax.psum(g, "data"), jax.grad(loss)(params, batch))

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
        axis_names=manual,
        check_vma=False,
    )
    compiled = jax.jit(mapped).lower(p.start, p.batch).compile()
    gathers = [
        c for c in auditor.audit(compiled, dict(mesh.shape)).collectives if "gather" in c.kind
    ]
    return compiled(p.start, p.batch), sum(c.elements * c.runs for c in gathers)


@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}], ids=["automatic", "manual"])
@pytest.mark.parametrize(
    ("name", "policy", "gathered"),
    [
        ("scanned", "block@partitioned", 6),
        ("scanned", "block_sqrt@partitioned+host", 3),
        ("scanned", "names:h@partitioned", 6),
        ("plain", "block@partitioned", DEPTH - 1),
    ],
)
def test_partitioned_values_are_gathered_once_and_change_nothing(name, policy, gathered, manual):
    """And only in the backward pass. An unrolled first layer's input is the batch, which stays."""
    want, none = over_model(name, "block", manual)
    got, words = over_model(name, policy, manual)
    assert none == 0
    assert words == gathered * (ROWS // 2) * WIDTH
    assert ulps(got, want) < ULPS


def test_a_value_that_mp_does_not_divide_is_padded_and_comes_back():
    x = jnp.arange(15.0).reshape(5, 3)
    place = policies.parse("block@partitioned").inputs

    def there_and_back(x):
        kept = activations.put(x, place)
        assert kept.shape == (4,)
        return activations.fetch(kept, place, x)

    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        there_and_back, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    assert (mapped(x) == x).all()
