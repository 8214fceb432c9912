"""Default attention of the models.

Shapes: B batch, T tokens of a row, N heads of queries, M of keys and values, H head dim.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax

# Attention that replaces `attend`: called with queries, keys and values by position, and by keyword
# `segment_ids`, `window`, `scale`, and `implementation` if it is chosen.
AttentionFn = Callable[..., jax.Array]


def attend(
    q_BxTxNxH: jax.Array,
    k_BxTxMxH: jax.Array,
    v_BxTxMxH: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    implementation: Literal["cudnn", "xla"] | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns causal attention, (B, T, N, H), by `jax.nn.dot_product_attention`.

    Memory is quadratic in T: build models with `attention_fn=zero_jax.attention` for long rows.

    Args:
      q_BxTxNxH: Queries.
      k_BxTxMxH: Keys; M divides N.
      v_BxTxMxH: Values.
      segment_ids: Numbers (B, T) of documents that share a row; a token sees its own alone.
      implementation: "cudnn", "xla", or None for the choice of JAX.
      window: Number of tokens that one sees, itself included; None for all before it.
      scale: Factor of the scores; 1 / √H by default.
    """
    T, mask = q_BxTxNxH.shape[1], None
    if segment_ids is not None:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None]
    return jax.nn.dot_product_attention(
        *(q_BxTxNxH, k_BxTxMxH, v_BxTxMxH),
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None or window >= T else (window - 1, 0),
        implementation=implementation,
    )


def with_kernel(attention_fn: AttentionFn, implementation: str) -> AttentionFn:
    """Returns attention by this implementation; "auto" is the choice of `attention_fn`."""
    if implementation == "auto":
        return attention_fn
    return functools.partial(attention_fn, implementation=implementation)
