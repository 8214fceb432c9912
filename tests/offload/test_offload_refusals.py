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

START = {"w": np.ones((8, 8), np.float32), "b": np.ones(3, np.float32)}
AFTER = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))
FILES = "a state in files"


def given(offload):
    return lambda *_: zero_on(2, offload=offload)


def calls(*steps, offload=FILES):
    """Calls methods of transformations one after the other."""

    def call(folder, monkeypatch):
        setting = f"optimizer:nvme={folder}" if offload == FILES else offload
        zero = zero_on(2, stage=3, offload=setting)
        params = zero.shard(START)
        for method, tx in steps:
            wrapped = zero.optimizer(tx)
            made = getattr(wrapped, method)(params)
        return zero, params, wrapped, made

    return call


def init(tx=ADAMW, offload=FILES):
    return calls(("init", tx), offload=offload)


def update(offload=FILES):
    def call(folder, _):
        _, params, tx, state = init(offload=offload)(folder, _)
        tx.update(jax.tree.map(jnp.ones_like, params), state, params)

    return call


def plan(folder, _):
    zero = zero_on(2, stage=3, offload=f"optimizer:nvme={folder}")
    loss = lambda params, x: jnp.mean(x @ params["w"])  # noqa: E731
    zero.plan(loss, ADAMW, zero.abstract(lambda: START), jnp.ones((4, 8)))


def not_created(folder, _):
    try:
        init(optax.lamb(1e-2))(folder / "x", _)
    finally:
        assert not (folder / "x").exists()


def on_a_file(folder, _):
    (folder / "file").write_text("")
    init()(folder / "file", _)


def full(folder, monkeypatch):
    calls = []

    def allocate(fd, offset, size):
        calls.append(size)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    try:
        init()(folder, monkeypatch)
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
    ("offload='optimiser'.*'optimizer'", given("optimiser")), ("offload='cpu'", given("cpu")),
    ("'param'.*'params'", given("optimizer,param")), ("'hots'.*'host'", given("optimizer:hots")),
    ("offload='optimizer:nvme'", given("optimizer:nvme")), ("offload=3", given(3)),
    ("host=/x", given("optimizer:host=/x")), ("params", given("params")),
    ("piece_bytes=100", lambda *_: Offload(optimizer=True, piece_bytes=100)),
    ("host_bytes=100", lambda *_: Offload(True, tier="nvme", directory="x", host_bytes=100)),
    ("Bare 1.*pinned_host", lambda *_: tiers.settle(parse("optimizer"), Bare())),
    ("^scale_by_trust_ratio ", init(optax.lamb(1e-2), STATE)),
    ("^scale_by_trust_ratio ", init(optax.lars(1e-2), MASTERS)),
    ("^scale_by_trust_ratio ", not_created),
    ("^clip_by_block_rms ", init(optax.adafactor(1e-2, min_dim_size_to_factor=4), STATE)),
    ("^clip_by_global_norm ", init(AFTER, STATE)),
    ("^partition ", init(optax.contrib.muon(1e-2), STATE)),
    ("apply", update(MASTERS)), ("train_step", update()), ("nvme", plan),
    ("/file.*slots", on_a_file), (r"[\d,]+ bytes", full),
    ("step 0", calls(("init", ADAMW), ("init", ADAMW))),
    ("process-00000", calls(("init", ADAMW), ("resume", optax.sgd(1e-2, momentum=0.9)))),
    ("process-00000", calls(("resume", ADAMW))),
    ("files", calls(("resume", ADAMW), offload=None)),
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
