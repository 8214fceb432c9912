"""Errors about optimizer state in 8 and 16 bits; each message names the argument."""

import tempfile

import jax
import jax.numpy as jnp
import optax
import pytest
from test_narrow import drawn, zero_of

import zero_jax

ADAMW = optax.adamw(1e-2)


def initialise(tx, **settings):
    zero = zero_jax.Zero(zero_jax.make_mesh(), **settings)
    return zero.optimizer(tx).init(zero.abstract(lambda: {"w": jnp.zeros((64, 128))}))


def choose():
    zero = zero_jax.Zero(zero_jax.make_mesh(), "auto", states="8bit", memory_limit=1e9)
    params = zero.abstract(lambda: {"w": jnp.zeros((64, 64))})
    rows = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    zero.choose(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.adafactor(1e-2), params, rows)


def update(kept):
    zero, own = zero_of(2)
    params = zero.shard(drawn(0))
    own.update(params, zero_of(2, states=kept)[1].init(params), params)


def restate(make):
    zero, own = zero_of(2, tx=ADAMW)
    params = zero.shard(drawn(0))
    own.restated(make(params), params)


def momentum(params):
    return zero_of(2, states="fp32", tx=optax.sgd(1e-2, momentum=0.9))[1].init(params)


NVME = f"optimizer:nvme={tempfile.gettempdir()}"
REFUSALS = [
    ("states='4bit'", lambda: initialise(ADAMW, states="4bit")),
    ("nvme", lambda: initialise(ADAMW, states="8bit", offload=NVME)),
    ("8bit", lambda: initialise(optax.contrib.muon(1e-2), states="8bit")),
    ("clip_by_block_rms", lambda: initialise(optax.adafactor(1e-2), states="bf16")),
    ("clip_by_block_rms", choose),
    ("fp32", lambda: update("fp32")),
    ("bf16", lambda: update("bf16")),
    ("state", lambda: restate(lambda _: ADAMW.init(drawn(0)))),
    ("trace", lambda: restate(momentum)),
]


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()
