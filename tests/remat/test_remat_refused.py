"""Remat policies that are refused, by name and with a way out."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_remat import TX, WIDTH, X, step_of

import zero_jax
from zero_jax.remat import policies


@pytest.mark.parametrize(
    ("remat", "said"),
    [
        ("blok", "nearest: 'block'"),
        ("block@hosst", "no place is called 'hosst'.*nearest: 'host'"),
        ("dots@host", "dots keeps its values on the device"),
        ("names", "followed by a colon"),
        ("block:h", "followed by a colon"),
        ("names:", "write each name once"),
        ("names:a,a@host", "write each name once"),
        ("block@partitioned", r"only data.*make_mesh\(model=2\)"),
        ("names:a@partitioned+host", r"only data.*make_mesh\(model=2\)"),
    ],
)
def test_policies_that_cannot_be_are_refused(remat, said):
    with pytest.raises(ValueError, match=said):
        zero_jax.Zero(zero_jax.make_mesh(), remat=remat)


def test_host_needs_pinned_host_memory():
    class Kind:
        kind = "device"

    class Device:
        def addressable_memories(self):
            return [Kind()]

    class Mesh:
        axis_names = ("data",)
        local_devices = [Device()]

    with pytest.raises(ValueError, match="has only device: leave out host"):
        policies.check("block@host", Mesh())
    policies.check("block", Mesh())


@pytest.mark.parametrize("name", ["linen", "scanned"])
def test_a_name_that_marks_nothing_is_refused_with_those_that_do(name):
    with pytest.raises(ValueError, match="no value of the loss is marked 'g'; names that are: h"):
        step_of(name, "names:h,g")


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("mark", ["gathered", "transposed", "computed"])
def test_a_marked_weight_is_refused(mark, scanned):
    def layer(x, w):
        w = {"gathered": w, "transposed": w.T, "computed": w @ w.T}[mark]
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

    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), 3, remat="names:weight")
    with pytest.raises(ValueError, match="would keep a weight.*'weight'.*parameters alone"):
        zero.plan(loss, TX, zero.abstract(make), X)


def prime_problem():
    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    return (lambda: jnp.zeros((7, WIDTH, WIDTH))), loss


def test_a_prime_number_of_scanned_layers_cannot_be_grouped():
    make, loss = prime_problem()
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), remat="block_sqrt")
    with pytest.raises(ValueError, match='scan over 7 layers.*use "block"'):
        zero.plan(loss, TX, zero.abstract(make), X)


def test_auto_leaves_out_what_cannot_be_grouped_and_says_so():
    make, loss = prime_problem()
    zero = zero_jax.Zero(zero_jax.make_mesh(), "auto", remat="block_sqrt", memory_limit=1e9)
    said = []
    with pytest.raises(ValueError, match="no candidate"):
        zero.choice(loss, TX, zero.abstract(make), X, report=said.append)
    assert any("left out" in line and "7 layers" in line for line in said)
