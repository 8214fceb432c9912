"""Runs `python -m zero_jax.translate`."""

import sys

from zero_jax.streams import lasting_streams
from zero_jax.translate.command import main

lasting_streams()
sys.exit(main())
