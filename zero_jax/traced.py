"""A traced function as a flat list of operations and the values between them.

Calls (`jit`, `remat`, `custom_vjp`) are written out in place; loops and branches stay one operation
each, with a body of their own. What is left is the program as the compiler meets it, before it
fuses and schedules, small enough to be walked in a fraction of a second for any size of model.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"),
        *("custom_jvp_call", "custom_vjp_call", "shard_map"),
    )
)


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
    bytes: int
    host_bytes: int = 0


@dataclass(eq=False)
class Operation:
    """One equation of the flat program.

    Attributes:
      name: the primitive.
      inputs: values it reads; literals are left out.
      outputs: values it makes.
      bodies: what a loop or a branch runs, with what it is given; empty for the rest.
      carried: for a loop, (input, output) of each part of the state that it updates in place.
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


@dataclass
class Flat:
    """A flat program: operations in order, between inputs and outputs (literals left out)."""

    inputs: list[Value]
    outputs: list[Value]
    operations: list[Operation]


@dataclass
class Body:
    """What a loop or a branch runs.

    Attributes:
      flat: the program of one iteration.
      given: (inside, outside) pairs; a loop hands a slice to an inside of fewer dims.
    """

    flat: Flat
    given: list[tuple[Value, Value]]


def flatten(jaxpr: Any) -> Flat:
    """Writes a jaxpr out flat.

    Args:
      jaxpr: a jaxpr, open or closed.

    >>> import jax
    >>> step = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) @ x)(jnp.ones((2, 2)))
    >>> [operation.name for operation in flatten(step).operations]
    ['sin', 'dot_general']
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env = {var: _value(var) for var in (*jaxpr.invars, *jaxpr.constvars)}
    inputs = list(env.values())
    operations: list[Operation] = []
    _append(jaxpr, env, operations)
    outputs = _present(_read(env, atom) for atom in jaxpr.outvars)
    return Flat(inputs, outputs, _used(operations, outputs))


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


def _value(var: Any) -> Value:
    aval = var.aval
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    # Keys and tokens have no itemsize of their own; they are small.
    size = dtype.itemsize if dtype is not None and jnp.issubdtype(dtype, jnp.generic) else 4
    size *= math.prod(shape)
    if getattr(var.aval, "memory_space", None) == jax.memory.Space.Host:
        return Value(shape, str(dtype), 0, size)
    return Value(shape, str(dtype), size)


def _read(env: dict[Any, Value], atom: Any) -> Value | None:
    return None if isinstance(atom, jex.Literal) else env[atom]


def _called(eqn: Any) -> Any:
    params = eqn.params
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    return getattr(inner, "jaxpr", inner)


def _bodies(eqn: Any, given: Sequence[Value | None]) -> list[Body]:
    if eqn.primitive.name == "cond":
        return [_body(branch, given[1:]) for branch in eqn.params["branches"]]
    if eqn.primitive.name == "while":
        return [_body(eqn.params["body_jaxpr"], given[eqn.params["cond_nconsts"] :])]
    return [_body(eqn.params["jaxpr"], given)] if eqn.primitive.name == "scan" else []


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


def _body(jaxpr: Any, given: Sequence[Value | None]) -> Body:
    flat = flatten(jaxpr)
    pairs = zip(flat.inputs, given, strict=False)  # after them come constants of the body's own
    return Body(flat, [(mine, theirs) for mine, theirs in pairs if theirs is not None])


def _append(jaxpr: Any, env: dict[Any, Value], operations: list[Operation]) -> None:
    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, [_read(env, atom) for atom in eqn.invars]
        if name in _CALLS:
            outs = _inline(_called(eqn), given, operations)
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        made = [_value(var) for var in eqn.outvars]
        env.update(zip(eqn.outvars, made, strict=True))
        if name == "scan" and eqn.params["length"] == 1:
            _append_once(eqn, given, made, operations)
            continue
        context = str(eqn.source_info.name_stack)
        backward = "transpose(" in context
        bodies = _bodies(eqn, given)
        carried = _carried(eqn, given, made)
        operations.append(
            Operation(name, _present(given), made, bodies, carried, backward, context)
        )


def _append_once(
    eqn: Any, given: Sequence[Value | None], made: list[Value], operations: list[Operation]
) -> None:
    """A loop of one iteration is none: its body, between views of slices in and out."""
    context = str(eqn.source_info.name_stack)
    backward = "transpose(" in context
    body = _called(eqn)
    inside: list[Value | None] = []
    for var, value in zip(body.invars, given, strict=True):
        piece = value
        if value is not None and len(var.aval.shape) < len(value.shape):
            piece = _value(var)
            operations.append(Operation("squeeze", [value], [piece], [], [], backward, context))
        inside.append(piece)
    for value, out in zip(_inline(body, inside, operations), made, strict=True):
        operations.append(Operation("reshape", [value], [out], [], [], backward, context))


def _inline(jaxpr: Any, given: Sequence[Value | None], operations: list[Operation]) -> list[Value]:
    inside = {var: _value(var) for var in jaxpr.constvars}
    for var, value in zip(jaxpr.invars, given, strict=True):
        inside[var] = value or _value(var)
    _append(jaxpr, inside, operations)
    return [_read(inside, atom) or Value((), "", 0) for atom in jaxpr.outvars]


def _present(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _used(operations: list[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """The operations whose results somebody reads."""
    needed = set(outputs)
    kept = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs):
            kept.append(operation)
            needed.update(operation.inputs)
    return kept[::-1]
