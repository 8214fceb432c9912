"""Sharding annotations in a loss change no value; one that JAX does not take is an error."""

import inspect
import re

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax

W = jax.random.normal(jax.random.key(0), (8, 8)) / 2
X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2


def zero_of(stage=3, model=1):
    mesh = zero_jax.make_mesh(model=model, devices=jax.devices()[:4])
    return zero_jax.Zero(mesh, stage, model_specs={".*": P(None, "model")} if model > 1 else None)


def fsdp(devices=4, types=AUTO):
    mesh = jax.make_mesh((devices, 1), ("fsdp", "tensor"), types, devices=jax.devices()[:devices])
    return NamedSharding(mesh, P("fsdp"))


def rows(x, devices=4):
    return lax.with_sharding_constraint(x, fsdp(devices))


def named(x, mesh=None):
    with nn.logical_axis_rules((("batch", "fsdp"), ("embed", "tensor"))):
        return nn.with_logical_constraint(x, ("batch", "embed"), mesh=mesh)


def nested(x):
    """In the bodies of a layer, of a loop and of a branch; of two meshes in one operation."""
    x = jax.checkpoint(lambda x: rows(jnp.sin(x)))(x)
    x = lax.scan(lambda c, _: (rows(c) + rows(c, 1), None), x, None, length=2)[0]
    return lax.cond(jnp.sum(x) < 1e9, rows, jnp.sin, x)


def looped(kind):
    """Equinox compares types of arrays, which in a `shard_map` have the mesh in them."""

    def loop(x, w):
        step = lambda c: (jnp.tanh(c[0] @ w), c[1] + 1)  # noqa: E731
        start = x, jnp.asarray(0)
        return eqxi.while_loop(lambda c: c[1] < 2, step, start, max_steps=4, kind=kind)[0]

    return loop, lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w)


def same(x, *_):
    return x


# fmt: off
# Functions of activations and their parameter: with annotations, and without.
FORMS = {
    "four devices": (lambda x, w: rows(x), same),
    "one device": (lambda x, w: rows(x, 1), same),
    "rows over data": (lambda x, w: lax.with_sharding_constraint(
        x, NamedSharding(zero_of().mesh, P("data"))), same),
    "logical, a mesh": (lambda x, w: named(x, fsdp().mesh), same),
    "logical, no mesh": (lambda x, w: named(x), same),
    "device_put": (lambda x, w: jax.device_put(x, fsdp()), same),
    "jit": (lambda x, w: jax.jit(jnp.sin, in_shardings=fsdp())(x), lambda x, w: jnp.sin(x)),
    "nested": (lambda x, w: nested(x), lambda x, w: 4 * jnp.sin(x)),
    "checkpointed loop": looped("checkpointed"),
    "bounded loop": looped("bounded"),
}
# A mesh with a model axis is visible to Flax, whose rules then have to name its axes.
VISIBLE = ["four devices", "logical, a mesh", "nested"]
UNSUPPORTED = {
    "with_sharding_constraint": lambda x: lax.with_sharding_constraint(x, P("data")),
    "reshard": lambda x: jax.sharding.reshard(x, fsdp(types=EXPLICIT)),
    "explicit_axes": lambda x: jax.sharding.explicit_axes(jnp.sin, in_sharding=P("fsdp"))(x),
    "out_sharding=": lambda x: jnp.einsum("ab,bc", x, jnp.ones((8, 8)), out_sharding=P("fsdp")),
    "shard_map": lambda x: jax.shard_map(
        jnp.sin, mesh=fsdp().mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(x),
    "device_put": lambda x: jax.device_put(x[:3], fsdp()),
}
# fmt: on


@pytest.mark.parametrize(
    ("stage", "model", "names"), [(0, 1, FORMS), (3, 1, FORMS), (3, 2, VISIBLE)]
)
def test_annotations_change_no_value(stage, model, names):
    def loss(which, params, x):
        hidden = [(FORMS[name][which], jnp.tanh(x @ params[name]), params[name]) for name in names]
        return sum(jnp.mean(form(h, w) ** 2) for form, h, w in hidden)

    zero, params = zero_of(stage, model), dict.fromkeys(names, W)
    value, grads = zero.value_and_grad(lambda *args: loss(0, *args))(zero.shard(params), X)
    expected, gradients = jax.jit(jax.value_and_grad(lambda *args: loss(1, *args)))(params, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, found in zero.full(grads).items():
        np.testing.assert_allclose(found, gradients[name], rtol=1e-4, atol=1e-6, err_msg=name)


def differentiated(fun, model=1):
    zero = zero_of(model=model)
    loss = lambda p, x: jnp.mean(fun(jnp.tanh(x @ p["w"])) ** 2)  # noqa: E731
    return jax.jit(zero.value_and_grad(loss)).lower(zero.abstract(lambda: {"w": W}), X).as_text()


@pytest.mark.parametrize("spec", [P(None, "model"), P("data", "model")])
def test_annotations_over_the_model_axis_stay(spec):
    own, name = NamedSharding(zero_of(model=2).mesh, spec), "sharding_constraint"
    with_own = differentiated(lambda x: lax.with_sharding_constraint(x, own), 2)
    assert with_own.count(name) > differentiated(same, 2).count(name)


# A mesh with a model axis is no mesh with explicit axes: JAX says so at the next operation.
LINES = [(name, n) for name in UNSUPPORTED for n in (1, 2) if (name, n) != ("reshard", 2)]


@pytest.mark.parametrize(("name", "model"), LINES)
def test_an_unsupported_annotation_names_its_line(name, model):
    first = inspect.getsourcelines(UNSUPPORTED[name])[1]
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        differentiated(UNSUPPORTED[name], model)
    file, line = str(caught.value).split(": ")[0].rsplit(":", 1)
    assert file == __file__
    assert first <= int(line) <= first + 1


def test_other_errors_beside_annotations_stay():
    def mapped(x):
        mesh = jax.sharding.get_abstract_mesh()
        specs = {"in_specs": P(), "out_specs": P(), "axis_names": {"model"}, "check_vma": False}
        return jax.shard_map(lambda x: x @ jnp.ones((3, 3)), mesh=mesh, **specs)(x)

    with pytest.raises(ValueError, match="Incompatible shapes"):
        differentiated(lambda x: rows(x) + jnp.ones(5))
    with pytest.raises(TypeError, match="dot_general"):
        differentiated(mapped, model=2)
