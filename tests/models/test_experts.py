"""Experts against a loop over all of them: choices, and dropped tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_decoder import EXPERTS

from zero_jax.models.experts import Experts

X = jax.random.normal(jax.random.key(7), (3, 16, EXPERTS.width))


def layer(**changes):
    """One layer's experts, large enough that they differ."""
    mixture, rng = dataclasses.replace(EXPERTS.mixture, **changes), np.random.default_rng(0)
    config = dataclasses.replace(EXPERTS, mixture=mixture)
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(config, 0.02, nnx.Rngs(0))))
    return graph, jax.tree.map(lambda x: jnp.float32(0.3 * rng.normal(size=x.shape)), state)


def by_a_loop(experts, x, kept=None):
    """Every expert on every token; `kept` (B, T, K) are the choices that count, None all."""
    mixture = experts.mixture
    probs = jax.nn.softmax(x @ experts.router.kernel[...])
    weights, chosen = jax.lax.top_k(probs, mixture.chosen)
    if mixture.normalised:
        weights /= weights.sum(-1, keepdims=True)
    if kept is not None:
        weights *= kept
    out = jnp.zeros_like(x)
    for e in range(mixture.experts):
        gate, up, down = (k.kernel[...][e] for k in (experts.gate, experts.up, experts.down))
        made = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        out += jnp.sum(weights * (chosen == e), -1, keepdims=True) * made
    return out, chosen


def kept_by_hand(chosen, room, experts):
    """Choices that find room: in each row first choices first, then in the order of tokens."""
    kept = np.zeros(chosen.shape, bool)
    for b, row in enumerate(np.asarray(chosen)):
        left = [room] * experts
        for k in range(row.shape[1]):
            for t in range(row.shape[0]):
                kept[b, t, k] = left[row[t, k]] > 0
                left[row[t, k]] -= kept[b, t, k]
    return kept


# 16 tokens with 2 choices of 5 experts: by default up to 16 for each expert.
@pytest.mark.parametrize(
    ("capacity", "normalised", "room"), [(None, True, 16), (0.5, False, 4), (1.0, True, 7)]
)
def test_experts_are_a_loop_and_choices_without_room_are_dropped(capacity, normalised, room):
    graph, state = layer(capacity=capacity, normalised=normalised)
    _, chosen = jax.jit(lambda state: by_a_loop(nnx.merge(graph, state), X))(state)
    kept = kept_by_hand(chosen, room, 5)

    def loss(state, x, run):
        out = run(nnx.merge(graph, state), x)
        return jnp.mean((out[0] - X[::-1]) ** 2), out

    compute = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    with jax.default_matmul_precision("highest"):
        (_, (want, _)), want_grads = compute(state, X, functools.partial(by_a_loop, kept=kept))
        (_, (got, routed)), got_grads = compute(state, X, lambda experts, x: experts(x))
    np.testing.assert_allclose(got, want, atol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want_grads))
    close = functools.partial(np.testing.assert_allclose, atol=1e-6 * scale)
    jax.tree.map(close, got_grads, want_grads)
    assert np.array_equal(routed.dropped_B, (~kept).sum((1, 2)))
    assert (routed.dropped_B.sum() > 0) == (capacity is not None)


def test_the_losses_of_a_router_are_their_formulas_and_a_row_is_routed_by_itself():
    graph, state = layer(capacity=0.5)
    run = jax.jit(lambda x: nnx.merge(graph, state)(x))
    out, routed = run(X)
    logits = np.asarray(X @ nnx.merge(graph, state).router.kernel[...], np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probs, -1)[..., :2]
    parts = np.stack([(chosen == e).mean((1, 2)) for e in range(5)], -1)
    np.testing.assert_allclose(routed.balance_B, 5 * (parts * probs.mean(1)).sum(-1), rtol=1e-5)
    z = (np.log(np.exp(logits).sum(-1)) ** 2).mean(1)
    np.testing.assert_allclose(routed.z_B, z, rtol=1e-5)
    _, even = run(jnp.zeros_like(X))  # no expert is preferred
    np.testing.assert_allclose(even.z_B, np.log(5) ** 2, rtol=1e-6)
    np.testing.assert_allclose(even.balance_B, 1.0, rtol=1e-6)
    assert dataclasses.replace(EXPERTS.mixture, capacity=100.0).room(16) == 16  # a row has no more
    alone, own = run(X[1:2])
    np.testing.assert_allclose(alone[0], out[1], atol=1e-5)
    assert own.dropped_B[0] == routed.dropped_B[1]
