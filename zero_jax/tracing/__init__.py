"""Jaxprs: reading, rewriting, interpreting and analysing them, independent of ZeRO.

`jaxpr.py` wraps jaxprs of all supported JAX releases, `interpreter.py` visits their equations,
`evaluator.py` evaluates them, `dataflow.py` analyses them, `graph.py` and `sharded_dims.py` too,
`passes.py` rewrites them, `sources.py` names the transformations that equations come from. No other
package loops over equations. Imports nothing of zero_jax.
"""
