"""What differs between releases of JAX and XLA: all of it, so that a new one is taken in here."""

import math
from collections.abc import Mapping
from typing import Any

import jax

# By default XLA for GPUs runs one collective at a time, and those of a layer wait, exposed, for
# those of another. docs/performance-tables.md explains each option.
COLLECTIVES_AT_ONCE = 3
# Spellings of one option, of which the first that the installed XLA knows is taken.
Spellings = tuple[tuple[str, Any], ...]
# A loop over layers gathers the next one's weights while this one computes: from jaxlib 0.12 on,
# before.
GATHER_AHEAD: Spellings = (
    ("xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON"),
    ("xla_gpu_enable_pipelined_all_gather", True),
)
AT_ONCE: Spellings = (
    ("xla_gpu_experimental_parallel_collective_overlap_limit", COLLECTIVES_AT_ONCE),
)


def at_once(options: Mapping[str, Any]) -> int:
    """How many collectives XLA for GPUs has under way at a time, told these options."""
    return next((options[name] for name, _ in AT_ONCE if name in options), 1)


# What XLA for GPUs reads to know how long instructions take: see hlo/latencies.py.
LATENCIES = "xla_gpu_pgle_profile_file_or_directory_path"
# XLA before jaxlib 0.12 holds the gradients of a layer until one sum can take all that travel
# together: of a large layer no more than so many bytes do.
SUMMED_AT_ONCE = 2**28 if jax.__version_info__ < (0, 12) else math.inf
# The jaxlib whose compiler does, inside `shard_map` over several devices; of those from 0.10.2 to
# 0.12.0.1 this one alone.
CRASHES_ON_EMPTY = "0.11.2"
# What jaxlib 0.12 says where it would run a product by a kernel of its own and can time none, as
# for GPUs that are not there; and what makes all products a library's, which need no timing.
NO_KERNEL = "No supported config found for HLO"
BY_LIBRARY = "--xla_gpu_enable_triton_gemm=false"
# Whether JAX's coordination service can use mutual TLS: from jax 0.12 on.
MUTUAL_TLS = "jax_mtls_ca_file" in jax.config.values
