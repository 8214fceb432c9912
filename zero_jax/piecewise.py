"""Takes an optimizer's update apart, so that each leaf can be updated a piece at a time.

The update is traced once, on logical shapes, and its operations are sorted by what they read:

  global     needs no streamed state: the norm of all gradients, a schedule, a step counter.
             Computed first, once, on the whole arrays, as without offload.
  piecewise  elementwise along one leaf: the moments, the update. Run on pieces, where a piece
             of the result depends on the same piece of the operands and on global values.

What is neither (a norm of the updates, a factored moment, a matrix product with streamed state)
can't be done in pieces and is refused by name. No values are looked at: what streams is exact,
because the very same operations run on every element.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax

from zero_jax.elementwise import name_of, parts_of

PyTree = Any

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"),
        *("custom_jvp_call", "custom_vjp_call"),
    )
)
_ELEMENTWISE = frozenset(
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


class NotPiecewise(ValueError):
    """An operation needs the whole of a streamed state."""


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
class Recipe:
    """How one leaf's results are made from pieces.

    Attributes:
      inputs: positions of the program's inputs that are cut into pieces.
      wholes: further values of the leaf's shape, computed first, that are cut as well.
      scalars: global values.
      outputs: positions of the program's outputs that it makes.
    """

    inputs: tuple[int, ...]
    wholes: tuple[Slot, ...]
    scalars: tuple[Slot, ...]
    outputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    slots: tuple[Slot, ...]
    results: tuple[Atom, ...]

    def run(
        self,
        shape: tuple[int, ...],
        pieces: Sequence[Any],
        wholes: Sequence[Any],
        scalars: Sequence[Any],
    ) -> list[Any]:
        """The outputs' pieces, of this shape, in the order of `outputs`."""
        env: dict[Atom, Any] = dict(zip(self.slots, pieces, strict=True))
        env.update(zip(self.wholes, wholes, strict=True))
        env.update(zip(self.scalars, scalars, strict=True))
        for operation in self.operations:
            values = [_value(env, atom) for atom in operation.inputs]
            env.update(zip(operation.outputs, operation.on_piece(values, shape), strict=True))
        return [jnp.broadcast_to(_value(env, atom), shape) for atom in self.results]


class Program:
    """A traced function told apart into global values and recipes for leaves.

    Args:
      fn: a function of flat arrays that returns flat arrays.
      avals: its arguments, abstract.
      leaf_of: for each argument, which leaf it belongs to, or None.
      streamed: for each argument, whether it comes in pieces only.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        avals: Sequence[Any],
        leaf_of: Sequence[int | None],
        streamed: Sequence[bool],
    ):
        closed = jax.make_jaxpr(fn)(*avals)
        self.inputs = [_slot(v.aval) for v in closed.jaxpr.invars]
        self.operations: list[Operation] = []
        consts = [Constant(c) for c in closed.consts]
        self.outputs = _inline(closed.jaxpr, self.inputs, consts, self.operations)
        self._leaf_of = dict(zip(self.inputs, leaf_of, strict=True))
        self._streamed = {s for s, held in zip(self.inputs, streamed, strict=True) if held}
        for operation in self.operations:
            if not self._streamed.isdisjoint(operation.inputs):
                self._streamed.update(operation.outputs)
        self._made_by = {slot: o for o in self.operations for slot in o.outputs}

    def recipe(self, leaf: int, outputs: Sequence[int], shape: tuple[int, ...]) -> Recipe:
        """How these outputs, all of one leaf's shape, are made from pieces of it.

        Raises:
          NotPiecewise: an operation on streamed state is not elementwise along that leaf.
        """
        results = [self.outputs[at] for at in outputs]
        inputs, wholes, scalars = list[Slot](), list[Slot](), list[Slot]()
        needed = {atom for atom in results if isinstance(atom, Slot)}
        kept = list[Operation]()
        for operation in reversed(self.operations):
            wanted = [slot for slot in operation.outputs if slot in needed]
            if not wanted:
                continue
            if self._runs_on_pieces(operation, shape):
                kept.append(operation)
                needed.update(a for a in operation.inputs if isinstance(a, Slot))
                continue
            if not self._streamed.isdisjoint(wanted):
                raise NotPiecewise(self._culprit())
            (wholes if wanted[0].shape == shape else scalars).extend(wanted)
        made = set(self._made_by)
        for slot in (s for s in self.inputs if s in needed and s not in made):
            if slot.shape == () and slot not in self._streamed:
                scalars.append(slot)
            elif self._leaf_of[slot] == leaf and slot.shape == shape:
                inputs.append(slot)
            elif slot in self._streamed or slot.shape != shape:
                raise NotPiecewise("another leaf's state")
            else:
                wholes.append(slot)
        for slot in scalars:
            if slot.shape != ():
                raise NotPiecewise(f"a value of shape {slot.shape}")
        return Recipe(
            inputs=tuple(self.inputs.index(s) for s in inputs),
            wholes=tuple(wholes),
            scalars=tuple(scalars),
            outputs=tuple(outputs),
            operations=tuple(reversed(kept)),
            slots=tuple(inputs),
            results=tuple(results),
        )

    def _runs_on_pieces(self, operation: Operation, shape: tuple[int, ...]) -> bool:
        """Whether it is elementwise along a leaf of that shape, with scalars as the rest."""
        if any(slot.shape != shape for slot in operation.outputs) or shape == ():
            return False
        shapes = {atom.shape for atom in operation.inputs}
        if operation.name == "broadcast_in_dim":
            return shapes == {()}
        return operation.name in _ELEMENTWISE and bool(shapes) and shapes <= {shape, ()}

    def _culprit(self) -> str:
        """The first operation that makes something else than pieces of streamed state."""
        return next(
            o.name
            for o in self.operations
            if not self._streamed.isdisjoint(o.inputs)
            and not all(self._runs_on_pieces(o, slot.shape) for slot in o.outputs)
        )

    def evaluate(self, slots: Sequence[Atom], given: Mapping[Slot, Any]) -> list[Any]:
        """Global values, from the whole arrays that are given for inputs."""
        needed = {s for s in slots if isinstance(s, Slot)}
        kept = list[Operation]()
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.outputs):
                kept.append(operation)
                needed.update(a for a in operation.inputs if isinstance(a, Slot))
        env: dict[Atom, Any] = dict(given)
        for operation in reversed(kept):
            values = [_value(env, atom) for atom in operation.inputs]
            env.update(zip(operation.outputs, operation.run(*values), strict=True))
        return [_value(env, atom) for atom in slots]

    def is_global(self, output: int) -> bool:
        """Whether an output needs no streamed state."""
        return self.outputs[output] not in self._streamed


def blame(
    tx: optax.GradientTransformation, fails: Callable[[optax.GradientTransformation], bool]
) -> str:
    """The name of the part of a chain at which it begins to fail."""
    parts = parts_of(tx)
    for count in range(1, len(parts) + 1):
        if _fails(optax.chain(*parts[:count]), fails):
            part = parts[count - 1]
            return blame(part, fails) if _fails(part, fails) else name_of(part)
    return name_of(tx)


def _fails(tx: optax.GradientTransformation, fails: Callable[..., bool]) -> bool:
    try:
        return fails(tx)
    except Exception:  # a part that cannot be tried alone is not the one to blame
        return False


def _value(env: Mapping[Atom, Any], atom: Atom) -> Any:
    return atom.value if isinstance(atom, Constant) else env[atom]


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
            results = [_slot(v.aval) for v in eqn.outvars]
            out.append(Operation(name, inputs, list(results), _function(eqn)))
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
    if eqn.primitive.name in _ELEMENTWISE:

        def run(*values: Any) -> Sequence[Any]:
            return [eqn.primitive.bind(*values, **eqn.params)]

        return run
    invars = [jex.Var(a.aval) for a in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars]
    alone = eqn.replace(invars=invars, outvars=outvars)
    jaxpr = jex.Jaxpr((), invars, outvars, [alone], eqn.effects)
    function: Callable[..., Sequence[Any]] = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))
    return function
