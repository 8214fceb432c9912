"""Checkpoints: equal on any mesh and stage, of any optimizer."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import ODD_GPT, Problem, gpt_problem, ulps, zoo_problem, zoo_without_empty
from test_parity import OPTIMIZERS

import zero_jax
from zero_jax.checkpoint import arrays, leaves
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.writer import Handler

# eps: as in test_parity, so that no rounding becomes a full step.
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
# Sums over other devices come in another order: as in test_parity.
ULPS = 256
EVEN_GPT = dataclasses.replace(ODD_GPT, width=16, heads=4, vocab=20)  # a model axis divides it


@functools.cache
def problem(name: str) -> Problem:
    return (
        zoo_problem() if name == "zoo" else gpt_problem(EVEN_GPT if name == "even gpt" else ODD_GPT)
    )


def zero_on(n, stage=3, model=1, **settings):
    mesh = zero_jax.make_mesh(model=model, devices=jax.devices()[: n * model])
    return zero_jax.Zero(mesh, stage, **settings)


def trained(zero, made, tx=ADAMW, steps=2):
    """Parameters and state after some steps, and the step."""
    wrapped = zero.optimizer(tx)
    params = zero.shard(made.start)
    state, step = wrapped.init(params), zero.train_step(made.loss, wrapped)
    for _ in range(steps):
        params, state, _ = step(params, state, made.batch)
    return params, state, step


def like(zero, made, tx=ADAMW):
    params = zero.abstract(made.make)
    return params, zero.optimizer(tx).init(params)


def whole(tree):
    """Every leaf as one logical numpy array, by path; all devices are in this process."""
    found = {}
    for leaf in leaves.leaves(tree):
        out = np.zeros(leaf.shape, jnp.dtype(leaf.stored_dtype))
        for starts, piece in leaf.pieces():
            out[tuple(slice(a, a + n) for a, n in zip(starts, piece.shape, strict=True))] = piece
        found[leaf.name] = out
    return found


def assert_bitwise(a, b):
    a, b = whole(a), whole(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved at N = 4, stage 3: the directory, the tree and the loss of the next step."""
    made = {}
    for name in ("gpt", "even gpt", "zoo"):
        folder = tmp_path_factory.mktemp(name)
        params, state, step = trained(zero_on(4), problem(name))
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(2, (params, state), config={"a": 1}, extra={"sample": 240})
        tree = jax.tree.map(jnp.copy, (params, state))
        made[name] = folder, tree, step(params, state, problem(name).batch)
    return made


PLACES = [
    *((n, stage, 1, None) for n in (1, 2, 3, 8) for stage in (0, 1, 2, 3)),
    (2, 1, 1, "optimizer"),
    (3, 3, 1, "optimizer,params"),
]
SPLIT = [
    *((n, stage, 2, None) for n in (1, 2, 4) for stage in (0, 1, 3)),
    (4, 2, 2, "optimizer,params"),
    (2, 3, 4, None),
]


@pytest.mark.parametrize(
    ("name", "n", "stage", "model", "offload"),
    [
        *((name, *place) for name in ("gpt", "zoo") for place in PLACES),
        *(("even gpt", *place) for place in SPLIT),
    ],
)
def test_bits_are_the_same_on_any_mesh_and_stage_and_back(
    saved, tmp_path, name, n, stage, model, offload
):
    folder, tree, _ = saved[name]
    elsewhere = zero_on(n, stage, model, offload=offload)
    with Checkpoints(folder, read_only=True) as checkpoints:
        there = checkpoints.restore(like(elsewhere, problem(name)), say=lambda _: None)
    manifest = Handler().restore(folder / "2" / "state")  # what Orbax alone can read
    assert manifest.step == 2 and manifest.arrays.keys() == whole(tree).keys()
    assert (there.step, there.config, there.extra) == (2, {"a": 1}, {"sample": 240})
    assert_bitwise(there.tree, tree)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, there.tree)
        back = checkpoints.restore(like(zero_on(4), problem(name)), say=lambda _: None)
    assert_bitwise(back.tree, tree)


@pytest.mark.parametrize(
    ("n", "stage", "offload"), [(4, 3, None), (1, 0, None), (3, 2, "optimizer"), (8, 1, None)]
)
@pytest.mark.parametrize("name", ["gpt", pytest.param("zoo", marks=pytest.mark.slow)])
def test_the_next_step_is_that_of_the_run_that_never_stopped(saved, name, n, stage, offload):
    folder, _, (params, state, metrics) = saved[name]
    zero = zero_on(n, stage, offload=offload)
    with Checkpoints(folder, read_only=True) as checkpoints:
        tree = checkpoints.restore(like(zero, problem(name)), say=lambda _: None).tree
    step = zero.train_step(problem(name).loss, zero.optimizer(ADAMW))
    mine = step(*tree, problem(name).batch)
    if n == 4:
        assert_bitwise(mine[:2], (params, state))
        assert mine[2].loss == metrics.loss
    else:
        np.testing.assert_allclose(mine[2].loss, metrics.loss, rtol=ULPS * 2**-23)
        assert ulps(zero.full(mine[0]), zero_on(4).full(params)) <= ULPS


@pytest.mark.slow
@pytest.mark.parametrize("words", ["optimizer", "optimizer,params"])
@pytest.mark.parametrize("name", ["gpt", "zoo"])
def test_a_state_in_files_is_saved_and_restored_like_any_other(saved, tmp_path, name, words):
    folder, tree, (params, _, _) = saved[name]
    made = problem(name)
    filed = zero_on(4, offload=f"{words}:nvme={tmp_path / 'nvme'}")
    tx = filed.optimizer(ADAMW)
    born = filed.init(made.make)
    with Checkpoints(folder, read_only=True) as checkpoints:
        there = checkpoints.restore((born, tx.init(born)), say=lambda _: None).tree
    with pytest.raises(ValueError, match="no state to go on from"):
        tx.resume(there[0])  # what was in the files is no longer what was committed
    assert_bitwise(there, tree)
    there = filed.train_step(made.loss, tx)(*there, made.batch)[:2]
    with Checkpoints(tmp_path / "new") as checkpoints:
        checkpoints.save(3, there)
        back = checkpoints.restore(like(zero_on(3, 1), made), say=lambda _: None).tree
    assert_bitwise(back, there)
    assert ulps(zero_on(3, 1).full(back[0]), zero_on(4).full(params)) <= ULPS
    tx.resume(there[0])


# States of other shapes than the parameters, or of several transformations.
TELLING = ("adamw", "adafactor", "muon", "MultiSteps", "mask on ndim")


@pytest.mark.parametrize(
    "optimizer",
    [
        name if name in TELLING else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_the_state_of_every_optimizer_comes_back(tmp_path, optimizer):
    tx = OPTIMIZERS[optimizer]()
    made = zoo_without_empty() if optimizer == "muon" else problem("zoo")
    params, state, step = trained(zero_on(3), made, tx, steps=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, (params, state))
        away = checkpoints.restore(like(zero_on(2, 1), made, tx), say=lambda _: None).tree
        checkpoints.save(2, away)
        back = checkpoints.restore(like(zero_on(3), made, tx), say=lambda _: None).tree
    assert_bitwise(back, (params, state))
    want = step(params, state, made.batch)
    assert_bitwise(step(*back, made.batch)[:2], want[:2])


def test_numbers_keys_and_other_dtypes_come_back(tmp_path):
    tree = {
        "count": 7,
        "rate": 0.25,
        "done": np.array(True),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 3),
        "bf16": jnp.arange(5, dtype=jnp.bfloat16),
        "fp8": jnp.arange(5, dtype=jnp.float8_e4m3fn),
        "empty": jnp.zeros((0, 3)),
        "zero": jnp.zeros(()),
        "host": np.arange(6).reshape(2, 3),
    }
    other = jax.tree.map(lambda x: x, tree) | {"count": 0, "rate": 0.0, "key": jax.random.key(0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
        back = checkpoints.restore(other, say=lambda _: None).tree
    assert (back["count"], back["rate"], type(back["count"])) == (7, 0.25, int)
    assert jax.random.key_impl(back["key"]) == jax.random.key_impl(tree["key"])
    assert_bitwise(back, tree)


def test_chunks_are_even_parts_of_a_shard():
    for shape, shard in itertools.product(
        [(36, 4096, 4096), (50304, 4096), (101,), (3, 50021, 999), (1 << 28,), (7, 5)], [1, 2, 3, 8]
    ):
        cut = int(np.argmax(shape))
        held = [-(-n // shard) if d == cut else n for d, n in enumerate(shape)]
        chunk = arrays.chunk_shape(shape, held, 4)
        assert all(c <= h for c, h in zip(chunk, held, strict=True))
        assert shard == 1 or held[cut] % chunk[cut] == 0, "or two processes write one chunk"
        assert np.prod(chunk) * 4 <= 1.2 * arrays.CHUNK_BYTES
