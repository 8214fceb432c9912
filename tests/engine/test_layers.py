"""Layers with explicit passes: gradients of plain JAX, elements sent in closed form, fallbacks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from one_device import audited, check_gradients, sent, zero_on

WIDTH, WORDS = 8, 40
TOKENS = jax.random.randint(jax.random.key(1), (24, 7), 0, WORDS)
DOTS = jax.checkpoint_policies.dots_saveable


def make(count, tied=False):
    shapes = {"up": (count, WIDTH, 16), "down": (count, 16, WIDTH), "bias": (count, WIDTH)}
    shapes |= {"words": (WORDS, WIDTH), "shared": (WIDTH, WIDTH)}
    shapes |= {"experts": (count, 2, WIDTH, WIDTH), "router": (count, WIDTH, 2)}
    shapes |= {} if tied else {"head": (WIDTH, WORDS)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {n: 0.3 * jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}


def layer(x, p):
    h = checkpoint_name(jnp.tanh(x @ p["up"]), "h")
    return x + jnp.sin(h @ p["down"] + p["bias"])


def mixture(x, own, _):
    """A router and experts; its probabilities are a result of each layer."""
    shares = jax.nn.softmax(x @ own["router"])
    return layer(x, own) + jnp.einsum("bte,btd,edf->btf", shares, x, own["experts"]), shares


def entropy(p, x, tokens):
    head = p["head"] if "head" in p else p["words"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ head), tokens[:, 1:, None], -1))


def stacks(p):
    return {n: p[n] for n in ("up", "down", "bias", "experts", "router")}


def scanned(p, tokens, *, reverse=False, body=lambda x, own, p: (layer(x, own), x[:, 0, 0])):
    """A scan that also carries a count and returns a result of each layer."""

    def one(carry, own):
        x, y = body(carry[0], own, p)
        return (x, carry[1] + 1), y

    start = p["words"][tokens[:, :-1]], 0
    (x, count), ys = jax.lax.scan(one, start, stacks(p), reverse=reverse)
    weights = jnp.arange(1.0, 1 + len(ys)).reshape(-1, *[1] * (ys.ndim - 1))
    return entropy(p, x, tokens) + jnp.mean(ys * weights) * count


reversed_order = functools.partial(scanned, reverse=True)
of_experts = functools.partial(scanned, body=mixture)
sharing = functools.partial(scanned, body=lambda x, own, p: (layer(x @ p["shared"], own), x))


def two_scans(p, tokens):
    x = jax.lax.scan(lambda x, own: (layer(x, own), None), p["words"][tokens[:, :-1]], stacks(p))[0]
    return entropy(p, jax.lax.map(lambda own: layer(x, own), stacks(p)).sum(0), tokens)


def unrolled(p, tokens):
    """Half of the layers see fewer tokens; all read a constant, and one has no gradient."""
    x, mask = p["words"][tokens[:, :-1]], jnp.arange(6.0)[:, None] / 6
    for i, own in enumerate(p["layers"]):
        x = layer(x * mask, own)
        if i == len(p["layers"]) // 2:
            x, mask = x[:, 1:] + layer(jax.lax.stop_gradient(x[:, 1:]), own), mask[1:]
    return entropy(p, x, tokens[:, : 1 + x.shape[1]])


def taken_apart(params):
    layers = [{n: x[i] for n, x in stacks(params).items()} for i in range(len(params["up"]))]
    return {n: params[n] for n in ("words", "head") if n in params} | {"layers": layers}


CASES = [
    (scanned, 1, 2, True, {}), (scanned, 4, 1, True, {}), (scanned, 6, 8, True, {}),
    (reversed_order, 5, 3, False, {}), (sharing, 2, 4, False, {}), (two_scans, 3, 2, True, {}),
    (of_experts, 4, 2, False, {"precision": "fp32"}), (of_experts, 3, 2, True, {"remat": "none"}),
    (unrolled, 3, 2, True, {}), (unrolled, 4, 4, False, {"remat": "dots", "frozen": "up"}),
    (unrolled, 3, 2, True, {"remat": "none"}), (scanned, 4, 2, False, {"frozen": "up|words"}),
    *((scanned, 5, 2, True, {"remat": r}) for r in ("none", "dots", "names:h", DOTS, "block@host")),
    *((scanned, 4, 2, tied, {"stage": s}) for s, tied in ((0, True), (1, False), (2, True))),
    (unrolled, 3, 3, False, {"stage": 1, "grad_accum_steps": 2}),
    (scanned, 5, 3, False, {"stage": 2, "grad_accum_steps": 2}),
    (sharing, 5, 4, True, {"grad_accum_steps": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "count", "devices", "tied", "settings"), CASES)
def test_gradients_equal_those_of_plain_jax(loss, count, devices, tied, settings):
    params, settings = make(count, tied), {"remat": "block"} | settings
    params = taken_apart(params) if loss is unrolled else params

    def one(path, x):
        frozen = re.search(settings.get("frozen", "none"), str(path))
        return jax.lax.stop_gradient(x) if frozen else x

    def plain(params, x):
        return loss(jax.tree.map_with_path(one, params), x)

    check_gradients(loss, params, TOKENS, devices, plain=plain, **settings)


@pytest.mark.parametrize("count", [6, 5])
def test_the_last_layer_is_gathered_once_and_unused_parameters_never(count):
    """Each layer but the last is gathered twice and reduced once: 3 Ψ - Ψ / L elements."""
    audit = audited(scanned, lambda: make(count), TOKENS, {"data": 4}, remat="block")
    one, others = 2 * 16 * WIDTH + WIDTH, 2 * WIDTH * WORDS
    assert sent(audit, "all-gather")[0] == (2 * count - 1) * one + others
    assert sent(audit, "reduce-scatter")[0] == count * one + others
    zero, params = zero_on(4), make(count)
    value = zero.evaluate(scanned)(zero.shard(params), TOKENS)[0]
    assert float(value) == pytest.approx(float(scanned(params, TOKENS)), rel=1e-5)


def test_an_evaluation_has_gradients_where_parameters_are_gathered_for_the_step():
    zero, params = zero_on(2, stage=2, remat="block"), make(5)
    grads = jax.grad(lambda p: zero.evaluate(scanned)(p, TOKENS)[0])(zero.shard(params))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(near, zero.unshard(grads), jax.grad(scanned)(params, TOKENS))


def test_a_table_read_after_the_layers_is_looked_up_by_rows():
    def loss(p, tokens):
        x = jax.lax.scan(lambda x, own: (layer(x, own), None), jnp.ones(WIDTH), stacks(p))[0]
        return jnp.mean((p["table"][tokens[:, 0]] @ x) ** 2)

    table = jnp.ones((100 * WORDS, WIDTH))
    audit = audited(loss, lambda: make(4) | {"table": table}, TOKENS, {"data": 4}, remat="block")
    assert sent(audit, "all-gather")[0] < table.size


def test_a_plan_says_which_layers_have_no_explicit_passes():
    def found(loss, make=lambda: make(4), **settings):
        zero = zero_on(4, **settings)
        step = zero.train_step(loss, zero.optimizer(optax.sgd(0.1)))
        return [x.fallback for x in step.read(zero.eval_shape(make), None, TOKENS).layers]

    def pairs():
        return {n: x.reshape(2, 2, *x.shape[1:]) if len(x) == 4 else x for n, x in make(4).items()}

    def nested(p, tokens):
        inner = lambda x, own: (layer(x, own), None)  # noqa: E731
        outer = lambda x, own: jax.lax.scan(inner, x, own)  # noqa: E731
        return entropy(p, jax.lax.scan(outer, p["words"][tokens[:, :-1]], stacks(p))[0], tokens)

    assert found(scanned) == [""] == found(unrolled, lambda: taken_apart(make(4)), remat="dots")
    assert "groups" in found(scanned, remat="block_sqrt")[0]
    assert "larger" in found(scanned, bucket_bytes=64)[0]
    assert "scans" in found(nested, pairs)[0]
