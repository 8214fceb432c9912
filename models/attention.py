"""Causal attention a block of queries at a time, so that scores cost a fraction.

Written out at once, scores take B·N·T² fp32 numbers, a few times over. Here they exist for one of
at most `BLOCKS` blocks of queries and the keys up to its end (the others are behind the causal
mask), forward and backward; the backward pass makes them again, as FlashAttention does. cuDNN's
kernel does that on the chip; this runs wherever XLA does.

Shapes: B batch, T tokens of a row, N heads of queries, M of keys and values, G = N / M, H head dim,
K queries of a block (of all heads of a group), S keys it sees.

Source: Dao et al., FlashAttention, arXiv:2205.14135, section 3.1 and algorithm 4.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

# Of queries at least, so that products are large.
BLOCK = 256
# At most, since each is written out.
BLOCKS = 16


def causal_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxMxH: jax.Array,
    v_BxTxMxH: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns softmax(q kᵀ · scale) v per head, (B, T, N, H); position t sees positions up to t.

    Scores and softmax are fp32, products are of the inputs' dtype.

    Args:
      q_BxTxNxH: queries.
      k_BxTxMxH: keys, of as many heads or of fewer, each for N / M queries in a row.
      v_BxTxMxH: values, of the keys' shape.
      segments_BxT: numbers of documents that share a row; a position sees its own alone.
      window: how many positions one sees, itself among them; None for all before it.
      scale: of the scores, 1 / √H by default.

    Differentiable once backward, not forward. The backward pass computes the scores again.

    Raises:
      ValueError: shapes or dtypes differ, or the window is empty.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> bool(jnp.allclose(causal_attention(x, x, x), x))
    True
    """
    _check(q_BxTxNxH, k_BxTxMxH, v_BxTxMxH, segments_BxT, window)
    N, H = q_BxTxNxH.shape[2:]
    if q_BxTxNxH.shape[1] == 0:
        return q_BxTxNxH
    how = _How(N // k_BxTxMxH.shape[2], window, H**-0.5 if scale is None else scale)
    return _attention(how, q_BxTxNxH, k_BxTxMxH, v_BxTxMxH, segments_BxT)


@dataclasses.dataclass(frozen=True)
class _How:
    """What does not depend on numbers: G queries a key, the window, the scale of scores."""

    group: int
    window: int | None
    scale: float


def _check(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, window: int | None) -> None:
    kinds = [f"{x.dtype}{list(x.shape)}" for x in (q, k, v)]
    B, T, N, H = q.shape
    heads = k.shape[2] if k.ndim == 4 else 0
    if kinds[1] != kinds[2] or k.shape != (B, T, heads, H) or q.dtype != k.dtype:
        raise ValueError(
            f"queries, keys and values are {', '.join(kinds)}: equal shapes and dtypes are "
            "required (keys and values may have fewer heads). For others use "
            "jax.nn.dot_product_attention"
        )
    if not heads or N % heads:
        raise ValueError(
            f"{heads} heads of keys must divide {N} heads of queries: {', '.join(kinds)}"
        )
    if segments is not None and segments.shape != (B, T):
        raise ValueError(
            f"`segments` has shape {list(segments.shape)}, but rows have shape {[B, T]}: give one "
            "number for each token"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"`window`={window}: at least 1 is required, because a position sees itself"
        )


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Block:
    """K queries, and the S keys that one of them may see."""

    queries: slice
    keys: slice


def _blocks(T: int, window: int | None) -> list[_Block]:
    K = max(BLOCK, -(-T // BLOCKS))
    ends = [(start, min(start + K, T)) for start in range(0, T, K)]
    first = [0 if window is None else max(0, start - window + 1) for start, _ in ends]
    return [_Block(slice(*end), slice(low, end[1])) for end, low in zip(ends, first, strict=True)]


def _parts(given: Any, at: _Block, group: int) -> tuple[jax.Array, ...]:
    """The queries of a block, and the keys and values that they may see."""
    q_BxTxNxH, k_BxTxMxH, v_BxTxMxH = given
    q_BxKxMxH = _folded(q_BxTxNxH[:, at.queries], group)
    return q_BxKxMxH, k_BxTxMxH[:, at.keys], v_BxTxMxH[:, at.keys]


def _folded(x_BxTxNxH: jax.Array, group: int) -> jax.Array:
    """Queries of one key's group as more positions: (B, G·T, M, H), so that heads are the keys'."""
    if group == 1:
        return x_BxTxNxH
    B, T, N, H = x_BxTxNxH.shape
    x_BxTxMxGxH = x_BxTxNxH.reshape(B, T, N // group, group, H)
    return jnp.moveaxis(x_BxTxMxGxH, 3, 1).reshape(B, group * T, N // group, H)


def _unfolded(x_BxTxMxH: jax.Array, group: int) -> jax.Array:
    """What `_folded` made of (B, T, N, H)."""
    if group == 1:
        return x_BxTxMxH
    B, T, M, H = x_BxTxMxH.shape
    x_BxGxTxMxH = x_BxTxMxH.reshape(B, group, T // group, M, H)
    return jnp.moveaxis(x_BxGxTxMxH, 1, 3).reshape(B, T // group, M * group, H)


def _seen(at: _Block, how: _How, segments_BxT: jax.Array | None) -> jax.Array:
    """Which keys of a block its queries see, of shape (K, S), or (B, 1, K, S) with segments."""
    position_S = jnp.arange(at.keys.start, at.keys.stop)
    position_Kx1 = jnp.arange(at.queries.start, at.queries.stop)[:, None]
    seen = position_S <= position_Kx1
    if how.window is not None:
        seen &= position_S > position_Kx1 - how.window
    if segments_BxT is not None:
        own_BxKx1 = segments_BxT[:, at.queries, None]
        seen = (seen & (own_BxKx1 == segments_BxT[:, None, at.keys]))[:, None]
    repeats = (*[1] * (seen.ndim - 2), how.group, 1)
    return seen if how.group == 1 else jnp.tile(seen, repeats)


def _shares(
    q_BxKxMxH: jax.Array, k_BxSxMxH: jax.Array, at: _Block, how: _How, segments: jax.Array | None
) -> jax.Array:
    """How much of each value a query takes, (B, M, K, S)."""
    scores_BxMxKxS = _dot("bknh,bsnh->bnks", q_BxKxMxH, k_BxSxMxH) * how.scale
    # Added, not chosen: XLA would keep minus infinity in the shape of the scores.
    scores_BxMxKxS += jnp.where(_seen(at, how, segments), 0.0, -jnp.inf)
    return jax.nn.softmax(scores_BxMxKxS, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> jax.Array:
    return _attention_fwd(how, q, k, v, segments)[0]


def _attention_fwd(
    how: _How,
    q_BxTxNxH: jax.Array,
    k_BxTxMxH: jax.Array,
    v_BxTxMxH: jax.Array,
    segments_BxT: jax.Array | None,
) -> tuple[jax.Array, Any]:
    outs = []
    given = q_BxTxNxH, k_BxTxMxH, v_BxTxMxH
    for at in _blocks(q_BxTxNxH.shape[1], how.window):
        q_BxKxMxH, k_BxSxMxH, v_BxSxMxH = _parts(given, at, how.group)
        shares_BxMxKxS = _shares(q_BxKxMxH, k_BxSxMxH, at, how, segments_BxT)
        shares_BxMxKxS = shares_BxMxKxS.astype(v_BxSxMxH.dtype)
        out_BxKxMxH = _dot("bnks,bsnh->bknh", shares_BxMxKxS, v_BxSxMxH).astype(v_BxSxMxH.dtype)
        outs.append(_unfolded(out_BxKxMxH, how.group))
        outs[-1], given = jax.lax.optimization_barrier((outs[-1], given))
    out_BxTxNxH = jnp.concatenate(outs, axis=1)
    return out_BxTxNxH, (q_BxTxNxH, k_BxTxMxH, v_BxTxMxH, segments_BxT, out_BxTxNxH)


def _attention_bwd(how: _How, kept: Any, dout_BxTxNxH: jax.Array) -> tuple[Any, ...]:
    q_BxTxNxH, k_BxTxMxH, v_BxTxMxH, segments_BxT, out_BxTxNxH = kept
    dtype, T = k_BxTxMxH.dtype, k_BxTxMxH.shape[1]
    given = q_BxTxNxH, k_BxTxMxH, v_BxTxMxH
    dqs: list[jax.Array] = []
    sums: Any = None
    # From the last block, which sees all keys unless there is a window.
    for at in reversed(_blocks(T, how.window)):
        q_BxKxMxH, k_BxSxMxH, v_BxSxMxH = _parts(given, at, how.group)
        out_BxKxMxH = _folded(out_BxTxNxH[:, at.queries], how.group)
        dout_BxKxMxH = _folded(dout_BxTxNxH[:, at.queries], how.group)
        shares_BxMxKxS = _shares(q_BxKxMxH, k_BxSxMxH, at, how, segments_BxT)
        # XLA's CPU code has no product of this kind whose result is fp32.
        dv_BxMxSxH = jnp.einsum("bnks,bknh->bnsh", shares_BxMxKxS.astype(dtype), dout_BxKxMxH)
        dshares_BxMxKxS = _dot("bknh,bsnh->bnks", dout_BxKxMxH, v_BxSxMxH)
        # What the softmax takes back: the sum over keys of shares * dshares, which is out · dout.
        mean_BxMxKx1 = _dot("bknh,bknh->bnk", out_BxKxMxH, dout_BxKxMxH)[..., None]
        # Before the scale of the scores, which in fp16 would take what is small below its range.
        dscores_BxMxKxS = (shares_BxMxKxS * (dshares_BxMxKxS - mean_BxMxKx1)).astype(dtype)
        dk_BxMxSxH = jnp.einsum("bnks,bknh->bnsh", dscores_BxMxKxS, q_BxKxMxH)
        dq_BxKxMxH = _dot("bnks,bsnh->bknh", dscores_BxMxKxS, k_BxSxMxH) * how.scale
        dqs.insert(0, _unfolded(dq_BxKxMxH.astype(dtype), how.group))
        found = dk_BxMxSxH.astype(jnp.float32) * how.scale, dv_BxMxSxH.astype(jnp.float32)
        sums = _added(sums, found, at.keys, T)
        (dqs[0], sums), given = jax.lax.optimization_barrier(((dqs[0], sums), given))
    dk_BxTxMxH, dv_BxTxMxH = (jnp.moveaxis(x.astype(dtype), 1, 2) for x in sums)
    return jnp.concatenate(dqs, axis=1), dk_BxTxMxH, dv_BxTxMxH, None


def _added(sums: Any, found: Any, at: slice, T: int) -> tuple[jax.Array, ...]:
    """Sums (B, M, T, H) and what S of their positions add to them; of no sums, those alone."""
    around = (0, 0), (0, 0), (at.start, T - at.stop), (0, 0)
    added = []
    for n, part in enumerate(found):
        wide = part if part.shape[2] == T else jnp.pad(part, around)
        added.append(wide if sums is None else sums[n] + wide)
    return tuple(added)


_attention.defvjp(_attention_fwd, _attention_bwd)
