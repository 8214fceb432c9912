"""Differences between releases of JAX and XLA; a new release is supported here."""

import math

import jax

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
