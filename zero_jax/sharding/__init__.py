"""Sharding of leaves: partition by shape, meshes, tensor parallelism over `model`.

Names the leaves of a tree, assigns a partition to each, and compares replicas. May import nothing
of zero_jax.
"""
