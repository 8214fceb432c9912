"""Attention by cuDNN's fused kernel where its inputs allow it, else in blocks of queries.

Shapes: B batch, T tokens of a row, N heads of queries, M of keys and values, H head dim.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .attention import causal_attention

# Attention that replaces `attend`: called with queries, keys and values by position, and by keyword
# `segment_ids`, `window`, `scale`, and `implementation` if it is chosen.
AttentionFn = Callable[..., jax.Array]

LARGEST_HEAD = 128  # whose gradient cuDNN's kernel has on every GPU that JAX runs on
# JAX gives cuDNN the documents of a packed row as a bf16 bias of (B, 1, T, T): 34 MB a row of 4,096
# tokens, 2.1 GB of 32,768 (compiled for an H100: 2,689 MB of temporaries, 541 without documents).
LONGEST_PACKED = 4096


def kernel_for(
    dtype: Any, head_dim: int, tokens: int, *, packed: bool
) -> tuple[Literal["cudnn", "xla"], str]:
    """Returns the attention that "auto" takes on a GPU, and the reason.

    Args:
      dtype: Dtype of queries, keys and values.
      head_dim: H.
      tokens: T, tokens in a row.
      packed: True if rows hold several documents, separated by segments.

    >>> kernel_for("bfloat16", 128, 32768, packed=False)
    ('cudnn', '')
    >>> kernel_for("bfloat16", 128, 32768, packed=True)
    ('xla', 'packed rows of 32768 tokens, over 4096, would need a bias of 2.1 GB a row')
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return "xla", f"cuDNN supports bfloat16 and float16, not {dtype}"
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        return "xla", f"head dim {head_dim} is not a multiple of 8 up to {LARGEST_HEAD}"
    if packed and tokens > LONGEST_PACKED:
        size = f"{2 * tokens**2 / 1e9:.1f} GB a row"
        return "xla", (
            f"packed rows of {tokens} tokens, over {LONGEST_PACKED}, would need a bias of {size}"
        )
    return "cudnn", ""


def attend(
    q_BxTxNxH: jax.Array,
    k_BxTxMxH: jax.Array,
    v_BxTxMxH: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    implementation: str = "auto",
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns causal attention, (B, T, N, H); other arguments as for `causal_attention`.

    Args:
      segment_ids: Numbers (B, T) of documents that share a row; a position sees its own alone.
      implementation: "cudnn", "xla" (in blocks of queries), or "auto": on a GPU the one that
        `kernel_for` returns, elsewhere "xla". With segments "cudnn" holds 2·T² bytes a row.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> bool(jnp.allclose(attend(x, x, x), x))
    True
    """
    T, H = q_BxTxNxH.shape[1], q_BxTxNxH.shape[-1]
    window = None if window is None or window >= T else window
    if implementation == "auto" and jax.default_backend() == "gpu":
        implementation, _ = kernel_for(q_BxTxNxH.dtype, H, T, packed=segment_ids is not None)
    if implementation == "cudnn":
        mask = None
        if segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None]
        return jax.nn.dot_product_attention(
            *(q_BxTxNxH, k_BxTxMxH, v_BxTxMxH),
            mask=mask,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    given = q_BxTxNxH, k_BxTxMxH, v_BxTxMxH, segment_ids
    return causal_attention(*given, window=window, scale=scale)


def with_kernel(attention_fn: AttentionFn, implementation: str) -> AttentionFn:
    """Returns attention by this implementation; "auto" is the choice of `attention_fn`."""
    if implementation == "auto":
        return attention_fn
    return functools.partial(attention_fn, implementation=implementation)
