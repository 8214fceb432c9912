"""What travels: a leaf is gathered and its gradient reduce-scattered, as one differentiable touch.

In buckets of constant size, in the dtypes of `precision`, as integers if asked; and the barriers
that tell XLA when. May import `sharding`.
"""
