"""Runs `python -m zero_jax.translate`."""

from zero_jax.streams import run
from zero_jax.translate.command import main

run(main)
