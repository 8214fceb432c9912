"""A traced function as a flat list of operations and the values between them.

Calls (`jit`, `remat`, `custom_vjp`) are written out in place; loops and branches stay one operation
each, with a body of their own. What is left is the program as the compiler meets it, before it
fuses and schedules, small enough to be walked in a fraction of a second for any size of model.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.jaxpr import equations
from zero_jax.jaxpr import spread as any_axis
from zero_jax.jaxpr.equations import CALLS, AnyJaxpr, as_closed, is_var, shape_of, written_out
from zero_jax.jaxpr.spread import Dim
from zero_jax.plan.flat_program import IN_PLACE, Body, Flat, Operation, Value, present, value_of
from zero_jax.sharding.mesh import MODEL


def flatten(jaxpr: AnyJaxpr, split: Sequence[Dim] = (), parts: int = 1) -> Flat:
    """Writes a jaxpr out flat.

    Args:
      jaxpr: a jaxpr, open or closed.
      split: of its first inputs, the dim that is split over `model`, or None.
      parts: the size of that axis.

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
    """The jaxpr that one device runs: the body of the first `shard_map`.

    Raises:
      ValueError: there is none.
    """
    for eqn in written_out(as_closed(jaxpr), CALLS).jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return eqn.params["jaxpr"]
    raise ValueError("the function has no shard_map in it: give one made by zero.train_step")


class _Trace:
    """Operations that are written out one after the other; MP `parts`."""

    def __init__(self, parts: int):
        self.parts = parts
        self.operations: list[Operation] = []

    def run(self, closed: jex.ClosedJaxpr, given: Sequence[Value | None]) -> list[Value | None]:
        """Writes a jaxpr out on these inputs, None for literals; returns its results."""
        flat = written_out(closed, CALLS).jaxpr
        env: dict[jex.Var, Value | None] = {
            var: value_of(var, self.parts) for var in flat.constvars
        }
        env.update(zip(flat.invars, given, strict=True))

        def read(atom: Any) -> Value | None:
            return env[atom] if is_var(atom) else None

        for eqn in flat.eqns:
            made = self._one(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(a) for a in flat.outvars]

    def _one(self, eqn: jex.JaxprEqn, given: list[Value | None]) -> list[Value]:
        name = eqn.primitive.name
        if name == "shard_map":
            return self._pieces(eqn, given)
        if name == "add_any":  # parts of one gradient are split alike
            _split_alike(present(given))
        dims = spread(eqn, [None if v is None else v.split for v in given])
        made = [value_of(v, self.parts, d) for v, d in zip(eqn.outvars, dims, strict=True)]
        if name == "scan" and eqn.params["length"] == 1:
            self._once(eqn, given, made)
        elif equations.bodies(eqn):
            self._loop(eqn, given, made)
        else:
            # They write to their first operand, if nobody else needs it.
            first = [(given[0], made[0])] if name in IN_PLACE and given[0] is not None else []
            self._append(eqn, name, given, made, carried=first)
        return made

    def _append(
        self,
        eqn: jex.JaxprEqn,
        name: str,
        given: Sequence[Value | None],
        made: Sequence[Value],
        bodies: Sequence[Body] = (),
        carried: Sequence[tuple[Value, Value]] = (),
    ) -> None:
        context = str(eqn.source_info.name_stack)
        backward, reads = "transpose(" in context, present(given)
        self.operations.append(
            Operation(name, reads, list(made), list(bodies), list(carried), backward, context)
        )

    def _loop(self, eqn: jex.JaxprEqn, given: list[Value | None], made: list[Value]) -> None:
        """A loop or a branch. What it makes is split as its body's results are; what it carries,
        from the start on."""
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

    def _bodies(self, eqn: jex.JaxprEqn, given: Sequence[Value | None]) -> list[Body]:
        return [self._body(body, given[first:]) for body, first in equations.bodies(eqn)]

    def _body(self, closed: jex.ClosedJaxpr, given: Sequence[Value | None]) -> Body:
        pairs = zip(given, closed.jaxpr.invars, strict=True)
        split = [_split_in(theirs, shape_of(var)) for theirs, var in pairs]
        flat = flatten(closed, split, self.parts)
        both = zip(flat.inputs, given, strict=True)
        return Body(flat, [(mine, theirs) for mine, theirs in both if theirs is not None])

    def _once(
        self, eqn: jex.JaxprEqn, given: Sequence[Value | None], made: Sequence[Value]
    ) -> None:
        """A loop of one iteration is none: its body, between views of slices in and out."""
        ((body, _),) = equations.bodies(eqn)
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

    def _pieces(self, eqn: jex.JaxprEqn, given: Sequence[Value | None]) -> list[Value]:
        """A part that is manual over `model`: inside, values are what one device has of them."""
        body = as_closed(eqn.params["jaxpr"])
        inside = [value_of(var, self.parts) for var in body.jaxpr.invars]
        for own, value, spec in zip(inside, given, eqn.params["in_specs"], strict=True):
            if value is not None:
                value.split = dim_of(spec) if value.split is None else value.split
                self._append(eqn, "reshape", [value], [own])
        outs = self.run(body, inside)
        made = [
            value_of(var, self.parts, dim_of(spec))
            for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)
        ]
        for out, value in zip(outs, made, strict=True):
            self._append(eqn, "reshape", [out], [value])
        return made


def _split_in(value: Value | None, shape: Sequence[int]) -> Dim:
    """The split dim of a stack that a value is a slice of, or of a slice of it, of that shape."""
    if value is None or value.split is None:
        return None
    return value.split + len(shape) - len(value.shape)


def _carried(
    eqn: jex.JaxprEqn, given: Sequence[Value | None], made: Sequence[Value]
) -> list[tuple[Value, Value]]:
    """The state of a loop, in and out."""
    if eqn.primitive.name == "cond":
        return []
    first, count = equations.state_of(eqn)
    pairs = zip(given[first : first + count], made[:count], strict=True)
    return [(start, end) for start, end in pairs if start is not None]


def _unread(body: Body) -> set[Value]:
    """What a loop is given and does not look at: it need not be there."""
    read = {v for operation in body.flat.operations for v in operation.inputs}
    read.update(body.flat.outputs)
    looked_at = {theirs for mine, theirs in body.given if mine in read}
    return {theirs for _, theirs in body.given} - looked_at


def _split_alike(values: Sequence[Value]) -> None:
    split = next((v.split for v in values if v.split is not None), None)
    for value in values:
        value.split = split


def _used(operations: list[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """The operations whose results somebody reads."""
    needed = set(outputs)
    kept = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs):
            kept.append(operation)
            needed.update(operation.inputs)
    return kept[::-1]


def spread(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> list[Dim]:
    """As `jaxpr.spread.spread`, of the axis `model`, which constraints and activations name."""
    if eqn.primitive.name == "sharding_constraint":
        return [dim_of(eqn.params["sharding"].spec)]
    return any_axis.spread(eqn, given)


def dim_of(spec: Any) -> Dim:
    """The dim of a PartitionSpec that is over `model`."""
    entries = [e if isinstance(e, tuple) else (e,) for e in spec]
    return next((d for d, names in enumerate(entries) if MODEL in names), None)
