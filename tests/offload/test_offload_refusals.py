"""Unsupported settings of offload raise errors that name them."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_offload import ADAMW, MASTERS, STATE, zero_on

from zero_jax.offload import tiers
from zero_jax.offload.tiers import Offload, parse

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
    zero.plan(loss, ADAMW, zero.abstract(lambda: START), jnp.ones((4, 8)))


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


class Bare:
    """A mesh of devices that have their own memory only."""

    device_kind = "Bare 1"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "device"})]

    @property
    def devices(self):
        return np.array([self])


# fmt: off
REFUSALS = [
    *((named, lambda *_, given=given: zero_on(2, offload=given)) for named, given in (
        ("offload='optimiser'.*'optimizer'", "optimiser"), ("'param'.*'params'", "optimizer,param"),
        ("offload='cpu'", "cpu"), ("'hots'.*'host'", "optimizer:hots"), ("offload=3", 3),
        ("offload='optimizer:nvme'", "optimizer:nvme"), ("host=/x", "optimizer:host=/x"),
        ("params", "params"))),
    ("piece_bytes=100", lambda *_: Offload(optimizer=True, piece_bytes=100)),
    ("host_bytes=100", lambda *_: Offload(True, tier="nvme", directory="x", host_bytes=100)),
    ("Bare 1.*pinned_host", lambda *_: tiers.settle(parse("optimizer"), Bare())),
    *((f"^{named} ", use(("init", tx), offload=offload)) for named, tx, offload in (
        ("scale_by_trust_ratio", optax.lamb(1e-2), STATE),
        ("scale_by_trust_ratio", optax.lars(1e-2), MASTERS),
        ("clip_by_block_rms", optax.adafactor(1e-2, min_dim_size_to_factor=4), STATE),
        ("clip_by_global_norm", AFTER, STATE), ("partition", optax.contrib.muon(1e-2), STATE))),
    ("^scale_by_trust_ratio ", not_created),
    ("apply", use(("init", ADAMW), offload=MASTERS, update=True)),
    ("train_step", use(("init", ADAMW), update=True)),
    ("nvme", plan), ("/file.*slots", on_a_file), (r"[\d,]+ bytes", full),
    ("step 0", use(("init", ADAMW), ("init", ADAMW))),
    ("process-00000", use(("init", ADAMW), ("resume", optax.sgd(1e-2, momentum=0.9)))),
    ("process-00000", use(("resume", ADAMW))),
    ("files", use(("resume", ADAMW), offload="none")),
]
# fmt: on


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refusals(tmp_path, monkeypatch, named, call):
    with pytest.raises(ValueError, match=named):
        call(tmp_path, monkeypatch)


def test_settings_are_read_and_written():
    assert parse("optimizer,params,activations:host") == Offload(True, True, True)
    assert parse("optimizer:auto").auto and str(parse("optimizer,params")) == "optimizer,params"
    assert parse(None) == parse("none") and not parse("activations").states
    with pytest.warns(UserWarning, match="Bare 1"):
        assert not tiers.settle(parse("optimizer:auto"), Bare()).states
