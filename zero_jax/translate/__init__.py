"""Translation of DeepSpeed and accelerate configurations. Imports nothing of zero_jax but names."""
