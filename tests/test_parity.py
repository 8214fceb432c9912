"""Ten steps under Zero equal ten steps of plain optax on one device.

fp32 tolerance: 256 ulps of a leaf's largest element after ten steps. Sums over devices are taken
in another order, which moves a gradient by an ulp or two of its largest term, and ten steps and
the optimizers' divisions amplify it. A wrong mean, norm or padding is off by 10^4 ulps or more:
see the guards at the end.
"""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from problems import (
    PROBLEMS,
    ROWS,
    Problem,
    train_plain,
    train_zero,
    ulps,
    zoo_problem,
    zoo_without_empty,
)

import zero_jax
from zero_jax.collectives import gather_scatter

STEPS = 10
ULPS = 256
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)

# eps: the gradient of an attention key's bias is zero but for rounding, and Adam would turn
# that rounding into full steps. ReLU has a kink, which a rounding can cross: small steps there.
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
TX = {
    "gpt": ADAM,
    "zoo": ADAM,
    "resnet": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9)),
}


def by_rank(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4),
    "lion": lambda: optax.lion(1e-3),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-4),
    "lars": lambda: optax.lars(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1e-1)),
    "mask on ndim": lambda: optax.adamw(
        1e-2, eps=1e-4, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p), weight_decay=0.1
    ),
    "mask on path": lambda: optax.masked(
        optax.sgd(1e-2),
        lambda p: jax.tree_util.tree_map_with_path(lambda path, _: "tiny" not in str(path), p),
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2, eps=1e-4), "vector": optax.sgd(1e-2)}, by_rank
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 0.0, STEPS), eps=1e-4
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2, eps=1e-4), every_k_schedule=3),
    "EMA": lambda: optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, STEPS), eps=1e-4),
}


@functools.cache
def problem(name: str) -> Problem:
    return {**PROBLEMS, "zoo without empty": zoo_without_empty}[name]()


@functools.cache
def plain(name: str, optimizer: str | None = None):
    tx = OPTIMIZERS[optimizer]() if optimizer else TX[name]
    return train_plain(problem(name), tx, STEPS)


def assert_parity(name, tx, n, want, **settings):
    losses, params, _ = train_zero(problem(name), tx, STEPS, n, **settings)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS
    assert want[0][-1] < want[0][0], "a run that does not learn compares little"


# Where nothing divides: stages 1 and 3; on all devices: stage 3. With -m slow all.
USUAL = [(3, 1), (3, 3), (8, 3)]
EVERY = itertools.product((1, 2, 3, 4, 5, 8), range(4))


@pytest.mark.parametrize(("n", "stage"), [p if p in USUAL else SLOW(*p) for p in EVERY])
@pytest.mark.parametrize("name", PROBLEMS)
def test_ten_steps_equal_plain_optax(name, n, stage):
    assert_parity(name, TX[name], n, plain(name), stage=stage)


@pytest.mark.slow
def test_seven_devices_and_two_hundred_tiny_leaves():
    zoo = zoo_problem(tiny=200)
    zoo.batch = jax.tree.map(lambda x: x[:112], zoo.batch)  # 120 rows have no factor 7
    want = train_plain(zoo, optax.sgd(1e-2), 3)
    losses, params, _ = train_zero(zoo, optax.sgd(1e-2), 3, 7, stage=3)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "block"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_remat_changes_no_value(stage, remat):
    assert_parity("gpt", ADAM, 3, plain("gpt"), stage=stage, remat=remat)


# Every stage, and four N, of which 3 and 5 pad most leaves.
@pytest.mark.parametrize(("stage", "n"), [SLOW(0, 2), SLOW(1, 3), SLOW(2, 5), (3, 8)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_exact(optimizer, stage, n):
    tx = OPTIMIZERS[optimizer]()
    name = "zoo without empty" if optimizer == "muon" else "zoo"
    assert_parity(name, tx, n, plain(name, optimizer), stage=stage)


@pytest.mark.parametrize("k", [2, SLOW(3)])
@pytest.mark.parametrize("stage", [SLOW(0), 1, SLOW(2), 3])
def test_micro_batches_equal_one_batch(stage, k):
    assert_parity("gpt", ADAM, 4, plain("gpt"), stage=stage, micro_batches=k)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unequal_weights_are_divided_once_by_the_global_weight(stage):
    rows = jax.random.normal(jax.random.key(1), (24, 5))
    # From 0 to 23 tokens a row: devices and micro-batches of very different weight.
    batch = {"x": rows, "mask": jnp.arange(24.0)}

    def loss(params, batch):
        error = jnp.square(batch["x"] @ params["w"]).sum(1)
        return zero_jax.Weighted(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"]))

    weighted = Problem(lambda: {"w": jnp.ones((5, 6))}, loss, batch)
    want = train_plain(weighted, optax.sgd(1e-2), 3)
    for k in (1, 2, 3):
        losses, params, _ = train_zero(
            weighted, optax.sgd(1e-2), 3, 4, stage=stage, micro_batches=k
        )
        assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
        assert ulps(params, want[1]) < ULPS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "zoo"])
def test_in_bf16_the_stages_agree(name):
    """bf16 has 8 bits: one ulp is 2^-8; runs differ by summation order only."""
    settings = {"precision": zero_jax.Precision("bf16", "bf16")}
    runs = [
        train_zero(problem(name), ADAM, STEPS, 4, stage=stage, **settings) for stage in range(4)
    ]
    for losses, params, _ in runs[1:]:
        np.testing.assert_allclose(losses, runs[0][0], rtol=2**-7)
        assert ulps(params, runs[0][1]) * np.finfo(np.float32).eps < 0.05
    fp32 = plain(name)
    np.testing.assert_allclose(runs[3][0], fp32[0], rtol=0.05)
    assert ulps(runs[3][1], fp32[1]) > ULPS, "bf16 equal to fp32: was anything cast?"


def test_same_seed_twice_is_bitwise_equal():
    runs = [train_zero(problem("zoo"), ADAM, 3, 5, stage=3)[1] for _ in range(2)]
    assert ulps(*runs) == 0


# Guards: the comparison above catches what it is there to catch.


def test_a_gradient_counted_twice_is_caught(monkeypatch):
    honest = gather_scatter.reduce_scatter
    monkeypatch.setattr(gather_scatter, "reduce_scatter", lambda *args: 2 * honest(*args))
    _, params, _ = train_zero(zoo_problem(), optax.sgd(1e-2), STEPS, 4, stage=1)
    want = train_plain(zoo_problem(), optax.sgd(1e-2), STEPS)
    assert ulps(params, want[1]) > 100 * ULPS


def test_a_mean_over_devices_instead_of_rows_is_caught():
    """Dividing each device's sum by its own weight is the classic averaging bug."""
    rows = jax.random.normal(jax.random.key(1), (8, 5))
    weights = jnp.array([1.0, 9.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0])
    batch = (rows, weights)

    def pair(params, batch):
        error = jnp.square(batch[0] @ params["w"]).sum(1)
        return zero_jax.Weighted(jnp.sum(error * batch[1]), jnp.sum(batch[1]))

    def mean(params, batch):
        total, weight = pair(params, batch)
        return total / weight

    make = lambda: {"w": jnp.ones((5, 4))}  # noqa: E731
    want = train_plain(Problem(make, pair, batch), optax.sgd(1e-2), 3)
    wrong = train_zero(Problem(make, mean, batch), optax.sgd(1e-2), 3, 4, stage=3)
    assert ulps(wrong[1], want[1]) > 100 * ULPS


def test_a_local_clip_norm_is_caught(monkeypatch):
    """Inside shard_map, optax clips by the norm of this device's shards; that is refused."""
    module = importlib.import_module("zero_jax.engine.partitioned")
    monkeypatch.setattr(module, "require_elementwise", lambda *args: None)
    tx, zoo = zero_jax.partitioned(OPTIMIZERS["clip"]()), problem("zoo")

    def steps(params, batch):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(zoo.loss)(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), None, STEPS)[0][0]

    mesh = zero_jax.make_mesh(devices=jax.devices()[:4])
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    run = jax.jit(jax.shard_map(steps, mesh=mesh, check_vma=False, **specs))
    wrong = run(jax.tree.map(jnp.asarray, zoo.start), zoo.batch)
    assert ulps(wrong, plain("zoo", "clip")[1]) > 20 * ULPS


def test_rows_reach_every_device():
    """A run whose devices all see the same rows would pass a test with constant data."""
    assert len(np.unique(np.asarray(problem("gpt").batch), axis=0)) > ROWS // 2
