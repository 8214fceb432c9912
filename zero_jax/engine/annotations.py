"""Sharding annotations of the model inside the loss.

An annotation (`jax.lax.with_sharding_constraint`, `nn.with_logical_constraint`, a `device_put` to a
sharding) says where a value is stored and nothing about the value. Each device runs the loss on its
own rows, so an axis that the step is manual over, or another mesh, means nothing there: such
annotations are dropped from the trace. Those over automatic axes of the step's mesh stay.
"""

import contextlib
import traceback
from collections.abc import Iterator, Sequence

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from zero_jax.sharding.mesh import AnyMesh, Axis, batch_axes
from zero_jax.tracing.jaxpr import Atom, Rewriter
from zero_jax.tracing.sources import JAX, is_library, line_of

# Functions of JAX that annotate. A frame of one shows that JAX failed in it.
_ANNOTATING = frozenset(
    ("with_sharding_constraint", "reshard", "auto_axes", "explicit_axes", "device_put", "shard_map")
)


def check_context(mesh: AnyMesh) -> None:
    """Raises ValueError if the mesh of `jax.set_mesh` differs from that of the step."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return
    same = tuple(context.shape.items()) == tuple(mesh.shape.items())
    if not same or AxisType.Explicit in context.axis_types:
        raise ValueError(
            f"the mesh of `jax.set_mesh` is {dict(context.shape)} with axis types "
            f"{context.axis_types}, but zero_jax runs on {dict(mesh.shape)} with Auto axes. Call "
            "it outside that context, or under jax.set_mesh(zero.mesh)"
        )


@contextlib.contextmanager
def allowed(mesh: AnyMesh) -> Iterator[None]:
    """Context in which a loss is traced; an annotation that JAX refuses raises ValueError.

    A mesh without automatic axes is hidden: Flax then annotates nothing, and types of arrays are
    those of one device.
    """
    empty = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    try:
        with contextlib.nullcontext() if _automatic(mesh) else empty:
            yield
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        place = _annotating_line(error)
        if place is None:
            raise
        raise _unsupported(place, mesh) from error


def _unsupported(place: str, mesh: AnyMesh) -> ValueError:
    axes = _automatic(mesh)
    return ValueError(
        f"{place} in the loss is unsupported: each device runs the loss on its own rows, and "
        f"{f'{axes[-1]!r} is the only axis' if axes else 'there is no axis'} of the mesh to shard "
        "over. Explicit axis types are unsupported. Remove it; jax.lax.with_sharding_constraint "
        "with a NamedSharding of another mesh with Auto axes is ignored"
    )


def without(closed: jex.ClosedJaxpr, mesh: AnyMesh) -> jex.ClosedJaxpr:
    """Drops sharding annotations, at every depth, except those over automatic axes of the mesh.

    Raises ValueError for explicit axis types, and for a `shard_map` with no axis to map over.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> where = NamedSharding(mesh, PartitionSpec("data"))
    >>> fun = lambda x: jax.lax.with_sharding_constraint(x, where) + 1
    >>> program = jax.make_jaxpr(fun)(jax.numpy.ones(2))
    >>> "sharding_constraint" in str(program), "sharding_constraint" in str(without(program, mesh))
    (True, False)
    """
    return _WithoutAnnotations(mesh)(closed)


def _automatic(mesh: AnyMesh) -> list[str]:
    return [axis for axis in mesh.axis_names if axis not in batch_axes(mesh)]


class _WithoutAnnotations(Rewriter):
    def __init__(self, mesh: AnyMesh):
        self._mesh = mesh

    def equation(self, eqn: jex.JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        name = eqn.primitive.name
        mapped = name == "shard_map" and not _automatic(self._mesh)
        if mapped or any(map(_is_explicit, eqn.outvars)):
            raise _unsupported(f"{line_of(eqn)}{name}", self._mesh)
        if name == "device_put" and all(map(_is_device, eqn.params["devices"])):
            return values
        if name == "sharding_constraint":
            sharding = _automatic_part(eqn.params["sharding"], self._mesh)
            if sharding is None:
                return values
            if sharding is not eqn.params["sharding"]:
                eqn = eqn.replace(params={**eqn.params, "sharding": sharding})
        return super().equation(eqn, values)


def _automatic_part(sharding: Sharding, mesh: AnyMesh) -> Sharding | None:
    """Returns the part of a sharding over automatic axes of the mesh, or None."""
    if not isinstance(sharding, NamedSharding) or not _automatic(mesh):
        return None
    if tuple(sharding.mesh.shape.items()) != tuple(mesh.shape.items()):
        return None
    manual = batch_axes(mesh)

    def one(axes: Axis | None) -> Axis | None:
        if isinstance(axes, tuple):
            return tuple(a for a in axes if a not in manual)
        return None if axes in manual else axes

    spec = PartitionSpec(*map(one, sharding.spec))
    return sharding if spec == sharding.spec else NamedSharding(sharding.mesh, spec)


def _is_device(device: object) -> bool:
    """Returns True for devices with their own memory kind."""
    if isinstance(device, Sharding):
        return device.memory_kind in (None, "device")
    return isinstance(device, jax.Device)


def _is_explicit(var: jex.Var) -> bool:
    sharding = getattr(var.aval, "sharding", None)
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _annotating_line(error: BaseException) -> str | None:
    """Returns the user's line and the annotation in it, if JAX failed there."""
    place: str | None = None
    annotation: str | None = None  # the user's own code below it has errors of its own
    for frame, line in traceback.walk_tb(error.__traceback__):
        function = frame.f_code.co_qualname.partition(".")[0].lstrip("_")
        if not is_library(frame.f_code.co_filename):
            place, annotation = f"{frame.f_code.co_filename}:{line}", None
        elif place and not annotation and frame.f_code.co_filename.startswith(JAX):
            if function in _ANNOTATING:
                annotation = f"{place}: {function}"
            elif frame.f_locals.get("out_sharding") is not None:
                annotation = f"{place}: out_sharding="
    return annotation
