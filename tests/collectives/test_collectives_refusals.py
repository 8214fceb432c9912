"""Errors about precision and buckets; each message names the argument."""

import jax
import jax.numpy as jnp
import pytest

from zero_jax import Precision, Zero, make_mesh


def gradients_without_a_loss_scale():
    zero = Zero(make_mesh(), precision="fp16")
    params = zero.init(lambda: {"w": jnp.ones((8, 8))})
    zero.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]))(params, jnp.ones((8, 8)))


def zero_of(devices, stage, **option):
    mesh = make_mesh(devices=jax.devices()[:devices])
    return lambda: Zero(mesh, stage, precision=Precision(**option))


REFUSALS = [
    ("compute='bf15'.*'bf16'", lambda: Precision(compute="bf15")),
    ("compute=.*int32", lambda: Precision(compute=jnp.int32)),
    ("reduce='fp16'", lambda: Precision(reduce="fp16")),
    ("growth_interval=0", lambda: Precision(growth_interval=0)),
    ("gather='int4'.*int8", lambda: Precision("bf16", gather="int4")),
    ("scatter='fp8'.*int4", lambda: Precision("bf16", scatter="fp8")),
    ("loss_scale", gradients_without_a_loss_scale),
    # Nothing is communicated in integers there.
    ("gather", zero_of(8, 0, gather="int8")),
    ("scatter", zero_of(8, 0, scatter="int4")),
    ("gather", zero_of(1, 3, gather="int8")),
]


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("bucket", [4 * 8 - 1, -1, float("nan"), float("inf"), True, "1", None])
def test_a_bucket_holds_one_element_of_every_device(bucket):
    with pytest.raises(ValueError, match="bucket_bytes=.* 32 "):
        Zero(make_mesh(), bucket_bytes=bucket)
