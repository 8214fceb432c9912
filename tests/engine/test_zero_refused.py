"""What a Zero refuses before it takes memory: meshes, parameters, batches, losses, states."""

import jax
import jax.numpy as jnp
import optax
import pytest
from test_zero import X, loss, make, zero_on

import zero_jax


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match=r"frozen='bsae' matches none of the 2 .* b, w"):
        zero_on(frozen="bsae").init(make)


def test_an_optimizer_of_another_zero_is_refused():
    with pytest.raises(ValueError, match="wrap it with the same Zero"):
        zero_on(stage=3).train_step(loss, zero_on(stage=0).optimizer(optax.adam(1e-3)))


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
    with pytest.raises(ValueError, match="replica=3 x data=2 x model=1 = 6, but there are 8"):
        zero_jax.make_mesh(replica=3)
    with pytest.raises(ValueError, match="replica=0, data=8, model=1: each must be at least 1"):
        zero_jax.abstract_mesh(8, replica=0)


def test_parameters_that_are_not_arrays_are_refused():
    with pytest.raises(TypeError):
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
    ((jnp.ones((8, 10)), jnp.ones((4, 1))), r"\[4, 8\] rows"),
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
