"""Runs `python -m zero_jax.plan`."""

import sys

from zero_jax.plan.command import main

sys.exit(main())
