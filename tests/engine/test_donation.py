"""Arrays that were donated, used again: an error that names argument and leaf, no dead process."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax


def loss(params, x, *_):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def make():
    return {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}


X = jnp.ones((8, 64))


@pytest.fixture(scope="module")
def used():
    """Zero, step, and (params, opt_state) before and after the step that donated them."""
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    tx = zero.optimizer(optax.adam(0.1))
    step = zero.train_step(loss, tx)
    params = zero.init(make)
    before = params, tx.init(params)
    return zero, step, before, step(*before, X)[:2]


def test_every_argument_of_a_step_is_looked_at(used):
    _, step, (old, old_state), (params, state) = used
    with pytest.raises(ValueError, match=r"'b' of `params` was deleted.*jnp\.copy"):
        step(old, state, X)
    with pytest.raises(ValueError, match=r"'inner/0/count' of `opt_state` was deleted"):
        step(params, old_state, X)
    with pytest.raises(ValueError, match="'w' of `params` was deleted"):
        step({**params, "w": old["w"]}, state, X)
    with pytest.raises(ValueError, match="'0/b' of `extras` was deleted"):
        step(params, state, X, old)
    with pytest.raises(ValueError, match="'b' of `params` was deleted"):
        step.first_bad_leaf(old, state, X)


def test_functions_that_donate_nothing_look_too(used):
    zero, _, (old, _), (params, _) = used
    for fn in (zero.value_and_grad(loss), zero.evaluate(loss)):
        with pytest.raises(ValueError, match="'b' of `params` was deleted"):
            fn(old, X)
        with pytest.raises(ValueError, match="`batch` was deleted"):
            fn(params, old["w"])


def test_an_array_that_is_donated_and_given_twice_is_named(used):
    """JAX: "attempt to donate the same buffer twice", and on 0.10 the process ends."""
    _, step, _, (params, state) = used
    with pytest.raises(ValueError, match="'b' of `params` and '0/b' of `extras` are one and the"):
        step(params, state, X, params)
    twice = optax.tree.set(state, mu=params)
    with pytest.raises(ValueError, match="'b' of `params` and 'inner/0/mu/b' of `opt_state`"):
        step(params, twice, X)
    # A copy is the way out.
    step(jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, state), X, params)


def test_the_step_with_states_in_files_looks_too(tmp_path):
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, offload=f"optimizer:nvme={tmp_path}")
    tx = zero.optimizer(optax.adam(0.1))
    step = zero.train_step(loss, tx)
    old = zero.init(make)
    _, state, _ = step(old, tx.init(old), X)
    with pytest.raises(ValueError, match="'b' of `params` was deleted"):
        step(old, state, X)
