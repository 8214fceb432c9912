"""Command lines that use the public API: those of `plan`, `checkpoint` and `offload`.

`python -m zero_jax.plan` runs `commands/plan.py`, and so on. May import every package and
`zero.py`; only `__main__.py` of those packages imports it.
"""
