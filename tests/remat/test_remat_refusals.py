"""Unsupported remat policies raise errors that name them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_remat import TX, WIDTH, X, step_of

import zero_jax
from zero_jax.remat import layer_groups, policies


class Bare:
    """A mesh, and its only device, without host memory."""

    axis_names = ("data",)

    @property
    def local_devices(self):
        return [self]

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "device"})]


def zero(remat, **options):
    return lambda: zero_jax.Zero(zero_jax.make_mesh(), remat=remat, **options)


def marked(mark, scanned):
    """A weight is marked by the name."""

    def layer(x, w):
        return jnp.tanh(x @ checkpoint_name(mark(w), "weight")), None

    def loss(params, x):
        if scanned:
            return jnp.mean(jax.lax.scan(layer, x, params)[0])
        for w in params:
            x = layer(x, w)[0]
        return jnp.mean(x)

    stack = jnp.zeros((4, WIDTH, WIDTH))
    make = lambda: stack if scanned else list(stack)  # noqa: E731
    return lambda: step_of("marked", "names:weight", loss=loss, make=make)


def prime_loss(params, x):
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def prime():
    return jnp.zeros((7, WIDTH, WIDTH))


# fmt: off
REFUSALS = [
    ("remat='blok'.*'block'", zero("blok")),
    ("'hosst'.*'host'", zero("block@hosst")),
    *((f"remat='{re.escape(text)}'", zero(text)) for text in (
        "dots@host", "names", "block:h", "names:", "names:a,a@host", "names:a@partitioned+host")),
    ("block@partitioned.*data.*model=2", zero("block@partitioned")),
    ("activations.*remat='none'", zero("none", offload="activations")),
    ("block@host.*device", lambda: policies.check("block@host", Bare())),
    *(("'g'.*: h", lambda name=name: step_of(name, "names:h,g")) for name in ("linen", "scanned")),
    *(("'weight'", marked(mark, scanned)) for mark, scanned in (
        (lambda w: w, False), (lambda w: w.T, True), (lambda w: w @ w.T, False),
        (lambda w: w @ w.T, True))),
    ("block_sqrt.*7 layers", lambda: step_of("p", "block_sqrt", loss=prime_loss, make=prime)),
]
# fmt: on


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refusals(named, call):
    with pytest.raises(ValueError, match=named):
        call()


def test_auto_leaves_out_layers_that_cannot_be_grouped():
    assert [layer_groups.size_of(layers) for layers in (3, 36, 98)] == [1, 6, 7]
    policies.check("block", Bare())  # needs no host memory
    auto, said = zero("block_sqrt", stage="auto", memory_limit=1e9)(), []
    with pytest.raises(ValueError, match="candidate"):
        auto.choice(prime_loss, TX, auto.abstract(prime), X, report=said.append)
    assert any("7 layers" in line for line in said)
