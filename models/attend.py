"""Attention by cuDNN's fused kernel where it takes what is given, else in blocks of queries.

Shapes: B batch, T tokens of a row, N heads of queries, M of keys and values, H head dim.
"""

import jax
import jax.numpy as jnp

from .attention import causal_attention

LARGEST_HEAD = 128  # whose gradient cuDNN's kernel has on every GPU that JAX runs on


def attend(
    q_BxTxNxH: jax.Array,
    k_BxTxMxH: jax.Array,
    v_BxTxMxH: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    implementation: str = "auto",
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention, (B, T, N, H); arguments as for `causal_attention`.

    Args:
      implementation: "cudnn", "xla" (in blocks of queries), or "auto": cuDNN on a GPU where dtype
        and head dim allow it.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> bool(jnp.allclose(attend(x, x, x), x))
    True
    """
    T, H = q_BxTxNxH.shape[1], q_BxTxNxH.shape[-1]
    window = None if window is None or window >= T else window
    fits = q_BxTxNxH.dtype in (jnp.bfloat16, jnp.float16) and H % 8 == 0 and H <= LARGEST_HEAD
    fused = fits and jax.default_backend() == "gpu"
    if implementation == "cudnn" or (implementation == "auto" and fused):
        mask = None
        if segments_BxT is not None:
            mask = segments_BxT[:, None, :, None] == segments_BxT[:, None, None]
        return jax.nn.dot_product_attention(
            *(q_BxTxNxH, k_BxTxMxH, v_BxTxMxH),
            mask=mask,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    given = q_BxTxNxH, k_BxTxMxH, v_BxTxMxH, segments_BxT
    return causal_attention(*given, window=window, scale=scale)
