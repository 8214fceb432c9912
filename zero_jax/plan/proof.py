"""Compile check of a plan: its step compiled for a target, or for the devices of the mesh."""

import functools
import pathlib

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from zero_jax import releases
from zero_jax.engine.step import TrainStep
from zero_jax.hlo import aot, auditor, roofline, targets
from zero_jax.hlo import latencies as own_latencies
from zero_jax.hlo.targets import Target
from zero_jax.sharding.mesh import AnyMesh, abstract_of
from zero_jax.sharding.paths import PyTree


def check(latencies: str | pathlib.Path | None, target: Target | None) -> None:
    """Raises ValueError unless such a file can be written, for a target with known figures."""
    if latencies is None:
        return
    if target is None or target.platform != "cuda":
        name = "the devices of the mesh" if target is None else target.name
        raise ValueError(
            f"`latencies`={str(latencies)!r} requires a GPU target, and this plan is for {name}: "
            "use target='h100', or leave it out"
        )
    path = pathlib.Path(latencies)
    if path.suffix != own_latencies.SUFFIX:
        raise ValueError(
            f"`latencies`={str(latencies)!r}: XLA reads text from {own_latencies.SUFFIX} files "
            f"only: use {path.stem or 'step'}{own_latencies.SUFFIX}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"`latencies`={str(latencies)!r}: the folder {path.parent} does not exist")
    if len(str(path.absolute()).split()) > 1:
        raise ValueError(
            f"`latencies`={str(latencies)!r}: XLA_FLAGS cannot contain the space in "
            f"{path.absolute()}: use a path without spaces"
        )


def flags(latencies: str | pathlib.Path) -> str:
    """Returns the XLA flag of a run with the schedule of such a file."""
    return f"--{releases.LATENCIES}={pathlib.Path(latencies).absolute()}"


def compiled(
    step: TrainStep,
    args: tuple[PyTree, ...],
    target: Target | None,
    topology: str | None,
    latencies: str | pathlib.Path | None,
) -> auditor.Audit:
    """Compiles a step for a target.

    Args:
      step: The step.
      args: Its arguments, arrays or their shapes.
      target: None compiles for the devices of the mesh.
      topology: See `targets.topology`.
      latencies: File to write modelled latencies to; the step is then compiled again with it.

    Raises:
      ValueError: There is nothing to compile for, or a loop of unknown length has no latencies.
    """
    mesh = step.settings.mesh
    if target is None:
        if isinstance(mesh, AbstractMesh):
            raise ValueError(
                "the mesh has no devices to compile for: set `target`, such as target='h100', "
                "or use zero_jax.make_mesh()"
            )
        return auditor.audit(step.lower(*args).compile(), dict(mesh.shape))
    abstract = abstract_of(mesh)
    shapes = jax.tree.map(lambda x: _abstract(x, abstract), args)
    options = step.compiler_options(*args) if target.platform == "cuda" else {}
    compile_for = functools.partial(
        aot.compile_for,
        *(target, step.function, shapes, abstract),
        topology=topology,
        options=options,
    )
    found = compile_for(seconds=None)
    if latencies is None:
        return found
    if found.flops is None:
        raise ValueError(
            f"`latencies`={str(latencies)!r}: a loop of the step has an unknown trip count: "
            "use a loop of fixed length (jax.lax.scan), or leave latencies out"
        )
    modelled = own_latencies.of(found.program, found.collectives, target, releases.at_once(options))
    pathlib.Path(latencies).write_text(own_latencies.text(modelled))
    return compile_for(seconds=modelled)


def time(
    audit: auditor.Audit, target: Target | None, mesh: AnyMesh, model_flops: float | None
) -> roofline.StepTime | None:
    """Returns the modelled (roofline) step time; None for a device without known peaks."""
    if target is None and not isinstance(mesh, AbstractMesh):
        target = targets.of_kind(mesh.devices.flat[0].device_kind)
    if target is None or target.platform != "cuda" or audit.flops is None:
        return None
    return roofline.step_time(audit.program, audit.collectives, target, model_flops)


def _abstract(x: PyTree, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    kind = getattr(sharding, "memory_kind", None)
    placed = None if spec is None else NamedSharding(mesh, spec, memory_kind=kind)
    dtype = getattr(x, "dtype", None) or jax.dtypes.result_type(x)
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=placed)
