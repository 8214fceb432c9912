"""Ordinary Flax models, a transformer in NNX and a convolutional net in linen.

In a checkout they stand beside the library; both there and installed they are `zero_jax.models`.
They import nothing of zero_jax.
"""
