"""Unsupported remat policies raise errors that name them."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_remat import TX, WIDTH, X, step_of

import zero_jax
from zero_jax.remat import policies


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


def marked(kind, scanned):
    """A weight is marked by the name."""

    def layer(x, w):
        w = {"gathered": w, "transposed": w.T, "computed": w @ w.T}[kind]
        return jnp.tanh(x @ checkpoint_name(w, "weight")), None

    def loss(params, x):
        if scanned:
            return jnp.mean(jax.lax.scan(layer, x, params)[0])
        for w in params:
            x = layer(x, w)[0]
        return jnp.mean(x)

    def make():
        stack = jnp.zeros((4, WIDTH, WIDTH))
        return stack if scanned else list(stack)

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
    *((f"remat='{text}'", zero(text))
      for text in ("dots@host", "names", "block:h", "names:", "names:a,a@host")),
    *((r"only data.*model=2", zero(text)) for text in ("block@partitioned",
                                                       "names:a@partitioned+host")),
    ("activations.*remat='none'", zero("none", offload="activations")),
    ("block@host.*device", lambda: policies.check("block@host", Bare())),
    *(("'g'.*: h", lambda name=name: step_of(name, "names:h,g")) for name in ("linen", "scanned")),
    ("'weight'", marked("gathered", False)),
    ("'weight'", marked("transposed", True)),
    ("'weight'", marked("computed", False)),
    ("'weight'", marked("computed", True)),
    ("block_sqrt.*7 layers", lambda: step_of("p", "block_sqrt", loss=prime_loss, make=prime)),
]
# fmt: on


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refusals(named, call):
    with pytest.raises(ValueError, match=named):
        call()


def test_block_needs_no_host_memory():
    policies.check("block", Bare())


def test_auto_leaves_out_layers_that_cannot_be_grouped():
    auto, said = zero("block_sqrt", stage="auto", memory_limit=1e9)(), []
    with pytest.raises(ValueError, match="candidate"):
        auto.choice(prime_loss, TX, auto.abstract(prime), X, report=said.append)
    assert any("7 layers" in line for line in said)
