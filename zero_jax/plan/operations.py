"""A traced step as a list of operations between the arrays of one device.

Calls (`jit`, `remat`, `custom_vjp`) are inlined. A loop is one iteration between the operations
`LOOP` and `LOOP_END`, and branches follow each other. This is the step before the compiler fuses
and schedules it, analysed in a fraction of a second for a model of any size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec

from zero_jax.sharding.mesh import MODEL
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.interpreter import Interpreter
from zero_jax.tracing.jaxpr import AnyJaxpr, Atom, as_closed, is_var, shape_of
from zero_jax.tracing.sharded_dims import Dim, sharded_dims

# Operations that write their result over their first operand.
IN_PLACE = {f"scatter{kind}" for kind in ("", "-add", "-mul", "-min", "-max")}
IN_PLACE |= {"dynamic_update_slice"}
# Other views of the same bytes.
VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "optimization_barrier", "pcast"}
VIEWS |= {"name", "stop_gradient", "bitcast_convert_type"}
# A loop starts with its state and with memory for stacked results, and ends with both.
LOOP, LOOP_END = "loop", "loop_end"


@dataclass(eq=False)
class Value:
    """An array that an operation computes, compared by identity."""

    shape: tuple[int, ...]  # on one device, not divided by the size of `model`
    full_bytes: int  # of that shape
    split: Dim = None  # the dim that is sharded over `model`
    parts: int = 1  # the size of that axis
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
    """An equation, or an end of a loop."""

    name: str  # the primitive
    context: str  # its place in the traced function
    inputs: list[Value]
    outputs: list[Value]
    # (input, output) pairs that share memory: views, targets of updates, states of loops.
    shared: Sequence[tuple[Value, Value]] = ()


class LinearStep(NamedTuple):
    """The inputs, the results, and the operations on which these depend, in their order."""

    inputs: list[Value]
    results: Values
    operations: list[Operation]


def linear_step(jaxpr: AnyJaxpr, split: Sequence[Dim] = (), parts: int = 1) -> LinearStep:
    """Returns the operations of a jaxpr.

    `split` has the dim of each of its first inputs that is sharded over `model`, an axis of `parts`
    devices, or None.

    >>> sin = jax.jit(jax.numpy.sin)
    >>> step = jax.make_jaxpr(lambda x: sin(x) @ x)(jax.numpy.ones((2, 2)))
    >>> [operation.name for operation in linear_step(step).operations]
    ['sin', 'dot_general']
    """
    closed, recorder = as_closed(jaxpr), _Recorder(parts)
    inputs = [recorder.value(var) for var in closed.jaxpr.invars]
    for value, dim in zip(inputs, split, strict=False):
        value.split = dim
    results = recorder.run(closed, inputs)
    needed, operations, ends = set(_present(results)), list[Operation](), list[bool]()
    for operation in reversed(recorder.operations):
        keep = not needed.isdisjoint(operation.outputs)
        if operation.name == LOOP_END:
            ends.append(keep)
        elif operation.name == LOOP:
            keep = ends.pop()
        if keep:
            operations.append(operation)
            needed.update(operation.inputs)
    return LinearStep(inputs, results, operations[::-1])


def device_part(jaxpr: AnyJaxpr) -> jex.Jaxpr:
    """Returns the jaxpr that one device runs: the body of the first `shard_map`, or raises."""
    nested = jaxprs.nested(as_closed(jaxpr).jaxpr)
    bodies = (eqn.params["jaxpr"] for eqn in nested if eqn.primitive.name == "shard_map")
    body: jex.Jaxpr | None = next(bodies, None)
    if body is None:
        raise ValueError("the function has no shard_map in it: give one made by zero.train_step")
    return body


class _Recorder(Interpreter[Value | None]):
    """Records the operations of a jaxpr; `parts` is the size of the axis `model`."""

    def __init__(self, parts: int):
        super().__init__()
        self.handlers["shard_map"] = self._shard_map
        self._parts = parts
        self.operations: list[Operation] = []

    def value(self, var: jex.Var, split: Dim = None) -> Value:
        on_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        return Value(shape_of(var), jaxprs.bytes_of(var), split, self._parts, on_host)

    def constant(self, atom: Atom, value: object) -> Value | None:
        return self.value(atom) if is_var(atom) else None

    def default(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        name, outputs = eqn.primitive.name, self._outputs(eqn, values)
        shared = len(outputs) if name in VIEWS else int(name in IN_PLACE)
        self._record(eqn, name, values, outputs, shared)
        return outputs

    def _outputs(self, eqn: jex.JaxprEqn, values: Values) -> list[Value]:
        if eqn.primitive.name == "sharding_constraint":
            dims = [_dim_over_model(eqn.params["sharding"].spec)]
        else:
            if eqn.primitive.name in ("add_any", "dynamic_update_slice"):
                # Parts of one gradient are sharded alike, and a stack like what is put into it.
                arrays = [v for v in _present(values) if v.shape]
                split = next((v.split for v in arrays if v.split is not None), None)
                for value in arrays:
                    value.split = split
            dims = sharded_dims(eqn, [None if v is None else v.split for v in values])
        return [self.value(v, dim) for v, dim in zip(eqn.outvars, dims, strict=True)]

    def _record(
        self, eqn: jex.JaxprEqn, name: str, inputs: Values, outputs: Values, shared: int = 0
    ) -> None:
        """Records an operation whose first inputs share memory with its first outputs."""
        pairs = zip(inputs[:shared], outputs[:shared], strict=True)
        both = [(old, new) for old, new in pairs if old is not None and new is not None]
        context, made = str(eqn.source_info.name_stack), list(dict.fromkeys(_present(outputs)))
        self.operations.append(Operation(name, context, _present(inputs), made, both))

    def scan(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        """Records one iteration of a loop. A loop that has only one is no loop."""
        if eqn.params.get("length") == 1:
            return self._inlined(eqn, values)
        mark, outputs = len(self.operations), self._outputs(eqn, values)
        ((body, first),), (start, count) = jaxprs.bodies(eqn), jaxprs.state_of(eqn)
        state, variables = values[start : start + count], body.jaxpr.invars[start - first :]
        pairs = zip(variables, values[start:], strict=True)
        inside = [self.value(var, _split_as(value, shape_of(var))) for var, value in pairs]
        room = [self.value(var) for var in eqn.outvars[count:]]
        self._record(eqn, LOOP, state, [*inside[:count], *room], count)
        for stack, part in zip(values[start + count :], inside[count:], strict=True):
            self._record(eqn, "dynamic_slice", [stack], [part])
        results = self.run(body, [*values[first:start], *inside])
        late = [(x, y.split) for x, y in zip(state, results, strict=False) if x and y]
        late = [(x, split) for x, split in late if x.split is None and split is not None]
        if late:  # the state is sharded like its result from the start
            for value, split in late:
                value.split = split
            del self.operations[mark:]
            return self.scan(eqn, values)
        _split_like([*outputs, *room], [*results, *results[count:]])
        ends, outs = [*results, *room], [*outputs, *outputs[count:]]
        self._record(eqn, LOOP_END, ends, outs, len(outs))
        return outputs

    while_loop = scan

    def cond(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        """Records all branches, one after the other."""
        outputs = self._outputs(eqn, values)
        cases = [self.run(branch, values[first:]) for branch, first in jaxprs.bodies(eqn)]
        for results in cases:
            _split_like(outputs, results)
        self._record(eqn, "cond", [x for case in cases for x in case], outputs, len(outputs))
        return outputs

    def _inlined(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        """Records the body of a scan with one iteration."""
        body = jaxprs.inner(eqn)
        inside = self._views(eqn, values, body.jaxpr.invars)
        return self._views(eqn, self.run(body, inside), eqn.outvars)

    def _shard_map(self, eqn: jex.JaxprEqn, values: Values) -> Values:
        """Inlines a part that is manual over `model`: its values are those of one device."""
        body, specs = as_closed(eqn.params["jaxpr"]), eqn.params["in_specs"]
        for value, spec in zip(values, specs, strict=True):
            if value is not None and value.split is None:
                value.split = _dim_over_model(spec)
        inside = self._views(eqn, values, body.jaxpr.invars, [None] * len(values))
        dims = list(map(_dim_over_model, eqn.params["out_specs"]))
        return self._views(eqn, self.run(body, inside), eqn.outvars, dims)

    def _views(
        self,
        eqn: jex.JaxprEqn,
        values: Values,
        variables: Sequence[jex.Var],
        splits: Sequence[Dim] | None = None,
    ) -> list[Value]:
        """Returns values under the shapes of variables; they are sharded alike without `splits`."""
        alike = [_split_as(v, shape_of(var)) for v, var in zip(values, variables, strict=True)]
        views = list(map(self.value, variables, splits or alike))
        for value, view in zip(values, views, strict=True):
            self._record(eqn, "reshape", [value], [view], 1)
        return views


def _present(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _split_as(value: Value | None, shape: Sequence[int]) -> Dim:
    """Returns the sharded dim of a value in another shape, at the same distance from the end."""
    if value is None or value.split is None:
        return None
    return value.split + len(shape) - len(value.shape)


def _split_like(outputs: Sequence[Value], results: Values) -> None:
    """Shards the outputs of a loop or a branch like the results of its body."""
    for out, result in zip(outputs, results, strict=True):
        split = _split_as(result, out.shape)
        out.split = out.split if split is None else split


def _dim_over_model(spec: PartitionSpec) -> Dim:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return next((dim for dim, names in enumerate(entries) if MODEL in names), None)
