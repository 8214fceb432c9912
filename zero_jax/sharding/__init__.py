"""Sharding of leaves: partition by shape, meshes, tensor parallelism over `model`.

Names the leaves of a tree and assigns a partition to each. May import nothing of zero_jax.
"""
