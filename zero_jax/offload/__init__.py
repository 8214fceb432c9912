"""Offload of optimizer state to host memory or files (NVMe), with piecewise updates.

`python -m zero_jax.offload --check` compares a step with and without offload on this machine. May
import `tracing`, `sharding`, `collectives` and `low_bit`.
"""
