"""JAX's own remat policies: what is saved is what `jax.checkpoint` with that policy saves."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from problems import Problem, train_plain, train_zero, ulps

import zero_jax
from zero_jax.models import gpt
from zero_jax.plan import flat_trace

KNOWN = jax.checkpoint_policies
POLICIES = {
    "everything_saveable": KNOWN.everything_saveable,
    "nothing_saveable": KNOWN.nothing_saveable,
    "dots_saveable": KNOWN.dots_saveable,
    "dots_with_no_batch_dims_saveable": KNOWN.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": KNOWN.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save_anything_except_these_names": KNOWN.save_anything_except_these_names("up"),
    "save_any_names_but_these": KNOWN.save_any_names_but_these("up"),
    "save_only_these_names": KNOWN.save_only_these_names("up"),
    "save_and_offload_only_these_names": KNOWN.save_and_offload_only_these_names(
        names_which_can_be_saved=["up"],
        names_which_can_be_offloaded=["mixed"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "save_from_both_policies": KNOWN.save_from_both_policies(
        KNOWN.save_only_these_names("up"), KNOWN.save_only_these_names("mixed")
    ),
    "a callable": lambda prim, *_, **params: prim.name == "tanh",
}
N, ROWS, WIDTH, L = 4, 24, 16, 3
X = jax.random.normal(jax.random.key(1), (ROWS, 4, WIDTH))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k = nn.Dense(WIDTH, name="q")(x), nn.Dense(WIDTH, name="k")(x)
        mixed = checkpoint_name(jnp.tanh(q @ k.mT) @ x, "mixed")
        up = checkpoint_name(nn.Dense(2 * WIDTH, name="up")(x + mixed), "up")
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(up)), None


def linen_loss(policy=None):
    layer = nn.remat(Layer, prevent_cse=False, policy=policy) if policy else Layer
    model = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)()

    def loss(params, x):
        return jnp.mean(model.apply(params, x, None)[0] ** 2)

    return lambda: model.init(jax.random.key(0), X[:1], None), loss


CONFIG = dataclasses.replace(gpt.preset("nano", seq=16), layers=L, width=WIDTH, heads=2)
TOKENS = jax.random.randint(jax.random.key(2), (ROWS, 17), 0, CONFIG.vocab)


def gpt_loss(policy=None):
    """With the policy, the blocks of models/gpt.py in a loop of their own around `nnx.remat`."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0))))

    def loss(params, rows):
        model = nnx.merge(graphdef, params)
        if policy is None:
            total, weight = gpt.loss(model, rows)
            return total / weight
        blocks, x = nnx.split(model.blocks), model.wte(rows[:, :-1]) + model.wpe(jnp.arange(16))
        layer = jax.checkpoint(
            lambda x, own: nnx.merge(blocks[0], own)(x), policy=policy, prevent_cse=False
        )
        x = model.ln_f(jax.lax.scan(lambda x, own: (layer(x, own), None), x, blocks[1])[0])
        found = gpt.chunked_cross_entropy(
            *(x.reshape(-1, WIDTH), model.wte.embedding[...], rows[:, 1:].reshape(-1)),
            *(jnp.ones(rows[:, 1:].size), CONFIG.loss_chunk),
        )
        return found[0] / found[1]

    return lambda: nnx.state(gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), nnx.Param), loss


MODELS = {"linen": (linen_loss, X), "gpt": (gpt_loss, TOKENS)}


def saved(jaxpr):
    """Shape, dtype and place of what the forward loop over layers hands to the backward pass.

    But a weight's broadcast, which has no rows: made of a gathered weight, it is not kept here.
    """
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == L:
            reads = {a for e in jaxpr.eqns for a in e.invars if not hasattr(a, "val")}
            outs = [v for v in eqn.outvars if v in reads or v in jaxpr.outvars]
            avals = [v.aval for v in outs if v.aval.ndim > 2 and v.aval.shape[0] == L]
            kept = [a for a in avals if a.shape[1] > 1]
            found.append(sorted((a.shape, str(a.dtype), str(a.memory_space)) for a in kept))
    return found[0]


@functools.cache
def ours(model, name):
    make, loss = MODELS[model][0]()
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), 3, remat=POLICIES[name])
    tx = zero.optimizer(optax.sgd(0.1))
    params, batch = zero.abstract(make), MODELS[model][1]
    args = (params, tx.init(params), jax.ShapeDtypeStruct(batch.shape, batch.dtype))
    return saved(flat_trace.device_part(zero.train_step(loss, tx).trace(*args).jaxpr))


@functools.cache
def jaxs(model, name):
    make, _ = MODELS[model][0]()
    _, loss = MODELS[model][0](POLICIES[name])
    part = jax.tree.map(lambda x: x[: ROWS // N], MODELS[model][1])
    return saved(jax.make_jaxpr(jax.value_and_grad(loss))(jax.eval_shape(make), part).jaxpr)


def test_two_names_are_other_names_of_two_policies():
    assert KNOWN.checkpoint_dots is KNOWN.dots_saveable
    assert KNOWN.checkpoint_dots_with_no_batch_dims is KNOWN.dots_with_no_batch_dims_saveable


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_saved_is_what_jax_checkpoint_saves(model, name):
    assert ours(model, name) == jaxs(model, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_no_policy_changes_a_value(model, name):
    make, loss = MODELS[model][0]()
    problem = Problem(make, loss, MODELS[model][1])
    want = train_plain(problem, optax.sgd(0.1), 1)
    for stage in (1, 3):
        given = {"stage": stage, "remat": POLICIES[name]}
        losses, params, _ = train_zero(problem, optax.sgd(0.1), 1, N, **given)
        assert ulps(jnp.array(losses), jnp.array(want[0])) < 64
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(want[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["dots_saveable", "save_only_these_names", "nothing_saveable"])
def test_a_checkpoint_of_the_models_own_saves_what_its_policy_says(stage, name):
    make, loss = linen_loss(POLICIES[name])
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage)
    tx = zero.optimizer(optax.sgd(0.1))
    params = zero.abstract(make)
    step = zero.train_step(loss, tx)
    batch = jax.ShapeDtypeStruct(X.shape, X.dtype)
    found = saved(flat_trace.device_part(step.trace(params, tx.init(params), batch).jaxpr))
    assert found == jaxs("linen", name)


LAYERS = 3
STACK = {"a": jax.random.normal(jax.random.key(3), (LAYERS, 8, 8)), "b": jnp.zeros((LAYERS, 8))}


def run(layer, params, x, scanned):
    """Each layer's output into the next; what it has beside that, added up."""
    if scanned:
        x, beside = jax.lax.scan(layer, x, params)
        return x, beside.sum()
    beside = 0.0
    for i in range(LAYERS):
        x, more = layer(x, jax.tree.map(lambda p, i=i: p[i], params))
        beside += more
    return x, beside


def with_a_norm_of_zeros(x, own):
    """The norm's derivative at zero is infinite; nobody asks for it."""
    return jnp.tanh(x @ own["a"] + own["b"]), jnp.linalg.norm(own["b"])


def with_a_loop_over_data(x, own):
    """A while loop has no gradient; none is asked for."""
    rows = jax.lax.while_loop(lambda v: jnp.sum(v) < 50, lambda v: 2 * v, jnp.abs(DATA) + 1)
    return jnp.tanh(x @ own["a"] + own["b"]) * jnp.mean(rows), 0.0


DATA = jax.random.normal(jax.random.key(4), (4, 8))


@pytest.mark.parametrize("remat", ["block", "dots", KNOWN.dots_saveable, KNOWN.everything_saveable])
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("layer", [with_a_norm_of_zeros, with_a_loop_over_data])
def test_what_nobody_differentiates_has_no_derivative(layer, scanned, remat):
    def loss(params, x):
        out, beside = run(layer, params, x, scanned)
        return jnp.mean(out**2), beside

    x = jax.random.normal(jax.random.key(5), (8, 8))
    zero = zero_jax.Zero(zero_jax.make_mesh(N, devices=jax.devices()[:N]), 3, remat=remat)
    _, found = zero.value_and_grad(loss, has_aux=True)(zero.shard(STACK), x)
    want = jax.grad(loss, has_aux=True)(STACK, x)[0]
    for name in STACK:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", ["offload_dot_with_no_batch_dims", "save_and_offload_only_these_names"]
)
@pytest.mark.parametrize("model", MODELS)
def test_the_program_for_gpus_has_in_host_memory_what_jax_checkpoint_puts_there(model, name):
    make, loss = MODELS[model][0]()
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), 3, remat=POLICIES[name])
    tx, batch = optax.sgd(0.1), MODELS[model][1]
    rows = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    found = zero.plan(loss, tx, zero.abstract(make), rows, target="h100").compiled
    in_host = [(shape, dtype) for shape, dtype, space in jaxs(model, name) if "Host" in space]
    assert found.host_bytes == sum(np.prod(s) * jnp.dtype(d).itemsize for s, d in in_host)
    assert (found.host_bytes > 0) == (model == "linen" or "dot" in name)
