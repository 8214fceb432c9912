"""Is offload right on this machine? A small step with and without it, compared.

Host memory is the youngest part of XLA's GPU backend: releases of 2026 gave wrong gradients from
offloaded scan residuals, without a word. So before a `Zero` offloads for the first time on a
version of jaxlib and a kind of device, two small trainings are run both ways: one whose states
stream, and one whose layers keep their inputs in host memory. A difference refuses offload. What
passed is remembered by an empty file, so the next run starts at once:

    python -m zero_jax.offload --check

runs it again and prints the outcome. The file is in $ZERO_JAX_CACHE, by default in zero_jax in
the user's cache folder; where that can't be written, nothing is, and each process checks anew.
ZERO_JAX_OFFLOAD_CHECK=off trusts the machine.
"""

import functools
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh

from zero_jax._version import __version__
from zero_jax.engine import optimizer
from zero_jax.engine.config import Config
from zero_jax.engine.step import TrainStep
from zero_jax.offload import tiers
from zero_jax.remat import policies
from zero_jax.sharding import layout
from zero_jax.sharding.mesh import make_mesh

PyTree = Any
# Of a leaf's largest element: what another order of fused operations moves in a few steps. A lost
# or a torn piece moves a leaf by its own size.
TOLERANCE = 1e-4
_STEPS, _LAYERS, _WIDTH = 3, 6, 64


class Outcome(NamedTuple):
    """One comparison: how far apart, as a share of the largest element, or what it raised."""

    what: str
    gap: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.gap <= TOLERANCE

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{verdict}: {self.what}: {self.error or f'off by {self.gap:.2g}'}"


class WrongHere(ValueError):
    """Offload gives wrong results on this machine."""


def ensure(settings: Config) -> None:
    """Checks offload, if it is used, the first time on this machine.

    Args:
      settings: Settings whose state or remat policy may use host memory.

    Raises:
      WrongHere: A result differs; the message has the versions and the device.
    """
    mesh = settings.mesh
    saves = any(place.host for place in policies.parse(settings.remat).places)
    if not (settings.offload.streams or saves) or isinstance(mesh, AbstractMesh):
        return
    if os.environ.get("ZERO_JAX_OFFLOAD_CHECK") == "off":
        return
    failed = fault_on(mesh.local_devices[0])
    if failed:
        raise WrongHere(
            f"`offload` gives wrong results with {versions(mesh.local_devices[0])}: {failed}. "
            "Known causes are faults of XLA's host offload in single releases: install another "
            "jaxlib, or leave `offload` out. python -m zero_jax.offload --check repeats this "
            "check; ZERO_JAX_OFFLOAD_CHECK=off skips it"
        )


@functools.cache
def fault_on(device: jax.Device) -> str:
    """What failed, "" if nothing; remembered here, and in a file if it passed."""
    marker = marker_of(device)
    if marker.exists():
        return ""
    failed = "; ".join(str(o) for o in check(device) if not o.passed)
    if not failed:
        remember(marker)
    return failed


def versions(device: jax.Device) -> str:
    """What a check is good for."""
    jaxlib = importlib.metadata.version("jaxlib")
    return f"jax {jax.__version__}, jaxlib {jaxlib}, {device.device_kind}"


def marker_of(device: jax.Device) -> pathlib.Path:
    """The file that says that a check passed."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = pathlib.Path(os.environ.get("ZERO_JAX_CACHE") or os.path.join(base, "zero_jax"))
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{__version__} {versions(device)}")
    return folder / f"offload-{name}.passed"


def remember(marker: pathlib.Path) -> None:
    """Writes the file, if that can be done."""
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        pass


def check(device: jax.Device) -> list[Outcome]:
    """Runs every comparison on one device."""
    # A thread of its own, since a caller may be tracing.
    with ThreadPoolExecutor(1) as thread:
        named = (
            ("a step with streamed optimizer state", _states),
            ("saved activations", _residuals),
        )
        return [thread.submit(_compare, what, run, device).result() for what, run in named]


def _compare(what: str, run: Callable[[jax.Device, bool], PyTree], device: jax.Device) -> Outcome:
    try:
        # Else GPUs multiply in TF32, and what two programs round apart is more than the tolerance.
        with jax.default_matmul_precision("highest"):
            runs = [run(device, on) for on in (False, True)]
        pairs = zip(*map(jax.tree.leaves, runs), strict=True)
        return Outcome(what, max(_gap(*map(np.asarray, pair)) for pair in pairs))
    except Exception as error:
        said = str(error).partition("\n")[0]
        return Outcome(what, float("inf"), f"it raised {type(error).__name__}: {said}")


def _gap(want: np.ndarray, got: np.ndarray) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(want - got).max() / max(np.abs(want).max(), 1e-30))


def _states(device: jax.Device, offloaded: bool) -> PyTree:
    """After some steps whose optimizer state and masters stream, in some ten pieces."""

    def model(p: PyTree, x: jax.Array) -> jax.Array:
        return functools.reduce(lambda h, w: jnp.tanh(h @ w), p["layers"], x + p["bias"]) @ p["out"]

    offload = tiers.Offload(offloaded, offloaded, piece_bytes=1 << 16)
    return _trained(model, Config(make_mesh(devices=[device]), offload=offload))


def _residuals(device: jax.Device, offloaded: bool) -> PyTree:
    """After some steps whose saved activations go to host memory and back, layer by layer."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w) + h, None

    def model(p: PyTree, x: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x + p["bias"], p["layers"])[0] @ p["out"]

    remat = "block@host" if offloaded else "block"
    return _trained(model, Config(make_mesh(devices=[device]), remat=remat))


def _trained(model: Callable[[PyTree, jax.Array], jax.Array], settings: Config) -> PyTree:
    """Parameters and moments after a few steps of clipped AdamW."""
    mesh, offload = settings.mesh, settings.offload
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = optimizer.partition(plain, settings)
    shapes = {"layers": (_LAYERS, _WIDTH, _WIDTH), "out": (_WIDTH, 3), "bias": (_WIDTH,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    named = zip(shapes.items(), keys, strict=True)
    params = {name: jax.random.normal(key, shape) / 8 for (name, shape), key in named}
    cuts = settings.splitter(params)
    placed = layout.shardings(params, cuts, mesh)
    params = jax.device_put(params, tiers.place(placed, params, offload))

    def loss(p: PyTree, x: jax.Array) -> jax.Array:
        return jnp.mean((model(p, x) - 1.0) ** 2)

    step = TrainStep(settings, loss, tx, has_aux=False, max_skips=1)
    state, batch = tx.init(params), jnp.cos(jnp.arange(8.0 * _WIDTH)).reshape(8, _WIDTH)
    for _ in range(_STEPS):
        params, state, _ = step(params, state, jax.device_put(batch, mesh.devices.flat[0]))
    return params, state.inner
