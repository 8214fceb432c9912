"""Checkpoints that load on any mesh and at any stage: written, restored, looked at, verified.

`python -m zero_jax.checkpoint` looks at them. May import `cluster`, `sharding` and `offload`.
"""
