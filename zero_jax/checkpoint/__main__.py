"""Runs `python -m zero_jax.checkpoint`."""

import sys

from zero_jax.checkpoint.command import main

sys.exit(main())
