"""Compile check of a plan: its step compiled for a target, or for the devices of the mesh."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from zero_jax import releases
from zero_jax.engine.step import TrainStep
from zero_jax.hlo import aot, auditor, roofline, targets
from zero_jax.hlo import latencies as own_latencies
from zero_jax.hlo.targets import Target
from zero_jax.sharding.mesh import AnyMesh, abstract_of


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


@dataclasses.dataclass(frozen=True)
class Proof:
    """A step and its compilation target.

    Attributes:
      step: The step.
      args: Its arguments, arrays or their shapes.
      mesh: Its mesh.
      target: None for the devices of the mesh.
      topology: See `targets.topology`.
    """

    step: TrainStep
    args: tuple[Any, ...]
    mesh: AnyMesh
    target: Target | None
    topology: str | None

    def compiled(self, latencies: str | pathlib.Path | None) -> auditor.Audit:
        """Compiles the step; with `latencies`, compiles it again with the file written there."""
        if self.target is None:
            if isinstance(self.mesh, AbstractMesh):
                raise ValueError(
                    "the mesh has no devices to compile for: set `target`, such as target='h100', "
                    "or use zero_jax.make_mesh()"
                )
            return auditor.audit(self.step.lower(*self.args).compile(), dict(self.mesh.shape))
        found = self._for(self.target, None)
        if latencies is None:
            return found
        if found.flops is None:
            raise ValueError(
                f"`latencies`={str(latencies)!r}: a loop of the step has an unknown trip count: "
                "use a loop of fixed length (jax.lax.scan), or leave latencies out"
            )
        at_once = releases.at_once(self.step.compiler_options(*self.args))
        told = own_latencies.of(found.program, found.collectives, self.target, at_once)
        pathlib.Path(latencies).write_text(own_latencies.text(told))
        return self._for(self.target, told)

    def time(self, compiled: auditor.Audit, model_flops: float | None) -> roofline.StepTime | None:
        """Returns the modelled (roofline) step time; None for a device without known peaks."""
        device = self.target
        if device is None and not isinstance(self.mesh, AbstractMesh):
            device = targets.of_kind(self.mesh.devices.flat[0].device_kind)
        if device is None or device.platform != "cuda" or compiled.flops is None:
            return None
        return roofline.step_time(compiled.program, compiled.collectives, device, model_flops)

    def _for(self, target: Target, told: Any) -> auditor.Audit:
        mesh = abstract_of(self.mesh)
        return aot.compile_for(
            *(target, self.step.function, jax.tree.map(lambda x: _abstract(x, mesh), self.args)),
            mesh,
            topology=self.topology,
            options=self.step.compiler_options(*self.args) if target.platform == "cuda" else {},
            seconds=told,
        )


def _abstract(x: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    kind = getattr(sharding, "memory_kind", None)
    placed = None if spec is None else NamedSharding(mesh, spec, memory_kind=kind)
    dtype = getattr(x, "dtype", None) or jax.dtypes.result_type(x)
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=placed)
