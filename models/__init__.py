"""Ordinary Flax models: transformers in NNX and a convolutional net in linen.

In a checkout they are in `models/`, beside the library. Both there and installed they are
`zero_jax.models`. They import nothing of zero_jax.
"""
