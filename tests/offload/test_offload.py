"""States in host memory: the same numbers in pieces of bounded size, the check, and refusals.

On the CPU backend host memory is the device's own. Tolerance: 4 ulps of a leaf's largest element,
since XLA may contract a product and a sum in one of two programs; most runs agree to the bit.
"""

import dataclasses
import errno
import functools
import os
import runpy
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import nvme_run
import optax
import pytest
from jax.experimental import multihost_utils
from problems import compare, gpt_problem, train_zero, ulps, zero_on, zoo_problem

import zero_jax
from training.supervise import free_address
from zero_jax.commands.case import Case
from zero_jax.doctor import check_offload as main
from zero_jax.engine import offload_check
from zero_jax.models import gpt
from zero_jax.offload.host import HOST, Offload, parse, settle
from zero_jax.offload.nvme import FileArray, Store

STEPS, ULPS = 4, 4
FP16 = zero_jax.Precision("fp16", initial_scale=1024.0)
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
# Pieces of a page: every leaf of more than 256 parameters on a device is cut.
STATE = Offload(optimizer=True, piece_bytes=4096)
MASTERS = Offload(optimizer=True, params=True, piece_bytes=4096)
PROBLEMS = {"gpt": functools.cache(gpt_problem), "zoo": functools.cache(lambda: zoo_problem(2))}


def rates_of_its_own():
    """A closed-over array of the shape of each leaf."""
    rates = lambda x: np.linspace(0.5, 1.5, x.size, dtype=np.float32).reshape(x.shape)  # noqa: E731
    return optax.stateless(lambda updates, _: jax.tree.map(lambda x: x * rates(x), updates))


def adam(rate=1e-2, **more):
    return optax.adam(rate, eps=1e-4, **more)


OPTIMIZERS = {
    "clip and adamw": lambda: ADAMW, "sgd with momentum": lambda: optax.sgd(1e-2, momentum=0.9),
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
    "lars": lambda: optax.lars(1e-2)}  # fmt: skip
LARS = {"replica": 2, "precision": FP16, "grad_accum_steps": 2, "frozen": "prime"}
CASES = [  # problem, setting, devices, stage, optimizer, further settings
    ("zoo", STATE, 3, 1, "lars", LARS),
    *(pytest.param(*case, {}, marks=pytest.mark.slow) for case in (
        ("gpt", MASTERS, 3, 1, "clip and adamw"), ("gpt", STATE, 4, 3, "clip and adamw"),
        ("zoo", STATE, 3, 0, "clip and adamw"), ("zoo", MASTERS, 1, 3, "clip and adamw"),
        ("zoo", "in files", 4, 0, "noise"), ("zoo", "in files", 3, 3, "inject_hyperparams"),
        *(("zoo", MASTERS, 3, 3, name) for name in OPTIMIZERS if name != "lars"))),
]  # fmt: skip
NAMES = ("name", "setting", "n", "stage", "optimizer", "more")


@pytest.mark.parametrize(NAMES, CASES, ids=lambda x: None if isinstance(x, dict) else str(x))
def test_offload_changes_no_value(name, setting, n, stage, optimizer, more, tmp_path):
    p, tx = PROBLEMS[name](), OPTIMIZERS[optimizer]()
    run = functools.partial(train_zero, p, tx, STEPS, n, stage=stage, **more)
    got = run(offload=on(tmp_path) if setting == "in files" else setting)
    compare(got, run(), ULPS)
    if "frozen" in more:
        np.testing.assert_array_equal(got[1]["prime_7x13"], p.start["prime_7x13"])


def test_states_stay_in_host_memory_change_no_value_and_are_skipped():
    zero, made = zero_on(4, stage=3, offload=MASTERS), PROBLEMS["zoo"]()
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    state, step, losses = tx.init(params), zero.train_step(made.loss, tx), []
    for _ in range(STEPS):
        held = params, state.inner[1][0].mu, state.inner[1][0].nu
        for leaf in jax.tree.leaves(held):
            assert leaf.sharding.memory_kind == (HOST if leaf.ndim else "device")
        before = jax.tree.leaves((params, state))
        params, state, metrics = step(params, state, made.batch)
        losses.append(float(metrics.loss))
        assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(state.guard))
        assert all(x.is_deleted() for x in before), "donated, so that it is updated in place"
    want = train_zero(made, ADAMW, STEPS, 4, stage=3)
    compare((losses, zero.unshard(params)), want, ULPS)
    before = jax.tree.map(np.asarray, (params, state.inner))
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), made.batch)
    params, state, metrics = step(params, state, bad)
    assert int(metrics.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, before, (params, state.inner))
    _, _, metrics = step(params, state, made.batch)
    assert np.isfinite(metrics.grad_norm) and int(metrics.skipped_in_a_row) == 0


# States in files: the same numbers, bounded host memory, nothing lost when killed.

BOTH = "optimizer,params"


def on(folder, words="optimizer", **options):
    return dataclasses.replace(parse(f"{words}:nvme={folder}"), **{"piece_bytes": 4096} | options)


def test_a_state_in_files_changes_no_value_and_is_resumed(tmp_path, monkeypatch):
    made, zero = nvme_run.small_problem(), zero_on(3, stage=3, offload=on(tmp_path, BOTH))
    want = [train_zero(made, ADAMW, steps, 3)[:2] for steps in (2, 4)]
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    state, step = tx.init(params), zero.train_step(made.loss, tx)
    files, losses = state.inner, []
    for _ in range(2):
        params, state, metrics = step(params, state, made.batch)
        losses.append(float(metrics.loss))
    assert ulps(zero.unshard(params), want[0][1]) <= ULPS

    def moments():
        tree = files.unfolded()
        return [np.asarray(x.fetch()) for x in jax.tree.leaves(tree) if isinstance(x, FileArray)]

    # A step that is not finite is skipped.
    before = jax.tree.map(np.asarray, params), moments()
    params, state, metrics = step(params, state, made.batch.at[0].set(jnp.nan))
    assert int(metrics.skipped) == 1 and files.store.step == 3
    after = jax.tree.map(np.asarray, params), moments()
    jax.tree.map(np.testing.assert_array_equal, before, after)

    # The files alone are enough: parameters of another run are replaced.
    resumed = zero.optimizer(ADAMW)
    params, state = resumed.resume(zero.shard(jax.tree.map(np.zeros_like, made.start)))
    assert int(state.guard.consecutive) == 1
    step = zero.train_step(made.loss, resumed)
    for _ in range(2):
        earlier = zero.unshard(params), [np.asarray(x.fetch()) for x in state.inner.state]
        params, state, metrics = step(params, state, made.batch)
        losses.append(float(metrics.loss))
    compare((losses, zero.unshard(params)), want[1], ULPS)

    # Another process has not finished the last step: both resume from the one before.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.stack([x, x - 1]))
    params, state = zero.optimizer(ADAMW).resume(params)
    monkeypatch.undo()
    assert state.inner.store.step == 4
    found = zero.unshard(params), [np.asarray(x.fetch()) for x in state.inner.state]
    jax.tree.map(np.testing.assert_array_equal, earlier, found)


@pytest.mark.parametrize("words", ["optimizer", BOTH])
def test_a_state_four_times_the_host_budget_trains(words, tmp_path, monkeypatch):
    shape, budget = (128, 256), 1 << 16
    assert 8 * shape[0] * shape[1] == 4 * budget  # of this process, over its two devices
    zero = zero_on(2, stage=3, offload=on(tmp_path, words, host_bytes=budget, piece_bytes=1 << 26))
    params, tx = zero.init(lambda: {"w": jnp.ones(shape)}), zero.optimizer(ADAMW)
    step = zero.train_step(lambda params, x: jnp.mean((x @ params["w"] - 1.0) ** 2), tx)
    state, written, put = tx.init(params), [], FileArray.put
    monkeypatch.setattr(FileArray, "put", lambda *args: [written.append(args[3]), put(*args)])
    params, state, metrics = step(params, state, jnp.ones((4, shape[0])))
    # Two pieces, of two arrays that are read and two or three that are written.
    size = max(sum(x.nbytes for x in pieces.values()) for pieces in written)
    assert budget / 2 < 2 * (5 if words == BOTH else 4) * size <= budget
    assert np.isfinite(metrics.loss)


def run(folder, out, processes, kill_in=0):
    """The exit code of the last of some processes, which train for five steps."""
    env = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, nvme_run.__file__, str(folder), str(out), "5"]
    group, started = [free_address(), str(processes)], []
    for rank in range(processes):
        kill = str(kill_in if rank == processes - 1 else 0)
        args = [*command, kill, *[*group, str(rank)] * (processes > 1)]
        started.append(subprocess.Popen(args, env=env | {"JAX_PLATFORMS": "cpu"}))
    code = started.pop().wait(timeout=300)
    for process in started:
        if code != 0:
            process.kill()  # it waits for the one that died
        process.wait(timeout=300)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_in_the_middle_of_a_step_it_resumes_with_nothing_lost(tmp_path, processes):
    whole, broken = tmp_path / "whole.npz", tmp_path / "broken.npz"
    assert run(tmp_path / "a", whole, processes) == 0
    assert run(tmp_path / "b", broken, processes, kill_in=3) == -signal.SIGKILL
    assert not broken.exists()
    assert run(tmp_path / "b", broken, processes) == 0
    whole, broken = dict(np.load(whole)), dict(np.load(broken))
    assert (whole.pop("begin"), broken.pop("begin")) == (0, 2)
    jax.tree.map(np.testing.assert_array_equal, whole, broken)


def test_a_step_is_whole_or_does_not_exist(tmp_path):
    shapes = {"a": ((3, 2), np.float32), "b": ((5,), np.int8)}
    store = Store(tmp_path / "s", shapes, create=True)
    store.view(0, "a")[:] = 1
    store.view(0, "b")[:] = range(5)
    store.commit(0)
    store.view(1, "a")[1:] = 7  # and dies
    again = Store(tmp_path / "s", shapes, create=False)
    assert again.step == 0
    np.testing.assert_array_equal(again.view(0, "a"), np.ones((3, 2)))
    np.testing.assert_array_equal(again.view(0, "b"), range(5))
    store.commit(1)
    assert Store(tmp_path / "s", shapes, create=False).step == 1
    np.testing.assert_array_equal(store.view(1, "a")[2:], [[7, 7]])


# Bytes of programs compiled for H100; no GPU.

PIECE = 4 * 2**20
SLACK = 2**17  # scalars, tables of the runtime, pieces that are rounded up to XLA's 128 bytes
# Arrays of 4 bytes a parameter that are in host memory.
SETTINGS = {0: None, 2: Offload(True, piece_bytes=PIECE), 3: Offload(True, True, piece_bytes=PIECE)}


@functools.cache
def plan_of(words, layers):
    config = gpt.GPTConfig(layers=layers, width=512, heads=8, vocab=2048, seq=128)
    settings = {"stage": 3, "precision": "bf16", "remat": "block", "offload": SETTINGS[words]}
    zero = zero_jax.Zero(zero_jax.abstract_mesh(8), **settings)
    return Case(config, zero, "adamw", 8).plan(3, target="h100")


@pytest.mark.compile
@pytest.mark.parametrize("words", [2, 3])
@pytest.mark.parametrize("layers", [8, 32])
def test_8_or_12_bytes_a_parameter_move_from_the_device_to_the_host(layers, words):
    plan, plain = plan_of(words, layers), plan_of(0, layers)
    found, without, stored = plan.compiled, plain.compiled, plain.predicted.parameters
    assert found.host_bytes == words * stored == plan.predicted.host and without.host_bytes == 0
    assert found.argument_bytes == without.argument_bytes - found.host_bytes
    assert found.argument_bytes == plan.predicted.argument_bytes
    assert found.alias_bytes == without.alias_bytes - found.host_bytes
    # Masters come to the device while the model uses them, which at stage 3 is the whole step.
    masters = stored if words == 3 else 0
    assert found.temp_bytes <= without.temp_bytes + masters + 2 * PIECE + SLACK
    # What the tier saves is predicted to less than a piece. Of the step itself, which is small,
    # copies of one layer's fp32 gradients are not predicted, 11 MB.
    saved = without.total_bytes - found.total_bytes
    foreseen = plain.predicted.total_bytes - plan.predicted.total_bytes
    assert abs(saved - foreseen) < PIECE and abs(plain.error) < 0.13


# The check that offload changes no value on this machine.


def test_the_check_passes_here_and_fails_for_a_difference_and_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["offload", "--check"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("zero_jax.offload", run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("passed: ") == 2 and jax.__version__ in said
    ones, wrong = np.ones(2), lambda _: zero_on(2, offload="disk")
    off = lambda s: ones + s.offload.optimizer, lambda s: ones + (s.remat == "block@host")
    runs = [lambda _: ones, *off, wrong]
    for number, run in enumerate(runs):
        monkeypatch.setattr(offload_check, "_trained", run)
        assert main(["--check"]) == (number > 0)
        assert ("FAILED: " in capsys.readouterr().out) == (number > 0)
    with pytest.raises(SystemExit, match="2"):
        main([])


# Unsupported settings raise errors that name them.

START = {"w": np.ones((8, 8), np.float32), "b": np.ones(3, np.float32), "s": np.float32(1)}
AFTER = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))


def use(*calls, offload=None, update=False):
    """Calls methods of transformations, by default of a state in files; then `update`."""

    def call(folder, _):
        zero = zero_on(2, stage=3, offload=offload or f"optimizer:nvme={folder}")
        params = zero.shard(START)
        for method, tx in calls:
            wrapped = zero.optimizer(tx)
            state = getattr(wrapped, method)(params)
        if update:
            wrapped.update(jax.tree.map(jnp.ones_like, params), state, params)

    return call


START_ANEW = use(("init", ADAMW))


def plan(folder, _):
    zero = zero_on(2, stage=3, offload=f"optimizer:nvme={folder}")
    loss = lambda params, x: jnp.mean(x @ params["w"])  # noqa: E731
    zero.plan(loss, zero.optimizer(ADAMW), zero.eval_shape(lambda: START), jnp.ones((4, 8)))


def not_created(folder, _):
    try:
        use(("init", optax.lamb(1e-2)))(folder / "x", _)
    finally:
        assert not (folder / "x").exists()


def on_a_file(folder, _):
    (folder / "file").write_text("")
    START_ANEW(folder / "file", _)


def full(folder, monkeypatch):
    calls = []

    def allocate(fd, offset, size):
        calls.append(size)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    try:
        START_ANEW(folder, monkeypatch)
    finally:
        assert not [p for p in folder.rglob("*") if p.is_file()], "it is left empty"


# A mesh of devices that have their own memory only.
MEMORIES = [types.SimpleNamespace(kind="device")]
BARE = types.SimpleNamespace(device_kind="Bare 1", addressable_memories=lambda: MEMORIES)
BARE.devices = np.array([BARE])
REFUSALS = [
    *((named, lambda *_, given=given: zero_on(2, offload=given)) for named, given in (
        ("offload`='optimiser'.*optimizer", "optimiser"), ("param'.*params", "optimizer,param"),
        ("hots'.*host", "optimizer:hots"), ("offload`=3", 3),
        ("offload`='optimizer:nvme'", "optimizer:nvme"), ("host=/x", "optimizer:host=/x"),
        ("params", "params"))),
    ("piece_bytes`=100", lambda *_: Offload(optimizer=True, piece_bytes=100)),
    ("host_bytes`=100", lambda *_: Offload(True, tier="nvme", directory="x", host_bytes=100)),
    ("Bare 1.*pinned_host", lambda *_: settle(parse("optimizer"), BARE)),
    *((f"^{named} ", use(("init", tx), offload=offload)) for named, tx, offload in (
        ("scale_by_trust_ratio", optax.lars(1e-2), MASTERS),
        ("clip_by_block_rms", optax.adafactor(1e-2, min_dim_size_to_factor=4), STATE),
        ("clip_by_global_norm", AFTER, STATE),
        (r"\w+ \(in scale_by_muon,.*", optax.contrib.muon(1e-2), STATE))),
    ("^scale_by_trust_ratio ", not_created),
    ("apply", use(("init", ADAMW), offload=MASTERS, update=True)),
    ("train_step", use(("init", ADAMW), update=True)), ("nvme", plan), ("/file.*slots", on_a_file),
    (r"[\d,]+ bytes", full), ("step 0", use(("init", ADAMW), ("init", ADAMW))),
    ("process-00000", use(("init", ADAMW), ("resume", optax.sgd(1e-2, momentum=0.9)))),
    ("process-00000", use(("resume", ADAMW))),
    ("files", use(("resume", ADAMW), offload="none"))]  # fmt: skip


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_offload_refusals(tmp_path, monkeypatch, named, call):
    with pytest.raises(ValueError, match=named):
        call(tmp_path, monkeypatch)


def test_settings_are_read_and_written():
    assert parse("optimizer,params,activations:host") == Offload(True, True, True)
    assert parse("optimizer:auto").auto and str(parse("optimizer,params")) == "optimizer,params"
    assert parse(None) == parse("none") and not parse("activations").optimizer
    with pytest.warns(UserWarning, match="Bare 1"):
        assert not settle(parse("optimizer:auto"), BARE).optimizer


@pytest.mark.parametrize("guard", [True, False])
def test_a_state_in_files_sees_gradients_that_are_not_finite_without_the_guard(tmp_path, guard):
    offload = f"optimizer:nvme={tmp_path}"
    zero = zero_jax.Zero(zero_jax.make_mesh(), skip_nonfinite=guard, offload=offload)
    params, tx = zero.shard({"w": np.ones((8, 8), np.float32)}), zero.optimizer(optax.adam(1))
    step = zero.train_step(lambda p, x: jnp.mean(x @ p["w"]), tx)
    params, _, metrics = step(params, tx.init(params), jnp.full((8, 8), jnp.inf))
    assert int(metrics.skipped) == guard == np.isfinite(zero.unshard(params)["w"]).all()
