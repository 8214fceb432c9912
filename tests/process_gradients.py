"""Gradients of a GPT by path, three times, as process 0 sees them, to OUT-0.npz to OUT-2.npz.

python process_gradients.py OUT ROUNDED [ADDRESS COUNT RANK]     # a key of PRECISIONS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np
from problems import gpt_problem

import zero_jax
from zero_jax.models import gpt
from zero_jax.sharding.paths import named_leaves

CONFIG = gpt.GPTConfig(layers=4, width=128, heads=4, vocab=256, seq=16)


PRECISIONS = {
    "none": zero_jax.Precision(),
    "int4": zero_jax.Precision(grad_comm_dtype="int4"),
    "fp8": zero_jax.Precision(matmul_dtype="fp8"),
}


def main(out: str, rounded: str, address: str = "", count: int = 1, rank: int = 0) -> None:
    jax.config.update("jax_num_cpu_devices", 2 // count)
    if count > 1:
        zero_jax.initialize(address, count, rank)
    zero = zero_jax.Zero(zero_jax.make_mesh(), remat="block", precision=PRECISIONS[rounded])
    problem, (index, parts) = gpt_problem(CONFIG), zero_jax.batch_share(zero.mesh)
    rows = np.random.default_rng(0).integers(0, CONFIG.vocab, (parts, 8 // parts, 17))
    batch = zero_jax.global_batch(zero.mesh, rows[index].astype(np.int32))
    params, grad = zero.init(problem.make), jax.jit(zero.value_and_grad(problem.loss))
    for number in range(3):
        named = named_leaves(zero.unshard(grad(params, batch)[1]))
        if rank == 0:
            full = {name: np.asarray(x.addressable_data(0)) for name, x in named}
            np.savez(f"{out}-{number}.npz", **full)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
