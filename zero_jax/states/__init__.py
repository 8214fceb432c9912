"""Optimizer states in 8 or 16 bits: codes, how they are rounded, which leaves are kept so.

The bits depend on what was trained, not on how it is partitioned. May import `jaxpr` and
`sharding`.
"""
