"""Trains with its optimizer state in files, from the start or from its last step.

python nvme_run.py FOLDER OUT STEPS KILL_IN_STEP [ADDRESS PROCESSES PROCESS]
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import conftest  # noqa: F401  the same flags as in every test
import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import Problem

import zero_jax
from zero_jax.offload.host import Offload
from zero_jax.offload.nvme import FileArray

ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))


def small_problem() -> Problem:
    """Sharded matrices with padding, one of several pieces of 4 KiB, a vector and a scalar."""
    keys = jax.random.split(jax.random.key(0), 3)

    def make():
        w, up = jax.random.normal(keys[0], (13, 13)), jax.random.normal(keys[1], (13, 101))
        return {"w": w / 4, "up": up / 4, "b": jnp.zeros(13), "s": jnp.ones(())}

    def loss(params, x):
        h = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.mean((jnp.tanh(h @ params["up"]) * params["s"] - 0.5) ** 2)

    return Problem(make, loss, jax.random.normal(keys[2], (24, 13)))


def main(folder: str, out: str, steps: str, kill_in: str, *processes: str) -> None:
    if processes:
        address, count, index = processes
        jax.config.update("jax_num_cpu_devices", 4 // int(count))
        zero_jax.initialize(address, int(count), int(index))
    mesh = zero_jax.make_mesh(devices=jax.devices()[:4])
    offload = Offload(True, True, tier="nvme", directory=folder, piece_bytes=4096)
    zero = zero_jax.Zero(mesh, stage=3, offload=offload)
    problem = small_problem()
    params, wrapped = zero.shard(problem.start), zero.optimizer(ADAMW)
    begun = any(Path(folder).glob("*/step.json"))
    params, state = wrapped.resume(params) if begun else (params, wrapped.init(params))
    step = zero.train_step(problem.loss, wrapped)
    writes, write = [0], FileArray.put

    def counted(self: FileArray, number: int, *args: object) -> None:
        writes[0] += number == int(kill_in)
        if writes[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, number, *args)

    FileArray.put = counted
    own = np.split(np.asarray(problem.batch), jax.process_count())[jax.process_index()]
    batch = zero_jax.global_batch(mesh, own)
    begin = state.inner.store.step
    for _ in range(begin, int(steps)):
        params, state, metrics = step(params, state, batch)
    full = {k: np.asarray(x.addressable_data(0)) for k, x in zero.unshard(params).items()}
    if jax.process_index() == 0:
        np.savez(out, begin=begin, loss=jnp.asarray(metrics.loss), **full)


if __name__ == "__main__":
    main(*sys.argv[1:])
