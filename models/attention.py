"""Causal attention a block of queries at a time, so that scores cost a fraction.

Written out at once, scores take B·N·T² fp32 numbers, a few times over. Here they exist for one of
at most `BLOCKS` blocks of queries and the keys up to its end (the others are behind the causal
mask), forward and backward; the backward pass makes them again, as FlashAttention does. cuDNN's
kernel does that on the chip; this runs wherever XLA does.

Shapes: B batch, T tokens of a row, N heads, H head dim, K queries of a block, S keys it sees.

Source: Dao et al., FlashAttention, arXiv:2205.14135, section 3.1 and algorithm 4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

# Of queries at least, so that products are large.
BLOCK = 256
# At most, since each is written out.
BLOCKS = 16


def causal_attention(q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array) -> jax.Array:
    """Returns softmax(q kᵀ / √H) v per head, (B, T, N, H); position t sees positions up to t.

    Scores and softmax are fp32, products are of the inputs' dtype.

    Args:
      q_BxTxNxH: queries.
      k_BxTxNxH: keys, of the same shape.
      v_BxTxNxH: values, of the same shape.

    Differentiable once backward, not forward. The backward pass computes the scores again.

    Raises:
      ValueError: shapes or dtypes differ.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> bool(jnp.allclose(causal_attention(x, x, x), x))
    True
    """
    kinds = [f"{x.dtype}{list(x.shape)}" for x in (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)]
    if len(set(kinds)) > 1:
        raise ValueError(
            f"queries, keys and values are {', '.join(kinds)}: give all the same shape and dtype, "
            "or use jax.nn.dot_product_attention"
        )
    if q_BxTxNxH.shape[1] == 0:
        return v_BxTxNxH
    return _attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _blocks(T: int) -> list[slice]:
    K = max(BLOCK, -(-T // BLOCKS))
    return [slice(start, min(start + K, T)) for start in range(0, T, K)]


def _parts(given: Any, at: slice) -> tuple[jax.Array, ...]:
    """The queries of a block, and the keys and values up to its end."""
    q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = given
    return q_BxTxNxH[:, at], k_BxTxNxH[:, : at.stop], v_BxTxNxH[:, : at.stop]


def _shares(q_BxKxNxH: jax.Array, k_BxSxNxH: jax.Array) -> jax.Array:
    """How much of each value a query takes, (B, N, K, S); the last K keys are its block's own."""
    K, S, H = q_BxKxNxH.shape[1], k_BxSxNxH.shape[1], k_BxSxNxH.shape[-1]
    scores_BxNxKxS = _dot("bknh,bsnh->bnks", q_BxKxNxH, k_BxSxNxH) * H**-0.5
    seen_KxS = jnp.arange(S) <= jnp.arange(S - K, S)[:, None]
    # Added, not chosen: XLA would keep minus infinity in the shape of the scores.
    scores_BxNxKxS += jnp.where(seen_KxS, 0.0, -jnp.inf)
    return jax.nn.softmax(scores_BxNxKxS, axis=-1)


@jax.custom_vjp
def _attention(q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array) -> jax.Array:
    return _attention_fwd(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)[0]


def _attention_fwd(
    q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array
) -> tuple[jax.Array, Any]:
    outs = []
    given = q_BxTxNxH, k_BxTxNxH, v_BxTxNxH
    for at in _blocks(q_BxTxNxH.shape[1]):
        q_BxKxNxH, k_BxSxNxH, v_BxSxNxH = _parts(given, at)
        shares_BxNxKxS = _shares(q_BxKxNxH, k_BxSxNxH).astype(v_BxSxNxH.dtype)
        outs.append(_dot("bnks,bsnh->bknh", shares_BxNxKxS, v_BxSxNxH).astype(v_BxSxNxH.dtype))
        outs[-1], given = jax.lax.optimization_barrier((outs[-1], given))
    out_BxTxNxH = jnp.concatenate(outs, axis=1)
    return out_BxTxNxH, (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, out_BxTxNxH)


def _attention_bwd(kept: Any, dout_BxTxNxH: jax.Array) -> tuple[jax.Array, ...]:
    q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, out_BxTxNxH = kept
    dtype, scale = k_BxTxNxH.dtype, k_BxTxNxH.shape[-1] ** -0.5
    given = q_BxTxNxH, k_BxTxNxH, v_BxTxNxH
    dqs: list[jax.Array] = []
    sums: Any = None
    # From the last block, which sees all keys.
    for at in reversed(_blocks(q_BxTxNxH.shape[1])):
        q_BxKxNxH, k_BxSxNxH, v_BxSxNxH = _parts(given, at)
        out_BxKxNxH, dout_BxKxNxH = out_BxTxNxH[:, at], dout_BxTxNxH[:, at]
        shares_BxNxKxS = _shares(q_BxKxNxH, k_BxSxNxH)
        # XLA's CPU code has no product of this kind whose result is fp32.
        dv_BxNxSxH = jnp.einsum("bnks,bknh->bnsh", shares_BxNxKxS.astype(dtype), dout_BxKxNxH)
        dshares_BxNxKxS = _dot("bknh,bsnh->bnks", dout_BxKxNxH, v_BxSxNxH)
        # What the softmax takes back: the sum over keys of shares * dshares, which is out · dout.
        mean_BxNxKx1 = _dot("bknh,bknh->bnk", out_BxKxNxH, dout_BxKxNxH)[..., None]
        # Before the scale of the scores, which in fp16 would take what is small below its range.
        dscores_BxNxKxS = (shares_BxNxKxS * (dshares_BxNxKxS - mean_BxNxKx1)).astype(dtype)
        dk_BxNxSxH = jnp.einsum("bnks,bknh->bnsh", dscores_BxNxKxS, q_BxKxNxH)
        dq_BxKxNxH = _dot("bnks,bsnh->bknh", dscores_BxNxKxS, k_BxSxNxH) * scale
        dqs.insert(0, dq_BxKxNxH.astype(dtype))
        found = dk_BxNxSxH.astype(jnp.float32) * scale, dv_BxNxSxH.astype(jnp.float32)
        sums = found if sums is None else jax.tree.map(_add_first, sums, found)
        (dqs[0], sums), given = jax.lax.optimization_barrier(((dqs[0], sums), given))
    dk_BxTxNxH, dv_BxTxNxH = (jnp.moveaxis(x.astype(dtype), 1, 2) for x in sums)
    return jnp.concatenate(dqs, axis=1), dk_BxTxNxH, dv_BxTxNxH


def _add_first(x_BxNxTxH: jax.Array, first_BxNxSxH: jax.Array) -> jax.Array:
    """Adds to the first S positions."""
    after = x_BxNxTxH.shape[2] - first_BxNxSxH.shape[2]
    return x_BxNxTxH + jnp.pad(first_BxNxSxH, ((0, 0), (0, 0), (0, after), (0, 0)))


_attention.defvjp(_attention_fwd, _attention_bwd)
