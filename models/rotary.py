"""Rotary positions: each pair of a head's numbers is turned by an angle that grows with position.

Shapes: B batch, T tokens of a row, N heads, H head dim, F = H / 2 frequencies.

Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2; the stretch of Llama 3.1 as its makers
published it with the model.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .decoder_config import Rope

# Cosines and sines, each (B, T, 1, F) in fp32.
Table = tuple[jax.Array, jax.Array]


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angles for one step of position, (F,), in fp32.

    >>> frequencies(Rope(100.0), 4).tolist()
    [1.0, 0.10000000149011612]
    """
    exponent_F = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    angle_F = (1.0 / np.float32(rope.theta) ** exponent_F).astype(np.float32)
    if rope.stretched is None:
        return (angle_F / np.float32(rope.factor)).astype(np.float32)
    length, least, most = rope.stretched
    turns_F = length * angle_F / (2 * math.pi)  # on the positions that it was trained on
    kept_F = np.clip((turns_F - least) / (most - least), 0.0, 1.0)
    return ((1 - kept_F) * angle_F / rope.factor + kept_F * angle_F).astype(np.float32)


def tables(rope: Rope, head_dim: int, positions_BxT: jax.Array) -> Table:
    """Cosines and sines of the angles of positions."""
    angle_BxTxF = positions_BxT[..., None].astype(jnp.float32) * frequencies(rope, head_dim)
    return jnp.cos(angle_BxTxF)[:, :, None], jnp.sin(angle_BxTxF)[:, :, None]


def rotate(x_BxTxNxH: jax.Array, table: Table) -> jax.Array:
    """Turns number f of a head's first half with number f of its second half."""
    cos, sin = (t.astype(x_BxTxNxH.dtype) for t in table)
    first, second = jnp.split(x_BxTxNxH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
