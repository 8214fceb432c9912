"""Sharding of leaves: meshes, the layout of each leaf, names of leaves and dims, the `model` axis.

Also checks of parameters and replicas. May import nothing of zero_jax but `releases.py`.
"""
