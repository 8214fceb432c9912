"""Cross entropy of a tied head whose logits never exist for the whole batch at once.

Shapes: D width, V vocab, M tokens of a batch, C chunks of K tokens (C * K >= M), P columns of
the embedding.
Costs (V, D) in fp32 and (M, D) in fp32, or bf16 if x is, for the gradients, and `chunk` x V in fp32
for the logits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .token_chunks import split, vary_alike

# Of the embedding's gradient that a chunk of tokens makes at once.
COLUMNS = 1024


def chunked_cross_entropy(
    x_MxD: jax.Array, embed_VxD: jax.Array, labels_M: jax.Array, weights_M: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted cross entropy of `x @ embed.T` as (sum, weight), chunk by chunk.

    The gradient of a cross entropy needs nothing that comes after it but one scalar. So when it
    is differentiated the forward scan, which has the logits at hand, also makes dx (M, D) and
    dE (V, D); the backward pass scales them and casts. Logits are computed once, exist
    `chunk` tokens at a time, and the embedding is not kept for the backward pass.

    Args:
      x_MxD: hidden states.
      embed_VxD: the embedding.
      labels_M: the right rows of the embedding, each in [0, V) even where its weight is 0.
      weights_M: weights of the tokens, numbers or booleans; differentiable too.
      chunk: tokens in a chunk at most; it need not divide M.

    Returns:
      The weighted sum of the tokens' losses and the sum of the weights, both fp32.
    """
    weights_M = weights_M.astype(jnp.float32)
    weight = jnp.sum(weights_M)
    x_CxKxD, labels_CxK, weights_CxK = (split(x, chunk) for x in (x_MxD, labels_M, weights_M))
    return _cross_entropy(*vary_alike(x_CxKxD, embed_VxD, labels_CxK, weights_CxK)), weight


def _token_losses(
    x_KxD: jax.Array, embed_VxD: jax.Array, labels_K: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns one chunk's losses (K,), log-probabilities (K, V) in fp32, and where labels hit."""
    logits_KxV = jnp.einsum("kd,vd->kv", x_KxD, embed_VxD, preferred_element_type=jnp.float32)
    logits_KxV = nn.with_logical_constraint(logits_KxV, (None, "vocab"))
    logsum_K = _logsumexp(logits_KxV)
    # A label that is none would cost nothing, and train on nothing. NaN here, in one number a
    # token, it is in all that is made of it.
    known_K = (labels_K >= 0) & (labels_K < embed_VxD.shape[0])
    logsum_K = jnp.where(known_K, logsum_K, jnp.nan)
    # A sum, not a lookup: where the vocabulary is split, each part knows its own labels.
    hit_KxV = labels_K[:, None] == jnp.arange(embed_VxD.shape[0])
    losses_K = logsum_K - jnp.sum(jnp.where(hit_KxV, logits_KxV, 0.0), axis=1)
    return losses_K, logits_KxV - logsum_K[:, None], hit_KxV


@jax.custom_jvp
def _logsumexp(x_KxV: jax.Array) -> jax.Array:
    """Returns log(sum(exp(x))) of each row, (K,), in one pass over x.

    Each part of a row has a maximum and the sum of exp(x - maximum). Parts are joined as in Milakov
    and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    Part = tuple[jax.Array, jax.Array]

    def joined(a: Part, b: Part) -> Part:
        (max_a, sum_a), (max_b, sum_b) = a, b
        smaller = jnp.exp(-jnp.abs(max_a - max_b))
        total = jnp.where(max_a > max_b, sum_a + smaller * sum_b, sum_b + smaller * sum_a)
        return jnp.maximum(max_a, max_b), total

    # Finite, since the difference of two infinities is NaN.
    least = jnp.asarray(jnp.finfo(x_KxV.dtype).min, x_KxV.dtype)
    start = least, jnp.zeros_like(least)
    max_K, sum_K = jax.lax.reduce((x_KxV, jnp.ones_like(x_KxV)), start, joined, (1,))
    return max_K + jnp.log(sum_K)


# For second derivatives: JAX has no derivative of this `reduce`.
@_logsumexp.defjvp
def _logsumexp_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x_KxV,), (dx_KxV,) = primals, tangents
    out_K = _logsumexp(x_KxV)
    return out_K, jnp.sum(jnp.exp(x_KxV - out_K[:, None]) * dx_KxV, axis=1)


@jax.custom_vjp
def _cross_entropy(
    x_CxKxD: jax.Array, embed_VxD: jax.Array, labels_CxK: jax.Array, weights_CxK: jax.Array
) -> jax.Array:
    losses_CxK = jax.lax.map(
        lambda chunk: _token_losses(chunk[0], embed_VxD, chunk[1])[0], (x_CxKxD, labels_CxK)
    )
    return jnp.sum(losses_CxK * weights_CxK)


def _cross_entropy_fwd(
    x_CxKxD: jax.Array, embed_VxD: jax.Array, labels_CxK: jax.Array, weights_CxK: jax.Array
) -> tuple[jax.Array, Any]:
    dtype = jnp.promote_types(x_CxKxD.dtype, embed_VxD.dtype)
    # softmax - onehot is as small as 1 / V, too small for fp16, so it is cast times a power of
    # two that puts the largest weight near 2**14; the backward pass takes the power out again.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(weights_CxK)))
    scale = jnp.ldexp(jnp.float32(1), 14 - exponent)
    # bf16 has the range of fp32, so dx is rounded before it is scaled. That changes nothing if the
    # cotangent is a power of two, and adds at most half an ulp if not.
    kept = x_CxKxD.dtype if x_CxKxD.dtype == jnp.bfloat16 else jnp.float32

    D = x_CxKxD.shape[-1]
    columns = [slice(start, min(start + COLUMNS, D)) for start in range(0, D, COLUMNS)]

    def body(dembed: list[jax.Array], chunk: Any) -> tuple[list[jax.Array], Any]:
        x_KxD, labels_K, weights_K = chunk
        losses_K, logp_KxV, hit_KxV = _token_losses(x_KxD, embed_VxD, labels_K)
        dlogits_KxV = (jnp.exp(logp_KxV) - hit_KxV.astype(logp_KxV.dtype)) * (weights_K * scale)[
            :, None
        ]
        dlogits_KxV = dlogits_KxV.astype(dtype)
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        dx_KxD = dot("kv,vd->kd", dlogits_KxV, embed_VxD)
        if len(x_CxKxD) == 1:
            # First, so that the embedding is no longer there when its gradient is.
            dx_KxD, dlogits_KxV = jax.lax.optimization_barrier((dx_KxD, dlogits_KxV))
        sums = []
        # What is added exists beside the sum: a part at a time, one after the other.
        for sum_VxP, at in zip(dembed, columns, strict=True):
            sum_VxP += dot("kv,kp->vp", dlogits_KxV, x_KxD[:, at])
            sum_VxP = nn.with_logical_constraint(sum_VxP, ("vocab", None))
            sum_VxP, dlogits_KxV = jax.lax.optimization_barrier((sum_VxP, dlogits_KxV))
            sums.append(sum_VxP)
        return sums, (losses_K, dx_KxD.astype(kept))

    # To add to -0.0 changes no number, which XLA knows: one chunk adds nothing.
    zeros = jnp.full_like(embed_VxD, -0.0, dtype=jnp.float32)
    if len(x_CxKxD) > 1:
        # Made of x (NaN where x is, as the sums are): else they may be there, and be held, while
        # the last layer computes. jaxlib 0.10 does so.
        zeros *= jnp.abs(x_CxKxD[0, 0, 0]).astype(jnp.float32)
    dembed, (losses_CxK, dx_CxKxD) = jax.lax.scan(
        body, [zeros[:, at] for at in columns], (x_CxKxD, labels_CxK, weights_CxK)
    )
    # Empty arrays carry the dtypes of x and embed, which the backward pass must return.
    dtypes = jnp.zeros((0,), x_CxKxD.dtype), jnp.zeros((0,), embed_VxD.dtype)
    residuals = dx_CxKxD, dembed, losses_CxK, scale, dtypes
    return jnp.sum(losses_CxK * weights_CxK), residuals


def _cross_entropy_bwd(residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    dx_CxKxD, dembed, losses_CxK, scale, (x_like, embed_like) = residuals
    factor = cotangent / scale
    # Together: else the embedding's gradient is cast when the layers have run backward, and waits
    # in fp32 until then.
    dx_CxKxD, dembed_VxD = jax.lax.optimization_barrier(
        (
            (dx_CxKxD.astype(jnp.float32) * factor).astype(x_like.dtype),
            jnp.concatenate([(x * factor).astype(embed_like.dtype) for x in dembed], axis=1),
        )
    )
    return dx_CxKxD, dembed_VxD, None, losses_CxK * cotangent


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)
