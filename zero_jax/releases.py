"""Differences between releases of JAX and XLA; a new release is supported here."""

import math
from collections.abc import Mapping

import jax

# XLA for GPUs runs one collective at a time by default: those of a layer wait, exposed, for those
# of another layer. Modelled steps of 7.5b on 64 H100 (jax 0.12.0.1) with 3 at a time, and with 1:
# 0.3590 and 0.3601 s scanned, 0.3570 and 0.3666 s unrolled.
AT_ONCE, COLLECTIVES_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit", 3


def at_once(options: Mapping[str, str | float]) -> int:
    """Returns the number of collectives that XLA for GPUs runs at a time with these options."""
    return int(options.get(AT_ONCE, 1))


# The option for a file of instruction latencies, which XLA for GPUs reads: see hlo/latencies.py.
LATENCIES = "xla_gpu_pgle_profile_file_or_directory_path"
# XLA before jaxlib 0.12 keeps the gradients of a layer until one reduction combines them. The
# reductions of a large layer are limited to this many bytes.
SUMMED_AT_ONCE = 2**28 if jax.__version_info__ < (0, 12) else math.inf
# The jaxlib whose compiler crashes on empty arrays inside `shard_map` over several devices: the
# only one from 0.10.2 to 0.12.0.1.
CRASHES_ON_EMPTY = "0.11.2"
# The error of jaxlib 0.12 if it can't time its own kernels for a matmul, as in a compilation
# without a GPU, and the flag that makes it use library kernels, which need no timing.
NO_KERNEL = "No supported config found for HLO"
BY_LIBRARY = "--xla_gpu_enable_triton_gemm=false"
# True if JAX's coordination service can use mutual TLS: from jax 0.12 on.
MUTUAL_TLS = "jax_mtls_ca_file" in jax.config.values
# True if JAX multiplies cuDNN's offsets of keys by the keys' own number of heads. Before, attention
# over packed rows is wrong if keys have fewer heads: https://github.com/jax-ml/jax/pull/39521.
GROUPED_OFFSETS = jax.__version_info__ >= (0, 12)
