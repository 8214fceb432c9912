"""A traced step as operations between the arrays of one device.

Calls (`jit`, `remat`, `custom_vjp`) are inlined. A loop or a branch is one operation with the
program of an iteration. This is the step before the compiler fuses and schedules it, analysed in a
fraction of a second for a model of any size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec

from zero_jax.sharding.mesh import MODEL
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Dim, sharded_dims
from zero_jax.tracing.interpreter import Interpreter
from zero_jax.tracing.jaxpr import AnyJaxpr, Atom, as_closed, is_var, shape_of

# Operations that write their result over their first operand.
IN_PLACE = frozenset(
    (
        *("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"),
        "dynamic_update_slice",
    )
)


@dataclass(eq=False)
class Value:
    """An array that an operation computes, compared by identity.

    Attributes:
      shape: Shape on one device, not divided by the size of `model`.
      full_bytes: Bytes of that shape.
      split: The dim that tensor parallelism shards over `model`, or None.
      parts: Size of that axis.
      on_host: True in host memory.
    """

    shape: tuple[int, ...]
    full_bytes: int
    split: Dim = None
    parts: int = 1
    on_host: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of this device's shard, in either memory."""
        return self.full_bytes if self.split is None else self.full_bytes // self.parts

    @property
    def bytes(self) -> int:
        """Bytes in device memory."""
        return 0 if self.on_host else self.stored_bytes


# A literal has no value.
Values = Sequence[Value | None]


@dataclass(eq=False)
class Operation:
    """An equation, a loop or a branch.

    Attributes:
      name: The primitive.
      context: Its place in the traced function.
      inputs: Values it reads.
      outputs: Values it computes.
      bodies: Program of an iteration of a loop, or of each branch.
      in_place: (input, output) pairs that share memory: the state of a loop, the target of an
        update.
    """

    name: str
    context: str
    inputs: list[Value]
    outputs: list[Value]
    bodies: "Sequence[Program]" = ()
    in_place: Sequence[tuple[Value, Value]] = ()

    @property
    def backward(self) -> bool:
        """True in the transposed part."""
        return "transpose(" in self.context

    @property
    def inside(self) -> "list[Operation]":
        """The operations of one iteration of a loop, or of all branches."""
        return [o for body in self.bodies for o in body.operations]


@dataclass
class Program:
    """Operations in the order of the trace.

    Attributes:
      inputs: The inputs.
      results: The results.
      operations: Operations on which results depend.
      given: For a body, (input, value outside) pairs; a loop passes a slice to an input of lower
        rank.
    """

    inputs: list[Value]
    results: Values
    operations: list[Operation]
    given: Sequence[tuple[Value, Value]] = ()

    @property
    def outputs(self) -> set[Value]:
        """The results without literals."""
        return set(_present(self.results))


def program_of(
    jaxpr: AnyJaxpr, split: Sequence[Dim] = (), parts: int = 1, outside: Values = ()
) -> Program:
    """Returns a jaxpr as a program.

    Args:
      jaxpr: A jaxpr, open or closed.
      split: The dim of each of its first inputs that is sharded over `model`, or None.
      parts: Size of that axis.
      outside: For a body, the values that it is given.

    >>> sin = jax.jit(jax.numpy.sin)
    >>> step = jax.make_jaxpr(lambda x: sin(x) @ x)(jax.numpy.ones((2, 2)))
    >>> [operation.name for operation in program_of(step).operations]
    ['sin', 'dot_general']
    """
    closed, recorder = as_closed(jaxpr), _Recorder(parts)
    inputs = [recorder.value(var) for var in closed.jaxpr.invars]
    for value, dim in zip(inputs, split, strict=False):
        value.split = dim
    results = recorder.run(closed, inputs)
    needed, operations = set(_present(results)), list[Operation]()
    for operation in reversed(recorder.operations):
        if not needed.isdisjoint(operation.outputs):
            operations.append(operation)
            needed.update(operation.inputs)
    pairs = zip(inputs, outside, strict=False)
    given = [(inside, value) for inside, value in pairs if value is not None]
    return Program(inputs, results, operations[::-1], given)


def device_part(jaxpr: AnyJaxpr) -> jex.Jaxpr:
    """Returns the jaxpr that one device runs: the body of the first `shard_map`.

    Raises:
      ValueError: There is none.
    """
    for eqn in jaxprs.nested(as_closed(jaxpr).jaxpr):
        if eqn.primitive.name == "shard_map":
            body: jex.Jaxpr = eqn.params["jaxpr"]
            return body
    raise ValueError("the function has no shard_map in it: give one made by zero.train_step")


class _Recorder(Interpreter[Value | None]):
    """Records the operations of a jaxpr.

    Args:
      parts: Size of the axis `model`.
    """

    def __init__(self, parts: int):
        super().__init__()
        self.handlers |= {"while": self._loop, "cond": self._loop, "shard_map": self._shard_map}
        self._parts = parts
        self.operations: list[Operation] = []

    def value(self, var: jex.Var, split: Dim = None) -> Value:
        on_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        return Value(shape_of(var), jaxprs.bytes_of(var), split, self._parts, on_host)

    def constant(self, atom: Atom, value: object) -> Value | None:
        return self.value(atom) if is_var(atom) else None

    def default(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        outputs = self._outputs(eqn, values)
        pairs = zip(values[:1], outputs, strict=False) if eqn.primitive.name in IN_PLACE else ()
        in_place = [(old, new) for old, new in pairs if old is not None]
        self._record(eqn, eqn.primitive.name, values, outputs, in_place=in_place)
        return outputs

    def _outputs(self, eqn: jex.JaxprEqn, values: Values) -> list[Value]:
        if eqn.primitive.name == "sharding_constraint":
            dims = [_dim_over_model(eqn.params["sharding"].spec)]
        else:
            if eqn.primitive.name == "add_any":  # parts of one gradient are sharded alike
                split = next((v.split for v in _present(values) if v.split is not None), None)
                for value in _present(values):
                    value.split = split
            dims = sharded_dims(eqn, [None if v is None else v.split for v in values])
        return [self.value(v, dim) for v, dim in zip(eqn.outvars, dims, strict=True)]

    def _record(
        self, eqn: jex.JaxprEqn, name: str, inputs: Values, outputs: Values, **more: Any
    ) -> None:
        context = str(eqn.source_info.name_stack)
        operation = Operation(name, context, _present(inputs), _present(outputs), **more)
        self.operations.append(operation)

    def scan(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        if eqn.params["length"] > 1:
            return self._loop(eqn, values)
        outputs, body = self._outputs(eqn, values), jaxprs.inner(eqn)
        splits = [_split_as(v, shape_of(x)) for v, x in zip(values, body.jaxpr.invars, strict=True)]
        for out, result in zip(outputs, self._inlined(eqn, body, values, splits), strict=True):
            out.split = _split_as(result, out.shape)
            self._record(eqn, "reshape", [result], [out])
        return outputs

    def _shard_map(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        """Inlines a part that is manual over `model`: its values are those of one device."""
        for value, spec in zip(values, eqn.params["in_specs"], strict=True):
            if value is not None and value.split is None:
                value.split = _dim_over_model(spec)
        body = as_closed(eqn.params["jaxpr"])
        results = self._inlined(eqn, body, values, [None] * len(values))
        dims = map(_dim_over_model, eqn.params["out_specs"])
        outputs = [self.value(v, dim) for v, dim in zip(eqn.outvars, dims, strict=True)]
        for out, result in zip(outputs, results, strict=True):
            self._record(eqn, "reshape", [result], [out])
        return outputs

    def _inlined(
        self, eqn: jex.JaxprEqn, body: jex.ClosedJaxpr, values: Values, splits: Sequence[Dim]
    ) -> Values:
        """Records a body whose inputs are views of these values."""
        inside: list[Value | None] = []
        for var, value, split in zip(body.jaxpr.invars, values, splits, strict=True):
            inside.append(None if value is None else self.value(var, split))
            self._record(eqn, "reshape", [value], inside[-1:])
        return self.run(body, inside)

    def _loop(self, eqn: jex.JaxprEqn, values: Values) -> list[Value]:
        """Records a loop or a branch, whose results are sharded as those of its body.

        The state of a loop is sharded like its result from the start.
        """
        outputs, bodies = self._outputs(eqn, values), self._bodies(eqn, values)
        for out, result in zip(outputs, bodies[0].results, strict=True):
            split = _split_as(result, out.shape)
            out.split = out.split if split is None else split
        first, count = (0, 0) if eqn.primitive.name == "cond" else jaxprs.state_of(eqn)
        pairs = zip(values[first : first + count], outputs[:count], strict=True)
        state = [(start, end) for start, end in pairs if start is not None]
        late = [
            (start, end) for start, end in state if start.split is None and end.split is not None
        ]
        for start, end in late:
            start.split = end.split
        bodies = self._bodies(eqn, values) if late else bodies
        inputs = [start for start, _ in state]
        for body in bodies:
            read = body.outputs.union(*(o.inputs for o in body.operations))
            inputs += [outside for inside, outside in body.given if inside in read]
        inputs = list(dict.fromkeys(inputs))
        self._record(eqn, eqn.primitive.name, inputs, outputs, bodies=bodies, in_place=state)
        return outputs

    def _bodies(self, eqn: jex.JaxprEqn, values: Values) -> list[Program]:
        programs = []
        for body, first in jaxprs.bodies(eqn):
            given = values[first:]
            shapes = map(shape_of, body.jaxpr.invars)
            split = [_split_as(value, shape) for value, shape in zip(given, shapes, strict=True)]
            programs.append(program_of(body, split, self._parts, given))
        return programs


def _present(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _split_as(value: Value | None, shape: Sequence[int]) -> Dim:
    """Returns the sharded dim of a value in another shape, at the same distance from the end."""
    if value is None or value.split is None:
        return None
    return value.split + len(shape) - len(value.shape)


def _dim_over_model(spec: PartitionSpec) -> Dim:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return next((dim for dim, names in enumerate(entries) if MODEL in names), None)
