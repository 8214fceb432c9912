"""Errors for unsupported arguments: their type, and the argument or value that they name."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from one_device import zero_on
from optax import contrib
from test_outside import straight_through
from test_zero import X, loss, make

import zero_jax
from zero_jax.releases import CRASHES_ON_EMPTY
from zero_jax.sharding.mesh import check_global

AUTO = {"axis_types": (jax.sharding.AxisType.Auto,) * 2}
SGD = optax.sgd(1.0)
SAM = contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
LOOKAHEAD = optax.lookahead(optax.sgd(0.1), 2, 0.5)
PRIVATE = contrib.differentially_private_aggregate(1.0, 1.0, 0)


class WithNorm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(0))


def under(context, fn, *args):
    with context:
        return fn(*args)


def mesh_of(*axes, **options):
    sizes, devices = (4, 2)[: len(axes)], jax.devices()[: 4 * len(axes)]
    return jax.make_mesh(sizes, axes, devices=devices, **options)


def initialised(value, **settings):
    return zero_on(**settings).init(lambda: value)


def differentiated(fn=loss, batch=X, params=None, has_aux=False, zero=None, **settings):
    zero = zero or zero_on(**settings)
    grad_fn = zero.value_and_grad(fn, has_aux=has_aux)
    return grad_fn(zero.abstract(make) if params is None else params, batch)


def differentiated_under(axis):
    params = zero_on().init(lambda: {"w": jnp.ones((10, 8))})
    with jax.set_mesh(mesh_of(axis)):
        differentiated(lambda p, x: jnp.mean(x @ p["w"]), params=params)


def in_dtype(dtype, **settings):
    """With parameters that were cast to fewer bits."""
    params = zero_on().abstract(make)
    cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)
    return differentiated(params=cast, **settings)


def with_aux(aux, **options):
    return differentiated(lambda p, x: (loss(p, x), aux(x)), has_aux=True, **options)


def with_weight(fn):
    return differentiated(lambda p, x: zero_jax.Weighted(jnp.sum(x @ p["w"]), jnp.sum(fn(p["w"]))))


def state_of(tx, **settings):
    zero = zero_on(**settings)
    return zero.optimizer(tx).init(zero.abstract(make))


def stepped(tx, state=None, **named):
    zero = zero_on()
    params, own = zero.abstract(make), zero.optimizer(tx)
    state = own.init(params) if state is None else state
    return zero.train_step(loss, own).trace(params, state, X, **named)


def updated(tx, state=None):
    zero, own = zero_on(), zero_on().optimizer(tx)
    params = zero.shard({"w": jnp.ones((4, 8))})
    state = own.init(params) if state is None else state
    return own.update(params, state, params, value=jnp.float32(1))


def by_update(update):
    return optax.GradientTransformationExtraArgs(lambda _: {}, update)


def growing(grads, state, params=None, **_):
    return grads, {**state, str(len(state)): jnp.zeros(3)}


def with_curvature(grads, state, params=None, *, curvature, **_):
    return grads, {"curvature": curvature}


# fmt: off
# Words of the message, and the call.
ROWS = [
    ("mesh 4", lambda: zero_jax.Zero(4)),
    ("mesh 2", lambda: zero_jax.Zero(zero_jax.make_mesh(devices=[jax.devices()[0]] * 2))),
    ("mesh x y", lambda: zero_jax.Zero(mesh_of("x", "y", **AUTO))),
    ("mesh 'more' 2", lambda: zero_jax.Zero(mesh_of("data", "more", **AUTO))),
    ("mesh Auto", lambda: zero_jax.Zero(mesh_of("data"))),
    ("replica 3 8", lambda: zero_jax.make_mesh(replica=3)),
    ("replica 0", lambda: zero_jax.abstract_mesh(8, replica=0)),
    ("AbstractMesh 8", lambda: zero_jax.Zero(zero_jax.abstract_mesh(8)).init(make)),
    ("mesh set_mesh fsdp", lambda: differentiated_under("fsdp")),
    ("mesh set_mesh Explicit", lambda: differentiated_under("data")),
    ("stage 4", lambda: zero_on(stage=4)),
    ("stage '3'", lambda: zero_on(stage="3")),
    ("stage True", lambda: zero_on(stage=True)),
    ("stage auto", lambda: zero_on(stage="auto").value_and_grad(loss)),
    ("stage auto", lambda: zero_on(stage="auto").plan(loss, SGD)),
    ("micro_batches 0", lambda: zero_on(micro_batches=0)),
    ("remat blok block", lambda: zero_on(remat="blok")),
    ("bf17 bf16", lambda: zero_on(precision="bf17")),
    ("guard fp16", lambda: zero_on(guard=False, precision="fp16")),
    ("frozen bsae b w", lambda: zero_on(frozen="bsae").abstract(make)),
    ("frozen (b", lambda: zero_on(frozen="(b").abstract(make)),
    ("configuration c9", lambda: zero_jax.configuration("c9")),
    ("max_skips 0", lambda: zero_on().train_step(loss, SGD, max_skips=0)),
    ("jax_threefry_partitionable",
     lambda: under(jax.threefry_partitionable(False), zero_on().init, make)),
    ("jax_disable_jit", lambda: under(jax.disable_jit(), zero_on().init, make)),
    ("parameter 'w' str", lambda: initialised({"w": "text"})),
    ("parameter 'w' float", lambda: zero_on().shard({"w": 1.0})),
    # A Keras variable has a dtype.
    ("parameter 'w'", lambda: zero_on().shard({"w": types.SimpleNamespace(dtype="float32")})),
    ("parameters", lambda: initialised({})),
    ("parameter 'key'", lambda: initialised({"key": jax.random.key(0)})),
    ("parameters WithNorm nnx.split", lambda: zero_on().init(WithNorm)),
    ("'norm/mean' BatchStat", lambda: zero_on().init(
        lambda: nnx.state(WithNorm(), (nnx.Param, nnx.BatchStat)))),
    ("parameter Rng", lambda: zero_on().init(lambda: nnx.state(WithNorm(), nnx.RngState))),
    ("'w' float8_e4m3fn frozen", lambda: initialised({"w": jnp.ones(4, "float8_e4m3fn")})),
    ("'w' complex64 float32", lambda: zero_on().shard({"w": jnp.ones(4, "complex64")})),
    ("b (7,) zero.init", lambda: differentiated(params=make())),
    # An update smaller than half a unit of bf16 would be lost, step after step.
    ("params 'b' bfloat16", lambda: in_dtype("bfloat16")),
    ("params 'w' float16", lambda: in_dtype("float16", frozen="b")),
    (f"'none' (0, 3) {CRASHES_ON_EMPTY}", lambda: under(
        mock.patch.object(jax.lib, "__version__", CRASHES_ON_EMPTY),
        initialised, make() | {"none": jnp.zeros((0, 3))})),
    ("22 20 24", lambda: differentiated(batch=jnp.ones((22, 10)))),
    ("batch scalar", lambda: differentiated(batch=jnp.ones(()))),
    ("batch arrays", lambda: differentiated(batch={})),
    ("[0] 40 [1] 96", lambda: differentiated(batch=(jnp.ones((40, 3)), jnp.ones((96, 3))))),
    ("Weighted (6, 7)", lambda: differentiated(lambda p, x: x @ p["w"])),
    ("has_aux Weighted", lambda: differentiated(lambda p, x: (loss(p, x), {"aux": 1}))),
    ("has_aux 3", lambda: differentiated(lambda p, x: (loss(p, x), 1.0, 2.0))),
    ("has_aux loss", lambda: differentiated(has_aux=True)),
    ("Weighted (2,)",
     lambda: differentiated(lambda p, x: zero_jax.Weighted(loss(p, x), jnp.ones(2)))),
    ("NoneType", lambda: differentiated(lambda p, x: None)),
    ("complex", lambda: differentiated(lambda p, x: loss(p, x) * 1j)),
    ("Weighted jnp.mean", lambda: differentiated(lambda p, x: jnp.sum((x @ p["w"]) ** 2))),
    ("Weighted jnp.mean",
     lambda: zero_on().evaluate(lambda p, x: jnp.sum((x @ p["w"]) ** 2))(zero_on().init(make), X)),
    ("aux zero.batch_axes", lambda: with_aux(lambda x: (x[:, 0] > 0).sum())),
    ("aux zero.batch_axes",  # two replicas have different rows
     lambda: with_aux(lambda x: jax.lax.psum((x[:, 0] > 0).sum(), "data"), zero=zero_jax.Zero(
        zero_jax.make_mesh(2, replica=2, devices=jax.devices()[:4])))),
    ("'m' 6 12", lambda: with_aux(lambda x: {"m": x.reshape(6, 10).mean(1)})),
    ("weight stop_gradient", lambda: with_weight(jax.nn.sigmoid)),
    ("weight stop_gradient", lambda: with_weight(straight_through)),
    ("lax.while_loop b", lambda: differentiated(lambda p, x: loss(p, x) + jax.lax.while_loop(
        lambda c: c < 9, lambda c: c + p["b"].sum() + 1, 0.0))),
    ("tx 'adam'", lambda: zero_on().optimizer("adam")),
    ("tx adam", lambda: zero_on().train_step(loss, optax.adam)),
    ("optimizer Precision", lambda: zero_on(precision="fp16").train_step(
        loss, zero_on().optimizer(optax.adam(1e-3)))),
    ("state tuple zero.optimizer", lambda: stepped(SGD, SGD.init(make()))),
    ("state tuple zero.optimizer", lambda: updated(SGD, SGD.init({}))),
    ("'nonsense' ZeroState", lambda: state_of(optax.adam(1e-3)).nonsense),
    ("gradient w (4, 8)", lambda: updated(PRIVATE)),
    # With a transformation that needs the loss the update finds it, not `init`.
    ("gradient w (4, 8)", lambda: updated(optax.chain(PRIVATE, optax.polyak_sgd(0.1)))),
    ("tx (3,)", lambda: state_of(by_update(growing))),
    ("tx curvature", lambda: stepped(by_update(with_curvature), curvature=jnp.ones(()))),
    ("'curvature' host", lambda: state_of(by_update(with_curvature), offload="optimizer")),
    ("value_fn zero.value_and_grad", lambda: stepped(optax.lbfgs(0.1))),
    ("grad_fn zero.value_and_grad", lambda: stepped(SAM)),
    ("zero.value_and_grad", lambda: stepped(LOOKAHEAD)),
    ("value", lambda: zero_on().train_step(loss, SGD)(None, None, X, value=1.0)),
    ("grad_fn zero.value_and_grad", 
     lambda: zero_on().train_step(loss, SGD)(None, None, X, grad_fn=loss)),
]
# fmt: on


@pytest.mark.parametrize(("words", "call"), ROWS)
def test_an_error_names_the_argument(words, call):
    with pytest.raises((ValueError, AttributeError)) as caught:
        call()
    assert isinstance(caught.value, ValueError) == ("nonsense" not in words)
    assert [word for word in words.split() if word not in str(caught.value)] == []


def test_a_padded_parameter_is_no_array():
    """Outside a loss; only the type of its values is known to JAX."""
    leaf = zero_on().abstract(make)["b"]
    uses = jnp.sum, np.asarray, lambda x: 2 * x, lambda x: X @ x, lambda x: x[0], lambda x: x.T
    for use in uses:
        with pytest.raises((TypeError, AttributeError), match=r"\(7,\).*\(8,\).*zero\.full"):
            use(leaf)


def test_several_processes_need_a_global_batch():
    several = types.SimpleNamespace(local_devices=[0], size=2)
    check_global({"x": jax.ShapeDtypeStruct((4,), "float32")}, several)
    check_global({"x": np.ones(4)}, zero_jax.make_mesh())
    for rows in (np.ones(4), jnp.ones(4), [1.0]):
        with pytest.raises(ValueError, match=r"'x'.*zero_jax\.global_batch"):
            check_global({"x": rows}, several)
