"""What is gathered when: collectives of the compiled step, counted where loops run."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from one_device import audited, sent, zero_on

import zero_jax
from zero_jax.engine import repeats, weights
from zero_jax.jaxpr import equations
from zero_jax.plan import flat_trace, plans
from zero_jax.sharding.cuts import split

ROWS, D, FOUR = 16, 16, {"data": 4}
X, ONES = jax.random.normal(jax.random.key(1), (ROWS, D)), jnp.ones((D, D))


SHARED = {
    "scan": lambda p, x: jnp.mean(
        jax.lax.scan(lambda c, _: (jnp.tanh(c @ p["w"]), None), x, None, length=5)[0]
    ),
    "cond": lambda p, x: jnp.mean(
        jax.lax.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: jnp.tanh(x @ p["w"] * 2), x)
    ),
}


@pytest.mark.parametrize(("form", "remat"), [("scan", "none"), ("scan", "block"), ("cond", "none")])
def test_weights_that_iterations_share_are_sent_once_forward_and_once_backward(form, remat):
    """In the traced step: XLA for CPUs removes the barrier and merges the two gathers."""
    zero = zero_on(FOUR, remat=remat)
    text = str(zero.value_and_grad(SHARED[form]).trace(zero.abstract(lambda: {"w": ONES}), X).jaxpr)
    assert (text.count("all_gather["), text.count("reduce_scatter[")) == (2, 1)


def test_an_attention_of_rank_three_is_no_stack_of_layers():
    """As many collectives as leaves, never as rows: its kernels are (width, heads, depth)."""
    model, x = nn.MultiHeadDotProductAttention(num_heads=4), jnp.ones((ROWS, 3, 128))
    make = functools.partial(model.init, jax.random.key(0), x[:1])
    audit = audited(lambda p, x: jnp.mean(model.apply(p, x) ** 2), make, x, FOUR, stage=2)
    assert all(0 < sent(audit, kind)[1] <= 8 for kind in ("all-gather", "reduce-scatter"))


def test_a_stack_that_is_sharded_along_its_layers_is_gathered_before_its_loop():
    """Leaves of 2 x 2 over 8 devices: sharded along 64 layers, else three quarters are padding."""

    def loss(p, x):
        return jnp.mean(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x[:, :2], p["w"])[0])

    make = lambda: {"w": jnp.ones((64, 2, 2))}  # noqa: E731
    assert split((64, 2, 2), 8).dim == -3
    elements, messages = sent(audited(loss, make, X, {"data": 8}, remat="block"), "all-gather")
    assert messages <= 2 and elements <= 2 * 64 * 4


def test_a_plan_names_the_layers_it_found_and_their_policy():
    def make():
        return {"loop": jnp.ones((6, D, D)), "list": [ONES] * 4, "last": ONES}

    def loss(p, x):
        x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["loop"])[0]
        for w in p["list"]:
            x = x + jnp.sin(x @ w)
        dots = jax.checkpoint_policies.dots_saveable
        return jnp.mean(jax.checkpoint(lambda x, w: jnp.cos(x @ w), policy=dots)(x, p["last"]))

    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), 3, remat="block")
    plan = zero.plan(loss, optax.sgd(0.1), zero.abstract(make), X)
    found = {(x.count, x.words, x.scanned, x.policy) for x in plan.layers}
    assert {(6, D * D, True, "block"), (4, D * D, False, "block")} <= found
    assert any(count == 1 and "dots" in policy.lower() for count, _, _, policy in found)
    text = plans.format_layers(plan)
    for words in ("6 scanned", "4 unrolled", "256", "block"):
        assert words in text


# Layers of a model that does not scan over them: stretches of its trace that repeat.


def traced_layers(loss, params):
    jaxpr = equations.written_out(jax.make_jaxpr(loss)(params, X)).jaxpr
    leaves = enumerate(zip(jaxpr.invars, jax.tree.leaves(params), strict=False))
    forms = {var: weights.Form(at, leaf.ndim, None) for at, (var, leaf) in leaves}
    return jaxpr, repeats.runs_of(jaxpr, forms)


def test_a_layer_starts_where_least_is_alive():
    """Before the norm, of which the first half comes before its first parameter is used."""

    def loss(params, x):
        for scale, w in params["layers"]:
            centred = x - jnp.mean(x, axis=-1, keepdims=True)
            x = x + jnp.tanh((centred * scale) @ w)
        return jnp.sum(x @ params["head"])

    params = {"layers": [(jnp.ones(D), ONES)] * 2, "head": jnp.ones((D, 3))}
    jaxpr, ((first, second),) = traced_layers(loss, params)
    names = [[jaxpr.eqns[at].primitive.name for at in layer] for layer in (first, second)]
    assert names[0] == names[1] and first[0] == 0 and first[-1] < second[0]
    assert names[1][0] == "reduce_sum" and names[1][-1] == "add"


def product(x, w):
    return jnp.tanh(x @ w)


def block(x, pair):
    return x + product(product(x, pair[0]), pair[1])


def tower(x, pairs):
    return jnp.sqrt(1.0 + functools.reduce(block, pairs, x))


@pytest.mark.parametrize(
    ("layers", "params", "counts"),
    [
        (lambda p, x: functools.reduce(product, p, x), [ONES, ONES], [2]),
        (lambda p, x: functools.reduce(block, p, x), [(ONES, ONES)] * 3, [3]),
        (lambda p, x: functools.reduce(tower, p, x), [[(ONES, ONES)] * 3] * 2, [3, 3]),
        (lambda p, x: product(x, p[0]) * jnp.cos(x @ p[1]), [ONES, ONES], []),
        (lambda p, x: product(product(x, p), p), ONES, []),
        (lambda p, x: x * p[0] * p[1] * p[2], [jnp.ones(D)] * 3, []),
    ],
)
def test_layers_are_what_repeats_on_other_matrices(layers, params, counts):
    runs = traced_layers(lambda p, x: jnp.sum(layers(p, x)), params)[1]
    assert [len(run) for run in runs] == counts


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("dots", 0), ("block_sqrt", 2)])
def test_layers_that_the_model_wraps_itself_stay_as_they_are(remat, again):
    """sin(cos(x)): forward both once, backward cos(x) again, and cos and sin for the derivative.
    The policy around applies too: groups of two layers run the first one again."""

    def loss(params, x):
        for w in params:
            x = x + jax.checkpoint(lambda x, w: jnp.sin(jnp.cos(x @ w)))(x, w)
        return jnp.mean(x**2)

    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), remat=remat)
    params, tx = zero.abstract(lambda: [ONES] * 4), optax.sgd(1e-1)
    args = params, zero.optimizer(tx).init(params), jax.ShapeDtypeStruct(X.shape, X.dtype)
    part = flat_trace.device_part(zero.train_step(loss, tx).trace(*args).jaxpr)
    names = [operation.name for operation in flat_trace.flatten(part).operations]
    assert (names.count("sin"), names.count("cos")) == (2 * 4 + again, 3 * 4 + again)
