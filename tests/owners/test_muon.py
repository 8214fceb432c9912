"""Training with Muon equals one device at every stage, N and number of micro-batches.

Tolerance: 256 fp32 ulps of a leaf's largest element after four steps, as in test_parity.py. The
iteration is in fp32, as optax has it, and what is sent is not rounded; but products are summed in
another order, and its five turns multiply what differs by up to 3.4445**5 = 485 where a matrix has
small singular values. So biases, whose gradients are nothing but such differences where keys ignore
them, are left to Adam, with an eps that hides them.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from optax import contrib
from problems import gpt_problem, train_plain, train_zero, ulps

STEPS, ULPS = 4, 256
USUAL = [(1, 3, 1), (3, 3, 4), (2, 8, 4), (3, 8, 1)]
EVERY = itertools.product(range(4), (1, 2, 3, 4, 5, 8), (1, 4))


def kernels_and_embeddings(params):
    """Stacked kernels (L, in, out), and the embeddings."""

    def one(path, x):
        vector = "bias" in jax.tree_util.keystr(path) or "scale" in jax.tree_util.keystr(path)
        return None if vector else contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree_util.tree_map_with_path(one, params)


TX = contrib.muon(0.02, eps=1e-4, muon_weight_dimension_numbers=kernels_and_embeddings)


def problem(rows):
    made = gpt_problem()
    return dataclasses.replace(made, batch=jnp.tile(made.batch, (2, 1))[:rows])


@functools.cache
def plain(rows):
    return train_plain(problem(rows), TX, STEPS)


@pytest.mark.parametrize(
    ("stage", "n", "k"),
    [p if p in USUAL else pytest.param(*p, marks=pytest.mark.slow) for p in EVERY],
)
def test_muon_equals_one_device(stage, n, k):
    rows = 120 if n == 3 else 160
    with jax.default_matmul_precision("highest"):
        losses, params, _ = train_zero(problem(rows), TX, STEPS, n, stage=stage, micro_batches=k)
        want = plain(rows)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS
    assert want[0][-1] < want[0][0], "a run that does not learn compares little"
