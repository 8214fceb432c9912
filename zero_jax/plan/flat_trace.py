"""A traced function as a flat list of operations and the values between them.

Calls (`jit`, `remat`, `custom_vjp`) are inlined. A loop or a branch stays one operation with a
body. The result is the program before the compiler fuses and schedules it, analysed in a fraction
of a second for a model of any size.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.plan.flat_program import IN_PLACE, Body, Flat, Operation, Value, present, value_of
from zero_jax.sharding.mesh import MODEL
from zero_jax.tracing.dataflow import Dim, sharded_dims
from zero_jax.tracing.interpreter import Interpreter
from zero_jax.tracing.jaxpr import AnyJaxpr, as_closed, bodies, nested, shape_of, state_of


def flatten(jaxpr: AnyJaxpr, split: Sequence[Dim] = (), parts: int = 1) -> Flat:
    """Returns a jaxpr as a flat program.

    Args:
      jaxpr: A jaxpr, open or closed.
      split: The dim of each of its first inputs that is sharded over `model`, or None.
      parts: Size of that axis.

    >>> import jax
    >>> sin = jax.jit(jax.numpy.sin)
    >>> step = jax.make_jaxpr(lambda x: sin(x) @ x)(jax.numpy.ones((2, 2)))
    >>> [operation.name for operation in flatten(step).operations]
    ['sin', 'dot_general']
    """
    closed, trace = as_closed(jaxpr), _Trace(parts)
    inputs = [value_of(var, parts) for var in closed.jaxpr.invars]
    for value, dim in zip(inputs, split, strict=False):
        value.split = dim
    results = trace.run(closed, inputs)
    return Flat(inputs, results, _used(trace.operations, present(results)))


def device_part(jaxpr: AnyJaxpr) -> Any:
    """Returns the jaxpr that one device runs: the body of the first `shard_map`.

    Raises:
      ValueError: There is none.
    """
    for eqn in nested(as_closed(jaxpr).jaxpr):
        if eqn.primitive.name == "shard_map":
            return eqn.params["jaxpr"]
    raise ValueError("the function has no shard_map in it: give one made by zero.train_step")


class _Trace(Interpreter[Value | None]):
    """Collects the operations of a jaxpr; the value of a literal is None.

    Args:
      parts: Size of the axis `model`.
    """

    def __init__(self, parts: int):
        super().__init__()
        self.handlers["shard_map"] = self._shard_map
        self.parts = parts
        self.operations: list[Operation] = []

    def literal(self, atom: jex.Literal) -> None:
        return None

    def constant(self, var: jex.Var, value: Any) -> Value:
        return value_of(var, self.parts)

    def default(self, eqn: jex.JaxprEqn, values: list[Value | None]) -> list[Value | None]:
        name, made = eqn.primitive.name, self._made(eqn, values)
        # These write to their first operand, if nobody else needs it.
        first = [(values[0], made[0])] if name in IN_PLACE and values[0] is not None else []
        self._append(eqn, name, values, made, carried=first)
        return [*made]

    def _made(self, eqn: jex.JaxprEqn, values: Sequence[Value | None]) -> list[Value]:
        if eqn.primitive.name == "sharding_constraint":
            dims = [dim_of(eqn.params["sharding"].spec)]
        else:
            if eqn.primitive.name == "add_any":  # parts of one gradient are sharded alike
                _split_alike(present(values))
            dims = sharded_dims(eqn, [None if v is None else v.split for v in values])
        return [value_of(v, self.parts, d) for v, d in zip(eqn.outvars, dims, strict=True)]

    def _append(
        self,
        eqn: jex.JaxprEqn,
        name: str,
        given: Sequence[Value | None],
        made: Sequence[Value | None],
        bodies: Sequence[Body] = (),
        carried: Sequence[tuple[Value, Value]] = (),
    ) -> None:
        context = str(eqn.source_info.name_stack)
        backward, reads = "transpose(" in context, present(given)
        self.operations.append(
            Operation(name, reads, present(made), list(bodies), list(carried), backward, context)
        )

    def scan(self, eqn: jex.JaxprEqn, values: list[Value | None]) -> Sequence[Value | None]:
        return self._once(eqn, values) if eqn.params["length"] == 1 else self._loop(eqn, values)

    def while_loop(self, eqn: jex.JaxprEqn, values: list[Value | None]) -> Sequence[Value | None]:
        return self._loop(eqn, values)

    def cond(self, eqn: jex.JaxprEqn, values: list[Value | None]) -> Sequence[Value | None]:
        return self._loop(eqn, values)

    def _loop(self, eqn: jex.JaxprEqn, given: list[Value | None]) -> list[Value]:
        """Adds a loop or a branch, whose results are sharded as those of its body.

        The state of a loop is sharded so from the start on.
        """
        made = self._made(eqn, given)
        bodies, carried = self._bodies(eqn, given), _carried(eqn, given, made)
        for value, inside in zip(made, bodies[0].flat.results, strict=True):
            split = _split_in(inside, value.shape)
            value.split = value.split if split is None else split
        late = [(a, b) for a, b in carried if a.split is None and b.split is not None]
        for start, end in late:
            start.split = end.split
        if late:
            bodies = self._bodies(eqn, given)
        reads: Sequence[Value | None] = given
        if eqn.primitive.name == "scan":
            unread = _unread(bodies[0]) - {start for start, _ in carried}
            reads = [value for value in given if value not in unread]
        self._append(eqn, eqn.primitive.name, reads, made, bodies, carried)
        return made

    def _bodies(self, eqn: jex.JaxprEqn, given: Sequence[Value | None]) -> list[Body]:
        return [self._body(body, given[first:]) for body, first in bodies(eqn)]

    def _body(self, closed: jex.ClosedJaxpr, given: Sequence[Value | None]) -> Body:
        pairs = zip(given, closed.jaxpr.invars, strict=True)
        split = [_split_in(theirs, shape_of(var)) for theirs, var in pairs]
        flat = flatten(closed, split, self.parts)
        both = zip(flat.inputs, given, strict=True)
        return Body(flat, [(mine, theirs) for mine, theirs in both if theirs is not None])

    def _once(self, eqn: jex.JaxprEqn, given: Sequence[Value | None]) -> list[Value]:
        """Adds the body of a loop of one iteration, between views of slices in and out."""
        made = self._made(eqn, given)
        ((body, _),) = bodies(eqn)
        inside: list[Value | None] = []
        for var, value in zip(body.jaxpr.invars, given, strict=True):
            piece = value
            if value is not None and len(shape_of(var)) < len(value.shape):
                piece = value_of(var, self.parts, _split_in(value, shape_of(var)))
                self._append(eqn, "squeeze", [value], [piece])
            inside.append(piece)
        for value, out in zip(made, self.run(body, inside), strict=True):
            value.split = _split_in(out, value.shape)
            self._append(eqn, "reshape", [out], [value])
        return made

    def _shard_map(self, eqn: jex.JaxprEqn, values: list[Value | None]) -> list[Value | None]:
        """Adds a part that is manual over `model`, whose values are those of one device."""
        body = as_closed(eqn.params["jaxpr"])
        inside = [value_of(var, self.parts) for var in body.jaxpr.invars]
        for piece, value, spec in zip(inside, values, eqn.params["in_specs"], strict=True):
            if value is not None:
                value.split = dim_of(spec) if value.split is None else value.split
                self._append(eqn, "reshape", [value], [piece])
        specs = zip(eqn.outvars, eqn.params["out_specs"], strict=True)
        made = [value_of(var, self.parts, dim_of(spec)) for var, spec in specs]
        for out, value in zip(self.run(body, inside), made, strict=True):
            self._append(eqn, "reshape", [out], [value])
        return [*made]


def _split_in(value: Value | None, shape: Sequence[int]) -> Dim:
    """Returns the sharded dim of a value in another shape, at the same distance from the end."""
    if value is None or value.split is None:
        return None
    return value.split + len(shape) - len(value.shape)


def _carried(
    eqn: jex.JaxprEqn, given: Sequence[Value | None], made: Sequence[Value]
) -> list[tuple[Value, Value]]:
    """Returns the state of a loop, in and out."""
    if eqn.primitive.name == "cond":
        return []
    first, count = state_of(eqn)
    pairs = zip(given[first : first + count], made[:count], strict=True)
    return [(start, end) for start, end in pairs if start is not None]


def _unread(body: Body) -> set[Value]:
    """Returns the inputs of a loop that it does not read."""
    read = {v for operation in body.flat.operations for v in operation.inputs}
    read.update(body.flat.outputs)
    looked_at = {theirs for mine, theirs in body.given if mine in read}
    return {theirs for _, theirs in body.given} - looked_at


def _split_alike(values: Sequence[Value]) -> None:
    split = next((v.split for v in values if v.split is not None), None)
    for value in values:
        value.split = split


def _used(operations: list[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """Returns the operations whose results are read."""
    needed = set(outputs)
    kept = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs):
            kept.append(operation)
            needed.update(operation.inputs)
    return kept[::-1]


def dim_of(spec: Any) -> Dim:
    """Returns the dim of a PartitionSpec that is over `model`."""
    entries = [e if isinstance(e, tuple) else (e,) for e in spec]
    return next((d for d, names in enumerate(entries) if MODEL in names), None)
