"""Checkpoints that load on any mesh and at any stage: written, restored, looked at, verified.

`python -m zero_jax.checkpoint` looks at them; its `command` stands above all packages. The others
may import `cluster`, `sharding` and `offload`.
"""
