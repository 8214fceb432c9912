"""Attention by cuDNN's fused kernel, with the documents of a packed row as offsets.

The public `jax.nn.dot_product_attention` takes documents as a mask, which becomes a bias of 2·T²
bytes for a row. cuDNN also takes the start and the length of each document. JAX has these arguments
in a private module, and this is the only file that imports it; `RELEASES` were tested.

cuDNN's softmax statistics have T fp32 numbers for each head and each document that a row may have.
So one call takes `DOCUMENTS` documents of a row. A loop runs the kernel again for further ones, a
head of keys at a time. It needs no memory beyond the peak of the backward pass.

`compiling_for` makes all of this compile for a GPU that is absent.

Shapes: B batch, T tokens of a row, N heads of queries, M of keys and values, G = N / M, H head dim,
D documents of a call.
"""

import concurrent.futures
import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax._src.cudnn.fused_attention_stablehlo as fused
import jax.numpy as jnp

from zero_jax import releases
from zero_jax.names import FURTHER_DOCUMENTS

# Releases of JAX whose private module has the functions, arguments and results used here.
RELEASES = ("0.10.2", "0.12.0.1")
# Statistics of 64 documents are as large as queries of 128 numbers a head in bf16.
DOCUMENTS = 64
# cuDNN's kernel has a gradient for heads up to the first size on every GPU that JAX runs on, and up
# to the second one on Hopper.
LARGEST_HEAD, LARGEST_ON_HOPPER = 128, 256
# Largest relative error of the self-check, in the norm of an array. Rounding to bf16 gives less
# than 1 %; one wrong document of 5 tokens among 768 gives 8 %.
TOLERANCE = 0.03
_FUSED, _PACKED = (8, 0), (9, 0)  # compute capabilities
_PACKED_CUDNN = 90600  # the first version with offsets; it also has the largest heads
_Arrays: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True)
class KernelTarget:
    """Devices that a program is traced for.

    Attributes:
      platform: "gpu", "cpu" or "tpu".
      capability: CUDA's compute capability (major, minor); None for other devices.
      present: False if the devices are only compiled for.
    """

    platform: str
    capability: tuple[int, int] | None = None
    present: bool = True


# Part of JAX's trace cache key: a trace for an absent GPU is none for the CPU.
_TARGET = jax.make_user_context(None)


def kernel_target() -> KernelTarget:
    """Returns the target of `compiling_for`, otherwise that of JAX's default backend."""
    if _TARGET.value is not None:
        return _TARGET.value
    platform = jax.default_backend()
    version = getattr(jax.local_devices()[0], "compute_capability", "")
    found = re.fullmatch(r"(\d+)\.(\d+)", version) if platform == "gpu" else None
    return KernelTarget(platform, (int(found[1]), int(found[2])) if found else None)


@contextlib.contextmanager
def compiling_for(platform: str, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Traces programs for absent devices, whose cuDNN JAX cannot ask.

    The kernel runs where all mesh axes are manual, so JAX needs no devices to partition it over.

    Args:
      platform: "cuda", "cpu" or "tpu".
      capability: Compute capability (major, minor) of a GPU.
    """
    target = KernelTarget("gpu" if platform == "cuda" else platform, capability, present=False)

    def parsed(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    replaced: dict[str, object] = {
        "check_cudnn_version": lambda: _PACKED_CUDNN,
        "check_compute_capability": lambda least: (capability or ()) >= parsed(least),
        "is_cuda_compute_capability_equal": lambda other: capability == parsed(other),
    }
    before = {name: getattr(fused, name) for name in replaced}
    partitioned = fused.dispatch.prim_requires_devices_during_lowering
    own = {x for x in partitioned if x.name.startswith("dot_product_attention_")}
    if target.platform != "gpu":
        replaced, own = {}, set()
    try:
        for name, value in replaced.items():
            setattr(fused, name, value)
        partitioned -= own
        with _TARGET(target):
            yield
    finally:
        partitioned |= own
        for name, value in before.items():
            setattr(fused, name, value)


def reason_against(
    dtype: Any, head_dim: int, *, packed: bool = False, grouped: bool = False, elements: int = 0
) -> str:
    """Returns why `attention` cannot run on the `kernel_target`; "" if it can.

    The first call on a GPU for packed rows, or for heads above `LARGEST_HEAD`, compares the kernel
    with attention in fp32.

    Args:
      dtype: Dtype of queries, keys and values.
      head_dim: H.
      packed: True if rows hold several documents, separated by segments.
      grouped: True if keys have fewer heads than queries.
      elements: Elements of the queries on one device, B·T·N·H.

    >>> with compiling_for("cuda", (9, 0)):
    ...     print(reason_against("bfloat16", 128, packed=True) or "none")
    ...     print(reason_against("float32", 128))
    none
    cuDNN supports bfloat16 and float16, not float32
    """
    target, dtype = kernel_target(), jnp.dtype(dtype)
    needs, least = ("packed documents require", _PACKED) if packed else ("cuDNN requires", _FUSED)
    if target.platform != "gpu" or (target.capability or (0, 0)) < least:
        return f"{needs} an NVIDIA GPU of compute capability {least[0]}.{least[1]}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN supports bfloat16 and float16, not {dtype}"
    hopper = target.capability is not None and target.capability[0] == 9
    largest = LARGEST_ON_HOPPER if hopper else LARGEST_HEAD
    if head_dim % 8 or head_dim > largest:
        return f"head dim {head_dim} is not a multiple of 8 up to {largest}"
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    if automatic and (mesh.manual_axes or not target.present):
        where = "a step" if mesh.manual_axes else "a compile check"
        return f"{where} cannot partition cuDNN's kernel over {' and '.join(automatic)}"
    if packed and grouped and not releases.GROUPED_OFFSETS:
        return f"jax {jax.__version__} has wrong offsets for keys with fewer heads than queries"
    if packed and elements >= 2**31:
        return f"{elements:,} elements are too many for offsets of 32 bits"
    if not target.present or not (packed or head_dim > LARGEST_HEAD):
        return ""
    if (version := fused.check_cudnn_version()) < _PACKED_CUDNN:
        what = "packed documents require" if packed else f"head dim {head_dim} requires"
        return f"{what} cuDNN 9.6, and {version} is installed"
    return "" if _passes_check(-(-head_dim // 64) * 64) else "cuDNN failed its check on this GPU"


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns softmax(q kᵀ · scale) v for each head, (B, T, N, H), by cuDNN.

    `reason_against` says if the kernel takes the arguments.

    Args:
      query: (B, T, N, H), bf16 or fp16.
      key: (B, T, M, H); M divides N.
      value: (B, T, M, H).
      segment_ids: Integers (B, T). A document is a run of tokens with equal ids, and a token sees
        its own document alone; padding is a document too. Rows may have any number of documents.
      is_causal: If True, a token sees tokens up to itself.
      window: Number of tokens that one sees, itself included; requires `is_causal`.
      scale: Scale of the scores; the default is 1 / √H.
    """
    tokens, head_dim = query.shape[1], query.shape[-1]
    window = None if window is None or window >= tokens else window
    if segment_ids is None:
        return jax.nn.dot_product_attention(
            *(query, key, value),
            scale=scale,
            is_causal=is_causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    mask = fused.MaskType.PADDING_CAUSAL if is_causal else fused.MaskType.PADDING
    kernel = _Kernel(mask, window, head_dim**-0.5 if scale is None else scale)
    return _packed(kernel, query, key, value, segment_ids)


class _Offsets(NamedTuple):
    """Documents of one call.

    Attributes:
      starts: First token of each document in its row, (B, D + 1); -1 for none, and at the end.
      lengths: Tokens of each document, (B, D); -1 for none.
    """

    starts: jax.Array
    lengths: jax.Array


@dataclass(frozen=True)
class _Kernel:
    """cuDNN's kernel of packed attention; results of tokens outside its documents are undefined."""

    mask: fused.MaskType
    window: int | None
    scale: float

    def forward(self, qkv: _Arrays, at: _Offsets) -> _Arrays:
        """Returns the output (B, T, N, H) and the softmax statistics (B·D, N, T)."""
        query, key, value = qkv
        out, statistics = fused.dot_product_attention(
            query,
            key,
            value,
            q_seqlen=at.lengths,
            kv_seqlen=at.lengths,
            q_offsets=at.starts,
            kv_offsets=at.starts,
            scale=self.scale,
            mask_type=self.mask,
            sliding_window_length=self.window,
            return_residual=True,
        )
        return out, statistics

    def backward(
        self, qkv: _Arrays, at: _Offsets, results: _Arrays, cotangent: jax.Array
    ) -> _Arrays:
        """Returns the gradients of queries, keys and values, given the results of `forward`."""
        rule: Any = fused._dot_product_attention_bwd_rule
        # Since jax 0.12 a function may change the scores; None does not.
        changes = "score_mod" in inspect.signature(rule).parameters
        function, arguments = ([None], [()]) if changes else ([], [])
        no_dropout = 42, 0.0  # seed, rate
        bias, pages = (False, False), [jnp.zeros(0, cotangent.dtype)] * 2
        settings = self.scale, *no_dropout, bias, self.mask, fused.AttentionLayout.BTNH.value
        out, statistics = results
        lengths, starts = [at.lengths] * 2, [at.starts] * 2
        saved = *qkv, pages[0], *lengths, *starts, *pages, *arguments, statistics, out
        version, residual = fused.check_cudnn_version(), False
        grads = rule(*settings, self.window, *function, version, residual, saved, cotangent)
        return tuple(grads[:3])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed(
    kernel: _Kernel, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array
) -> jax.Array:
    return _packed_fwd(kernel, q, k, v, segments)[0]


def _packed_fwd(
    kernel: _Kernel, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array
) -> tuple[jax.Array, Any]:
    documents = _numbered(segments)
    out, statistics = kernel.forward((q, k, v), _offsets(documents, 0))

    def further(group: jax.Array, head: jax.Array) -> _Arrays:
        qkv = _of_head((q, k, v), head, k.shape[2])
        return kernel.forward(qkv, _offsets(documents, group))[:1]

    (out,) = _over_further_documents(further, (out,), documents, k.shape[2])
    return out, (q, k, v, segments, out, statistics)


def _packed_bwd(kernel: _Kernel, kept: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, out, statistics = kept
    documents = _numbered(segments)
    grads = kernel.backward((q, k, v), _offsets(documents, 0), (out, statistics), cotangent)

    def further(group: jax.Array, head: jax.Array) -> _Arrays:
        *qkv, part = _of_head((q, k, v, cotangent), head, k.shape[2])
        at = _offsets(documents, group)
        return kernel.backward(tuple(qkv), at, kernel.forward(tuple(qkv), at), part)

    return *_over_further_documents(further, grads, documents, k.shape[2]), None


_packed.defvjp(_packed_fwd, _packed_bwd)


def _numbered(segments: jax.Array) -> jax.Array:
    """Returns the number of each token's document in its row, (B, T), from 0."""
    differs = segments[:, 1:] != segments[:, :-1]
    return jnp.pad(jnp.cumsum(differs, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _offsets(documents: jax.Array, group: jax.Array | int) -> _Offsets:
    """Returns the documents g·D to g·D + D - 1 of each row, for group g.

    >>> starts, lengths = _offsets(jnp.array([[0, 0, 0, 1, 1]]), 0)
    >>> starts[0, :4].tolist(), lengths[0, :3].tolist()
    ([0, 3, -1, -1], [3, 2, -1])
    """
    numbers = group * DOCUMENTS + jnp.arange(DOCUMENTS + 1)
    starts = jnp.sum(documents[:, :, None] < numbers, axis=1, dtype=jnp.int32)
    lengths = starts[:, 1:] - starts[:, :-1]
    exists = lengths > 0
    starts = jnp.pad(jnp.where(exists, starts[:, :-1], -1), ((0, 0), (0, 1)), constant_values=-1)
    return _Offsets(starts, jnp.where(exists, lengths, -1))


def _over_further_documents(
    run: Callable[[jax.Array, jax.Array], _Arrays],
    results: _Arrays,
    documents: jax.Array,
    key_heads: int,
) -> _Arrays:
    """Returns results with those of all documents after the first D of a row.

    Args:
      run: Returns the results of a group of D documents for one head of keys.
      results: Results of the first D documents, for all heads.
      documents: Number of each token's document.
      key_heads: M.
    """

    def body(i: jax.Array, results: _Arrays) -> _Arrays:
        group, head = 1 + i // key_heads, i % key_heads
        in_group = (documents // DOCUMENTS == group)[:, :, None, None]
        before, after = _of_head(results, head, key_heads), run(group, head)
        merged = [jnp.where(in_group, *pair) for pair in zip(after, before, strict=True)]
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(x, part, head * part.shape[2], axis=2)
            for x, part in zip(results, merged, strict=True)
        )

    with jax.named_scope(FURTHER_DOCUMENTS):
        groups = jnp.max(documents) // DOCUMENTS
        return jax.lax.fori_loop(0, groups * key_heads, body, results)


def _of_head(arrays: _Arrays, head: jax.Array, key_heads: int) -> _Arrays:
    """Returns the part of each array (B, T, heads, H) that belongs to one head of keys."""
    widths = [x.shape[2] // key_heads for x in arrays]
    pairs = zip(arrays, widths, strict=True)
    return tuple(jax.lax.dynamic_slice_in_dim(x, head * n, n, axis=2) for x, n in pairs)


# The self-check.


@functools.cache
def _passes_check(head_dim: int) -> bool:
    """Returns whether attention equals that in fp32 on this GPU; else warns."""
    # A thread of its own: this one may be tracing a program.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        error = pool.submit(_check_error, head_dim).result()
    if error <= TOLERANCE:
        return True
    warnings.warn(
        f"cuDNN's attention with heads of {head_dim} differs from fp32 by {error:.2g} on this GPU "
        f"(at most {TOLERANCE} is expected): attention in blocks of queries is used instead",
        stacklevel=2,
    )
    return False


def _check_error(head_dim: int) -> float:
    """Returns the largest relative error of packed attention and its gradients.

    Windows are checked too. Row 0 has more than D documents, row 1 has three. The error is infinite
    if the kernel does not run.
    """
    tokens, heads = 6 * DOCUMENTS, 4
    key_heads = 2 if releases.GROUPED_OFFSETS else heads
    many = jnp.arange(tokens) // 5
    few = jnp.searchsorted(jnp.array([100, 300]), jnp.arange(tokens), side="right")
    segments = jnp.stack([many, few])
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, cotangent = (
        jax.random.normal(key, (2, tokens, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys, (heads, key_heads, key_heads, heads), strict=True)
    )

    def errors(window: int | None) -> list[jax.Array]:
        def run(fn: Callable[..., jax.Array], *arrays: jax.Array) -> _Arrays:
            out, pull = jax.vjp(functools.partial(fn, segment_ids=segments, window=window), *arrays)
            return out, *pull(cotangent.astype(out.dtype))

        exact = jax.jit(functools.partial(run, _reference))(
            *(x.astype(jnp.float32) for x in (q, k, v))
        )
        found = jax.jit(functools.partial(run, attention))(q, k, v)
        pairs = zip(found, exact, strict=True)
        norm = jnp.linalg.norm
        return [norm((a.astype(b.dtype) - b).ravel()) / norm(b.ravel()) for a, b in pairs]

    try:
        with jax.default_matmul_precision("highest"):
            found = jnp.stack([*errors(None), *errors(48)])
        return float(jnp.where(jnp.isfinite(found), found, jnp.inf).max())
    except (ValueError, NotImplementedError, RuntimeError):
        return float("inf")


def _reference(
    q: jax.Array, k: jax.Array, v: jax.Array, *, segment_ids: jax.Array, window: int | None
) -> jax.Array:
    """Returns attention with all scores at once, in the inputs' dtype."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    t, s = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = (s <= t) & (s > t - (q.shape[1] if window is None else window))
    seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    shares = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v)
