"""JAX's own remat policies: the same values are saved as by `jax.checkpoint`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from problems import Problem

import zero_jax
from zero_jax.plan import flat_trace

KNOWN, SLOW = jax.checkpoint_policies, pytest.mark.slow
# fmt: off
POLICIES = {
    **{name: getattr(KNOWN, name) for name in (
        "everything_saveable", "nothing_saveable", "dots_saveable",
        "dots_with_no_batch_dims_saveable")},
    **{name: getattr(KNOWN, name)("up") for name in (
        "save_anything_except_these_names", "save_any_names_but_these", "save_only_these_names")},
    "offload_dots": KNOWN.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "offload_names": KNOWN.save_and_offload_only_these_names(
        names_which_can_be_saved=["up"], names_which_can_be_offloaded=["mixed"],
        offload_src="device", offload_dst="pinned_host"),
    "both": KNOWN.save_from_both_policies(
        KNOWN.save_only_these_names("up"), KNOWN.save_only_these_names("mixed")),
    "a callable": lambda prim, *_, **params: prim.name == "tanh",
}
# fmt: on
N, ROWS, WIDTH, L = 4, 24, 16, 3
X = jax.random.normal(jax.random.key(1), (ROWS, 4, WIDTH))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k = nn.Dense(WIDTH, name="q")(x), nn.Dense(WIDTH, name="k")(x)
        mixed = checkpoint_name(jnp.tanh(q @ k.mT) @ x, "mixed")
        up = checkpoint_name(nn.Dense(2 * WIDTH, name="up")(x + mixed), "up")
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(up)), None


def scanned(name=None):
    """Three layers; with a policy, each is checkpointed by Flax."""
    layer = Layer if name is None else nn.remat(Layer, prevent_cse=False, policy=POLICIES[name])
    model = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)()

    def loss(params, x):
        return jnp.mean(model.apply(params, x, None)[0] ** 2)

    return Problem(lambda: model.init(jax.random.key(0), X[:1], None), loss, X)


def saved(jaxpr):
    """Shape, dtype and place of the values that the forward loop hands to the backward pass.

    Without a weight's broadcast, which has no rows: zero_jax makes it of the gathered weight.
    """
    eqn = next(e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == L)
    reads = {a for e in jaxpr.eqns for a in e.invars if not hasattr(a, "val")}
    avals = [v.aval for v in eqn.outvars if v in reads or v in jaxpr.outvars]
    kept = [a for a in avals if a.ndim > 2 and a.shape[0] == L and a.shape[1] > 1]
    return sorted((a.shape, str(a.dtype), str(a.memory_space)) for a in kept)


def by_zero_jax(problem, stage=3, **settings):
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage, **settings)
    tx, params = zero.optimizer(optax.sgd(0.1)), zero.abstract(problem.make)
    args = (params, tx.init(params), jax.ShapeDtypeStruct(X.shape, X.dtype))
    return saved(flat_trace.device_part(zero.train_step(problem.loss, tx).trace(*args).jaxpr))


def by_jax(name):
    problem, rows = scanned(name), X[: ROWS // N]
    grad = jax.value_and_grad(problem.loss)
    return saved(jax.make_jaxpr(grad)(jax.eval_shape(problem.make), rows).jaxpr)


USUAL = {"dots_with_no_batch_dims_saveable", "save_any_names_but_these", "offload_names"}
MARKED = [n if n in USUAL else pytest.param(n, marks=SLOW) for n in POLICIES]


@pytest.mark.parametrize("name", MARKED)
def test_saved_values_are_those_of_jax_checkpoint(name):
    assert by_zero_jax(scanned(), remat=POLICIES[name]) == by_jax(name)


def test_a_checkpoint_of_the_model_saves_what_its_policy_says():
    assert by_zero_jax(scanned("a callable"), 0) == by_jax("a callable")


@pytest.mark.compile
@pytest.mark.parametrize("name", ["offload_dots", "offload_names"])
def test_the_program_for_gpus_has_in_host_memory_what_jax_checkpoint_puts_there(name):
    problem, zero = scanned(), zero_jax.Zero(zero_jax.abstract_mesh(N), 3, remat=POLICIES[name])
    args = (zero.abstract(problem.make), jax.ShapeDtypeStruct(X.shape, X.dtype))
    found = zero.plan(problem.loss, optax.sgd(0.1), *args, target="h100").compiled
    in_host = [(shape, dtype) for shape, dtype, space in by_jax(name) if "Host" in space]
    assert found.host_bytes > 0
    assert found.host_bytes == sum(np.prod(s) * jnp.dtype(d).itemsize for s, d in in_host)
