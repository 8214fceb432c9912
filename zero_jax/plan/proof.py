"""The proof of a plan: its step as the compiler of a target, or of the devices there, makes it."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from zero_jax import releases
from zero_jax.engine.step import TrainStep
from zero_jax.hlo import auditor, prove, roofline, targets
from zero_jax.hlo import latencies as own_latencies
from zero_jax.hlo.targets import Target
from zero_jax.sharding.mesh import AnyMesh, abstract_of


def check(latencies: str | pathlib.Path | None, target: Target | None) -> None:
    """Raises ValueError unless there is something that such a file can be made of, and for."""
    if latencies is None:
        return
    if target is None or target.platform != "cuda":
        name = "the devices of the mesh" if target is None else target.name
        raise ValueError(
            f"latencies={str(latencies)!r} are told to XLA for GPUs, from a target's figures, and "
            f"this plan is for {name}: give target='h100' say, or leave it out"
        )
    path = pathlib.Path(latencies)
    if path.suffix != own_latencies.SUFFIX:
        raise ValueError(
            f"latencies={str(latencies)!r}: XLA takes the file for text by its end, so call it "
            f"{path.stem or 'step'}{own_latencies.SUFFIX}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"latencies={str(latencies)!r}: there is no folder {path.parent}")
    if len(str(path.absolute()).split()) > 1:
        raise ValueError(
            f"latencies={str(latencies)!r}: XLA_FLAGS end at a blank, and {path.absolute()} has "
            "one: name a file in a folder without"
        )


def flags(latencies: str | pathlib.Path) -> str:
    """What XLA_FLAGS has to have for a run that is scheduled by such a file."""
    return f"--{releases.LATENCIES}={pathlib.Path(latencies).absolute()}"


@dataclasses.dataclass(frozen=True)
class Proof:
    """A step and what it is compiled for.

    Attributes:
      step: the step.
      args: its arguments, arrays or their shapes.
      mesh: its mesh.
      target: None for the devices of the mesh.
      topology: see `targets.topology`.
    """

    step: TrainStep
    args: tuple[Any, ...]
    mesh: AnyMesh
    target: Target | None
    topology: str | None

    def compiled(self, latencies: str | pathlib.Path | None) -> auditor.Audit:
        """The program; with latencies that which is made by the file that they are written to."""
        if self.target is None:
            if isinstance(self.mesh, AbstractMesh):
                raise ValueError(
                    "the mesh has no devices to compile for: name a target, as target='h100', or "
                    "use zero_jax.make_mesh()"
                )
            return auditor.audit(self.step.lower(*self.args).compile(), dict(self.mesh.shape))
        found = self._for(self.target, None)
        if latencies is None:
            return found
        if found.flops is None:
            raise ValueError(
                f"latencies={str(latencies)!r}: a loop of the step has no trip count in the "
                "program, so how long it takes is unknown; use a loop of fixed length "
                "(jax.lax.scan), or leave latencies out"
            )
        at_once = releases.at_once(self.step.compiler_options(*self.args))
        told = own_latencies.of(found.program, found.collectives, self.target, at_once)
        pathlib.Path(latencies).write_text(own_latencies.text(told))
        return self._for(self.target, told)

    def time(self, compiled: auditor.Audit, model_flops: float | None) -> roofline.StepTime | None:
        """How long a step takes by the roofline; None where there are no figures for one."""
        device = self.target
        if device is None and not isinstance(self.mesh, AbstractMesh):
            device = targets.of_kind(self.mesh.devices.flat[0].device_kind)
        if device is None or device.platform != "cuda" or compiled.flops is None:
            return None
        return roofline.step_time(compiled.program, compiled.collectives, device, model_flops)

    def _for(self, target: Target, told: Any) -> auditor.Audit:
        mesh = abstract_of(self.mesh)
        return prove.compile_for(
            *(target, self.step.function, jax.tree.map(lambda x: _abstract(x, mesh), self.args)),
            mesh,
            given_topology=self.topology,
            options=self.step.compiler_options(*self.args) if target.platform == "cuda" else {},
            told=told,
        )


def _abstract(x: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    kind = getattr(sharding, "memory_kind", None)
    placed = None if spec is None else NamedSharding(mesh, spec, memory_kind=kind)
    dtype = getattr(x, "dtype", None) or jax.dtypes.result_type(x)
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=placed)
