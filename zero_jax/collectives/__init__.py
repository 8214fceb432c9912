"""Communication: differentiable all-gather of parameters and reduce-scatter of their gradients.

Collectives use buckets of constant size, the dtypes of `precision` or integers, and barriers that
order them for XLA. May import `sharding`.
"""
