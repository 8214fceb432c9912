"""Attention over rows whose tokens are split over the mesh axis `context`.

The one operation of a model that exchanges tokens. A device has T / C tokens of a row, two chunks
of 2·C (`chunks.py`: as in Llama 3, arXiv:2407.21783, section 3.3.2). Its queries attend to all keys
of the row in one of two ways:

- `all_gather`: keys and values are gathered over `context`, and their gradients reduce-scattered in
  fp32 (Llama 3, the same section). A forward pass, its recomputation and a backward pass send
  3 · 2·M·H·T elements per row.
- `all_to_all`: heads are exchanged for tokens, so that a device has full rows of N / C heads
  (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509, section 3.2). The three passes send
  3 · (2·N + 2·M)·H·T / C elements: queries, keys, values and the output, or their gradients. Heads
  are repeated or added until C divides their number (`sent_heads`).

With a `model` axis (tensor parallelism) each of its devices computes its part of the heads.

Shapes: B batch, T tokens of a row, C devices of `context`, N heads of queries, M of keys and
values, H head dim. Outside `shard_map`, and without a `context` axis, C = 1 and nothing is sent.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from zero_jax.collectives.gather_scatter import all_gather, psum_scatter
from zero_jax.context_parallel import blocks, chunks, cudnn
from zero_jax.sharding.mesh import CONTEXT, MODEL
from zero_jax.sharding.model_axis import over_model

Exchange: TypeAlias = Literal["all_gather", "all_to_all"]
Implementation: TypeAlias = Literal["cudnn", "xla"]
_Segments: TypeAlias = jax.Array | None
_Gradients: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
# The exchange of a step's settings, while its loss is traced.
_EXCHANGE = jax.make_user_context(None)


def exchanged_by(exchange: Exchange | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which attention exchanges tokens in this way, unless it is given one."""
    return _EXCHANGE(exchange)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    exchange: Exchange | None = None,
) -> jax.Array:
    """Returns softmax(query keyᵀ · scale) value per head, over all tokens of a row.

    Works in a step of `Zero` whose mesh has a `context` axis, where each device has a part of the
    tokens, and anywhere else. Scores and softmax are fp32, products have the inputs' dtype. Memory
    is linear in T. Differentiable once, in reverse mode.

    Args:
      query: (B, T, N, H). Inside `shard_map` with a `context` axis, T is the number of this
        device's tokens.
      key: (B, T, M, H). M divides N; each head of keys is for N / M consecutive heads of queries.
      value: (B, T, M, H).
      segment_ids: (B, T), the document of each token in a packed row. A token attends to its own
        document only.
      is_causal: True for a causal mask, False if each token attends to all.
      window: Size of a sliding window: tokens that a token attends to, itself included. None for no
        limit.
      scale: Factor of the scores; 1 / √H by default.
      implementation: "cudnn", on full rows alone, or "xla", in blocks of queries and keys. By
        default cuDNN's kernel where it takes the arguments.
      exchange: "all_gather" of keys and values, or "all_to_all" of heads. By default that of the
        settings of `Zero`; without one "all_to_all" if a cuDNN kernel takes its full rows, else the
        one that sends fewer elements.

    Returns:
      (B, T, N, H), in the dtype of the inputs.

    Raises:
      ValueError: Shapes or dtypes do not match, or an option has another value.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> bool(jnp.allclose(attention(x, x, x, window=2), x))
        True
    """
    _check(query, key, value, segment_ids, is_causal, window)
    _check_choice("implementation", implementation, get_args(Implementation))
    _check_choice("exchange", exchange, get_args(Exchange))
    if query.size == 0:
        return query
    run = functools.partial(
        _of_heads,
        is_causal=is_causal,
        window=window,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        implementation=implementation,
        exchange=exchange or _EXCHANGE.value,
    )
    arrays = query, key, value, segment_ids
    mesh = jax.sharding.get_abstract_mesh()
    parts = mesh.shape.get(MODEL, 1)
    if parts == 1 or not mesh.manual_axes or key.shape[2] % parts:
        return run(*arrays)  # XLA partitions it, if there is a `model` axis
    heads = PartitionSpec(None, None, MODEL)
    return over_model(run, arrays, [heads, heads, heads, PartitionSpec()], heads)


def _of_heads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: _Segments,
    *,
    implementation: Implementation | None,
    exchange: Exchange | None,
    **options: Any,
) -> jax.Array:
    """Returns `attention` of this device's part of the heads."""
    N, M = q.shape[2], k.shape[2]
    exchange, implementation = _chosen(q, k, segments is not None, exchange, implementation)
    if exchange == "all_to_all":
        queries, keys = sent_heads(N, M, chunks.size())
        q = _with_heads(q, 1, queries)
        k, v = (_with_heads(x, min(N, keys) // M, keys) for x in (k, v))
    how = _Options(implementation=implementation, exchange=exchange, **options)
    out = _attention(how, q, k, v, segments)
    return out if out.shape[2] == N else out[:, :, :N]


@dataclasses.dataclass(frozen=True)
class _Options:
    """The static arguments."""

    is_causal: bool
    window: int | None
    scale: float
    implementation: Implementation
    exchange: Exchange


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: _Segments,
    is_causal: bool,
    window: int | None,
) -> None:
    arrays = ", ".join(
        f"`{name}` {x.dtype}{list(x.shape)}" for name, x in (("query", q), ("key", k), ("value", v))
    )
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"{arrays}: shapes (batch, tokens, heads, head dim) are required")
    B, T, N, H = q.shape
    M = k.shape[2]
    if k.shape != (B, T, M, H) or v.shape != k.shape or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"{arrays}: equal shapes and dtypes are required (keys and values may have fewer "
            "heads). For others use jax.nn.dot_product_attention"
        )
    if not M or N % M:
        raise ValueError(
            f"`key` has {M} heads and `query` {N}: heads of keys must divide those of queries"
        )
    if segments is not None and segments.shape != (B, T):
        raise ValueError(
            f"`segment_ids` has shape {list(segments.shape)}, but rows have shape {[B, T]}: give "
            "one number for each token"
        )
    if window is not None and (window < 1 or not is_causal):
        raise ValueError(
            f"`window`={window} with `is_causal`={is_causal}: at least 1 token, the token "
            "itself, and causal attention are required. Leave `window` out for no limit"
        )
    if chunks.size() > 1 and T % 2:
        raise ValueError(
            f"`query` has {T} tokens on each of {chunks.size()} devices of the context axis: two "
            f"chunks of equal length are required. Pad rows to a multiple of {2 * chunks.size()}"
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ValueError(f"`{name}`={value!r}: use {' or '.join(map(repr, choices))}, or None")


def sent_heads(N: int, M: int, C: int) -> tuple[int, int]:
    """Returns the heads of queries and of keys that `all_to_all` sends: C divides both.

    Heads of keys are repeated, so that each device has those that its heads of queries attend to.
    If C does not divide N, each head of queries has its own head of keys, and heads of zeros are
    added to both.

    >>> sent_heads(32, 8, 4), sent_heads(32, 8, 16), sent_heads(28, 4, 8)
    ((32, 8), (32, 16), (32, 32))
    """
    if N % C == 0:
        return N, math.lcm(M, C)
    added = -(-N // C) * C
    return added, added


def _with_heads(x: jax.Array, repeats: int, heads: int) -> jax.Array:
    """Repeats each head of (B, T, heads, H), and adds heads of zeros."""
    x = x if repeats == 1 else jnp.repeat(x, repeats, axis=2)
    added = heads - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, added), (0, 0))) if added else x


def _chosen(
    q: jax.Array,
    k: jax.Array,
    packed: bool,
    exchange: Exchange | None,
    implementation: Implementation | None,
) -> tuple[Exchange, Implementation]:
    """Returns the exchange and the kernel: the given ones, else the best possible."""
    C, (B, T, N, H), M = chunks.size(), q.shape, k.shape[2]
    queries, keys = sent_heads(N, M, C)
    # With all-to-all, and where nothing is sent, a device has full rows of some heads. Many heads
    # of zeros are no choice of this function.
    wanted = implementation == "cudnn" or queries < 2 * N
    is_full = exchange == "all_to_all" or C == 1 or (exchange is None and wanted)
    against = "it needs full rows, which `exchange`='all_gather' does not give"
    if is_full:
        against = cudnn.reason_against(
            q.dtype, H, packed=packed, grouped=queries != keys, elements=B * T * queries * H
        )
    if implementation == "cudnn" and against:
        raise ValueError(f"`implementation`='cudnn': {against}. Leave it out, or use \"xla\"")
    if is_full and implementation != "xla" and not against:
        return "all_to_all", "cudnn"
    if C == 1:
        return "all_to_all", "xla"
    fewer = queries + keys < M * C
    return exchange or ("all_to_all" if fewer else "all_gather"), "xla"


# All collectives are inside, so that the trace of a model has one equation that exchanges tokens.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments
) -> jax.Array:
    return _attention_fwd(options, q, k, v, segments)[0]


def _attention_fwd(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments
) -> tuple[jax.Array, Any]:
    if segments is not None:
        segments = _gathered(segments)
    if options.exchange == "all_gather":
        return _forward_in_blocks(options, q, _gathered(k), _gathered(v), segments)
    q, k, v = (_rows_of_heads(x) for x in (q, k, v))
    # The residuals are of full rows, so that the backward pass sends only gradients.
    out, residuals = _KERNELS[options.implementation].forward(options, q, k, v, segments)
    return _tokens_of_heads(out), residuals


def _attention_bwd(
    options: _Options, residuals: Any, dout: jax.Array
) -> tuple[jax.Array | None, ...]:
    dtype = dout.dtype
    if options.exchange == "all_gather":
        dq, dk, dv = _backward_in_blocks(options, residuals, dout)
        # In fp32, and rounded after the sum over devices.
        dk, dv = (psum_scatter(chunks.dealt(x, 1), CONTEXT, 1, None) for x in (dk, dv))
        return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype), None
    kernel = _KERNELS[options.implementation]
    grads = kernel.backward(options, residuals, _rows_of_heads(dout))
    return *(_tokens_of_heads(x.astype(dtype)) for x in grads), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _gathered(x: jax.Array) -> jax.Array:
    """Returns full rows, given this device's tokens in dim 1."""
    return x if chunks.size() == 1 else chunks.ordered(all_gather(x, CONTEXT, 1, None), 1)


def _rows_of_heads(x: jax.Array) -> jax.Array:
    """Returns full rows of this device's heads, (B, T, N / C, H), given its tokens of all heads."""
    if chunks.size() == 1:
        return x
    x = jax.lax.all_to_all(x, CONTEXT, split_axis=2, concat_axis=1, tiled=True)
    return chunks.ordered(x, 1)


def _tokens_of_heads(x: jax.Array) -> jax.Array:
    """Inverts `_rows_of_heads`: (B, T / C, N, H)."""
    if chunks.size() == 1:
        return x
    x = chunks.dealt(x, 1)
    return jax.lax.all_to_all(x, CONTEXT, split_axis=1, concat_axis=2, tiled=True)


class _Kernel(NamedTuple):
    """Attention over full rows, (B, T, heads, H), in the order of their tokens.

    `forward` takes queries, keys, values and segment ids (B, T) or None, and returns the output and
    any residuals. `backward` takes the residuals and the gradient of the output, and returns those
    of queries, keys and values. A differentiable function has both: `jax.vjp`, and its result.
    """

    forward: Callable[[_Options, jax.Array, jax.Array, jax.Array, _Segments], tuple[jax.Array, Any]]
    backward: Callable[[_Options, Any, jax.Array], _Gradients]


def _forward_in_blocks(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments
) -> tuple[jax.Array, Any]:
    """Attends to full rows, from full rows of queries, or with `all_gather` from this device's."""
    out, lse = blocks.forward(q, k, v, _mask(options, q.shape[1], segments), options.scale)
    return out, (q, k, v, segments, out, lse)


def _backward_in_blocks(options: _Options, residuals: Any, dout: jax.Array) -> _Gradients:
    q, k, v, segments, out, lse = residuals
    mask = _mask(options, q.shape[1], segments)
    return blocks.backward(q, k, v, out, lse, dout, mask, options.scale)


def _forward_by_cudnn(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments
) -> tuple[jax.Array, Any]:
    run = functools.partial(
        cudnn.attention,
        segment_ids=segments,
        is_causal=options.is_causal,
        window=options.window,
        scale=options.scale,
    )
    return jax.vjp(run, q, k, v)


def _backward_by_cudnn(options: _Options, residuals: Any, dout: jax.Array) -> _Gradients:
    grads: _Gradients = residuals(dout)
    return grads


_KERNELS = {
    "xla": _Kernel(_forward_in_blocks, _backward_in_blocks),
    "cudnn": _Kernel(_forward_by_cudnn, _backward_by_cudnn),
}


def _mask(options: _Options, tokens: int, segments: _Segments) -> blocks.Mask:
    """Returns which keys of the full rows are seen by so many queries of this device."""
    C = chunks.size() if options.exchange == "all_gather" else 1
    row = C * tokens
    if C == 1:
        positions, of_devices, of_queries = jnp.arange(row), np.arange(row)[None], segments
    else:
        positions = chunks.positions(tokens)
        # The loop over pairs of blocks is as long on each device as on that with most.
        chunk = np.arange(row).reshape(2 * C, -1)
        of_devices = np.concatenate([chunk[:C], chunk[::-1][:C]], axis=1)
        of_queries = None if segments is None else chunks.take(segments, 1)
    if not options.is_causal:  # each query sees what the last one sees
        positions, of_devices = jnp.full_like(positions, row - 1), np.full_like(of_devices, row - 1)
    window = None if options.window is None else min(options.window, row)
    both = None if segments is None or of_queries is None else (of_queries, segments)
    return blocks.Mask(positions, both, window, blocks.count_pairs(of_devices, row, window))
