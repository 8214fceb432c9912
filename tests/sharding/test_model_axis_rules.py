"""Specs, rules and names of dims for the model axis: how they are read, what is refused."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from test_model_axis import mesh_of, problem

import zero_jax
from zero_jax.sharding import model_axis, paths
from zero_jax.sharding.model_axis import ModelAxis

BAD_SPECS = [
    ({"wte": P("tensor")}, "wte/embedding.*'tensor'"),
    ({"wte": P("data")}, "wte/embedding.*data axis takes a dim by itself"),
    ({"up/kernel": P("model")}, r"up/kernel.*does not divide 2: dims \[1, 2\] would work"),
    ({"wte": P("model", "model")}, "wte/embedding.*one of its 2 dims"),
    ({"wte": P(None, None, "model")}, "wte/embedding.*one of its 2 dims"),
    ({"nothing": P("model")}, "matches none"),
]


@pytest.mark.parametrize(("specs", "message"), BAD_SPECS)
def test_bad_specs_are_refused(specs, message):
    zero = zero_jax.Zero(mesh_of(2, 4), model_specs=specs)
    with pytest.raises(ValueError, match=message):
        zero.abstract(problem("gpt").make)


def test_a_dim_that_mp_does_not_divide_is_refused_with_the_dims_that_would_work():
    tree = {"w": jnp.zeros((6, 8, 5))}
    axis = ModelAxis(4, (("w", P(None, None, "model")),))
    with pytest.raises(ValueError, match=r"w \(6, 8, 5\).*does not divide 5: dims \[1\] would"):
        axis.dims(tree)


def test_a_model_axis_that_splits_nothing_is_refused():
    zero = zero_jax.Zero(mesh_of(2, 2))
    with pytest.raises(ValueError, match="no parameter is split over it"):
        zero.init(lambda: {"w": jnp.ones((8, 8))})
    with pytest.raises(ValueError, match="this mesh has none"):
        zero_jax.Zero(mesh_of(2, 1), sequence_parallel=True)


def test_flax_metadata_names_the_dims():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.ones
            x = nn.Dense(8, kernel_init=nn.with_partitioning(init, (None, "model")))(x)
            return nn.Dense(8, kernel_init=nn.with_partitioning(init, ("rows", None)))(x)

    make = lambda: Named().init(jax.random.key(0), jnp.ones((1, 4)))  # noqa: E731
    zero = zero_jax.Zero(mesh_of(2, 2), axis_rules=(("rows", "model"),))
    specs = {n: x.sharding.spec for n, x in paths.named_leaves(zero.abstract(make))}
    assert specs["params/Dense_0/kernel"] == P("data", "model")
    assert specs["params/Dense_1/kernel"] == P("model", "data")
    with nn.logical_axis_rules((("rows", None),)):
        zero = zero_jax.Zero(mesh_of(2, 2))
    specs = {n: x.sharding.spec for n, x in paths.named_leaves(zero.abstract(make))}
    assert specs["params/Dense_1/kernel"] == P("data")


BAD_RULES = [
    ({"axis_rules": ("ab",)}, "axis_rules has 'ab': write pairs"),
    ({"axis_rules": (("a", "b", "c"),)}, "axis_rules has .*: write pairs"),
    ({"model_specs": {"w": None}}, "'w' the spec None: write a jax.sharding.PartitionSpec"),
    ({"model_specs": {"w": "model"}}, "'w' the spec 'model'"),
    ({"sequence_parallel": True, "axis_rules": {"seq": None}}, "keep 'seq' off the model axis"),
    ({"axis_rules": {"seq": "model"}, "remat": "block@partitioned"}, "kept is split already"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_RULES)
def test_rules_and_specs_of_no_use_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        zero_jax.Zero(mesh_of(2, 2), **settings)


def test_specs_are_looked_at_without_a_model_axis_too():
    for specs in ({"wte": P("modle")}, {"nothing": P("model")}):
        with pytest.raises(ValueError, match=r"'modle'|matches none"):
            zero_jax.Zero(mesh_of(2, 1), model_specs=specs).abstract(problem("gpt").make)


def test_a_model_axis_that_splits_only_what_data_takes_is_refused():
    make = lambda: {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}  # noqa: E731
    with pytest.raises(ValueError, match="`model_specs`=.* split no parameter"):
        zero_jax.Zero(mesh_of(2, 2), stage=2, model_specs={"^b$": P("model")}).abstract(make)


def test_rules_for_axes_that_the_step_is_manual_over_do_no_harm():
    rules = (("batch", "data"), ("hidden", ("model",)))
    zero = zero_jax.Zero(mesh_of(2, 2), model_specs={"up": P(None, "model")}, axis_rules=rules)

    def loss(params, x):
        h = jnp.tanh(x @ params["up"])
        return jnp.mean(nn.with_logical_constraint(h, ("batch", "hidden")))

    params = zero.init(lambda: {"up": jnp.ones((8, 16))})
    assert jnp.isfinite(zero.value_and_grad(loss)(params, jnp.ones((8, 8)))[0])


def test_the_names_of_dims_are_read_from_variables_and_boxes():
    names = model_axis.names_of_dims(jax.eval_shape(problem("gpt").make))
    leaves = [n for n, _ in paths.named_leaves(jax.eval_shape(problem("gpt").make))]
    found = dict(zip(leaves, names, strict=True))
    assert found["blocks/mlp/down/kernel"] == ("mlp", "embed")
    assert found["ln_f/scale"] == ()
