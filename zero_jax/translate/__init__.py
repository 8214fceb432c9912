"""Configuration files of DeepSpeed, accelerate and Megatron-LM, said in the words of zero_jax.

`python -m zero_jax.translate FILE`. Each file is read by the reader of its project into an
`Asked`, and every setting of it ends up in an `Account`. Imports nothing of zero_jax, and nothing
imports it.
"""
