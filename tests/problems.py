"""Small training problems, and the plain optax loop on one device that Zero is compared with."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zero_jax
from zero_jax.checkpoint import leaves
from zero_jax.models import gpt, resnet

ROWS = 120  # divisible by every N that is tested, times two micro-batches


def out_of_memory(*_: Any) -> None:
    """Raises the error of XLA for 400 TB."""
    jnp.zeros((10**5, 10**5, 10**4))


@dataclasses.dataclass
class Problem:
    """A model, a loss for one device and a batch."""

    make: Callable[[], Any]
    loss: Callable[..., Any]  # of (params, batch, *extras); with extras also returns new extras[0]
    batch: Any
    extras: tuple[Any, ...] = ()
    loss_on_mesh: Callable[..., Any] | None = None  # where the model names the mesh axis

    @functools.cached_property
    def start(self) -> Any:
        return jax.tree.map(np.asarray, jax.jit(self.make)())

    @property
    def has_aux(self) -> bool:
        return bool(self.extras)


ODD_GPT = gpt.GPTConfig(layers=2, width=12, heads=2, vocab=17, seq=8, loss_chunk=16)


def gpt_problem(config: gpt.GPTConfig = ODD_GPT) -> Problem:
    """Two scanned layers, odd widths, a tied embedding with a prime number of rows."""

    model = functools.partial(gpt.GPT, config)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0))))

    def loss(params, rows):
        return zero_jax.Weighted(*gpt.loss(nnx.merge(graphdef, params), rows))

    tokens = jax.random.randint(jax.random.key(1), (ROWS, config.seq + 1), 0, config.vocab)
    return Problem(lambda: nnx.state(model(rngs=nnx.Rngs(0)), nnx.Param), loss, tokens)


def resnet_problem() -> Problem:
    """Convolutions and batch norm: mutable statistics, synchronised over the mesh."""
    model = functools.partial(resnet.ResNet, stages=(1,), width=5, classes=3)
    images = jax.random.normal(jax.random.key(1), (ROWS, 6, 6, 3))
    batch = images, jax.random.randint(jax.random.key(2), (ROWS,), 0, 3)

    def make():
        return model(axis_name=None).init(jax.random.key(0), images[:1], train=True)

    def loss(axis, params, batch, stats):
        value, new_stats = resnet.loss(model(axis_name=axis), params, stats, *batch)
        return zero_jax.Weighted(*value), new_stats

    plain, on_mesh = (functools.partial(loss, axis) for axis in (None, "data"))
    extras = (jax.jit(make)()["batch_stats"],)
    return Problem(lambda: make()["params"], plain, batch, extras, on_mesh)


def zoo_problem(tiny: int = 6, empty: bool = True) -> Problem:
    def make():
        return {k: v for k, v in zoo_params(tiny).items() if empty or k != "empty_0x4"}

    def loss(p, batch):
        x_Bx7, want_Bx8 = batch
        h = x_Bx7 @ p["prime_7x13"] + p["scalar"] * p["three"].sum() + p["thirteen"]
        h = jnp.tanh(h + p["deep_5x2x13"].sum((0, 1)) + p.get("empty_0x4", jnp.zeros(0)).sum())
        h = h + jnp.tanh(h @ p["giant_13x101"]) @ p["giant_13x101"].T  # tied: used twice
        for v in p["tiny"].values():
            h = h + v.sum() / tiny
        return jnp.mean(jnp.square(h @ p["even_13x8"] * p["one_1x1"] - want_Bx8))

    x_Bx7 = jax.random.normal(jax.random.key(1), (ROWS, 7))
    return Problem(make, loss, (x_Bx7, jnp.sin(3 * x_Bx7[:, :1] + jnp.arange(8.0))))


def zoo_params(tiny):
    """Returns leaves whose shapes are difficult to shard, and `tiny` small vectors."""
    shapes = {"scalar": (), "three": (3,), "thirteen": (13,), "empty_0x4": (0, 4)}
    shapes |= {"prime_7x13": (7, 13), "deep_5x2x13": (5, 2, 13), "giant_13x101": (13, 101)}
    shapes |= {"even_13x8": (13, 8), "one_1x1": (1, 1)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = {n: 0.2 * jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}
    leaves["one_1x1"] = jnp.ones((1, 1))
    return {**leaves, "tiny": {f"t{i:03d}": jnp.full((i % 4 + 1,), 0.1) for i in range(tiny)}}


PROBLEMS = {"gpt": gpt_problem, "resnet": resnet_problem, "zoo": zoo_problem}


def zero_on(sizes=4, stage=3, **settings):
    """Returns a Zero on a mesh of these sizes, or of so many devices along `data`."""
    sizes = sizes if isinstance(sizes, dict) else {"data": sizes}
    devices = jax.devices()[: math.prod(sizes.values())]
    return zero_jax.Zero(zero_jax.make_mesh(**sizes, devices=devices), stage, **settings)


def plain_steps(problem, tx, steps):
    """Returns (loss, gradient norm, aux) of each step of plain optax on one device, in fp32, and
    the parameters after the last."""

    @jax.jit
    def step(params, state, extras):
        def objective(params):
            out = problem.loss(params, problem.batch, *extras)
            value, aux = out if problem.has_aux else (out, 0.0)
            return value[0] / value[1] if isinstance(value, tuple) else value, aux

        (loss, aux), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (loss, optax.tree.norm(grads), aux)

    params, extras = jax.tree.map(jnp.asarray, problem.start), problem.extras
    state, seen = tx.init(params), []
    for _ in range(steps):
        params, state, one = step(params, state, extras)
        extras = one[2:] if extras else ()
        seen.append(one)
    return seen, params


def train_plain(problem, tx, steps):
    """Returns the losses and final parameters of plain optax on one device, in fp32."""
    seen, params = plain_steps(problem, tx, steps)
    return [float(loss) for loss, _, _ in seen], params


def train_zero(problem, tx, steps, n, replica=1, model=1, **settings):
    """Runs the same under Zero on the first n x replica x model devices; returns the Zero too."""
    zero = zero_on({"data": n, "replica": replica, "model": model}, **settings)
    params, tx = zero.shard(problem.start), zero.optimizer(tx)
    step = zero.train_step(problem.loss_on_mesh or problem.loss, tx, has_aux=problem.has_aux)
    state, extras, losses = tx.init(params), problem.extras, []
    for _ in range(steps):
        params, state, metrics = step(params, state, problem.batch, *extras)
        extras = (metrics.aux,) if problem.has_aux else extras
        losses.append(float(metrics.loss))
    return losses, zero.unshard(params), zero


def ulps(got, want) -> float:
    """Returns the largest difference of two trees, in fp32 ulps of each leaf's largest element."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, f"{a.shape} against {b.shape}"
        if a.size:
            assert np.isfinite(a).all()
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst / float(np.finfo(np.float32).eps)


def compare(got, want, bound):
    """Asserts that losses and parameters of two runs differ by less than so many ulps."""
    assert ulps(jnp.array(got[0]), jnp.array(want[0])) < bound
    assert ulps(got[1], want[1]) < bound
    assert want[0][-1] < want[0][0], "a run that does not learn compares little"


def whole(tree) -> dict[str, np.ndarray]:
    found = {}
    for leaf in leaves.leaves(tree):
        out = np.zeros(leaf.array.shape, jnp.dtype(leaf.array.stored))
        for starts, piece in leaf.pieces():
            out[tuple(slice(a, a + n) for a, n in zip(starts, piece.shape, strict=True))] = piece
        found[leaf.name] = out
    return found


def assert_bitwise(a, b):
    a, b = whole(a), whole(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def equations_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations_of(inner)
