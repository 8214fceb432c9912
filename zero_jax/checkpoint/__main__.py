"""Runs `python -m zero_jax.checkpoint`."""

import sys

from zero_jax.commands.checkpoint import main
from zero_jax.streams import lasting_streams

lasting_streams()
sys.exit(main())
