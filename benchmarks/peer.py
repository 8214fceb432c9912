"""What every process of peers.py does, whatever its library: the same tokens, timed alike.

Needs numpy alone, so that each library can live in an environment of its own.
"""

import argparse
import ctypes
import json
import re
import statistics
import time
from collections.abc import Callable

import numpy as np

WARM = 2  # steps before the clock starts: compilation, allocators, optimizer states
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01


def arguments() -> argparse.Namespace:
    """The problem, and which process of how many this is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--address", help="host:port")
    parser.add_argument("--threads", type=int, help="of one process")
    for name in ("layers", "width", "heads", "vocab", "seq", "rows", "steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--weights", help="where all start, an .npz with arrays by path")
    parsed = parser.parse_args()
    parsed.imported_bytes = resident("VmRSS")
    return parsed


def batch(parsed: argparse.Namespace, number: int) -> np.ndarray:
    """This process's rows (rows, seq + 1) of a step; three batches in turn, to be learned."""
    shape = parsed.world * parsed.rows, parsed.seq + 1
    rows = np.random.default_rng(number % 3).integers(0, parsed.vocab, shape, np.int64)
    return rows[parsed.rank * parsed.rows : (parsed.rank + 1) * parsed.rows]


def measure(parsed: argparse.Namespace, step: Callable[[np.ndarray], float]) -> None:
    """Trains, and prints losses, seconds and bytes as JSON.

    Args:
      parsed: the problem.
      step: trains on these rows, and returns the loss of all processes' rows when it is done.
    """
    losses, seconds = [], []
    for number in range(WARM + parsed.steps):
        if number == WARM:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what a compiler left
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak of resident memory begins anew
        rows = batch(parsed, number)
        began = time.perf_counter()
        losses.append(step(rows))
        seconds.append(time.perf_counter() - began)
    found = {
        "losses": losses,
        "seconds": statistics.median(seconds[WARM:]),
        "peak_bytes": resident("VmHWM"),
        "imported_bytes": parsed.imported_bytes,
    }
    print(json.dumps(found), flush=True)


def resident(name: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most (VmHWM)."""
    with open("/proc/self/status") as file:
        found = re.search(rf"{name}:\s+(\d+) kB", file.read())
    assert found is not None
    return 1024 * int(found[1])
