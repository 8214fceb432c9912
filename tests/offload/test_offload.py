"""States in host memory: the same numbers, in pieces of bounded size.

On the CPU backend host memory is the device's own, so these tests show values and programs; the
bytes of an H100 are in test_offload_prove.py. Tolerance: 4 ulps of a leaf's largest element, since
XLA may contract a product and a sum in one of two programs; most runs agree to the bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import gpt_problem, train_zero, ulps, zoo_problem

import zero_jax
from zero_jax.offload import piece_stream, tiers
from zero_jax.offload.tiers import Offload

STEPS, ULPS = 4, 4
FP16 = zero_jax.Precision("fp16", initial_scale=1024.0)
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
# Pieces of a page: every leaf of more than 256 parameters on a device is cut.
STATE = Offload(optimizer=True, piece_bytes=4096)
MASTERS = Offload(optimizer=True, params=True, piece_bytes=4096)


def rates_of_its_own():
    """A closed-over array of the shape of each leaf."""

    def rated(x):
        return x * np.linspace(0.5, 1.5, x.size, dtype=np.float32).reshape(x.shape)

    return optax.stateless(lambda updates, params: jax.tree.map(rated, updates))


def adam(rate=1e-2, **more):
    return optax.adam(rate, eps=1e-4, **more)


# fmt: off
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4),
    "clip and adamw": lambda: ADAMW,
    "sgd with momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "schedule": lambda: adam(optax.cosine_decay_schedule(1e-2, STEPS)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 0.0, STEPS), eps=1e-4),
    "mask on ndim": lambda: optax.adamw(
        1e-2, eps=1e-4, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p), weight_decay=0.1),
    "MultiSteps": lambda: optax.MultiSteps(adam(), every_k_schedule=3),
    "bf16 moments": lambda: adam(mu_dtype=jnp.bfloat16),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), adam()),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "closed-over arrays": lambda: optax.chain(adam(), rates_of_its_own()),
    # Its momentum streams: its norms are of parameters, which stay on the device.
    "lars": lambda: optax.lars(1e-2),
}
# fmt: on


@functools.cache
def problem(name="zoo"):
    return gpt_problem() if name == "gpt" else zoo_problem(tiny=2)


@functools.cache
def plainly(n=4, stage=3):
    return train_zero(problem(), ADAMW, STEPS, n, stage=stage)[:2]


def zero_on(n, **settings):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), **settings)


def assert_equal(got, want):
    assert ulps(jnp.array(got[0]), jnp.array(want[0])) <= ULPS
    assert ulps(got[1], want[1]) <= ULPS
    assert want[0][-1] < want[0][0], "a run that does not learn compares little"


# fmt: off
CASES = [  # problem, setting, devices, stage, optimizer, further settings
    ("zoo", STATE, 3, 1, "lars", {"micro_batches": 2, "frozen": "prime"}),
    ("zoo", MASTERS, 2, 2, "clip and adamw", {"replica": 2, "precision": FP16}),
    *(pytest.param(*case, {}, marks=pytest.mark.slow) for case in (
        ("gpt", MASTERS, 3, 1, "clip and adamw"), ("gpt", STATE, 4, 3, "clip and adamw"),
        ("zoo", STATE, 3, 0, "clip and adamw"), ("zoo", MASTERS, 1, 3, "clip and adamw"),
        *(("zoo", MASTERS, 3, 3, name) for name in OPTIMIZERS if name != "lars"))),
]
# fmt: on
NAMES = ("name", "setting", "n", "stage", "optimizer", "more")


@pytest.mark.parametrize(NAMES, CASES, ids=lambda x: None if isinstance(x, dict) else str(x))
def test_offload_changes_no_value(name, setting, n, stage, optimizer, more):
    run = functools.partial(
        train_zero, problem(name), OPTIMIZERS[optimizer](), STEPS, n, stage=stage, **more
    )
    got, want = run(offload=setting), run()
    assert_equal(got, want)
    if "frozen" in more:
        np.testing.assert_array_equal(got[1]["prime_7x13"], problem().start["prime_7x13"])


def test_states_stay_in_host_memory_change_no_value_and_are_skipped():
    zero, made = zero_on(4, stage=3, offload=MASTERS), problem()
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    state, step, losses = tx.init(params), zero.train_step(made.loss, tx), []
    for _ in range(STEPS):
        held = params, state.inner[1][0].mu, state.inner[1][0].nu
        for leaf in jax.tree.leaves(held):
            assert leaf.sharding.memory_kind == (tiers.HOST if leaf.ndim else "device")
        before = jax.tree.leaves((params, state))
        params, state, metrics = step(params, state, made.batch)
        losses.append(float(metrics.loss))
        assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(state.guard))
        assert all(x.is_deleted() for x in before), "donated, so that it is updated in place"
    assert_equal((losses, zero.full(params)), plainly())
    before = jax.tree.map(np.asarray, (params, state.inner))
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), made.batch)
    params, state, metrics = step(params, state, bad)
    assert int(metrics.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, before, (params, state.inner))
    _, _, metrics = step(params, state, made.batch)
    assert np.isfinite(metrics.grad_norm) and int(metrics.skipped_in_a_row) == 0


def test_the_comparison_sees_a_lost_piece(monkeypatch):
    lost = []

    def boxes(shape, most):
        found = list(streaming_boxes(shape, most))
        lost.extend(found[1:2])
        return found[:1] + found[2:]

    streaming_boxes = piece_stream.boxes
    monkeypatch.setattr(piece_stream, "boxes", boxes)
    _, params, _ = train_zero(problem(), ADAMW, STEPS, 4, stage=3, offload=STATE)
    assert lost and ulps(params, plainly()[1]) > 1000


def test_the_four_lines_in_a_users_own_jit():
    zero, made = zero_on(4, stage=3, offload=STATE), problem()
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    state, grad_fn, losses = tx.init(params), zero.value_and_grad(made.loss), []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(STEPS):
        params, state, loss = step(params, state, made.batch)
        losses.append(float(loss))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.inner) if x.ndim} == {tiers.HOST}
    assert_equal((losses, zero.full(params)), plainly())


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (5, 3), (3, 1, 11), (2, 3, 4, 5)])
def test_boxes_cover_a_shape_once_in_pieces_of_at_most_so_many(shape):
    for most in (1, 4, 13, 1000):
        seen = np.zeros(shape, int)
        for starts, stops in piece_stream.boxes(shape, most):
            piece = tuple(map(slice, starts, stops))
            assert seen[piece].size <= most or shape == ()
            seen[piece] += 1
            # Contiguous: full below the first dim that is cut, one index above it.
            cut = [i for i, d in enumerate(shape) if stops[i] - starts[i] < d]
            assert all(stops[i] - starts[i] == 1 for i in cut[:-1])
        assert (seen == 1).all()
