"""Imports a model in one of several processes, and writes what it read and what it then holds.

python interchange_run.py FOLDER OUT ADDRESS PROCESSES PROCESS
"""

import functools
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# ruff: noqa: E402

import conftest  # noqa: F401  the same flags as in every test
import jax
import numpy as np
from flax import nnx

import zero_jax
from zero_jax.checkpoint import leaves
from zero_jax.interchange import hugging_face, safetensor_files
from zero_jax.models import gpt

folder, out, address, count, index = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
zero_jax.initialize(address, int(count), int(index))
make = functools.partial(gpt.GPT, hugging_face.config(folder))
zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
like = zero.abstract(lambda: nnx.state(make(rngs=nnx.Rngs(0)), nnx.Param))
sizes, read = [], safetensor_files.Folder.read


def counted(*args):
    part = read(*args)
    sizes.append(part.size)
    return part


safetensor_files.Folder.read = counted
found = {
    f"{leaf.name}@{','.join(map(str, starts))}": piece
    for leaf in leaves.leaves(hugging_face.load(folder, like))
    for starts, piece in leaf.pieces()
}
np.savez(out, read=sum(sizes), **found)
