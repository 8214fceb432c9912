"""Runs `python -m zero_jax.translate`."""

import sys

from zero_jax.translate.command import main

sys.exit(main())
