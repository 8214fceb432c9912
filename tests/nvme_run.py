"""Trains with its optimizer state in files, from the start or from where it was; prints the loss.

    python nvme_run.py FOLDER OUT STEPS KILL_AT_WRITE [ADDRESS PROCESSES PROCESS]

A process of its own, so that it can be killed in the middle of a step.
"""

import os
import pathlib
import signal
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# ruff: noqa: E402

import conftest  # noqa: F401  the same flags as in every test
import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import zoo_problem

import zero_jax
from zero_jax.offload.mapped_store import Store
from zero_jax.offload.tiers import Offload


def main(folder: str, out: str, steps: str, kill_at: str, *processes: str) -> None:
    """Runs until so many steps are done in all, or dies at the so-manieth write."""
    if processes:
        address, count, index = processes
        jax.config.update("jax_num_cpu_devices", 4 // int(count))
        zero_jax.initialize(address, int(count), int(index))
    mesh = zero_jax.make_mesh(devices=jax.devices()[:4])
    offload = Offload(True, True, tier="nvme", directory=folder, piece_bytes=4096)
    zero = zero_jax.Zero(mesh, stage=3, offload=offload)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
    problem = zoo_problem()
    params = zero.shard(problem.start)
    wrapped = zero.optimizer(tx)
    begun = any(pathlib.Path(folder).glob("*/step.json"))
    params, state = wrapped.resume(params) if begun else (params, wrapped.init(params))
    step = zero.train_step(problem.loss, wrapped)
    _die_at(int(kill_at))
    rows = jax.process_index() * 120 // jax.process_count()
    mine = jax.tree.map(
        lambda x: np.asarray(x)[rows : rows + 120 // jax.process_count()], problem.batch
    )
    batch = zero_jax.global_batch(mesh, mine)
    begin = state.inner.files.store.step
    for _ in range(begin, int(steps)):
        params, state, metrics = step(params, state, batch)
    full = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), zero.full(params))
    leaves = {f"leaf{i}": x for i, x in enumerate(jax.tree.leaves(full))}
    if jax.process_index() == 0:
        np.savez(out, begin=begin, loss=jnp.asarray(metrics.loss), **leaves)


def _die_at(count: int) -> None:
    writes, write = [0], Store.write

    def counted(self: Store, *args: object) -> None:
        writes[0] += 1
        if writes[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, *args)

    Store.write = counted


if __name__ == "__main__":
    main(*sys.argv[1:])
