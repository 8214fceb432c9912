"""Imports a model in one process of several, and notes what it read and what it then holds.

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


def main(folder: str, out: str, address: str, count: str, index: str) -> None:
    """Writes, by leaf, the pieces that this process would save, and how much was read."""
    jax.config.update("jax_num_cpu_devices", 2)
    zero_jax.initialize(address, int(count), int(index))
    config = hugging_face.config(folder)
    make = functools.partial(gpt.GPT, config)
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    like = zero.abstract(lambda: nnx.state(make(rngs=nnx.Rngs(0)), nnx.Param))
    held, read = [0], safetensor_files.Folder.read

    def reading(*args):
        part = read(*args)
        held[0] += part.size
        return part

    safetensor_files.Folder.read = reading
    params = hugging_face.load(folder, like)
    found = {
        f"{leaf.name}@{','.join(map(str, starts))}": piece
        for leaf in leaves.leaves(params)
        for starts, piece in leaf.pieces()
    }
    np.savez(out, read=held[0], **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
