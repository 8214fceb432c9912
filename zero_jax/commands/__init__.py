"""Command lines of `plan`, `checkpoint` and `offload`, and the models that they plan.

`python -m zero_jax.plan` runs `commands/plan.py`, and so on. May import every package and
`zero.py`; only `__main__.py` of those packages imports it.
"""
