"""`train.py`, but one process alone has an error: `failing_run.py RANK step|save ARGS...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

import zero_jax
from training.main import main
from zero_jax.checkpoint.arrays import Array


def fail_in(place, name, rank, after):
    """Lets a method fail in a process after so many calls."""
    works, calls = getattr(place, name), []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) > after and jax.process_index() == rank:
            raise OSError("this host's disk is gone")
        return works(*args, **kwargs)

    setattr(place, name, fails)


if __name__ == "__main__":
    rank, where = int(sys.argv[1]), sys.argv[2]
    if where == "step":
        fail_in(zero_jax.TrainStep, "__call__", rank, after=5)
    else:
        fail_in(Array, "write", rank, after=60)  # in the second checkpoint
    sys.exit(main(sys.argv[3:]))
