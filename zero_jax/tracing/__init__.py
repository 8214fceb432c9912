"""Jaxprs: reading, rewriting, interpreting and analysing them, independent of ZeRO.

`jaxpr.py` wraps jaxprs of all supported JAX releases, `interpreter.py` evaluates them,
`dataflow.py` analyses them, `passes.py` rewrites them, `sources.py` names the transformations that
equations come from. No other package loops over equations. Imports nothing of zero_jax.
"""
