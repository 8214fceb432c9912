"""What a Zero refuses before it takes memory: meshes, parameters, batches, losses, states."""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_zero import X, loss, make, zero_on

import zero_jax
from zero_jax.sharding.mesh import check_global


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match=r"frozen='bsae' matches none of the 2 .* b, w"):
        zero_on(frozen="bsae").init(make)


def test_an_optimizer_of_another_zero_is_refused():
    with pytest.raises(ValueError, match="wrap it with the same Zero"):
        zero_on(stage=3).train_step(loss, zero_on(stage=0).optimizer(optax.adam(1e-3)))


def test_what_is_no_optax_transformation_is_refused():
    for tx in ("adam", optax.adam, None):
        with pytest.raises(ValueError, match="no optax transformation"):
            zero_on().optimizer(tx)
        with pytest.raises(ValueError, match="no optax transformation"):
            zero_on().train_step(loss, tx)


def test_a_plain_optax_state_is_refused():
    zero, tx = zero_on(), optax.adam(1e-3)
    params = zero.init(make)
    with pytest.raises(ValueError, match=r"state is a tuple: make it .*zero\.optimizer\(tx\)"):
        zero.train_step(loss, tx)(params, tx.init(params), X)


def test_a_complex_loss_is_refused():
    zero = zero_on()
    with pytest.raises(ValueError, match="returned a complex number"):
        zero.value_and_grad(lambda p, x: loss(p, x) * 1j)(zero.init(make), X)


class WithNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)


def test_a_module_and_what_is_not_trained_are_refused_as_parameters():
    zero = zero_on()
    with pytest.raises(ValueError, match=r"a module, WithNorm: give .* nnx\.split"):
        zero.init(lambda: WithNorm(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"'norm/mean' is a BatchStat, which is not trained"):
        zero.init(lambda: nnx.state(WithNorm(nnx.Rngs(0)), (nnx.Param, nnx.BatchStat)))
    with pytest.raises(ValueError, match="is a Rng"):
        zero.init(lambda: nnx.state(WithNorm(nnx.Rngs(0)), nnx.RngState))
    zero.init(lambda: nnx.state(WithNorm(nnx.Rngs(0)), nnx.Param))


class Graph(NamedTuple):
    nodes: Any
    edges: Any


def test_a_batch_of_graphs_is_told_how_to_be_stacked():
    zero = zero_on()
    with pytest.raises(ValueError, match=r"rows: \.nodes 40, \.edges 96\. .*stack as many padded"):
        zero.value_and_grad(loss)(zero.init(make), Graph(jnp.ones((40, 3)), jnp.ones((96, 3))))


def test_what_is_no_mesh_and_a_device_twice_are_refused():
    for mesh in (None, 4, jax.devices()):
        with pytest.raises(ValueError, match="give a jax.sharding.Mesh"):
            zero_jax.Zero(mesh)
    with pytest.raises(ValueError, match="0 2 times: each place"):
        zero_jax.Zero(zero_jax.make_mesh(devices=[jax.devices()[0]] * 2))


def test_nothing_is_made_on_devices_that_are_not_there():
    zero = zero_jax.Zero(zero_jax.abstract_mesh(8))
    with pytest.raises(ValueError, match=r"AbstractMesh, \{'data': 8\}, .*zero\.abstract"):
        zero.init(make)


def test_what_has_a_dtype_and_no_shape_is_no_array():
    """As a model of Keras."""
    with pytest.raises(ValueError, match="parameters are arrays"):
        zero_on().shard({"w": types.SimpleNamespace(dtype="float32")})


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"frozen='\(b' is no regular expression: missing \)"):
        zero_on(frozen="(b").init(make)


def test_rows_of_one_process_alone_are_refused_where_there_are_several():
    several = types.SimpleNamespace(local_devices=[0], size=2)
    check_global({"x": jax.ShapeDtypeStruct((4,), "float32")}, several)
    for rows in (np.ones(4), jnp.ones(4), [1.0]):
        with pytest.raises(ValueError, match=r"of this process alone.*zero_jax\.global_batch"):
            check_global({"x": rows}, several)
    check_global({"x": np.ones(4)}, zero_jax.make_mesh())


BAD_SETTINGS = [
    ({"stage": 4}, "stage=4.*stages 0"),
    ({"stage": "3"}, "stage='3'"),
    ({"stage": True}, "stage=True"),
    ({"micro_batches": 0}, "micro_batches=0"),
    ({"remat": "blok"}, "nearest: 'block'"),
    ({"precision": "bf17"}, "for example 'bf16'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        zero_on(**settings)


def test_meshes_without_data_or_with_other_axes_are_refused():
    auto = (jax.sharding.AxisType.Auto,)
    with pytest.raises(ValueError, match=r"axes \('x', 'y'\).*make_mesh"):
        zero_jax.Zero(jax.make_mesh((4, 2), ("x", "y"), axis_types=auto * 2))
    with pytest.raises(ValueError, match="axis 'expert' of size 2"):
        zero_jax.Zero(jax.make_mesh((4, 2), ("data", "expert"), axis_types=auto * 2))
    with pytest.raises(ValueError, match="needs Auto axes"):
        zero_jax.Zero(jax.make_mesh((8,), ("data",)))
    with pytest.raises(
        ValueError, match="replica=3 x experts=1 x data=2 x model=1 = 6, but there are 8"
    ):
        zero_jax.make_mesh(replica=3)
    with pytest.raises(
        ValueError, match="replica=0, experts=1, data=8, model=1: each must be at least 1"
    ):
        zero_jax.abstract_mesh(8, replica=0)


def test_parameters_that_are_not_arrays_are_refused():
    with pytest.raises(ValueError, match="'w' is a str"):
        zero_on().init(lambda: {"w": "not an array"})
    with pytest.raises(ValueError, match="'w' is a float"):
        zero_on().shard({"w": 1.0})
    with pytest.raises(ValueError, match="no arrays"):
        zero_on().init(lambda: {})
    with pytest.raises(ValueError, match="'key' has dtype key"):
        zero_on().init(lambda: {"key": jax.random.key(0)})


def test_a_release_that_crashes_on_empty_leaves_refuses_them(monkeypatch):
    monkeypatch.setattr(jax.lib, "__version__", "0.11.2")
    empty = lambda: make() | {"none": jnp.zeros((0, 3))}  # noqa: E731
    with pytest.raises(ValueError, match=r"'none' has shape \(0, 3\).*0.11.2 crashes.*another"):
        zero_on(2).init(empty)
    zero_on(1).init(empty)
    zero_on(2).init(make)


def test_parameters_made_elsewhere_are_refused():
    with pytest.raises(ValueError, match=r"b has shape \(7,\).*zero\.init"):
        zero_on(4).value_and_grad(loss)(make(), X)


BAD_BATCHES = [
    (jnp.ones((22, 10)), "22 rows.*4 devices x 1 micro-batches.*use 20 or 24"),
    (jnp.ones(()), "scalar"),
    ({}, "no arrays"),
    ((jnp.ones((8, 10)), jnp.ones((4, 1))), r"rows: \[0\] 8, \[1\] 4"),
]


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES)
def test_bad_batches_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        zero_on(4).value_and_grad(loss)(zero_on(4).init(make), batch)


BAD_LOSSES = [
    (lambda p, x: x @ p["w"], r"scalar mean, or zero_jax\.Weighted"),
    (lambda p, x: (loss(p, x), {"aux": 1}), "has_aux=True"),
    (lambda p, x: (loss(p, x), 1.0), r"a pair: .*zero_jax\.Weighted.*has_aux=True"),
    (lambda p, x: (loss(p, x), 1.0, 2.0), "3 values"),
    (lambda p, x: zero_jax.Weighted(loss(p, x), jnp.ones(2)), "of two scalars"),
    (lambda p, x: None, "NoneType"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_LOSSES)
def test_losses_that_are_no_scalar_or_weighted_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        zero_on(4).value_and_grad(bad)(zero_on(4).init(make), X)


def test_a_foreign_optimizer_state_is_refused():
    zero = zero_on()
    params, tx = zero.init(make), optax.adam(1e-3)
    grads = zero.value_and_grad(loss)(params, X)[1]
    with pytest.raises(ValueError, match=r"tx = zero\.optimizer\(tx\)"):
        zero.optimizer(tx).update(grads, tx.init(make()), params)


@pytest.mark.parametrize(
    ("dtype", "way_out"),
    [("float8_e4m3fn", "`frozen`='w'"), ("complex64", "two float32 arrays")],
)
def test_a_trained_parameter_that_is_no_fp32_master_names_its_leaf(dtype, way_out):
    def make():
        return {"w": jnp.ones((8, 4), dtype), "b": jnp.zeros(4)}

    for at in (zero_on(stage=0), zero_on(stage=3)):
        with pytest.raises(ValueError, match=f"parameter 'w' has dtype {dtype}.*{way_out}"):
            at.init(make)
        with pytest.raises(ValueError, match=f"parameter 'w' has dtype {dtype}.*{way_out}"):
            at.shard(make())


def test_a_frozen_parameter_in_fp8_is_kept():
    params = zero_on(frozen="w").shard({"w": jnp.ones((8, 4), "float8_e4m3fn"), "b": jnp.zeros(4)})
    assert params["w"].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_masters_that_were_cast_to_fewer_bits_are_not_trained(dtype):
    """An update smaller than half a unit of bf16 would be lost, step after step."""
    zero, frozen = zero_on(), zero_on(frozen="b")
    cast = jax.tree.map(lambda x: x.astype(dtype), zero.init(make))
    with pytest.raises(ValueError, match=r"`params`: 'b' has dtype .*float16.*zero\.init"):
        zero.value_and_grad(loss)(cast, X)
    with pytest.raises(ValueError, match="`params`: 'w' has dtype .*float16"):
        tx = frozen.optimizer(optax.adam(1e-3))
        frozen.train_step(loss, tx)(cast, tx.init(cast), X)
    assert jnp.isfinite(zero.evaluate(loss)(cast, X)[0])


def test_without_jit_the_setting_is_named():
    with jax.disable_jit(), pytest.raises(ValueError, match=r"jax\.disable_jit\(\) is in force"):
        zero_on(stage=3).init(lambda: {"w": jnp.ones((8, 4))})


def test_optax_runs_under_strict_promotion():
    """optax.adam promotes by itself, and raises there on its own."""
    wanted = zero_on().init(make)
    with jax.numpy_dtype_promotion("strict"):
        zero = zero_on()
        tx = zero.optimizer(optax.adam(0.1))
        params = zero.init(make)
        params = zero.train_step(loss, tx)(params, tx.init(params), X)[0]
    # Adam's first step is the learning rate, in the direction of the gradient's sign.
    moved = jnp.abs(zero.full(params)["w"] - zero.full(wanted)["w"])
    np.testing.assert_allclose(moved, 0.1, rtol=1e-3)
