"""Optimizer state in 8 or 16 bits: codes, rounding, and the choice of leaves.

The stored bits do not depend on the partition. May import `jaxpr` and `sharding`.
"""
