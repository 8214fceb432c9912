"""Optimizer states outside the device: in host memory or in files, updated in pieces.

`python -m zero_jax.offload --check` asks whether offload is right on this machine; like every
command it stands above all packages. The others may import `jaxpr`, `sharding` and `collectives`.
"""
