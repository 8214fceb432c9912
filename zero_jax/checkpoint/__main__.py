"""Runs `python -m zero_jax.checkpoint`."""

from zero_jax.commands.checkpoint import main
from zero_jax.streams import run

run(main)
