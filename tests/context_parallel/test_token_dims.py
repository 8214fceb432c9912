"""Losses along the tokens of a row: mixed positions are an error, others are right on a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

import zero_jax
from zero_jax.context_parallel import chunks
from zero_jax.context_parallel.token_dims import averages, check_constants, split_tokens
from zero_jax.models.cross_entropy import chunked_cross_entropy
from zero_jax.tracing.jaxpr import as_function, written_out

B, T, D, N, H, V, L, SEQ = 2, 16, 6, 3, 2, 11, 2, 24
CONTEXT = "context"


def _attend(q, k, v):
    """Causal attention of this device's queries to the keys of the full row."""
    at, gather = chunks.positions(q.shape[1]), lambda x: x
    if chunks.size() > 1:
        gather = lambda x: chunks.ordered(jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), 1)  # noqa: E731
    k, v = gather(k), gather(v)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    scores = jnp.where(at[:, None] >= jnp.arange(k.shape[1]), scores, -1e9)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


attention = jax.custom_vjp(_attend)
attention.defvjp(lambda *qkv: (_attend(*qkv), qkv), lambda qkv, out: jax.vjp(_attend, *qkv)[1](out))


@pytest.fixture(scope="module")
def params():
    keys = iter(jax.random.split(jax.random.key(0), 20))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / 2  # noqa: E731
    return {
        "wte": normal(V, D),
        "wpe": normal(SEQ, D),
        "qkv": normal(L, D, 3 * D),
        "up": normal(L, D, 4 * D),
        "down": normal(L, 4 * D, D),
        "scale": 1 + normal(L, D),
    }


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, V, (B, T), np.int32),
        "labels": rng.integers(0, V, (B, T), np.int32),
        "weights": rng.integers(0, 2, (B, T)).astype(np.float32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)) % 5,
    }


def embedded(p, b):
    return p["wte"][b["tokens"]]


def token_losses(p, x, labels):
    logits = x @ p["wte"].T
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen


def weighted(p, x, b):
    return jnp.sum(token_losses(p, x, b["labels"]) * b["weights"]), jnp.sum(b["weights"])


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def rotated(x, positions):
    """Rotates (B, T, N, H) by angles of positions, (T,) or (B, T)."""
    angle = positions[..., None, None] * (0.3 ** jnp.arange(H // 2, dtype=jnp.float32))
    one, two = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def layer(x, w, positions, attend):
    tokens = x.shape[1]
    q, k, v = jnp.split(norm(x, w["scale"]) @ w["qkv"], 3, axis=-1)
    # One head of keys for all queries.
    q, k, v = q.reshape(B, tokens, N, H), k[..., :H, None], v.reshape(B, tokens, N, H)
    k = jnp.repeat(k.reshape(B, tokens, 1, H), N, axis=2)
    at = jnp.arange(tokens) if positions is None else positions
    x = x + attend(rotated(q, at), rotated(k, at), v).reshape(B, tokens, D)
    return x + jax.nn.silu(norm(x, w["scale"]) @ w["up"]) @ w["down"]


def decoder(p, b, positions=None, attend=attention):
    body = jax.checkpoint(lambda x, w: (layer(x, w, positions, attend), None))
    stacked = {name: p[name] for name in ("qkv", "up", "down", "scale")}
    return weighted(p, jax.lax.scan(body, embedded(p, b), stacked)[0], b)


def learned_positions(p, b):
    x = embedded(p, b) + p["wpe"][jnp.arange(b["tokens"].shape[1])]
    return weighted(p, jnp.tanh(x), b)


def mean(p, b):
    x = embedded(p, b) * (1 + jnp.exp(-0.1 * jnp.arange(b["tokens"].shape[1])))[:, None]
    losses = token_losses(p, x, b["labels"])
    return jnp.mean(losses) + 0.1 * jnp.mean(jnp.square(losses)), 1.0


def row_means(p, b):
    losses = token_losses(p, embedded(p, b), b["labels"])
    return jnp.mean(jnp.mean(losses, axis=1)) / 2, 1.0


def rematerialised(p, b):
    @jax.checkpoint
    def inside(x):
        at = jax.lax.broadcasted_iota(jnp.float32, x.shape, 1)
        return jnp.tanh(x * (1 + at / T)) + jnp.sin(at)

    return weighted(p, inside(embedded(p, b)), b)


def chunked(p, b, weights=lambda b: b["weights"], chunk=5):
    x = embedded(p, b) + p["wpe"][None, jnp.arange(b["tokens"].shape[1])]
    flat = x.reshape(-1, D), p["wte"], b["labels"].reshape(-1), weights(b).reshape(-1)
    return chunked_cross_entropy(*flat, chunk)


def summed_in_a_loop(p, b):
    """Adds the losses of chunks of two tokens, and the weights."""
    x, pairs = jnp.swapaxes(embedded(p, b), 0, 1), lambda x: x.reshape(-1, 2, *x.shape[1:])
    labels, weights = (jnp.swapaxes(b[name], 0, 1) for name in ("labels", "weights"))

    def body(sums, chunk):
        x, labels, weights, positions = chunk
        losses = token_losses(p, jnp.tanh(x * positions[:, None, None]), labels) * weights
        return (sums[0] + losses.sum(), sums[1] + weights.sum(0), sums[2]), None

    chunk = tuple(map(pairs, (x, labels, weights, jnp.arange(len(x)) / T)))
    (total, per_row, _), _ = jax.lax.scan(body, (0.0, jnp.zeros(B), p["scale"]), chunk)
    return total, per_row.sum()


def smoothed(p, b):
    logits = jax.nn.log_softmax(jax.nn.gelu(embedded(p, b)) @ p["wte"].T)
    wanted = optax_smooth(jax.nn.one_hot(b["labels"], V), 0.1)
    z = jax.nn.logsumexp(embedded(p, b) @ p["wte"].T, -1) ** 2
    losses = -jnp.sum(wanted * logits, -1) + 1e-2 * z
    kept = b["positions"] < 4
    return jnp.sum(losses, where=kept), jnp.sum(kept)


def optax_smooth(labels, alpha):
    return (1 - alpha) * labels + alpha / labels.shape[-1]


def by_vmap(p, b):
    """One token at a time, by a map and by vmap, with a branch."""
    one = lambda x, label: token_losses(p, jax.lax.cond(label > 4, jnp.tanh, jnp.sin, x), label)  # noqa: E731
    x, labels = (y.reshape(-1, *y.shape[2:]) for y in (embedded(p, b), b["labels"]))
    mapped = jax.lax.map(lambda pair: one(*pair), (x, labels)).reshape(B, -1)
    return jnp.vdot(mapped + jax.vmap(jax.vmap(one))(embedded(p, b), b["labels"]), b["weights"]), (
        b["weights"].sum(1).sum()
    )


def centred(p, b):
    """Uses the mean over all tokens, which the user adds over devices."""
    everywhere = lambda x: jax.lax.psum(x, CONTEXT) if chunks.size() > 1 else x  # noqa: E731
    x, weights = embedded(p, b), b["weights"][..., None]
    mean = everywhere(jnp.sum(x * weights, (0, 1))) / everywhere(jnp.sum(weights))
    return weighted(p, jnp.tanh(x - jax.lax.stop_gradient(mean)), b)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(V, D)(tokens) + linen.Embed(SEQ, D)(jnp.arange(tokens.shape[1]))
        x = x + linen.Dense(D)(linen.relu(linen.Dense(8)(linen.LayerNorm()(x))))
        return linen.Dense(V)(linen.GroupNorm(2, reduction_axes=-1)(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(V, D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.up, self.out = nnx.Linear(D, 8, rngs=rngs), nnx.LinearGeneral(8, V, rngs=rngs)

    def __call__(self, tokens):
        at = jnp.arange(tokens.shape[1])[None] / T
        return self.out(nnx.gelu(self.up(self.norm(self.embed(tokens) + at[..., None]))))


def of_logits(logits, b):
    labels = jax.nn.one_hot(b["labels"], V)
    return -jnp.sum(jax.nn.log_softmax(logits) * labels), jnp.sum(jnp.ones(labels.shape[:2]))


def of_linen(p, b):
    return of_logits(Linen().apply(start_of_linen(), b["tokens"]) * p["scale"][0, 0], b)


@functools.cache
def start_of_linen():
    with jax.ensure_compile_time_eval():
        return Linen().init(jax.random.key(1), np.zeros((1, 4), int))


@functools.cache
def start_of_nnx():
    with jax.ensure_compile_time_eval():
        return nnx.split(Nnx(nnx.Rngs(0)))


def of_nnx(p, b):
    return of_logits(nnx.merge(*start_of_nnx())(b["tokens"]) * p["scale"][0, 0], b)


MODELS = {
    "learned positions": learned_positions,
    "rotary positions in a scan": decoder,
    "rotary positions of the batch": lambda p, b: decoder(p, b, b["positions"]),
    "mean": mean,
    "means of rows": row_means,
    "rematerialised": rematerialised,
    "chunked cross entropy": chunked,
    "weights of one": functools.partial(
        chunked, weights=lambda b: jnp.ones(b["labels"].shape), chunk=3
    ),
    "in one chunk": functools.partial(chunked, chunk=B * T),
    "summed in a loop": summed_in_a_loop,
    "smoothed labels": smoothed,
    "vmap": by_vmap,
    "centred": centred,
    "linen": of_linen,
    "nnx": of_nnx,
}


def local(batch, size):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((B, T // size), x.dtype), batch)


def split(loss, params, batch, size, inline=False):
    """Returns a loss of one device of `context`, and the facts of its results."""
    traced = jax.make_jaxpr(loss, axis_env=[(CONTEXT, size)])(params, local(batch, size))
    traced = written_out(traced) if inline else traced
    tokens = [False] * len(jax.tree.leaves(params)) + [True] * len(batch)
    program, facts = split_tokens(traced, tokens, size)
    run = as_function(program)
    return lambda p, b: tuple(run(*jax.tree.leaves((p, b)))), facts


@pytest.fixture(scope="module")
def alone(params, batch):
    """Sum, weight and gradients of each model on one device."""
    run = lambda loss: jax.value_and_grad(loss, has_aux=True)(params, batch)  # noqa: E731
    return jax.jit(lambda: {name: run(loss) for name, loss in MODELS.items()})()


@pytest.mark.parametrize("size", [2, 4])
def test_a_position_wise_loss_of_each_part_adds_up_to_that_of_the_row(params, batch, alone, size):
    losses = {
        name: split(loss, params, batch, size, inline=at % 2 == 0)
        for at, (name, loss) in enumerate(MODELS.items())
    }
    for name, (_, (total, _)) in losses.items():
        assert total.partial and not total.tokens, name

    def inside(params, batch):
        own = jax.tree.map(lambda x: chunks.take(x, 1), batch)
        run = lambda loss: jax.value_and_grad(loss, has_aux=True)(params, own)  # noqa: E731
        return jax.lax.psum({name: run(loss) for name, (loss, _) in losses.items()}, CONTEXT)

    mesh = zero_jax.make_mesh(data=1, context=size, devices=jax.devices()[:size])
    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    together = jax.jit(jax.shard_map(inside, mesh=mesh, **specs))(params, batch)
    for name, ((total, weight), grads) in alone.items():
        (own, own_weight), own_grads = together[name]
        times = own_weight / weight
        assert times == (size if name in ("mean", "means of rows") else 1), name
        # Sums of 32 losses in another order.
        np.testing.assert_allclose(own / times, total, rtol=3e-6, err_msg=name)
        for leaf, expected in grads.items():
            text = f"{name}: {leaf}"
            grad = own_grads[leaf] / times
            # A few roundings of the largest addends.
            atol = 1e-6 * np.max(np.abs(expected))
            np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=atol, err_msg=text)


PARAMS = {"w": (D, D), "kernel": (3, D, D), "table": (SEQ, D), "mixer": (T // 2, T // 2)}


KEY = jax.random.key(3)


def of_x(loss):
    """Returns a loss of `PARAMS` and x (B, T / 2, D), traced on one of two devices."""
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in PARAMS.items()}
    x = jax.ShapeDtypeStruct((B, T // 2, D), jnp.float32)
    return jax.make_jaxpr(loss, axis_env=[(CONTEXT, 2), ("data", 2)])(shapes, x)


def split_of_x(traced):
    return split_tokens(traced, [*[False] * len(PARAMS), True], 2)


def refused(traced):
    """Returns the message of a loss that is an error."""
    with pytest.raises(ValueError) as error:
        split_of_x(traced)
    return str(error.value)


def softly(x):
    return jnp.sum(jnp.tanh(x))


@jax.custom_vjp
def with_own_gradient(x):
    return x * jnp.arange(x.shape[1])[:, None]


with_own_gradient.defvjp(lambda x: (with_own_gradient(x), None), lambda _, out: (out,))


def turned(x):
    """Returns another order of tokens."""
    return x.reshape(B, -1, 2, D).swapaxes(1, 2).reshape(B, -1, D)


def carries(step, start, xs):
    return jax.lax.scan(step, start, jnp.swapaxes(xs, 0, 1))


def recurrent(state, x):
    return (jnp.tanh(state + x),) * 2


def halved(a, b):
    return (a + b) / 2


def swaps(sums, x):
    return (sums[1], sums[0] + x), None


SUM, TABLE = "sum over the tokens of one device's part", "table[positions]"
TOKENS, PAIRS, LOOP = "along the tokens of a row", "zero_jax.attention", "loop over the tokens"
STRIP = {"dimension_numbers": ("NWC", "WIO", "NWC")}
# Each on one line, which the error names.
MIXED = {
    "attention": (lambda p, x: softly(jnp.einsum("btd,bsd->bts", x, x)), PAIRS),
    "values": (lambda p, x: softly(jnp.einsum("bst,btd->bsd", x @ x.mT, x)), PAIRS),
    "cumsum": (lambda p, x: softly(jnp.cumsum(x, axis=1)), "cumsum " + TOKENS),
    "convolution": (
        lambda p, x: softly(jax.lax.conv_general_dilated(x, p["kernel"], (1,), [(2, 0)], **STRIP)),
        "convolution " + TOKENS,
    ),
    "shift": (lambda p, x: softly(jnp.concatenate([x[:, :1] * 0, x[:, :-1]], 1)), TOKENS),
    "padded shift": (
        lambda p, x: softly(jnp.pad(x, ((0, 0), (1, 0), (0, 0)))),
        "padding " + TOKENS,
    ),
    "roll": (lambda p, x: softly(jnp.roll(x, 1, 1)), TOKENS),
    "flip": (lambda p, x: softly(x[:, ::-1]), "reversal " + TOKENS),
    "tile": (lambda p, x: softly(jnp.tile(x, (1, 2, 1))), "tile " + TOKENS),
    "labels": (
        lambda p, x: softly(x[jnp.arange(B)[:, None], jnp.arange(T // 2), 0]),
        "jnp.take_along_axis",
    ),
    "sort": (lambda p, x: softly(jnp.sort(x, 1)), "sort " + TOKENS),
    "top": (lambda p, x: softly(jax.lax.top_k(x.mT, 2)[0]), "top_k " + TOKENS),
    "fft": (lambda p, x: softly(jnp.fft.fft(x, axis=1).real), "fft " + TOKENS),
    "folded": (lambda p, x: softly(x.reshape(B, -1, 2 * D) @ jnp.tile(p["w"], (2, 1))), TOKENS),
    "interleaved": (
        lambda p, x: softly(x.reshape(B, -1, 2, D).swapaxes(2, 3).reshape(B, -1, 2)),
        TOKENS,
    ),
    "pooled": (lambda p, x: softly(jnp.mean(x, 1) @ p["w"]), SUM),
    "softmax": (lambda p, x: softly(jax.nn.softmax(x, axis=1)), "max " + TOKENS),
    "unsafe softmax": (lambda p, x: softly(jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True)), SUM),
    "slice of a table": (lambda p, x: softly(x + p["table"][: x.shape[1]]), TABLE),
    "sinusoidal table": (lambda p, x: softly(x + np.sin(np.arange(T // 2))[:, None]), TABLE),
    "short table": (
        lambda p, x: softly(x + jnp.sin(jnp.arange(T // 2))[x[..., 0].astype(int)][..., None]),
        TABLE,
    ),
    "triangle": (
        lambda p, x: softly(jnp.einsum("btd,ts->bsd", x, np.tril(np.ones((T // 2, T // 2))))),
        TOKENS,
    ),
    "mixer": (lambda p, x: softly(jnp.einsum("btd,ts->bsd", x, p["mixer"])), TOKENS),
    "shifted logits": (lambda p, x: softly((x @ p["w"])[:, :-1]), "slice " + TOKENS),
    "last token": (lambda p, x: softly(x[:, -1]), TOKENS),
    "max": (lambda p, x: softly(x - jnp.max(x, 1, keepdims=True)), "max " + TOKENS),
    "any": (lambda p, x: softly(x * jnp.any(x > 0)), "or " + TOKENS),
    "batch norm": (lambda p, x: softly(x - x.mean((0, 1))), SUM),
    "variance": (lambda p, x: softly(x / x.std((0, 1))), SUM),
    "reduce": (lambda p, x: softly(jax.lax.reduce(x, 0.0, halved, (1,))), "reduce " + TOKENS),
    "argmax": (lambda p, x: softly(jnp.argmax(x, 1)), "argmax " + TOKENS),
    "dynamic slice": (lambda p, x: softly(jax.lax.dynamic_slice_in_dim(x, 1, 2, axis=1)), TOKENS),
    "lookup": (lambda p, x: softly(jnp.take(x, jnp.array([0, 1, 1]), axis=1)), "gather " + TOKENS),
    "scatter": (lambda p, x: softly(x.at[:, 0].set(0.0)), "scatter"),
    "pairs": (lambda p, x: softly(x[:, :, None] * x[:, None]), PAIRS),
    "masked mean": (lambda p, x: jnp.sum(x) / jnp.sum(x > 0), SUM),
    "at least one": (lambda p, x: jnp.maximum(jnp.sum(x), 1.0), SUM),
    "penalty": (lambda p, x: jnp.sum(x) + jnp.sum(p["w"] ** 2), SUM),
    "rounded": (lambda p, x: jnp.sum(x).astype(int), SUM),
    "branch": (lambda p, x: jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x).sum(), SUM),
    "counted": (lambda p, x: softly(x * jnp.arange(x.shape[1])[::-1, None]), TABLE),
    "summed positions": (lambda p, x: softly(x * jnp.cumsum(jnp.ones(x.shape[1]))[:, None]), TABLE),
    "flat positions": (
        lambda p, x: softly(x.reshape(-1, D) * jnp.arange(B * T // 2)[:, None]),
        TABLE,
    ),
    "positions of chunks": (
        lambda p, x: softly(x.reshape(B, -1, 2, D) * jnp.arange(2)[:, None]),
        TABLE,
    ),
    "two orders": (lambda p, x: softly(x * turned(x)), TOKENS),
    "padding": (lambda p, x: softly(jnp.pad(x, ((0, 0), (0, 2), (0, 0))) + 1), "padding"),
    "recurrent": (lambda p, x: softly(carries(recurrent, jnp.zeros((B, D)), x)[1]), LOOP),
    "recurrent in one chunk": (
        lambda p, x: softly(carries(recurrent, jnp.zeros(x.shape), x.reshape(B, 1, -1, D))[1]),
        LOOP,
    ),
    "decay": (
        lambda p, x: softly(carries(lambda h, x: (0.5 * h + x, None), jnp.zeros((B, D)), x)[0]),
        LOOP,
    ),
    "two carries": (lambda p, x: jnp.sum(carries(swaps, (jnp.zeros((B, D)),) * 2, x)[0][0]), LOOP),
    "sums of chunks": (lambda p, x: jnp.sum(x.reshape(B, -1, 2, D).sum((0, 2, 3)) - x.sum()), SUM),
    "running sum": (
        lambda p, x: softly(carries(lambda h, x: (h + x,) * 2, jnp.zeros((B, D)), x)[1]),
        LOOP,
    ),
    "start": (
        lambda p, x: jnp.sum(carries(lambda h, x: (h + x, None), jnp.ones((B, D)), x)[0]),
        LOOP,
    ),
    "count": (lambda p, x: jnp.sum(carries(lambda i, x: (i + 1, x), 0, x)[0] * x), LOOP),
    "outer product": (lambda p, x: softly(jnp.einsum("btd,bte->bde", x, x)), SUM),
    "heads first": (
        lambda p, x: softly(zero_jax.attention(*[x.reshape(B, -1, H, N).swapaxes(1, 2)] * 3)),
        "in dim 1 of queries",
    ),
    "rows merged": (
        lambda p, x: softly(zero_jax.attention(*[x.reshape(1, -1, N, H)] * 3)),
        "in dim 1 of queries",
    ),
    "no tokens": (
        lambda p, x: softly(x * zero_jax.attention(*[p["w"].reshape(1, -1, N, H)] * 3).sum()),
        "in dim 1 of queries",
    ),
    "sum of rows": (lambda p, x: softly(x / jax.lax.psum(p["w"].sum(), CONTEXT)), "pmean"),
    "tiles": (lambda p, x: softly(jnp.tile(x, (1, 2, 1))), TOKENS),
    "inverse": (lambda p, x: softly(jnp.linalg.cholesky(x @ x.mT)), PAIRS),
    "added over devices": (lambda p, x: softly(jax.lax.psum(x, CONTEXT)), TOKENS),
    "neighbour": (lambda p, x: softly(x + jax.lax.ppermute(x, CONTEXT, [(0, 1), (1, 0)])), TABLE),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_mixes_positions_is_an_error_that_names_the_line(name):
    loss, part = MIXED[name]
    traced = of_x(loss)
    message = refused(traced)
    assert refused(written_out(traced)) == message
    lines = [f"{__file__}:{f.__code__.co_firstlineno + 1}: " for f in (softly, carries, recurrent)]
    lines += [f"{__file__}:{loss.__code__.co_firstlineno}: "]
    assert message.startswith(tuple(lines)) or name == "two orders"
    assert part in message


def test_positions_cannot_change_in_a_function_with_a_custom_derivative():
    traced = of_x(lambda p, x: softly(with_own_gradient(x)))
    assert "custom derivative" in refused(traced)


ALIKE = {
    "dropout": lambda p, x: softly(jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0)),
    "keys of chunks": lambda p, x: carries(
        lambda c, x: (
            (jax.random.split(c[0])[0], c[1] + jnp.sum(x * jax.random.normal(c[0], x.shape))),
            None,
        ),
        (jax.random.key(0), 0.0),
        x,
    )[0][1],
    "removed padding": lambda p, x: softly(jnp.pad(x, ((0, 0), (0, 2), (0, 0)))[:, : x.shape[1]]),
    "masked padding": lambda p, x: jnp.sum(
        jnp.where(jnp.pad(x[..., 0] > 9, ((0, 0), (0, 2))), 1.0, 0.0)
    ),
    "sort of features": lambda p, x: softly(
        jnp.sort(x, -1) + jnp.cumsum(x, -1) + jax.lax.top_k(x, D)[0]
    ),
    "mean of rows": lambda p, x: softly(x / jax.lax.pmean(p["w"].sum(), CONTEXT)),
    "linear": lambda p, x: jnp.sum(
        (jnp.sum(x, 1) @ p["w"]).T / 3 - 2 * jnp.stack([x.sum((0, 1))] * 2, 1)
    ),
    "printed": lambda p, x: (jax.debug.print("{}", x), jnp.sum(x))[1],
    "pointwise convolution": lambda p, x: softly(
        jax.lax.conv_general_dilated(x, p["kernel"][:1], (1,), [(0, 0)], **STRIP)
    ),
    "tiled positions": lambda p, x: softly(x.mT * jnp.tile(jnp.arange(x.shape[1]), (B, 1, 1))),
    "weights of NumPy": lambda p, x: jnp.sum(x * np.ones((B, T // 2, 1))),
    "unused": lambda p, x: (jnp.tanh(x[:, 0]), jnp.sum(x))[1],
    "penalty": lambda p, x: jnp.sum(x) + jnp.sum(p["w"] ** 2) * jnp.sum(jnp.ones_like(x) + 0 * x),
    "over data": lambda p, x: jax.lax.psum(jnp.sum(x), "data"),
    "attention": lambda p, x: softly(attention(*[x.reshape(B, -1, N, H)] * 3)),
    "attention of rows": lambda p, x: softly(
        jax.vmap(lambda x: zero_jax.attention(*[x.reshape(1, -1, N, H)] * 3))(x)
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_other_losses_are_sums_over_tokens(name):
    (fact,) = split_of_x(of_x(ALIKE[name]))[1]
    assert fact.partial and not fact.tokens


def facts(loss, tokens):
    x = jax.ShapeDtypeStruct((B, tokens, D), jnp.float32)
    return split_tokens(jax.make_jaxpr(loss)(x), [True], 2)[1]


AVERAGES = {
    "mean": lambda x: (jnp.mean(x), 1.0),
    "of two means": lambda x: (jnp.mean(x) - 1e-3 * jnp.mean(x**2), 1.0),
    "of means": lambda x: (jnp.mean(jnp.mean(x, 1) / 2), 1.0),
    "weighted": lambda x: (jnp.sum(x) / 3, jnp.sum(x > 0)),
    "by number": lambda x: (jnp.sum(x), 1.0 * x.size),
    "ones": lambda x: (jnp.sum(x), jnp.sum(jnp.ones(x.shape))),
}
OTHERS = {
    "sum": lambda x: (jnp.sum(x), 1.0),
    "mean and sum": lambda x: (jnp.mean(x) + jnp.sum(x), 1.0),
    "mean of a sum": lambda x: (jnp.mean(x.sum(1)), 1.0),
    "mean by number": lambda x: (jnp.mean(x), 1.0 * x.size),
    "mean over weights": lambda x: (jnp.mean(x), jnp.sum(x > 0)),
    "squared": lambda x: (jnp.mean(x) / x.shape[1], 1.0),
    "none": lambda x: (jnp.zeros(()), 1.0),
}


def test_a_mean_is_divided_by_twice_as_much_if_there_are_twice_the_tokens():
    (one, _), (two, _) = (facts(AVERAGES["mean"], tokens) for tokens in (4, 8))
    assert (one.over, two.over) == (B * 4 * D, B * 8 * D)
    found = {
        name: averages(facts(loss, 4), facts(loss, 8), 2)
        for name, loss in (AVERAGES | OTHERS).items()
    }
    assert found == dict.fromkeys(AVERAGES, True) | dict.fromkeys(OTHERS, False)


CONSTANT = {
    "mean": lambda x: jnp.mean(jnp.sin(x)),
    "sum of ones": lambda x: jnp.sum(x) / jnp.sum(jnp.ones(x.shape)),
    "positions": lambda x: jnp.sum(x * jnp.sin(jnp.arange(x.shape[1]) / 64)[:, None]),
    "chunks": lambda x: jax.lax.map(lambda x: jnp.sum(x / 8), x.reshape(-1, 2, D)).sum(),
    "layers": lambda x: jnp.sum(jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x)),
    "weights": lambda x: padded_losses(x, jnp.ones(x.shape[:2]))[0],
}
DEPENDENT = {
    "scaled tokens": lambda x: jnp.sum(jnp.sin(x / x.shape[1])),
    "scaled positions": lambda x: jnp.sum(x.mT * (jnp.arange(x.shape[1]) / x.shape[1])),
    "from the end": lambda x: jnp.sum(x * (x.shape[1] - 1 - jnp.arange(x.shape[1]))[:, None]),
    "first half": lambda x: jnp.sum(x[:, :, 0] * (jnp.arange(x.shape[1]) < x.shape[1] // 2)),
    "by a sum of positions": lambda x: jnp.sum(x) / jnp.sum(1.0 * jnp.arange(x.shape[1])),
    "by a part of a table": lambda x: jnp.sum(x * jnp.sum(jnp.sin(np.arange(64.0))[: x.shape[1]])),
    "entry of a table": lambda x: jnp.sum(jnp.sin(x * jnp.sin(np.arange(64.0))[x.shape[1]])),
    "power": lambda x: jnp.sum(jnp.sin(x ** x.shape[1])),
    "iterations": lambda x: jnp.sum(jax.lax.fori_loop(0, x.shape[1], lambda _, x: jnp.sin(x), x)),
}


def padded_losses(x, weights):
    flat = x.reshape(-1, D), jnp.ones((V, D)), jnp.zeros(weights.size, int), weights.reshape(-1)
    return chunked_cross_entropy(*flat, 3)


def test_only_divisors_of_sums_depend_on_the_number_of_tokens():
    for name, loss in (CONSTANT | DEPENDENT).items():
        one, two = (jax.make_jaxpr(loss)(jnp.ones((B, tokens, D))) for tokens in (4, 8))
        if name in CONSTANT:
            check_constants(one, two, [True])
        else:
            line = f"{__file__}:{loss.__code__.co_firstlineno}: "
            with pytest.raises(ValueError, match=f"{re.escape(line)}.*depends on the length"):
                check_constants(one, two, [True])


def test_dims_of_results():
    x = jax.ShapeDtypeStruct((B, 4, D), jnp.float32)
    loss = lambda x: (x.sum(-1), x.reshape(-1, D), x.swapaxes(0, 1).reshape(2, 2, B, D), x.sum(1))  # noqa: E731
    made = split_tokens(jax.make_jaxpr(loss)(x), [True], 2)[1]
    assert [sorted(fact.dims) for fact in made] == [[1], [0], [0, 1], []]
    assert [fact.partial for fact in made] == [False] * 3 + [True]


def test_a_program_without_positions_is_unchanged():
    traced = jax.make_jaxpr(lambda x: jnp.sum(jnp.tanh(x)))(np.ones((B, 4, D)))
    assert split_tokens(traced, [True], 2)[0] is traced
