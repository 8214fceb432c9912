"""A traced function as operations that can be run one by one, on whole arrays or on pieces.

Calls (`jit`, `custom_jvp`) and branches are written out in place; loops stay one operation each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"),
        *("custom_jvp_call", "custom_vjp_call"),
    )
)
ELEMENTWISE = frozenset(
    (
        *("add", "add_any", "sub", "mul", "div", "rem", "neg", "sign", "abs", "square", "max"),
        *("min", "pow", "integer_pow", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "log", "log1p"),
        *("expm1", "tanh", "logistic", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
        *("sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "floor", "ceil"),
        *("round", "clamp", "select_n", "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "and"),
        *("or", "xor", "not", "nextafter", "reduce_precision", "convert_element_type", "copy"),
        *("real", "imag", "conj", "complex", "stop_gradient", "population_count", "shift_left"),
        *("shift_right_logical", "shift_right_arithmetic"),
    )
)


@dataclass(eq=False)
class Slot:
    """A value of the flat program, told apart by identity."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(eq=False)
class Constant:
    """A value that is known when the program is traced, or closed over."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(jnp.shape(self.value))

    @property
    def dtype(self) -> Any:
        return jax.dtypes.result_type(self.value)


Atom = Slot | Constant


@dataclass(eq=False)
class Operation:
    """One equation, calls and branches written out."""

    name: str
    inputs: list[Atom]
    outputs: list[Slot]
    run: Callable[..., Sequence[Any]]

    def on_piece(self, values: Sequence[Any], shape: tuple[int, ...]) -> Sequence[Any]:
        """The results for one piece; scalars among the operands stand for whole leaves."""
        if self.name == "broadcast_in_dim":
            return [jnp.broadcast_to(values[0], shape)]
        return self.run(*(jnp.broadcast_to(v, shape) for v in values))


@dataclass(frozen=True)
class Flat:
    """Inputs, outputs and the operations between them, in order."""

    inputs: list[Slot]
    outputs: list[Atom]
    operations: list[Operation]


def flatten(fn: Callable[..., Any], avals: Sequence[Any]) -> Flat:
    """Traces a function of flat arrays that returns flat arrays."""
    closed = jax.make_jaxpr(fn)(*avals)
    inputs = [_slot(v.aval) for v in closed.jaxpr.invars]
    operations: list[Operation] = []
    consts = [Constant(c) for c in closed.consts]
    outputs = _inline(closed.jaxpr, inputs, consts, operations)
    return Flat(inputs, outputs, operations)


def _inline(
    jaxpr: Any, given: Sequence[Atom], consts: Sequence[Atom], out: list[Operation]
) -> list[Atom]:
    """Appends a jaxpr's operations, calls and branches written out; returns its results."""
    env: dict[Any, Atom] = dict(zip(jaxpr.invars, given, strict=True))
    env.update(zip(jaxpr.constvars, consts, strict=True))

    def read(atom: Any) -> Atom:
        return Constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [read(a) for a in eqn.invars]
        if name in _CALLS:
            params = eqn.params
            inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
            results = _inline_closed(inner, inputs, out)
        elif name == "cond":
            cases = [_inline_closed(b, inputs[1:], out) for b in eqn.params["branches"]]
            results = [_select(inputs[0], list(case), out) for case in zip(*cases, strict=True)]
        else:
            made = [_slot(v.aval) for v in eqn.outvars]
            out.append(Operation(name, inputs, made, _function(eqn)))
            results = [*made]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _slot(aval: Any) -> Slot:
    return Slot(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None))


def _inline_closed(inner: Any, inputs: Sequence[Atom], out: list[Operation]) -> list[Atom]:
    consts = [Constant(c) for c in getattr(inner, "consts", ())]
    return _inline(getattr(inner, "jaxpr", inner), inputs, consts, out)


def _select(index: Atom, cases: list[Atom], out: list[Operation]) -> Slot:
    """A branch's result: both branches are computed, which changes no value."""

    def select(index: Any, *cases: Any) -> list[Any]:
        which = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(cases) - 1)
        return [jax.lax.select_n(jnp.broadcast_to(which, jnp.shape(cases[0])), *cases)]

    slot = Slot(cases[0].shape, cases[0].dtype)
    out.append(Operation("select_n", [index, *cases], [slot], select))
    return slot


def _function(eqn: Any) -> Callable[..., Sequence[Any]]:
    """One equation as a function of its inputs, which for elementwise ones may be pieces."""
    if eqn.primitive.name in ELEMENTWISE:

        def run(*values: Any) -> Sequence[Any]:
            return [eqn.primitive.bind(*values, **eqn.params)]

        return run
    invars = [jex.Var(a.aval) for a in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars]
    alone = eqn.replace(invars=invars, outvars=outvars)
    jaxpr = jex.Jaxpr((), invars, outvars, [alone], eqn.effects)
    function: Callable[..., Sequence[Any]] = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))
    return function
