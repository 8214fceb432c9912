"""Errors about the model axis, stored arrays and padded leaves; each names the argument or leaf."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_model_axis import mesh_of, problem

import zero_jax
from zero_jax.sharding import layout
from zero_jax.sharding.cuts import Splitter
from zero_jax.sharding.model_axis import ModelAxis


def gpt(model, **settings):
    return lambda: zero_jax.Zero(mesh_of(2, model), **settings).abstract(problem("gpt").make)


def two(**settings):
    return lambda: zero_jax.Zero(mesh_of(2, 2), **settings)


def small(**settings):
    make = lambda: {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}  # noqa: E731
    return lambda: zero_jax.Zero(mesh_of(2, 2), **settings).abstract(make)


def dims_of_an_indivisible_leaf():
    axis = ModelAxis(4, (("w", P(None, None, "model")),))
    axis.dims({"w": jnp.zeros((6, 8, 5))})


def unsharded():
    whole = jax.device_put(jnp.ones((8, 8)), NamedSharding(zero_jax.make_mesh(), P()))
    layout.check_bytes({"w": whole}, Splitter(8)({"w": whole}))


SEQUENCE = {"sequence_parallel": True, "axis_rules": {"seq": None}}
PARTITIONED = {"axis_rules": {"seq": "model"}, "remat": "block@partitioned"}
REFUSALS = [
    ("wte/embedding.*'tensor'", gpt(4, model_specs={"wte": P("tensor")})),
    ("wte/embedding.*'data'", gpt(4, model_specs={"wte": P("data")})),
    (r"up/kernel.*\[1, 2\]", gpt(4, model_specs={"up/kernel": P("model")})),
    ("wte/embedding", gpt(4, model_specs={"wte": P("model", "model")})),
    ("wte/embedding", gpt(4, model_specs={"wte": P(None, None, "model")})),
    ("model_specs='nothing'", gpt(4, model_specs={"nothing": P("model")})),
    # Also without a model axis.
    ("'modle'", gpt(1, model_specs={"wte": P("modle")})),
    ("model_specs='nothing'", gpt(1, model_specs={"nothing": P("model")})),
    (r"w \(6, 8, 5\).*\[1\]", dims_of_an_indivisible_leaf),
    ("model_specs", small()),
    ("model_specs", small(stage=2, model_specs={"^b$": P("model")})),
    ("sequence_parallel|model", lambda: zero_jax.Zero(mesh_of(2, 1), sequence_parallel=True)),
    ("axis_rules.*'ab'", two(axis_rules=("ab",))),
    ("axis_rules", two(axis_rules=(("a", "b", "c"),))),
    ("model_specs.*None", two(model_specs={"w": None})),
    ("model_specs.*'model'", two(model_specs={"w": "model"})),
    ("seq", two(**SEQUENCE)),
    ("partitioned|seq", two(**PARTITIONED)),
    (r"w .*\(8, 8\).*\(1, 8\)", unsharded),
]


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()
