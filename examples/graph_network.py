"""A graph network on padded graphs, in plain Flax: weights that differ between devices.

Graphs are batched as jraph does: those of a part stand one after the other in arrays of fixed
size, padded, with a mask that says which are real. Each device works on parts of its own, so each
has another number of real graphs: `Weighted(sum, weight)` says so, and sums are divided once.

`one_device` is the loop as for one device, `sharded` the same at ZeRO stage 3.
Changed: +6 -4 lines, `import zero_jax` among them.

    python examples/graph_network.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used

PARTS, NODES, EDGES, GRAPHS, FEATURES = 8, 48, 96, 9, 16  # all but the first: of a part, padded


def part_of_graphs(random):
    """Real graphs, and a last one that owns all padding.

    What is learned of a graph: the mean, over its edges, of the product of their ends' first
    features.
    """
    nodes = np.zeros((NODES, FEATURES), np.float32)
    graph_of_node = np.full(NODES, GRAPHS - 1)
    senders = receivers = np.full(EDGES, NODES - 1)
    senders, receivers = senders.copy(), receivers.copy()
    targets = np.zeros(GRAPHS, np.float32)
    used_nodes = used_edges = 0
    real = random.integers(3, GRAPHS)
    for graph in range(real):
        n, e = random.integers(3, 6), random.integers(5, 11)
        own = slice(used_nodes, used_nodes + n)
        edges = slice(used_edges, used_edges + e)
        nodes[own] = random.normal(size=(n, FEATURES))
        graph_of_node[own] = graph
        senders[edges] = used_nodes + random.integers(0, n, e)
        receivers[edges] = used_nodes + random.integers(0, n, e)
        targets[graph] = np.mean(nodes[senders[edges], 0] * nodes[receivers[edges], 0])
        used_nodes, used_edges = used_nodes + n, used_edges + e
    return {
        "nodes": nodes,
        "graph_of_node": graph_of_node,
        "senders": senders,
        "receivers": receivers,
        "targets": targets,
        "mask": (np.arange(GRAPHS) < real).astype(np.float32),
    }


class GraphNetwork(nn.Module):
    """Two rounds of messages along edges, and what a graph's nodes sum to."""

    @nn.compact
    def __call__(self, part):
        h = nn.Dense(64)(part["nodes"])
        for _ in range(2):
            ends = jnp.concatenate([h[part["senders"]], h[part["receivers"]]], axis=-1)
            messages = nn.Dense(64)(nn.relu(nn.Dense(128)(ends)))
            h = h + jax.ops.segment_sum(messages, part["receivers"], NODES)
        sums = jax.ops.segment_sum(h, part["graph_of_node"], GRAPHS)
        return nn.Dense(1)(nn.relu(nn.Dense(64)(sums)))[:, 0]


random = np.random.default_rng(0)
parts = [part_of_graphs(random) for _ in range(PARTS)]
batch = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
model = GraphNetwork()


def summed(params, batch):
    """Squared errors of real graphs, and how many those are."""
    answers = jax.vmap(model.apply, (None, 0))(params, batch)
    errors = jnp.square(answers - batch["targets"]) * batch["mask"]
    return jnp.sum(errors), jnp.sum(batch["mask"])


def one_device():
    def loss_fn(params, batch):
        total, weight = summed(params, batch)
        return total / weight

    params = jax.jit(model.init)(jax.random.key(0), parts[0])
    tx = optax.adam(3e-3)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params, opt_state


def sharded():
    def loss_fn(params, batch):
        total, weight = summed(params, batch)
        return zero_jax.Weighted(total, weight)

    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.init(model.init, jax.random.key(0), parts[0])
    tx = zero.optimizer(optax.adam(3e-3))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = zero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params, opt_state


if __name__ == "__main__":
    want, whole, _ = one_device()
    losses, params, opt_state = sharded()
    real = batch["mask"].sum(axis=1).reshape(jax.device_count(), -1).sum(axis=1).astype(int)
    print("real graphs of each device:", *real)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    most = print_held(params=params, opt_state=opt_state)

    assert len(set(real)) > 1  # or a plain mean would do
    # Sums are made in another order, which shows in the last digits.
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    assert losses[-1] < losses[0] / 2
    # Parameters and Adam's two moments, in fp32: 12 bytes of Ψ / N.
    psi = sum(leaf.size for leaf in jax.tree.leaves(whole))
    assert most <= 1.01 * 12 * psi / jax.device_count(), most
