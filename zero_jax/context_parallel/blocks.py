"""Attention in blocks of queries and keys, forward and backward, wherever XLA runs.

A query t sees some keys s, and takes share_ts of their values:

    score_ts = scale · q_t · k_s        lse_t = log Σ_s exp(score_ts)
    share_ts = exp(score_ts - lse_t)    out_t = Σ_s share_ts v_s

Scores exist for one block of queries and one of keys at a time, so memory is linear in the tokens
of a row. Forward, sums over keys are relative to the largest score so far (online softmax, exact).
Backward, the shares are computed again from the saved lse:

    dv_s = Σ_t share_ts dout_t          dscore_ts = share_ts (dout_t · v_s - dout_t · out_t)
    dq_t = scale Σ_s dscore_ts k_s      dk_s = scale Σ_t dscore_ts q_t

One loop runs over the pairs of blocks in which a query sees a key. Its length is static: the cost
of other loops is unknown to a plan, and on a GPU the host waits for each of their iterations.

Shapes: B batch, T queries, S keys, N heads of queries, M of keys and values, G = N / M, H head dim,
I blocks of K queries, J blocks of L keys, P pairs of blocks.

Source: Dao et al., FlashAttention, arXiv:2205.14135, section 3.1 and algorithm 4.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Most queries or keys of a block. Its fp32 scores take 4 MB per row and head. Shorter rows have
# `BLOCKS` blocks of at least `SMALLEST`. With larger blocks more computed scores are masked, with
# smaller ones results are read and written more often: on a CPU a row of 1,024 tokens takes 35 ms
# with blocks of 256, 99 ms with one block; modelled for an H100, one of 8,192 takes a Gemma 0.217 s
# a step with blocks of 1,024, 0.325 s with 256.
BLOCK, BLOCKS, SMALLEST = 1024, 8, 256

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Mask(NamedTuple):
    """The keys that a query sees: those up to its position, in its window and of its segment.

    Attributes:
      positions: (T,) positions of the queries in the row, ascending; keys have 0 to S - 1.
      segments: Segment ids of queries (B, T) and keys (B, S), or None.
      window: Number of positions that a query sees, its own among them; None for no limit.
      pairs: P, the number of pairs of blocks to compute, from `count_pairs`.
    """

    positions: jax.Array | np.ndarray
    segments: tuple[jax.Array, jax.Array] | None
    window: int | None
    pairs: int


def count_pairs(positions: np.ndarray, keys: int, window: int | None) -> int:
    """Returns P for queries at these positions; the largest of D devices, given (D, T)."""
    first_DxI, end_DxI = _keys_seen(positions, keys, window)
    return int((end_DxI - first_DxI).sum(axis=-1).max())


def forward(
    q_BxTxNxH: jax.Array, k_BxSxMxH: jax.Array, v_BxSxMxH: jax.Array, mask: Mask, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the output (B, T, N, H), and lse (B, T, N, 1) in fp32."""
    blocks = _Blocks(q_BxTxNxH, k_BxSxMxH, v_BxSxMxH, mask, scale)

    def add(state: Sequence[jax.Array], pair: Sequence[jax.Array]) -> tuple[list[jax.Array], None]:
        i, j = pair
        top_BxMxGxKx1, total_BxMxGxKx1, out_BxMxGxKxH = (_at(x, i) for x in state)
        scores_BxMxGxKxL, v_BxMxLxH = blocks.scores(i, j), _at(blocks.v, j)
        new_BxMxGxKx1 = jnp.maximum(top_BxMxGxKx1, scores_BxMxGxKxL.max(axis=-1, keepdims=True))
        shares_BxMxGxKxL = jnp.exp(scores_BxMxGxKxL - new_BxMxGxKx1)
        # Earlier sums are relative to the largest score of that time.
        decay_BxMxGxKx1 = jnp.exp(top_BxMxGxKx1 - new_BxMxGxKx1)
        total_BxMxGxKx1 *= decay_BxMxGxKx1
        total_BxMxGxKx1 += shares_BxMxGxKxL.sum(axis=-1, keepdims=True)
        shares_BxMxGxKxL = shares_BxMxGxKxL.astype(v_BxMxLxH.dtype)
        out_BxMxGxKxH *= decay_BxMxGxKx1
        out_BxMxGxKxH += _dot("bmgkl,bmlh->bmgkh", shares_BxMxGxKxL, v_BxMxLxH)
        block = new_BxMxGxKx1, total_BxMxGxKx1, out_BxMxGxKxH
        return [_put(x, y, i) for x, y in zip(state, block, strict=True)], None

    out = jnp.zeros_like(blocks.q, jnp.float32)
    # The lowest finite number: minus infinity less itself, in a block that is masked, is NaN.
    top = jnp.full_like(out[..., :1], jnp.finfo(jnp.float32).min)
    (top, total, out), _ = jax.lax.scan(add, [top, jnp.zeros_like(top), out], blocks.pairs)
    T = q_BxTxNxH.shape[1]
    return _joined((out / total).astype(q_BxTxNxH.dtype), T), _joined(top + jnp.log(total), T)


def backward(
    q_BxTxNxH: jax.Array,
    k_BxSxMxH: jax.Array,
    v_BxSxMxH: jax.Array,
    out_BxTxNxH: jax.Array,
    lse_BxTxNx1: jax.Array,
    dout_BxTxNxH: jax.Array,
    mask: Mask,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of queries, keys and values in fp32."""
    blocks = _Blocks(q_BxTxNxH, k_BxSxMxH, v_BxSxMxH, mask, scale)
    dtype = q_BxTxNxH.dtype
    lse, out = blocks.split_queries(lse_BxTxNx1), blocks.split_queries(out_BxTxNxH)
    # Padding has a gradient of zero, and so adds nothing to those of keys and values.
    dout = blocks.split_queries(dout_BxTxNxH, padding="constant")
    mean = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)

    def add(state: Sequence[jax.Array], pair: Sequence[jax.Array]) -> tuple[list[jax.Array], None]:
        i, j = pair
        q_BxMxGxKxH, lse_BxMxGxKx1, dout_BxMxGxKxH, mean_BxMxGxKx1 = (
            _at(x, i) for x in (blocks.q, lse, dout, mean)
        )
        k_BxMxLxH, v_BxMxLxH = _at(blocks.k, j), _at(blocks.v, j)
        shares_BxMxGxKxL = jnp.exp(blocks.scores(i, j) - lse_BxMxGxKx1)
        dshares_BxMxGxKxL = _dot("bmgkh,bmlh->bmgkl", dout_BxMxGxKxH, v_BxMxLxH)
        # Before the scale of the scores, which in fp16 would take small numbers below its range.
        dscores_BxMxGxKxL = shares_BxMxGxKxL * (dshares_BxMxGxKxL - mean_BxMxGxKx1)
        dscores_BxMxGxKxL = dscores_BxMxGxKxL.astype(dtype)
        block = (
            (_dot("bmgkl,bmlh->bmgkh", dscores_BxMxGxKxL, k_BxMxLxH), i),
            (_dot("bmgkl,bmgkh->bmlh", dscores_BxMxGxKxL, q_BxMxGxKxH), j),
            (_dot("bmgkl,bmgkh->bmlh", shares_BxMxGxKxL.astype(dtype), dout_BxMxGxKxH), j),
        )
        return [_put(x, _at(x, at) + y, at) for x, (y, at) in zip(state, block, strict=True)], None

    start = [jnp.zeros_like(x, jnp.float32) for x in (blocks.q, blocks.k, blocks.v)]
    (dq, dk, dv), _ = jax.lax.scan(add, start, blocks.pairs)
    T, S = q_BxTxNxH.shape[1], k_BxSxMxH.shape[1]
    return scale * _joined(dq, T), scale * _joined(dk, S), _joined(dv, S)


class _Blocks:
    """Queries (I, B, M, G, K, H), keys and values (J, B, M, L, H), and the pairs of blocks."""

    def __init__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, scale: float):
        self._heads, self._mask, self._scale = k.shape[2], mask, scale
        self._queries, self._keys = _sizes(q.shape[1], k.shape[1])
        self.q = self.split_queries(q)
        self.k, self.v = (_split(x, self._keys) for x in (k, v))
        positions = jnp.asarray(mask.positions)
        self._positions_Ix1xKx1 = _split(positions[None, :, None], self._queries)
        if mask.segments is not None:
            sizes = self._queries, self._keys
            self._segments = [
                _split(x[..., None], size) for x, size in zip(mask.segments, sizes, strict=True)
            ]
        first_I, end_I = _keys_seen(positions, k.shape[1], mask.window)
        count_I, at_P = end_I - first_I, jnp.arange(mask.pairs)
        i_P = jnp.repeat(jnp.arange(len(count_I)), count_I, total_repeat_length=mask.pairs)
        # If another device has more pairs, the last ones have keys that no query sees.
        j_P = at_P + (first_I + count_I - jnp.cumsum(count_I))[i_P]
        self.pairs = i_P, j_P

    def split_queries(self, x_BxTxNxH: jax.Array, padding: str = "edge") -> jax.Array:
        B, T, N, H = x_BxTxNxH.shape
        x_BxTxMxGxH = x_BxTxNxH.reshape(B, T, self._heads, N // self._heads, H)
        return _split(x_BxTxMxGxH, self._queries, padding)

    def scores(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns the scores of a pair of blocks, (B, M, G, K, L), minus infinity if masked."""
        scores_BxMxGxKxL = _dot("bmgkh,bmlh->bmgkl", _at(self.q, i), _at(self.k, j)) * self._scale
        position_1xKx1 = _at(self._positions_Ix1xKx1, i)
        position_L = j * self._keys + jnp.arange(self._keys)
        seen_BxKxL = position_L <= position_1xKx1
        if self._mask.window is not None:
            seen_BxKxL &= position_L > position_1xKx1 - self._mask.window
        if self._mask.segments is not None:
            segment_BxKx1, segment_BxLx1 = map(_at, self._segments, (i, j))
            seen_BxKxL &= segment_BxKx1 == segment_BxLx1.swapaxes(1, 2)
        # Added, not chosen: XLA would keep minus infinity in the shape of the scores.
        return scores_BxMxGxKxL + jnp.where(seen_BxKxL, 0.0, -jnp.inf)[:, None, None]


def _sizes(queries: int, keys: int) -> tuple[int, int]:
    """Returns K and L. Blocks of queries are even in number: a device has two chunks of a row."""
    most = min(max(keys // BLOCKS, SMALLEST), BLOCK)
    even = 2 * -(-queries // (2 * most))
    return -(-queries // even), -(-keys // -(-keys // most))


def _keys_seen(
    positions: jax.Array | np.ndarray, keys: int, window: int | None
) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]:
    """Returns for each block of queries the first block of keys that one sees, and the end."""
    T = positions.shape[-1]
    K, L = _sizes(T, keys)
    last = np.minimum(np.arange(K, T + K, K), T) - 1
    end = positions[..., last] // L + 1
    first = 0 * end if window is None else (positions[..., ::K] - window + 1).clip(0) // L
    return first, end


def _split(x: jax.Array, size: int, padding: str = "edge") -> jax.Array:
    """Returns the tokens of dim 1 as blocks: dim 0 is that of the blocks, dim -2 has their tokens.

    Padding repeats the last token, which sees itself.
    """
    B, T, *others = x.shape
    count = -(-T // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - T), *[(0, 0)] * len(others)), mode=padding)
    return jnp.moveaxis(x.reshape(B, count, size, *others), (1, 2), (0, -2))


def _joined(x: jax.Array, tokens: int) -> jax.Array:
    """Inverts `_split` and `split_queries`: (B, T, heads, H)."""
    count, B, *_, size, H = x.shape
    x = jnp.moveaxis(x, (0, -2), (1, 2)).reshape(B, count * size, -1, H)
    return x[:, :tokens]


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, block, i, 0)
