"""`train.py`, but one process alone has an error: `failing_run.py RANK step|save ARGS...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

import zero_jax
from training.main import main
from zero_jax.checkpoint.arrays import StoredArray

rank, where = int(sys.argv[1]), sys.argv[2]
places = {"step": (zero_jax.TrainStep, "__call__", 5), "save": (StoredArray, "write", 60)}
place, name, after = places[where]  # "save": in the second checkpoint
works, calls = getattr(place, name), []


def fails(*args, **kwargs):
    calls.append(1)
    if len(calls) > after and jax.process_index() == rank:
        raise OSError("this host's disk is gone")
    return works(*args, **kwargs)


if __name__ == "__main__":
    setattr(place, name, fails)
    sys.exit(main(sys.argv[3:]))
