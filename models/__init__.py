"""Ordinary Flax models, a transformer in NNX and a convolutional net in linen."""
