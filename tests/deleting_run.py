"""Saves four checkpoints, keeps two, and is killed as it deletes: `deleting_run.py DIR FILES`.

Killed for good, before so many files of what it deletes are gone.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax.numpy as jnp

from zero_jax import Checkpoints

folder, left = sys.argv[1], [int(sys.argv[2])]


def watch(event, args):
    """Sees every file that Python removes of the first checkpoint, also in threads of others."""
    if event == "os.remove" and (args[1] != -1 or str(args[0]).startswith(f"{folder}/1/")):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(watch)
with Checkpoints(folder, keep=2) as checkpoints:
    for step in range(1, 5):
        checkpoints.save(step, {name: jnp.full(3, step) for name in ("a", "b", "c")})
print("not killed")
