"""Runs `python -m zero_jax.plan`."""

import sys

from zero_jax.commands.plan import main
from zero_jax.streams import lasting_streams

lasting_streams()
sys.exit(main())
