"""Planning: memory, communication and time of a step, predicted from its trace or compiled.

`python -m zero_jax.plan` prints a plan; `stage="auto"` chooses by one. May import everything below
but `checkpoint` and `interchange`.
"""
