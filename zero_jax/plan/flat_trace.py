"""A traced function as a flat list of operations and the values between them.

Calls (`jit`, `remat`, `custom_vjp`) are written out in place; loops and branches stay one operation
each, with a body of their own. What is left is the program as the compiler meets it, before it
fuses and schedules, small enough to be walked in a fraction of a second for any size of model.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.plan.flat_program import Body, Flat, Operation, Value, present, value_of
from zero_jax.plan.model_spread import Dim, dim_of, spread

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"),
        *("custom_jvp_call", "custom_vjp_call", "shard_map"),
    )
)


def flatten(jaxpr: Any, split: Sequence[Dim] = (), parts: int = 1) -> Flat:
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
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env = {var: value_of(var, parts) for var in (*jaxpr.invars, *jaxpr.constvars)}
    inputs = list(env.values())
    for value, dim in zip(inputs, split, strict=False):
        value.split = dim
    operations: list[Operation] = []
    _append(jaxpr, env, operations, parts)
    results = [_read(env, atom) for atom in jaxpr.outvars]
    return Flat(inputs, results, _used(operations, present(results)))


def device_part(jaxpr: Any) -> Any:
    """The jaxpr that one device runs: the body of the first `shard_map`.

    Raises:
      ValueError: there is none.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "shard_map":
            return _called(eqn)
        if eqn.primitive.name in _CALLS:
            try:
                return device_part(_called(eqn))
            except ValueError:
                continue
    raise ValueError("the function has no shard_map in it: give one made by zero.train_step")


def _read(env: dict[Any, Value], atom: Any) -> Value | None:
    return None if isinstance(atom, jex.Literal) else env[atom]


def _called(eqn: Any) -> Any:
    params = eqn.params
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    return getattr(inner, "jaxpr", inner)


def _bodies(eqn: Any, given: Sequence[Value | None], parts: int) -> list[Body]:
    if eqn.primitive.name == "cond":
        return [_body(branch, given[1:], parts) for branch in eqn.params["branches"]]
    if eqn.primitive.name == "while":
        return [_body(eqn.params["body_jaxpr"], given[eqn.params["cond_nconsts"] :], parts)]
    return [_body(eqn.params["jaxpr"], given, parts)] if eqn.primitive.name == "scan" else []


def _carried(
    eqn: Any, given: Sequence[Value | None], made: Sequence[Value]
) -> list[tuple[Value, Value]]:
    """The state of a loop. A scan's stands between constants and slices, in and out: told apart
    by rank, since the names of its parameters differ between versions of JAX."""
    if eqn.primitive.name == "while":
        return _pairs(given[len(given) - len(made) :], made)
    if eqn.primitive.name != "scan":
        return []
    inside = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    ranks = zip(inside.outvars, made, strict=True)
    count = sum(len(a.aval.shape) == len(b.shape) for a, b in ranks)
    sliced = sum(
        len(a.aval.shape) > len(b.aval.shape)
        for a, b in zip(eqn.invars, inside.invars, strict=True)
    )
    start = len(given) - sliced - count
    return _pairs(given[start : start + count], made[:count])


def _pairs(given: Sequence[Value | None], made: Sequence[Value]) -> list[tuple[Value, Value]]:
    return [(g, m) for g, m in zip(given, made, strict=True) if g is not None]


def _body(jaxpr: Any, given: Sequence[Value | None], parts: int) -> Body:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    split = [
        None
        if theirs is None or theirs.split is None
        # A slice has lost the leading dim.
        else theirs.split - (len(theirs.shape) - len(var.aval.shape))
        for var, theirs in zip(inner.invars, given, strict=False)
    ]
    flat = flatten(jaxpr, split, parts)
    pairs = zip(flat.inputs, given, strict=False)  # after them come constants of the body's own
    return Body(flat, [(mine, theirs) for mine, theirs in pairs if theirs is not None])


def _append(jaxpr: Any, env: dict[Any, Value], operations: list[Operation], parts: int) -> None:
    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, [_read(env, atom) for atom in eqn.invars]
        if name == "shard_map":
            outs = _inline_pieces(eqn, given, operations, parts)
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        if name in _CALLS:
            outs = _inline(_called(eqn), given, operations, parts)
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        if name == "add_any":  # parts of one gradient are split alike
            _split_alike(present(given))
        dims = spread(eqn, [None if v is None else v.split for v in given])
        made = [value_of(v, parts, d) for v, d in zip(eqn.outvars, dims, strict=True)]
        env.update(zip(eqn.outvars, made, strict=True))
        if name == "scan" and eqn.params["length"] == 1:
            _append_once(eqn, given, made, operations, parts)
            continue
        bodies = _bodies(eqn, given, parts)
        carried = _carried(eqn, given, made)
        if bodies:
            bodies = _hand_out(eqn, bodies, given, made, carried, parts)
        reads = present(given)
        if name == "scan":
            unread = _unread(bodies[0]) - {start for start, _ in carried}
            reads = [value for value in reads if value not in unread]
        operations.append(_operation(eqn, name, reads, made, bodies, carried))


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


def _operation(
    eqn: Any,
    name: str,
    inputs: list[Value],
    outputs: list[Value],
    bodies: Sequence[Body] = (),
    carried: Sequence[tuple[Value, Value]] = (),
) -> Operation:
    context = str(eqn.source_info.name_stack)
    backward = "transpose(" in context
    return Operation(name, inputs, outputs, list(bodies), list(carried), backward, context)


def _hand_out(
    eqn: Any,
    bodies: list[Body],
    given: Sequence[Value | None],
    made: list[Value],
    carried: list[tuple[Value, Value]],
    parts: int,
) -> list[Body]:
    """Splits what a loop makes as its body's results are; what it carries, from the start on."""
    for value, inside in zip(made, bodies[0].flat.results, strict=True):
        if inside is not None and inside.split is not None:
            value.split = inside.split + len(value.shape) - len(inside.shape)
    late = [(start, end) for start, end in carried if start.split is None and end.split is not None]
    if not late:
        return bodies
    for start, end in late:
        start.split = end.split
    return _bodies(eqn, given, parts)


def _append_once(
    eqn: Any,
    given: Sequence[Value | None],
    made: list[Value],
    operations: list[Operation],
    parts: int,
) -> None:
    """A loop of one iteration is none: its body, between views of slices in and out."""
    body = _called(eqn)
    inside: list[Value | None] = []
    for var, value in zip(body.invars, given, strict=True):
        piece = value
        if value is not None and len(var.aval.shape) < len(value.shape):
            piece = value_of(var, parts, None if value.split is None else value.split - 1)
            operations.append(_operation(eqn, "squeeze", [value], [piece]))
        inside.append(piece)
    for value, out in zip(made, _inline(body, inside, operations, parts), strict=True):
        shift = len(value.shape) - len(out.shape)
        value.split = None if out.split is None else out.split + shift
        operations.append(_operation(eqn, "reshape", [out], [value]))


def _inline_pieces(
    eqn: Any, given: Sequence[Value | None], operations: list[Operation], parts: int
) -> list[Value]:
    """A part that is manual over `model`: inside, values are what one device has of them."""
    body = _called(eqn)
    inside = [value_of(var, parts) for var in body.invars]
    for own, value, spec in zip(inside, given, eqn.params["in_specs"], strict=True):
        if value is not None:
            value.split = dim_of(spec) if value.split is None else value.split
            operations.append(_operation(eqn, "reshape", [value], [own]))
    outs = _inline(body, inside, operations, parts)
    made = [
        value_of(var, parts, dim_of(spec))
        for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)
    ]
    for out, value in zip(outs, made, strict=True):
        operations.append(_operation(eqn, "reshape", [out], [value]))
    return made


def _inline(
    jaxpr: Any, given: Sequence[Value | None], operations: list[Operation], parts: int
) -> list[Value]:
    inside = {var: value_of(var, parts) for var in jaxpr.constvars}
    for var, value in zip(jaxpr.invars, given, strict=True):
        inside[var] = value or value_of(var, parts)
    _append(jaxpr, inside, operations, parts)
    return [_read(inside, atom) or Value((), "", 0) for atom in jaxpr.outvars]


def _used(operations: list[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """The operations whose results somebody reads."""
    needed = set(outputs)
    kept = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs):
            kept.append(operation)
            needed.update(operation.inputs)
    return kept[::-1]
