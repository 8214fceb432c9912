"""Analysis and rewriting of jaxprs, independent of ZeRO.

Equations one by one or inlined, data dependence, marks that propagate from a value to its results,
and parts without a derivative. Imports nothing of zero_jax.
"""
