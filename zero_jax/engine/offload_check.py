"""A check that offload computes the same as no offload on this machine.

Some XLA releases of 2026 silently gave wrong gradients from offloaded scan residuals. So two small
trainings run with and without offload, and their results are compared: one whose optimizer state is
streamed, and one whose layers save their inputs in host memory. It runs only on request:

    python -m zero_jax.offload --check
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero_jax.engine.config import Config
from zero_jax.engine.optimizer import ZeroTransform
from zero_jax.engine.step import TrainStep
from zero_jax.offload import host
from zero_jax.sharding import layout
from zero_jax.sharding.mesh import make_mesh
from zero_jax.sharding.paths import PyTree

# Maximum difference as a fraction of a leaf's largest element: another order of fused operations
# changes less in a few steps, and a lost or torn piece changes a leaf by its own size.
TOLERANCE = 1e-4
_STEPS, _LAYERS, _WIDTH = 3, 6, 64


class Outcome(NamedTuple):
    """One comparison.

    Attributes:
      what: What was compared.
      gap: Largest difference, as a fraction of the largest element.
      error: Error that was raised; "" if none.
    """

    what: str
    gap: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.gap <= TOLERANCE

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{verdict}: {self.what}: {self.error or f'off by {self.gap:.2g}'}"


def check(device: jax.Device) -> list[Outcome]:
    """Runs every comparison on one device."""
    runs = (("a step with streamed optimizer state", _states), ("saved activations", _residuals))
    return [_compare(what, run, device) for what, run in runs]


def _compare(what: str, run: Callable[[jax.Device, bool], PyTree], device: jax.Device) -> Outcome:
    try:
        # By default GPUs multiply in TF32, and two programs differ by more than the tolerance.
        with jax.default_matmul_precision("highest"):
            runs = [run(device, on) for on in (False, True)]
        pairs = zip(*map(jax.tree.leaves, runs), strict=True)
        return Outcome(what, max(_gap(*map(np.asarray, pair)) for pair in pairs))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        said = str(error).partition("\n")[0]
        return Outcome(what, float("inf"), f"it raised {type(error).__name__}: {said}")


def _gap(want: np.ndarray, got: np.ndarray) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(want - got).max() / max(np.abs(want).max(), 1e-30))


def _states(device: jax.Device, offloaded: bool) -> PyTree:
    """Trains with optimizer state and fp32 master parameters streamed in about ten pieces."""
    offload = host.Offload(offloaded, offloaded, piece_bytes=1 << 16)
    return _trained(Config(make_mesh(devices=[device]), offload=offload))


def _residuals(device: jax.Device, offloaded: bool) -> PyTree:
    """Trains with saved activations copied to host memory and back, layer by layer."""
    remat = "block@host" if offloaded else "block"
    return _trained(Config(make_mesh(devices=[device]), remat=remat))


def _trained(settings: Config) -> PyTree:
    """Returns parameters and moments after a few steps of clipped AdamW."""
    mesh, offload = settings.mesh, settings.offload
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = ZeroTransform(plain, settings)
    shapes = {"layers": (_LAYERS, _WIDTH, _WIDTH), "out": (_WIDTH, 3), "bias": (_WIDTH,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    named = zip(shapes.items(), keys, strict=True)
    params = {name: jax.random.normal(key, shape) / 8 for (name, shape), key in named}
    cuts = settings.splitter(params)
    placed = layout.shardings(params, cuts, mesh)
    params = jax.device_put(params, host.place(placed, params, offload))

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w) + h, None

    def loss(p: PyTree, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(layer, x + p["bias"], p["layers"])
        return jnp.mean((h @ p["out"] - 1.0) ** 2)

    step = TrainStep(settings, loss, tx)
    state, batch = tx.init(params), jnp.cos(jnp.arange(8.0 * _WIDTH)).reshape(8, _WIDTH)
    for _ in range(_STEPS):
        params, state, _ = step(params, state, jax.device_put(batch, mesh.devices.flat[0]))
    return params, state.inner
