"""Optimizer states outside the device: in host memory or in files, updated in pieces.

`python -m zero_jax.offload --check` compares a step with and without offload on this machine. May
import `jaxpr`, `sharding`, `collectives` and `states`.
"""
