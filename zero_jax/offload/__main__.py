"""Runs `python -m zero_jax.offload`."""

from zero_jax.doctor import check_offload
from zero_jax.streams import run

run(check_offload)
