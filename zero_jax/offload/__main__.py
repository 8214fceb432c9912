"""Runs `python -m zero_jax.offload`."""

import sys

from zero_jax.commands.offload import main
from zero_jax.streams import lasting_streams

lasting_streams()
sys.exit(main())
