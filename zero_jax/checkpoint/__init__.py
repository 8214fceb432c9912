"""Checkpoints that load on any mesh and at any stage: saving, restoring, inspecting, verifying.

`python -m zero_jax.checkpoint` inspects them. May import `distributed`, `sharding` and `offload`.
"""
