"""What saving costs a run, and how fast checkpoints are beside a raw copy of the same bytes.

    python benchmarks/checkpoints.py [--params 20e6] [--devices 1] [--dir DIR]

Three measurements in one process, each the median of several rounds that alternate between the
things compared, because machines are noisy:

  steps    time of a stretch of training steps with one asynchronous save in it over the same
           stretch without, both with what saving still owes at the end waited for in the next one
  save     bytes/s until the checkpoint is on the disk, over writing the same bytes to one file
  restore  bytes/s until it is on the devices, over reading that file
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax

ROUNDS = 7


def problem(params: int, devices: int):
    """A stack of layers whose steps take as long as their parameters are many."""
    width = 512
    layers = max(1, params // width**2)
    mesh = zero_jax.make_mesh(devices=jax.devices()[:devices])
    zero = zero_jax.Zero(mesh, stage=3, remat="block")

    def loss(p, x):
        layer = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, p["layers"])[0] ** 2)

    tx = zero.optimizer(optax.adamw(1e-4))
    state = zero.init(lambda: {"layers": jnp.full((layers, width, width), 1e-3)})
    batch = jnp.ones((256 * devices, width))
    step = zero.train_step(loss, tx)
    return state, tx.init(state), step, batch


def stretch(states, step, batch, count, save=None):
    """Seconds of so many steps, with a save after the first."""
    began = time.perf_counter()
    for number in range(count):
        *states, _ = step(*states, batch)
        if number == 0 and save is not None:
            save(states)
    jax.block_until_ready(states)
    return time.perf_counter() - began, states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--params", type=float, default=20e6)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40, help="of a stretch with one save")
    parser.add_argument("--dir", default=None, help="on the disk to be measured")
    parsed = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", parsed.devices)
    *states, step, batch = problem(int(parsed.params), parsed.devices)
    _, states = stretch(states, step, batch, 3)
    size = sum(x.nbytes for x in jax.tree.leaves(states))
    alone, saving, ratios = [], [], {"save": [], "restore": []}
    with tempfile.TemporaryDirectory(dir=parsed.dir) as folder:
        with zero_jax.Checkpoints(folder, keep=1) as checkpoints:
            number = 0
            for _ in range(ROUNDS):
                number += 1
                seconds, states = stretch(states, step, batch, parsed.steps)
                alone.append(seconds)
                save = lambda s, n=number: checkpoints.save(n, tuple(s))  # noqa: E731
                seconds, states = stretch(states, step, batch, parsed.steps, save)
                saving.append(seconds)
                checkpoints.wait()
            for _ in range(ROUNDS):
                number += 1
                raw = pathlib.Path(folder, "raw")
                whole = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(states[0])])
                whole = np.concatenate([whole] * 3)
                began = time.perf_counter()
                with open(raw, "wb") as file:
                    file.write(whole.data)
                    os.fsync(file.fileno())
                written = time.perf_counter() - began
                began = time.perf_counter()
                checkpoints.save(number, tuple(states))
                checkpoints.wait()
                saved = time.perf_counter() - began
                began = time.perf_counter()
                np.fromfile(raw, np.float32)
                read = time.perf_counter() - began
                began = time.perf_counter()
                tree = checkpoints.restore(tuple(states), say=lambda _: None).tree
                jax.block_until_ready(tree)
                restored = time.perf_counter() - began
                ratios["save"].append((written / saved, size / saved))
                ratios["restore"].append((read / restored, size / restored))
                del tree
    print(f"{size / 1e6:.0f} MB, {parsed.devices} devices, jax {jax.__version__}")
    costs = [b / a - 1 for a, b in zip(alone, saving, strict=True)]
    print(f"steps    {statistics.median(costs):+.1%} ({min(costs):+.1%} to {max(costs):+.1%}) "
          f"with one save in {parsed.steps} steps, "
          f"{statistics.median(alone) / parsed.steps * 1e3:.0f} ms each")  # fmt: skip
    for name, found in ratios.items():
        ratio, speed = (statistics.median(x) for x in zip(*found, strict=True))
        print(f"{name:8} {speed / 1e6:.0f} MB/s, {ratio:.2f} of a raw copy")


if __name__ == "__main__":
    main()
