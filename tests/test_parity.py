"""Ten steps under Zero equal ten steps of plain optax on one device.

fp32 tolerance: 256 ulps of a leaf's largest element. Other orders of summation, ten steps and the
optimizers' divisions amplify an ulp or two; a wrong mean, norm or padding is off by 10^4 or more.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import PROBLEMS, ROWS, Problem, compare, train_plain, train_zero, ulps, zoo_problem

import zero_jax
from zero_jax.models import optimizers

STEPS = 10
ULPS = 256
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
# eps: the gradient of an attention key's bias is zero but for rounding, and Adam would turn
# that rounding into full steps. ReLU has a kink, which a rounding can cross: small steps there.
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
SGD = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9))
TX = {"gpt": ADAM, "zoo": ADAM, "few": ADAM, "resnet": SGD, "weighted": SGD, "many": SGD}
RATED = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, STEPS), eps=1e-4)
KINDS = {"matrix": RATED, "vector": optax.lion(1e-3)}
OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4), "muon": optax.contrib.muon(1e-2),
    "MultiSteps of lamb": optax.MultiSteps(optax.lamb(1e-2, eps=1e-4), 3),
    "clip, lars, EMA": optax.chain(
        optax.clip_by_global_norm(1e-2), optax.lars(1e-1), optax.ema(0.9)),
    "multi_transform of a schedule and lion": optax.multi_transform(
        KINDS, functools.partial(jax.tree.map, lambda p: "matrix" if p.ndim > 1 else "vector")),
    "masks on path and ndim": optax.chain(
        optax.masked(optax.clip(1e-3), functools.partial(
            jax.tree_util.tree_map_with_path, lambda path, _: "vector" not in str(path))),
        optax.adamw(1e-2, eps=1e-4, weight_decay=0.1,
                    mask=functools.partial(jax.tree.map, lambda p: p.ndim > 1)))}  # fmt: skip


def few_leaves(empty: bool = True) -> Problem:
    shapes = {"bias": (), "vector": (3,), "deep": (2, 13, 8), "tied": (7, 13), "none": (0, 4)}
    start = {name: 0.2 * jax.random.normal(jax.random.key(0), x) for name, x in shapes.items()}
    start = {name: leaf for name, leaf in start.items() if leaf.size or empty}

    def loss(params, batch):
        hidden = batch[0] + jnp.tanh(batch[0] @ params["tied"]) @ params["tied"].T
        hidden = jnp.tanh(hidden @ params["tied"] + params["vector"].sum())
        return jnp.mean(jnp.square(hidden @ params["deep"].sum(0) + params["bias"] - batch[1]))

    return Problem(lambda: start, loss, zoo_problem().batch)


def weighted_problem() -> Problem:
    """From 0 to 23 tokens a row: devices and micro-batches have very different weights."""

    def loss(params, batch):
        error = jnp.square(batch[0] @ params["w"]).sum(1)
        return zero_jax.Weighted(jnp.sum(error * batch[1]), jnp.sum(batch[1]))

    batch = jax.random.normal(jax.random.key(1), (24, 5)), jnp.arange(24.0)
    return Problem(lambda: {"w": jnp.ones((5, 6))}, loss, batch)


OWN = {"few": few_leaves, "few, none empty": lambda: few_leaves(empty=False)}
OWN |= {"weighted": weighted_problem, "many": lambda: zoo_problem(tiny=200)}
problem = functools.cache(lambda name: (PROBLEMS | OWN)[name]())
plain = functools.cache(lambda name, tx: train_plain(problem(name), tx, STEPS))


def assert_parity(name, tx, n, **settings):
    compare(train_zero(problem(name), tx, STEPS, n, **settings), plain(name, tx), ULPS)


# Problem, N, stage, micro-batches and remat; with -m slow every N and stage.
USUAL = [("gpt", 3, 3, 2, "block"), ("resnet", 8, 1, 1, "none"), ("few", 5, 2, 2, "none")]
USUAL += [("few", 1, 3, 1, "none"), SLOW("many", 5, 3, 1, "none")]
USUAL += [("weighted", 4, stage, k, "none") for stage, k in ((0, 1), (1, 3), (3, 2))]
for name, n, stage in itertools.product(PROBLEMS, (1, 2, 3, 4, 5, 8), range(4)):
    # Batch norm sees one micro-batch; 120 rows are not divisible by two of them on 8 devices.
    k = 2 if n in (3, 4) and name != "resnet" else 1
    remat = ("block", "dots", "none")[(n + 2 * stage) % 3] if name == "gpt" else "none"
    if (name, n, stage, k, remat) not in USUAL:
        USUAL.append(SLOW(name, n, stage, k, remat))


@pytest.mark.parametrize(("name", "n", "stage", "k", "remat"), USUAL)
def test_ten_steps_equal_plain_optax(name, n, stage, k, remat):
    assert_parity(name, TX[name], n, stage=stage, grad_accum_steps=k, remat=remat)


@pytest.mark.parametrize(("stage", "n"), [SLOW(0, 2), SLOW(1, 3), SLOW(2, 5), (3, 8)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_exact(optimizer, stage, n):
    # Plain optax itself cannot run muon on an empty leaf.
    name = "few, none empty" if optimizer == "muon" else "few"
    assert_parity(name, OPTIMIZERS[optimizer], n, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "zoo"])
def test_in_bf16_the_stages_agree(name):
    """bf16 has 8 bits: one ulp is 2^-8; runs differ by summation order only."""
    bf16, fp32 = zero_jax.Precision("bf16", "bf16"), plain(name, ADAM)
    train = functools.partial(train_zero, problem(name), ADAM, STEPS, 4, precision=bf16)
    (first, start, _), *others = (train(stage=stage) for stage in range(4))
    for losses, params, _ in others:
        np.testing.assert_allclose(losses, first, rtol=2**-7)
        assert ulps(params, start) * np.finfo(np.float32).eps < 0.05
    np.testing.assert_allclose(first, fp32[0], rtol=0.05)
    assert ulps(start, fp32[1]) > ULPS, "bf16 equal to fp32: was anything cast?"


def test_same_seed_twice_is_bitwise_equal():
    runs = [train_zero(problem("few"), ADAM, 3, 5, stage=3)[1] for _ in range(2)]
    assert ulps(*runs) == 0
    # A run whose devices all see the same rows would pass a test with constant data.
    assert len(np.unique(np.asarray(problem("gpt").batch), axis=0)) > ROWS // 2


def test_muon_of_train_py_updates_vectors_at_the_rate_of_adam():
    tx = optimizers.make("muon", lambda step: 0.02, weight_decay=0.0, clip=0.0)
    params = {"kernel": jnp.ones((2, 3, 3)), "bias": jnp.ones(3)}
    updates, _ = tx.update(params, tx.init(params), params)
    nesterov = 0.9 * 0.1 / (1 - 0.9**2) + 1  # Adam's first update over its rate
    np.testing.assert_allclose(updates["bias"], -0.004 * nesterov, rtol=1e-4)
