"""Two processes over loopback, as two hosts would be, on a laptop.

Without arguments the script starts itself twice, with an address and a rank. Each process joins the
run, has two of four devices, and feeds half of the batch. `one_device` is the loop as for one
device, `one_of_two` the same at ZeRO stage 3 in each process.
Changed: +8 -4 lines, `import zero_jax` among them.

On a cluster a launcher starts the processes, and `zero_jax.initialize()` asks SLURM for the rest.

    python examples/two_processes.py
"""

import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 2)  # of each process

random = np.random.default_rng(0)
x = random.normal(size=(64, 32)).astype(np.float32)
rows = (x, np.sin(x[:, :8]))


def make(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (32, 256)) / 6,
        "down": jax.random.normal(down, (256, 8)) / 16,
    }


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)


def one_device():
    params = make(jax.random.key(0))
    tx = optax.adamw(3e-3)
    opt_state = tx.init(params)
    batch = rows

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(20):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params, opt_state


def one_of_two(address, rank):
    zero_jax.initialize(address, num_processes=2, process_id=rank)
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.init(make, jax.random.key(0))
    tx = zero.optimizer(optax.adamw(3e-3))
    opt_state = tx.init(params)
    index, count = zero_jax.batch_share(zero.mesh)
    batch = zero_jax.global_batch(zero.mesh, [np.split(part, count)[index] for part in rows])

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = zero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(20):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params, opt_state


def start_both():
    """Starts this script twice; the exit code of the one that fails, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    commands = [[sys.executable, __file__, address, rank] for rank in "01"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in both:
        print(process.communicate()[0], end="")
    return max(abs(process.returncode) for process in both)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(start_both())
    address, rank = sys.argv[1], int(sys.argv[2])
    losses, params, opt_state = one_of_two(address, rank)
    print(f"process {rank}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    most = print_held(params=params, opt_state=opt_state)

    # Sums are made in another order, which shows in the last digits.
    want, whole, _ = one_device()
    np.testing.assert_allclose(losses, want, rtol=1e-4)
    assert losses[-1] < losses[0] / 2
    # Parameters and Adam's two moments, in fp32: 12 bytes of Ψ / N, with N the devices of both.
    psi = sum(leaf.size for leaf in jax.tree.leaves(whole))
    assert jax.device_count() == 4 and jax.local_device_count() == 2
    assert most <= 1.01 * 12 * psi / jax.device_count(), most
