"""Parts of a model that compute each token by itself, on a chunk of tokens at a time.

Their wide activations exist for one chunk, forward and backward: the forward pass saves the input
alone, and the backward pass computes each chunk again. So an MLP costs K·F activations, not B·T·F.

Shapes: B rows, T tokens of a row, D width, M = B·T tokens, C chunks of K tokens (C * K >= M).

Source: Bekman et al., Arctic Long Sequence Training, arXiv:2506.13996 (TiledMLP).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .dims import whole

Module = Callable[[jax.Array], jax.Array]


def in_chunks(modules: Sequence[Module], x_BxTxD: jax.Array, chunk: int | None) -> jax.Array:
    """Returns the result of modules that follow on each other, chunk by chunk.

    Args:
      modules: NNX modules without state, such as a norm and an MLP. They keep the width and compute
        each token by itself.
      x_BxTxD: Their input.
      chunk: Maximum tokens of a chunk; it need not divide M. None for all tokens at once.

    Differentiable once backward, not forward. Gradients of weights are summed over chunks in fp32,
    and rounded once.
    """
    D = x_BxTxD.shape[-1]
    tokens = x_BxTxD.size // D
    if chunk is None or tokens <= chunk:
        return _run(modules, x_BxTxD)
    graphs, weights = zip(*map(nnx.split, modules), strict=True)

    def apply(x_1xKxD: jax.Array, weights: Any) -> jax.Array:
        return _run([*map(nnx.merge, graphs, weights)], x_1xKxD)

    leaves, tree = jax.tree.flatten(weights)
    x_CxKxD = split(whole(x_BxTxD).reshape(tokens, D), chunk)
    x_Cx1xKxD, *leaves = vary_alike(jnp.expand_dims(x_CxKxD, 1), *leaves)
    out_Cx1xKxD = _map(apply, x_Cx1xKxD, jax.tree.unflatten(tree, leaves))
    return out_Cx1xKxD.reshape(-1, D)[:tokens].reshape(x_BxTxD.shape)


def _run(modules: Sequence[Module], x_BxTxD: jax.Array) -> jax.Array:
    first, *others = modules
    x_BxTxD = first(x_BxTxD)
    for module in others:
        x_BxTxD = module(whole(x_BxTxD))
    return x_BxTxD


def split(x_M: jax.Array, chunk: int) -> jax.Array:
    """Returns tokens as (C, K, ...) with K at most `chunk`, and zeros after the last of them.

    >>> split(jnp.arange(1, 6), 3).tolist()
    [[1, 2, 3], [4, 5, 0]]
    """
    tokens = len(x_M)
    count = max(1, -(-tokens // chunk))
    size = -(-tokens // count)  # equal chunks: M just over a multiple of `chunk` pads only a little
    pad = (0, count * size - tokens), *[(0, 0)] * (x_M.ndim - 1)
    return jnp.pad(x_M, pad).reshape(count, size, *x_M.shape[1:])


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Makes arrays vary over the same mesh axes, inside `jax.shard_map`.

    Tokens differ from device to device there, and parameters may not. A custom gradient must vary
    as its argument does, so the difference is settled outside, where jax knows that it transposes
    to a sum. Anywhere else this does nothing.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]  # jax >= 0.10
    missing = [tuple(frozenset().union(*varying) - axes) for axes in varying]
    return [
        jax.lax.pcast(array, axes, to="varying") if axes else array
        for array, axes in zip(arrays, missing, strict=True)
    ]


Apply = Callable[[jax.Array, Any], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map(apply: Apply, x_Cx1xKxD: jax.Array, weights: Any) -> jax.Array:
    return jax.lax.map(lambda x_1xKxD: apply(x_1xKxD, weights), x_Cx1xKxD)


def _map_fwd(apply: Apply, x_Cx1xKxD: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
    return _map(apply, x_Cx1xKxD, weights), (x_Cx1xKxD, weights)


def _map_bwd(apply: Apply, kept: Any, dout_Cx1xKxD: jax.Array) -> tuple[jax.Array, Any]:
    x_Cx1xKxD, weights = kept

    def body(sums: Any, chunk: Any) -> tuple[Any, jax.Array]:
        x_1xKxD, dout_1xKxD = chunk
        dx_1xKxD, own = jax.vjp(apply, x_1xKxD, weights)[1](dout_1xKxD)
        return jax.tree.map(lambda total, dw: total + dw.astype(total.dtype), sums, own), dx_1xKxD

    def zeros(weight: jax.Array) -> jax.Array:
        return jnp.full_like(weight, 0, dtype=jnp.promote_types(weight.dtype, jnp.float32))

    # JAX sums the gradients of a loop's constants in their own dtype. In bf16 such a sum stops
    # growing: 512 chunks of coherent gradients were 25 % off, in fp32 0.2 % like all at once.
    scanned = x_Cx1xKxD, dout_Cx1xKxD
    sums, dx_Cx1xKxD = jax.lax.scan(body, jax.tree.map(zeros, weights), scanned)
    return dx_Cx1xKxD, jax.tree.map(lambda total, w: total.astype(w.dtype), sums, weights)


_map.defvjp(_map_fwd, _map_bwd)
