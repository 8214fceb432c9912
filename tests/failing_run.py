"""`train.py` with an error in one process: `failing_run.py RANK step|save ARGS...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

import zero_jax
from training.main import main
from zero_jax.checkpoint.arrays import Array


def fail_after(count, owner, name, rank):
    method, calls = getattr(owner, name), []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) > count and jax.process_index() == rank:
            raise OSError("this host's disk is gone")
        return method(*args, **kwargs)

    setattr(owner, name, fails)


if __name__ == "__main__":
    # The 61st write belongs to the second checkpoint.
    faults = {"step": (5, zero_jax.TrainStep, "__call__"), "save": (60, Array, "write")}
    fail_after(*faults[sys.argv[2]], int(sys.argv[1]))
    sys.exit(main(sys.argv[3:]))
