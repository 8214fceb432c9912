"""Traces: reading and rewriting what JAX makes of a function, whatever it is for.

Equations one by one or written out flat, what depends on what, marks that go from a value to what
is made of it, where no derivative is wanted. Imports nothing of zero_jax.
"""
