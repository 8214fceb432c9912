"""Optimizer state in 8 or 16 bits.

The stored bits do not depend on the partition. May import `tracing` and `sharding`.
"""
