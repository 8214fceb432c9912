"""Saves four checkpoints, keeps two, is killed while it deletes: `deleting_run.py DIR FILES...`.

Each number of files has a process and a folder: it is killed before it deletes one file more.
Prints how the processes ended.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax.numpy as jnp

from zero_jax import Checkpoints


def main(folder, left):
    def watch(event, args):
        """Sees every file of the first checkpoint that Python removes, also in threads."""
        nonlocal left
        if event == "os.remove" and (args[1] != -1 or str(args[0]).startswith(f"{folder}/1/")):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {name: jnp.full(3, step) for name in ("a", "b", "c")})


for files in sys.argv[2:]:
    pid = os.fork()  # before JAX starts: its import takes longer than the run
    if pid == 0:
        main(Path(sys.argv[1], files), int(files))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
