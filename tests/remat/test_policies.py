"""JAX's own remat policies: the same values are saved as by `jax.checkpoint`."""

import dataclasses
import functools
import itertools

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
    """With a policy, the blocks of models/gpt.py in a loop around `jax.checkpoint`."""
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
    """Shape, dtype and place of the values that the forward loop hands to the backward pass.

    Without a weight's broadcast, which has no rows: zero_jax makes it of the gathered weight.
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


def traced(make, loss, batch, stage, **settings):
    """What is saved in a step on four devices."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage, **settings)
    tx = zero.optimizer(optax.sgd(0.1))
    params = zero.abstract(make)
    args = (params, tx.init(params), jax.ShapeDtypeStruct(batch.shape, batch.dtype))
    return saved(flat_trace.device_part(zero.train_step(loss, tx).trace(*args).jaxpr))


def ours(model, name):
    return traced(*MODELS[model][0](), MODELS[model][1], 3, remat=POLICIES[name])


@functools.cache
def jaxs(model, name):
    make, _ = MODELS[model][0]()
    _, loss = MODELS[model][0](POLICIES[name])
    part = jax.tree.map(lambda x: x[: ROWS // N], MODELS[model][1])
    return saved(jax.make_jaxpr(jax.value_and_grad(loss))(jax.eval_shape(make), part).jaxpr)


# fmt: off
USUAL = [("gpt", "dots_saveable"), ("gpt", "save_only_these_names"),
         *(("linen", name) for name in (
             "everything_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable",
             "save_any_names_but_these", "save_and_offload_only_these_names", "a callable"))]
# fmt: on


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(*case, marks=[] if case in USUAL else pytest.mark.slow)
        for case in itertools.product(MODELS, POLICIES)
    ],
)
def test_saved_values_are_those_of_jax_checkpoint(model, name):
    assert ours(model, name) == jaxs(model, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stage", "name"),
    [("linen", 3, name) for name in POLICIES if "offload" not in name]
    + [("gpt", 1, "save_and_offload_only_these_names"), ("gpt", 3, "dots_saveable")],
)
def test_no_policy_changes_a_value(model, stage, name):
    make, loss = MODELS[model][0]()
    problem, tx = Problem(make, loss, MODELS[model][1]), optax.sgd(0.1)
    want = train_plain(problem, tx, 1)
    losses, params, _ = train_zero(problem, tx, 1, N, stage=stage, remat=POLICIES[name])
    assert ulps(jnp.array(losses), jnp.array(want[0])) < 64
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "name"),
    [(0, "dots_saveable"), (3, "save_only_these_names"), (3, "nothing_saveable")],
)
def test_a_checkpoint_of_the_model_saves_what_its_policy_says(stage, name):
    assert traced(*linen_loss(POLICIES[name]), X, stage) == jaxs("linen", name)


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
