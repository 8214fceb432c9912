"""Models that annotate shardings: values are those without; what JAX cannot take names its line."""

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

X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
AUTO = (AxisType.Auto,) * 2


def make():
    return {"w": jax.random.normal(jax.random.key(0), (8, 8)) / 2}


def zero_of(stage=3, model=1, **settings):
    return zero_jax.Zero(
        zero_jax.make_mesh(model=model, devices=jax.devices()[:4]), stage, **settings
    )


def mesh_of(devices, types=AUTO):
    return jax.make_mesh((devices, 1), ("fsdp", "tensor"), types, devices=jax.devices()[:devices])


def rows(x, devices=4):
    return lax.with_sharding_constraint(x, NamedSharding(mesh_of(devices), P("fsdp", None)))


def named(x, mesh=None):
    with nn.logical_axis_rules((("batch", "fsdp"), ("embed", "tensor"))):
        return nn.with_logical_constraint(x, ("batch", "embed"), mesh=mesh)


def nested(x):
    """In the bodies of a layer, of a loop and of a branch; of two meshes in one operation."""
    x = jax.checkpoint(lambda x: rows(jnp.sin(x)))(x)
    x = lax.scan(lambda c, _: (rows(c) + rows(c, 1), None), x, None, length=2)[0]
    return lax.cond(jnp.sum(x) < 1e9, rows, jnp.sin, x)


OWN = {
    "four devices": rows,
    "one device": lambda x: rows(x, 1),
    "rows over data": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(zero_of().mesh, P("data"))
    ),
    "logical, a mesh": lambda x: named(x, mesh_of(4)),
    "logical, no mesh": named,
    "device_put": lambda x: jax.device_put(x, NamedSharding(mesh_of(4), P("fsdp"))),
    "jit": jax.jit(jnp.sin, in_shardings=NamedSharding(mesh_of(4), P("fsdp"))),
    "nested": nested,
}
# A mesh with a model axis is not hidden from Flax, whose rules then have to name its axes.
CASES = [(name, 1, stage) for name in OWN for stage in (0, 3)]
CASES += [(name, 2, 3) for name in ("four devices", "logical, a mesh", "nested")]


@pytest.mark.parametrize(("name", "model", "stage"), CASES)
def test_annotations_of_a_models_own_change_nothing(name, model, stage):
    def loss(annotated, p, x):
        h = jnp.tanh(x @ p["w"])
        h = OWN[name](h) if annotated else PLAIN.get(name, lambda x: x)(h)
        return jnp.mean(h**2)

    specs = {"w": P(None, "model")} if model > 1 else None
    zero = zero_of(stage, model, model_specs=specs)
    value, grads = zero.value_and_grad(lambda p, x: loss(True, p, x))(zero.init(make), X)
    expected, gradients = jax.value_and_grad(lambda p, x: loss(False, p, x))(make(), X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(zero.full(grads)["w"], gradients["w"], rtol=1e-4, atol=1e-6)


PLAIN = {"jit": jnp.sin, "nested": lambda x: 4 * jnp.sin(x)}


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
@pytest.mark.parametrize(
    ("names", "model"), [(("data", None, None), 1), ((None, "model", None), 2)]
)
def test_linen_attention_with_named_dims_is_that_without(box, names, model):
    init = nn.initializers.lecun_normal()
    plain = nn.MultiHeadDotProductAttention(4)
    boxed = nn.MultiHeadDotProductAttention(4, kernel_init=box(init, names))
    x = X.reshape(8, 2, 8)
    zero = zero_of(model=model)
    params = zero.init(boxed.init, jax.random.key(0), x)
    value = zero.evaluate(lambda p, x: jnp.mean(boxed.apply(p, x) ** 2))(params, x)[0]
    expected = jnp.mean(plain.apply(plain.init(jax.random.key(0), x), x) ** 2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("spec", [P(None, "model"), P("data", "model")])
def test_the_model_axis_of_the_runs_own_mesh_stays(spec):
    zero = zero_of(model=2, model_specs={"w": P(None, "model")})

    def lowered(fun):
        loss = lambda p, x: jnp.mean(fun(jnp.tanh(x @ p["w"])) ** 2)  # noqa: E731
        grads = jax.jit(zero.value_and_grad(loss))
        return grads.lower(zero.abstract(make), X).as_text().count("sharding_constraint")

    own = NamedSharding(zero.mesh, spec)
    assert lowered(lambda x: lax.with_sharding_constraint(x, own)) > lowered(lambda x: x)


EXPLICIT = (AxisType.Explicit,) * 2
UNSUPPORTED = {
    "with_sharding_constraint": lambda x: lax.with_sharding_constraint(x, P("data")),
    "reshard": lambda x: jax.sharding.reshard(x, NamedSharding(mesh_of(4, EXPLICIT), P("fsdp"))),
    "explicit_axes": lambda x: jax.sharding.explicit_axes(jnp.sin, in_sharding=P("fsdp"))(x),
    "out_sharding=": lambda x: jnp.einsum("ab,bc", x, jnp.ones((8, 8)), out_sharding=P("fsdp")),
    "shard_map": lambda x: jax.shard_map(
        jnp.sin, mesh=mesh_of(4), in_specs=P("fsdp"), out_specs=P("fsdp")
    )(x),
    "device_put": lambda x: jax.device_put(x[:3], NamedSharding(mesh_of(4), P("fsdp"))),
}


# A mesh with a model axis is no mesh with explicit axes: JAX says so at the next operation.
LINES = [(name, 1) for name in UNSUPPORTED]
LINES += [(name, 2) for name in UNSUPPORTED if name != "reshard"]


@pytest.mark.parametrize(("name", "model"), LINES)
def test_an_annotation_that_does_not_apply_names_its_line(name, model):
    zero = zero_of(model=model, model_specs={"w": P(None, "model")} if model > 1 else None)
    fun = UNSUPPORTED[name]
    first = inspect.getsourcelines(fun)[1]
    loss = lambda p, x: jnp.mean(fun(jnp.tanh(x @ p["w"])) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match=re.escape(f": {name} in the loss")) as caught:
        zero.value_and_grad(loss)(zero.abstract(make), X)
    file, line = str(caught.value).split(": ")[0].rsplit(":", 1)
    assert file == __file__
    assert first <= int(line) <= first + 2


def test_an_error_beside_annotations_stays_as_it_is():
    with pytest.raises(ValueError, match="Incompatible shapes"):
        zero_of().value_and_grad(lambda p, x: jnp.mean(rows(x) @ p["w"] + jnp.ones(5)))(
            zero_of().abstract(make), X
        )


def test_an_error_of_the_model_below_an_annotation_stays_as_it_is():
    zero = zero_of(model=2, model_specs={"w": P(None, "model")})

    def mapped(x):
        return x @ jnp.ones((3, 3))

    def loss(p, x):
        h = jnp.tanh(x @ p["w"])
        mesh = jax.sharding.get_abstract_mesh()
        specs = {"in_specs": P(), "out_specs": P(), "axis_names": {"model"}, "check_vma": False}
        return jnp.mean(jax.shard_map(mapped, mesh=mesh, **specs)(h))

    with pytest.raises(TypeError, match="dot_general"):
        zero.value_and_grad(loss)(zero.abstract(make), X)


def test_another_mesh_in_the_context_is_named():
    zero = zero_of()
    params = zero.init(make)
    for mesh in (mesh_of(4), jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])):
        with pytest.raises(ValueError, match="`mesh`"), jax.set_mesh(mesh):
            zero.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]))(params, X)


@pytest.mark.parametrize(
    ("kind", "stage"), [("checkpointed", 0), ("checkpointed", 3), ("bounded", 3)]
)
def test_equinox_loops_over_a_parameter(kind, stage):
    """Equinox compares types of arrays, which in a `shard_map` have the mesh in them."""

    def loss(p, x):
        step = lambda c: (jnp.tanh(c[0] @ p["w"]), c[1] + 1)  # noqa: E731
        start = x, jnp.asarray(0)
        return jnp.mean(
            eqxi.while_loop(lambda c: c[1] < 3, step, start, max_steps=4, kind=kind)[0] ** 2
        )

    zero = zero_of(stage)
    value, grads = zero.value_and_grad(loss)(zero.init(make), X)

    def unrolled(p, x):
        for _ in range(3):
            x = jnp.tanh(x @ p["w"])
        return jnp.mean(x**2)

    expected, gradients = jax.value_and_grad(unrolled)(make(), X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(zero.full(grads)["w"], gradients["w"], rtol=1e-4, atol=1e-6)
