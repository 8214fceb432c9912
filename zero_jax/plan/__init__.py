"""What a run will hold, send and take: foretold from its trace, proven by compiling, chosen.

`python -m zero_jax.plan` shows it; its `command` stands above all packages. The others may import
everything but `checkpoint` and `interchange`.
"""
