"""A flat program: values, the operations between them, and what loops run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from zero_jax.tracing.dataflow import Dim
from zero_jax.tracing.jaxpr import bytes_of, shape_of

SCATTERS = frozenset(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"))
# What writes its result over its first operand.
IN_PLACE = SCATTERS | {"dynamic_update_slice"}


@dataclass(eq=False)
class Value:
    """What an operation makes, told apart by identity.

    Attributes:
      shape: of one device.
      dtype: by name.
      bytes: in the device's memory.
      host_bytes: in host memory.
    """

    shape: tuple[int, ...]
    dtype: str
    full_bytes: int
    split: Dim = None  # the dim that tensor parallelism splits over `model`
    parts: int = 1  # the size of that axis
    on_host: bool = False

    @property
    def _own_bytes(self) -> int:
        return self.full_bytes if self.split is None else self.full_bytes // self.parts

    @property
    def bytes(self) -> int:
        """Of one device's memory."""
        return 0 if self.on_host else self._own_bytes

    @property
    def host_bytes(self) -> int:
        """Of the host's memory."""
        return self._own_bytes if self.on_host else 0


@dataclass(eq=False)
class Operation:
    """One equation of the flat program.

    Attributes:
      name: the primitive.
      inputs: values it reads; literals are left out.
      outputs: values it makes.
      bodies: what a loop or a branch runs, with what it is given; empty for the rest.
      carried: (input, output) of what it updates in place: of a loop each part of its state.
      backward: whether it belongs to the transposed (backward) part.
      context: where it stands in the traced function.
    """

    name: str
    inputs: list[Value]
    outputs: list[Value]
    bodies: list["Body"]
    carried: list[tuple[Value, Value]]
    backward: bool
    context: str

    @property
    def inside(self) -> list["Operation"]:
        """The operations of one turn of a loop, or of all branches."""
        return [o for body in self.bodies for o in body.flat.operations]


@dataclass
class Flat:
    """A flat program: operations in order, between inputs and results (None for a literal)."""

    inputs: list[Value]
    results: list[Value | None]
    operations: list[Operation]

    @property
    def outputs(self) -> list[Value]:
        """The results without literals."""
        return present(self.results)


@dataclass
class Body:
    """What a loop or a branch runs.

    Attributes:
      flat: the program of one iteration.
      given: (inside, outside) pairs; a loop hands a slice to an inside of fewer dims.
    """

    flat: Flat
    given: list[tuple[Value, Value]]


def value_of(var: Any, parts: int, split: Dim = None) -> Value:
    """What a variable of a jaxpr holds."""
    on_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
    dtype = str(getattr(var.aval, "dtype", None))
    return Value(shape_of(var), dtype, bytes_of(var), split, parts, on_host)


def present(values: Iterable[Value | None]) -> list[Value]:
    """Values without literals."""
    return [value for value in values if value is not None]
