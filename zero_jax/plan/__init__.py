"""What a run will hold, send and take: foretold from its trace, proven by compiling, chosen.

`python -m zero_jax.plan` shows it. May import everything below but `checkpoint` and `interchange`.
"""
