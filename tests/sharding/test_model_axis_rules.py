"""Specs, rules and names of dims for the model axis."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_model_axis import mesh_of, problem

import zero_jax
from zero_jax.sharding import model_axis, paths
from zero_jax.sharding.cuts import split


def specs_of(make, **settings):
    """The specs of parameters by name, on 2 x 2 devices."""
    params = zero_jax.Zero(mesh_of(2, 2), **settings).abstract(make)
    return {name: x.sharding.spec for name, x in paths.named_leaves(params)}


def test_linen_metadata_names_the_dims():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.ones
            x = nn.Dense(8, kernel_init=nn.with_partitioning(init, (None, "model")))(x)
            return nn.Dense(8, kernel_init=nn.with_partitioning(init, ("rows", None)))(x)

    make = lambda: Named().init(jax.random.key(0), jnp.ones((1, 4)))  # noqa: E731
    specs = specs_of(make, axis_rules=(("rows", "model"), ("rows", None)))  # the first counts
    assert specs["params/Dense_0/kernel"] == P("data", "model")
    assert specs["params/Dense_1/kernel"] == P("model", "data")
    with nn.logical_axis_rules((("rows", None),)):
        assert specs_of(make)["params/Dense_1/kernel"] == P("data")


def test_nnx_metadata_names_the_dims():
    class Named(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))
            self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)

    specs = specs_of(lambda: nnx.state(Named(nnx.Rngs(0)), nnx.Param))
    assert specs["up/kernel"] == P("data", "model")
    shapes = jax.eval_shape(problem("gpt").make)
    names = zip(paths.named_leaves(shapes), model_axis.names_of_dims(shapes), strict=True)
    found = {name: given for (name, _), given in names}
    assert found["blocks/mlp/down/kernel"] == ("mlp", "embed")
    assert found["ln_f/scale"] == ()


def test_rules_for_axes_that_are_manual_within_the_step_have_no_effect():
    rules = (("batch", "data"), ("hidden", ("model",)))
    zero = zero_jax.Zero(mesh_of(2, 2), model_specs={"up": P(None, "model")}, axis_rules=rules)

    def loss(params, x):
        h = jnp.tanh(x @ params["up"])
        return jnp.mean(nn.with_logical_constraint(h, ("batch", "hidden")))

    params = zero.init(lambda: {"up": jnp.ones((8, 16))})
    value, _ = zero.value_and_grad(loss)(params, jnp.ones((8, 8)))
    np.testing.assert_allclose(value, np.tanh(8), rtol=1e-6)


def test_without_a_data_axis_a_bias_is_sharded_over_model():
    cut = split((2, 64), 1, model=-1, model_shards=4)
    assert (cut.dim, cut.model, cut.device_shape) == (None, -1, (2, 16))
