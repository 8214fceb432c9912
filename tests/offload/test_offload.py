"""States in host memory: the same numbers, in pieces of bounded size, or a refusal by name.

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
from problems import PROBLEMS, train_zero, ulps, zoo_without_empty

import zero_jax
from zero_jax.offload import piece_stream, streamable, tiers
from zero_jax.offload.tiers import Offload
from zero_jax.sharding.cuts import Splitter, state_splits

STEPS, ULPS = 4, 4
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
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


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4),
    "clip and adamw": lambda: ADAMW,
    "sgd with momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, STEPS), eps=1e-4),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 0.0, STEPS), eps=1e-4
    ),
    "mask on ndim": lambda: optax.adamw(
        1e-2, eps=1e-4, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p), weight_decay=0.1
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2, eps=1e-4), every_k_schedule=3),
    "bf16 moments": lambda: optax.adamw(1e-2, eps=1e-4, mu_dtype=jnp.bfloat16),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2, eps=1e-4)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2, eps=1e-4), 3),
    "closed-over arrays": lambda: optax.chain(optax.adam(1e-2, eps=1e-4), rates_of_its_own()),
}


@functools.cache
def problem(name):
    return {**PROBLEMS, "zoo without empty": zoo_without_empty}[name]()


@functools.cache
def plainly(name, optimizer, n, stage):
    losses, params, _ = train_zero(problem(name), OPTIMIZERS[optimizer](), STEPS, n, stage=stage)
    return losses, params


def zero_on(n, **settings):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), **settings)


def assert_equal_to_no_offload(name, optimizer, n, stage, setting):
    want = plainly(name, optimizer, n, stage)
    losses, params, _ = train_zero(
        problem(name), OPTIMIZERS[optimizer](), STEPS, n, stage=stage, offload=setting
    )
    assert ulps(jnp.array(losses), jnp.array(want[0])) <= ULPS
    assert ulps(params, want[1]) <= ULPS
    assert want[0][-1] < want[0][0], "a run that does not learn compares little"


@pytest.mark.parametrize(("n", "stage"), [SLOW(1, 3), SLOW(3, 0), (3, 1), SLOW(3, 2), (4, 3)])
@pytest.mark.parametrize(
    ("name", "setting"), [("gpt", MASTERS), ("zoo", STATE), ("zoo", MASTERS)], ids=str
)
def test_offload_changes_no_value(name, n, stage, setting):
    assert_equal_to_no_offload(name, "clip and adamw", n, stage, setting)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_that_streams_is_exact(optimizer):
    assert_equal_to_no_offload("zoo without empty", optimizer, 3, 3, MASTERS)


def test_the_comparison_sees_a_lost_piece(monkeypatch):
    lost = []

    def boxes(shape, most):
        found = list(streaming_boxes(shape, most))
        lost.extend(found[1:2])
        return found[:1] + found[2:]

    streaming_boxes = piece_stream.boxes
    monkeypatch.setattr(piece_stream, "boxes", boxes)
    want = plainly("zoo", "clip and adamw", 4, 3)
    _, params, _ = train_zero(problem("zoo"), ADAMW, STEPS, 4, stage=3, offload=STATE)
    assert lost and ulps(params, want[1]) > 1000


REFUSED = {
    "scale_by_trust_ratio": lambda: optax.lamb(1e-2),
    "clip_by_block_rms": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "clip_by_global_norm": lambda: optax.chain(
        optax.scale_by_adam(), optax.clip_by_global_norm(1.0), optax.scale(-1e-2)
    ),
    "partition": lambda: optax.contrib.muon(1e-2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_whole_state_is_refused_by_name_before_memory_is_taken(name):
    zero = zero_on(3, offload="optimizer")
    params = zero.abstract(problem("zoo without empty").make)
    with pytest.raises(ValueError, match=f"^{name} can't be updated in pieces.*leave offload out"):
        zero.optimizer(REFUSED[name]()).init(params)


def test_lars_streams_its_momentum_because_its_norms_are_of_masters_on_the_device():
    run = functools.partial(train_zero, problem("zoo"), optax.lars(1e-2), STEPS, 3, stage=3)
    assert ulps(run(offload=STATE)[1], run()[1]) <= ULPS
    with pytest.raises(ValueError, match="scale_by_trust_ratio"):
        run(offload=MASTERS)


# What rests where.


@pytest.mark.parametrize("setting", ["optimizer", "optimizer,params"])
def test_states_rest_in_host_memory_and_stay_there(setting):
    zero = zero_on(4, stage=3, offload=setting)
    made = problem("zoo")
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    state = tx.init(params)
    step = zero.train_step(made.loss, tx)
    for _ in range(2):
        for name, tree, held in (
            ("params", params, "params" in setting),
            ("moments", (state.inner[1][0].mu, state.inner[1][0].nu), True),
            ("guard", state.guard, False),
        ):
            for leaf in jax.tree.leaves(tree):
                kind = tiers.HOST if held and leaf.ndim else "device"
                assert leaf.sharding.memory_kind == kind, name
        before = jax.tree.leaves((params, state))
        params, state, _ = step(params, state, made.batch)
    assert all(x.is_deleted() for x in before), "donated, so that it is updated in place"


def test_the_four_lines_in_a_users_own_jit():
    def run(setting):
        zero, made = zero_on(3, stage=2, offload=setting), problem("zoo")
        params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
        state, grad_fn = tx.init(params), zero.value_and_grad(made.loss)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, batch):
            loss, grads = grad_fn(params, batch)
            if zero.offload.params:
                return *tx.apply(grads, opt_state, params), loss
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        for _ in range(STEPS):
            params, state, loss = step(params, state, made.batch)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.inner) if x.ndim}
        assert kinds == {tiers.HOST if setting else "device"}
        return loss, zero.full(params)

    want = run(None)
    for setting in (STATE, MASTERS):
        assert ulps(run(setting), want) <= ULPS


def test_masters_in_host_memory_are_not_updated_by_optax():
    zero = zero_on(2, offload=MASTERS)
    params, tx = zero.shard({"w": np.ones((4, 4), np.float32)}), zero.optimizer(ADAMW)
    grads = jax.tree.map(jnp.ones_like, zero.full(params))
    with pytest.raises(ValueError, match=r"write params, opt_state = tx\.apply"):
        tx.update(grads, tx.init(params), params)


def test_a_skipped_step_changes_no_streamed_state():
    zero = zero_on(4, stage=3, offload=MASTERS)
    made = problem("zoo")
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    state, step = tx.init(params), zero.train_step(made.loss, tx)
    params, state, _ = step(params, state, made.batch)
    before = jax.tree.map(np.asarray, (params, state.inner))
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), made.batch)
    params, state, metrics = step(params, state, bad)
    assert int(metrics.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, before, (params, state.inner))
    _, _, metrics = step(params, state, made.batch)
    assert np.isfinite(metrics.grad_norm) and int(metrics.skipped_in_a_row) == 0


def test_frozen_leaves_rest_with_the_masters_and_do_not_change():
    made = problem("zoo")
    settings = {"stage": 3, "frozen": "giant"}
    want = train_zero(made, ADAMW, STEPS, 3, **settings)[1]
    got = train_zero(made, ADAMW, STEPS, 3, offload=MASTERS, **settings)[1]
    assert ulps(got, want) <= ULPS
    np.testing.assert_array_equal(got["giant_13x101"], made.start["giant_13x101"])


@pytest.mark.parametrize("settings", [{"replica": 2}, {"precision": FP16}, {"micro_batches": 2}])
def test_replicas_loss_scales_and_micro_batches_change_nothing(settings):
    def run(setting):
        made, more = problem("zoo"), dict(settings)
        mesh = zero_jax.make_mesh(replica=more.pop("replica", 1), devices=jax.devices()[:4])
        zero = zero_jax.Zero(mesh, stage=3, offload=setting, **more)
        params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
        state, step = tx.init(params), zero.train_step(made.loss, tx)
        for _ in range(2):
            params, state, metrics = step(params, state, made.batch)
        assert int(metrics.skipped) == 0
        return zero.full(params)

    assert ulps(run(MASTERS), run(None)) <= ULPS


@pytest.mark.slow
def test_the_chosen_stage_keeps_the_setting():
    made = problem("zoo")
    zero = zero_on(4, stage="auto", offload="optimizer", memory_limit=1e9)
    shapes = zero.abstract(made.make)
    chosen = zero.choice(made.loss, ADAMW, shapes, made.batch, report=lambda _: None).chosen
    leaves = [x for x in jax.tree.leaves(jax.eval_shape(made.make)) if x.ndim]
    assert chosen.plan.predicted.host >= 8 * sum(x.size for x in leaves) / 4
    assert chosen.plan.predicted.optimizer_state < 100


# Pieces.


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (5, 3), (3, 1, 11), (2, 3, 4, 5)])
@pytest.mark.parametrize("most", [1, 4, 13, 1000])
def test_boxes_cover_a_shape_once_in_pieces_of_at_most_so_many(shape, most):
    seen = np.zeros(shape, int)
    for starts, stops in piece_stream.boxes(shape, most):
        piece = tuple(map(slice, starts, stops))
        assert seen[piece].size <= most or shape == ()
        seen[piece] += 1
        # Contiguous: whole below the first dim that is cut, one index above it.
        cut = [i for i, d in enumerate(shape) if stops[i] - starts[i] < d]
        assert all(stops[i] - starts[i] == 1 for i in cut[:-1])
    assert (seen == 1).all()


def test_what_streams_are_the_leaves_that_mirror_a_parameter():
    params = jax.eval_shape(problem("zoo").make)
    cuts = Splitter(4)(params)
    state = jax.eval_shape(ADAMW.init, params)
    flags = streamable.offloaded(state_splits(state, params, cuts), cuts)
    moved = sum(x.size for x, f in zip(jax.tree.leaves(state), flags, strict=True) if f)
    whole = sum(x.size for x in jax.tree.leaves(params))
    scalars = sum(x.ndim == 0 for x in jax.tree.leaves(params))
    assert moved == 2 * (whole - scalars)
