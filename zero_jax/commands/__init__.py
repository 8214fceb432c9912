"""Command lines of `plan` and `checkpoint`, and the models that are planned.

`python -m zero_jax.plan` runs `commands/plan.py`, and so on. May import every package and
`zero.py`; only `__main__.py` of those packages imports it.
"""
