"""A check that offload computes the same as no offload on this machine.

Some XLA releases of 2026 silently gave wrong gradients from offloaded scan residuals. So two small
trainings run with and without offload, and their results are compared: one whose optimizer state is
streamed, and one whose layers save their inputs in host memory. It runs only on request:

    python -m zero_jax.offload --check
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zero_jax.engine import parameters
from zero_jax.engine.config import Config
from zero_jax.engine.optimizer import ZeroTransform
from zero_jax.engine.step import TrainStep
from zero_jax.offload.host import Offload
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
    """Compares streamed optimizer state, then saved activations, with the same step on `device`."""
    mesh = make_mesh(devices=[device])
    streamed = Offload(True, True, piece_bytes=1 << 16)  # in about ten pieces
    runs: dict[str, dict[str, Any]] = {
        "a step with streamed optimizer state": {"remat": "block", "offload": streamed},
        "saved activations": {"remat": "block@host"},
    }
    return [_compare(what, mesh, settings) for what, settings in runs.items()]


def _compare(what: str, mesh: Mesh, offloaded: dict[str, Any]) -> Outcome:
    try:
        settings = Config(mesh, remat="block"), Config(mesh, **offloaded)
        # By default GPUs multiply in TF32, and two programs differ by more than the tolerance.
        with jax.default_matmul_precision("highest"):
            runs = [jax.tree.leaves(_trained(one)) for one in settings]
        return Outcome(what, max(_gap(*map(np.asarray, pair)) for pair in zip(*runs, strict=True)))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        said = str(error).partition("\n")[0]
        return Outcome(what, float("inf"), f"it raised {type(error).__name__}: {said}")


def _gap(want: np.ndarray, got: np.ndarray) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(want - got).max() / max(np.abs(want).max(), 1e-30))


def _trained(settings: Config) -> PyTree:
    """Returns parameters and moments after a few steps of clipped AdamW."""

    def make() -> PyTree:
        shapes = {"layers": (_LAYERS, _WIDTH, _WIDTH), "out": (_WIDTH, 3), "bias": (_WIDTH,)}
        keys = jax.random.split(jax.random.key(0), len(shapes))
        named = zip(shapes.items(), keys, strict=True)
        return {name: jax.random.normal(key, shape) / 8 for (name, shape), key in named}

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w) + h, None

    def loss(p: PyTree, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(layer, x + p["bias"], p["layers"])
        return jnp.mean((h @ p["out"] - 1.0) ** 2)

    tx = ZeroTransform(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), settings)
    step, params = TrainStep(settings, loss, tx), parameters.init(settings, make)
    batch = jnp.cos(jnp.arange(8.0 * _WIDTH)).reshape(8, _WIDTH)
    state, batch = tx.init(params), jax.device_put(batch, settings.mesh.devices.flat[0])
    for _ in range(_STEPS):
        params, state, _ = step(params, state, batch)
    return params, state.inner
