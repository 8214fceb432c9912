"""Runs `python -m zero_jax.plan`."""

from zero_jax.commands.plan import main
from zero_jax.streams import run

run(main)
