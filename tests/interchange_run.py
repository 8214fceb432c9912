"""Imports a model in one of several processes, and writes what it read and what it then holds.

python interchange_run.py FOLDER OUT ADDRESS PROCESSES PROCESS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import conftest  # noqa: F401  the same flags as in every test
import jax
import numpy as np
from exchange import abstract

import zero_jax
from zero_jax.checkpoint import leaves
from zero_jax.interchange import hugging_face, safetensor_files

folder, out, address, count, index = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
zero_jax.initialize(address, int(count), int(index))
sizes, read = [], safetensor_files.Files.read


def counted(*args):
    part = read(*args)
    sizes.append(part.size)
    return part


safetensor_files.Files.read = counted
found = {}
for leaf in leaves.leaves(hugging_face.load(folder, abstract(hugging_face.config(folder), 4))):
    found |= {f"{leaf.name}@{','.join(map(str, at))}": piece for at, piece in leaf.pieces()}
np.savez(out, read=sum(sizes), **found)
