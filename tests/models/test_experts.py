"""Experts against a loop over all of them, what is dropped, and training at every stage."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import ulps

import zero_jax
from zero_jax.models import decoder, families
from zero_jax.models.experts import Experts

MIXTURE = decoder.Mixture(5, 2, balance=0.02, z=0.001)
TINY = decoder.DecoderConfig(
    layers=3,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    hidden=40,
    vocab=53,
    seq=32,
    loss_chunk=16,
    mixture=MIXTURE,
)


def layer(mixture=MIXTURE, seed=0):
    """One layer's experts, large enough that they differ."""
    config = dataclasses.replace(TINY, mixture=mixture)
    experts = Experts(config, 0.02, nnx.Rngs(seed))
    graph, state = nnx.split(experts)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    state = jax.tree.unflatten(
        treedef, [0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    )
    return graph, state


def rows(b=3, t=16):
    return jax.random.normal(jax.random.key(7), (b, t, TINY.width))


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
    """Which choices find room: in each row first choices first, then in the order of tokens."""
    kept = np.zeros(chosen.shape, bool)
    for b, row in enumerate(np.asarray(chosen)):
        left = [room] * experts
        for k in range(row.shape[1]):
            for t in range(row.shape[0]):
                kept[b, t, k] = left[row[t, k]] > 0
                left[row[t, k]] -= kept[b, t, k]
    return kept


@pytest.mark.parametrize("capacity", [None, 1.0, 0.5, 100.0])
@pytest.mark.parametrize("normalised", [True, False])
def test_experts_are_a_loop_over_all_and_what_has_no_room_counts_for_nothing(capacity, normalised):
    graph, state = layer(dataclasses.replace(MIXTURE, capacity=capacity, normalised=normalised))
    x, target = rows(), rows()[::-1]
    _, chosen = by_a_loop(nnx.merge(graph, state), x)
    room = MIXTURE.room(16) if capacity is None else min(16, int(np.ceil(capacity * 16 * 2 / 5)))
    kept = kept_by_hand(chosen, room, 5)

    def loss(state, x, run):
        out = run(nnx.merge(graph, state), x)
        return jnp.mean((out[0] - target) ** 2), out

    with jax.default_matmul_precision("highest"):
        compute = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
        (_, (want, _)), want_grads = compute(
            state, x, functools.partial(by_a_loop, kept=jnp.asarray(kept))
        )
        (_, (got, routed)), got_grads = compute(state, x, lambda experts, x: experts(x))
    np.testing.assert_allclose(got, want, atol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want_grads))
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * scale)
    assert np.array_equal(routed.dropped_B, (~kept).sum((1, 2)))
    assert (routed.dropped_B.sum() > 0) == (capacity in (1.0, 0.5))


def test_what_a_router_says_of_itself():
    graph, state = layer()
    experts, x = nnx.merge(graph, state), rows()
    _, routed = experts(x)
    logits = np.asarray(x @ experts.router.kernel[...], np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probs, -1)[..., :2]
    parts = np.stack([(chosen == e).mean((1, 2)) for e in range(5)], -1)
    np.testing.assert_allclose(routed.balance_B, 5 * (parts * probs.mean(1)).sum(-1), rtol=1e-5)
    z = (np.log(np.exp(logits).sum(-1)) ** 2).mean(1)
    np.testing.assert_allclose(routed.z_B, z, rtol=1e-5)
    # Where no expert is preferred.
    _, even = experts(jnp.zeros_like(x))
    np.testing.assert_allclose(even.z_B, np.log(5) ** 2, rtol=1e-6)
    np.testing.assert_allclose(even.balance_B, 1.0, rtol=1e-6)


def test_a_row_is_routed_by_itself():
    graph, state = layer(dataclasses.replace(MIXTURE, capacity=0.5))
    experts, x = nnx.merge(graph, state), rows()
    out, routed = experts(x)
    for b in range(3):
        alone, own = experts(x[b : b + 1])
        np.testing.assert_allclose(alone[0], out[b], atol=1e-5)
        assert own.dropped_B[0] == routed.dropped_B[b]


def make(config):
    params = nnx.state(decoder.Decoder(config, nnx.Rngs(0)), nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


@pytest.mark.parametrize(
    ("stage", "n", "capacity"),
    [
        (3, 3, None),
        (1, 8, 0.75),
        *(pytest.param(stage, 3, None, marks=pytest.mark.slow) for stage in range(3)),
        *(pytest.param(3, n, 0.75, marks=pytest.mark.slow) for n in (1, 2, 4, 8)),
    ],
)
def test_it_trains_as_on_one_device(stage, n, capacity):
    config = dataclasses.replace(TINY, mixture=dataclasses.replace(MIXTURE, capacity=capacity))
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(config, nnx.Rngs(0))))
    start, tx = jax.jit(functools.partial(make, config))(), optax.adamw(1e-3)
    tokens = np.asarray(jax.random.randint(jax.random.key(2), (24, 17), 0, config.vocab))

    def loss(params, batch):
        pair, routed = decoder.routed_loss(nnx.merge(graph, params), batch)
        return zero_jax.Weighted(*pair), routed

    @jax.jit
    def plain(params, state):
        def mean(params):
            (total, weight), routed = loss(params, tokens)
            return total / weight, routed

        (value, routed), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, routed

    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    zero = zero_jax.Zero(mesh, stage, remat="block")
    params, own = zero.shard(start), zero.optimizer(tx)
    step, state = zero.train_step(loss, tx, has_aux=True), own.init(params)
    want, plain_state = start, tx.init(start)
    for _ in range(2):
        want, plain_state, value, routed = plain(want, plain_state)
        params, state, metrics = step(params, state, zero_jax.global_batch(mesh, tokens))
        np.testing.assert_allclose(metrics.loss, value, rtol=1e-5)
        assert np.array_equal(metrics.aux.dropped_B, routed.dropped_B)
        assert (int(routed.dropped_B.sum()) > 0) == (capacity is not None)
    assert ulps(zero.full(params), want) <= 4096


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"experts": 4, "chosen": 5}, "chosen=5 of experts=4"),
        ({"experts": 4, "chosen": 2, "capacity": 0.0}, "would drop every token"),
    ],
)
def test_what_can_not_be_routed_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        decoder.Mixture(**given)


def test_room_for_experts_is_refused_where_there_are_none():
    assert families.with_capacity(TINY, 1.5).mixture.capacity == 1.5
    assert families.with_capacity(TINY, None) is TINY
    with pytest.raises(ValueError, match="capacity=1.5: the model has no experts"):
        families.with_capacity(families.preset("124m"), 1.5)


def test_experts_have_no_biases_and_models_without_them_no_router():
    with pytest.raises(ValueError, match="experts have no biases"):
        dataclasses.replace(TINY, mlp_bias=True)
    plain = dataclasses.replace(TINY, mixture=None)
    model = decoder.Decoder(plain, nnx.Rngs(0))
    with pytest.raises(ValueError, match="no experts"):
        decoder.routed_loss(model, jnp.zeros((1, 5), jnp.int32))
