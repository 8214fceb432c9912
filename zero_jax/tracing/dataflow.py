"""Dataflow analysis of jaxprs: facts of values, derived forward or backward.

A forward analysis is an interpreter whose values are facts from a lattice. Loops are iterated until
the facts of their state no longer change. `sharded_dims.py` and `engine/over_rows.py` have
further ones. Backward, `needed` finds the variables on which results depend.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax.extend.core as jex
from jax.typing import ArrayLike

from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.interpreter import Interpreter
from zero_jax.tracing.jaxpr import CALLS, Atom, T, is_var

# Facts of a loop's state converge within a few iterations, or are given up.
_ITERATIONS = 8
# Collectives whose results are equal on all devices of their axes.
EQUAL_RESULTS = frozenset(("psum", "psum_invariant", "pmax", "pmin", "all_gather"))


class Forward(Interpreter[T]):
    """A forward analysis: facts of results from facts of operands.

    A subclass is a lattice: it has `constants` (the fact of a constant), `default` (facts of the
    results of an operation), `join` and, where loops may not converge, `unknown`.
    """

    constants: T

    def constant(self, atom: Atom, value: ArrayLike) -> T:
        return self.constants

    def join(self, one: T, other: T) -> T:
        """Returns the fact of a value that is one of two."""
        raise NotImplementedError

    def unknown(self) -> T:
        """Returns the fact of an unknown value."""
        raise NotImplementedError

    def sliced(self, fact: T) -> T:
        """Returns the fact of a slice along dim 0, given that of the stack."""
        return fact

    def stacked(self, fact: T) -> T:
        """Returns the fact of a stack, given that of each slice."""
        return fact

    def selected(self, choice: T, fact: T) -> T:
        """Returns the fact of a value that depends on a branch taken, or on a loop's end."""
        return fact

    def carried(self, state: T, made: T) -> T:
        """Returns the fact of a scan's carry, given that of all iterations and of the last."""
        return made

    def body(self, eqn: jex.JaxprEqn, facts: Sequence[T]) -> tuple[list[T], list[T]]:
        """Returns facts of the inputs and results of a loop's body that hold in every iteration."""
        ((body, first),), (start, count) = jaxprs.bodies(eqn), jaxprs.state_of(eqn)
        fixed, state = facts[first:start], list(facts[start : start + count])
        slices = list(map(self.sliced, facts[start + count :]))
        for _ in range(max(_ITERATIONS, count + 1)):
            inputs = [*fixed, *state, *slices]
            made = self.run(body, inputs)
            before, state = state, list(map(self.join, state, made[:count]))
            if state == before:
                return inputs, made
        inputs = [*fixed, *[self.unknown()] * count, *slices]
        return inputs, self.run(body, inputs)

    def scan(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        (inputs, made), (start, count) = self.body(eqn, values), jaxprs.state_of(eqn)
        state = map(self.carried, inputs[start : start + count], made[:count])
        return [*state, *map(self.stacked, made[count:])]

    def while_loop(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        first, (start, _) = jaxprs.bodies(eqn)[0][1], jaxprs.state_of(eqn)
        state = self.body(eqn, values)[0][start - first :]
        (ends,) = self.run(eqn.params["cond_jaxpr"], [*values[:first], *state])
        return [self.selected(ends, fact) for fact in state]

    def cond(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        cases = [self.run(branch, values[first:]) for branch, first in jaxprs.bodies(eqn)]
        joined = (functools.reduce(self.join, each) for each in zip(*cases, strict=True))
        return [self.selected(values[0], fact) for fact in joined]


class _Marks(Forward[bool]):
    """A property that results have if an operand has it."""

    constants = False

    def join(self, one: bool, other: bool) -> bool:
        return one or other

    def selected(self, choice: bool, fact: bool) -> bool:
        return choice or fact


class HasGradient(_Marks):
    """True for values through which a gradient flows to marked inputs.

    The body of a function with a custom derivative says nothing about its gradient.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda a, b: (a + 1, jax.lax.stop_gradient(b), a * b))(1.0, 2.0)
    >>> HasGradient().run(program, [False, True])
    [False, False, True]
    """

    def default(self, eqn: jex.JaxprEqn, values: list[bool]) -> Sequence[bool]:
        floats = any(map(jaxprs.is_float, eqn.outvars)) and eqn.primitive.name != "stop_gradient"
        return [floats and any(values)] * len(eqn.outvars)

    def custom_derivative(self, eqn: jex.JaxprEqn, values: list[bool]) -> Sequence[bool]:
        return self.default(eqn, values)


def collective_axes(eqn: jex.JaxprEqn) -> set[str | int]:
    """Returns the mesh axes of a collective, or the axes of another operation."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return set(axes if isinstance(axes, (tuple, list, frozenset)) else (axes,))


class Varies(_Marks):
    """True for values that differ between devices of these axes; sums over them do not."""

    def __init__(self, axes: Sequence[str]):
        super().__init__()
        self._axes = axes

    def default(self, eqn: jex.JaxprEqn, values: list[bool]) -> Sequence[bool]:
        over = collective_axes(eqn)
        ungrouped = eqn.params.get("axis_index_groups") is None
        alike = eqn.primitive.name in EQUAL_RESULTS and set(self._axes) <= over and ungrouped
        varies = eqn.primitive.name == "axis_index" or (any(values) and not alike)
        return [varies] * len(eqn.outvars)


# Backward: what results depend on.

# Given an equation and which of its results are needed, returns which operands are.
Rule = Callable[[jex.JaxprEqn, list[bool]], Sequence[bool]]


def reads_all(eqn: jex.JaxprEqn, made: list[bool]) -> list[bool]:
    """Every result depends on every operand."""
    return [any(made)] * len(eqn.invars)


def needed(
    eqns: Sequence[jex.JaxprEqn], results: Iterable[Atom], rule: Rule = reads_all
) -> set[jex.Var]:
    """Returns the variables on which these results depend, the results included.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda a, b: (a * 2, a + b))(1.0, 2.0).jaxpr
    >>> [v in needed(program.eqns, program.outvars[:1]) for v in program.invars]
    [True, False]
    """
    reached = set(filter(is_var, results))
    for eqn in reversed(eqns):
        used = rule(eqn, [v in reached for v in eqn.outvars])
        reached.update(filter(is_var, itertools.compress(eqn.invars, used)))
    return reached


def read_inputs(jaxpr: jex.Jaxpr, *, differentiated: bool = True) -> list[bool]:
    """Returns for each input whether a result or an effect depends on it.

    In a program that is not `differentiated` yet, a gradient counts too: a function with a custom
    gradient depends on all of its inputs.
    """
    rule = _of_differentiated if differentiated else _with_effects
    reached = needed(jaxpr.eqns, jaxpr.outvars, rule)
    return [var in reached for var in jaxpr.invars]


def _with_effects(eqn: jex.JaxprEqn, made: list[bool]) -> list[bool]:
    return reads_all(eqn, [*made, bool(eqn.effects)])


def _of_differentiated(eqn: jex.JaxprEqn, made: list[bool]) -> list[bool]:
    used = any(made) or bool(eqn.effects)
    if used and eqn.primitive.name == "custom_vjp_call":
        # Differentiated already: a call like any other.
        return read_inputs(jaxprs.inner(eqn).jaxpr)
    return [used] * len(eqn.invars)


def differentiated(jaxpr: jex.Jaxpr, wanted: Sequence[bool]) -> set[jex.Var]:
    """Returns the variables through which a gradient flows to these results, or might.

    A function with a custom derivative depends on all of its inputs.
    """
    return needed(jaxpr.eqns, itertools.compress(jaxpr.outvars, wanted), _through_bodies)


def _through_bodies(eqn: jex.JaxprEqn, made: list[bool]) -> Sequence[bool]:
    body = jaxprs.called(eqn)
    if eqn.primitive.name == "stop_gradient":
        return [False]
    if body is None or not any(made):
        return reads_all(eqn, made)
    used = differentiated(body.jaxpr, body_results(eqn, made))
    return [v in used for v in body.jaxpr.invars]


def body_results(eqn: jex.JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
    """Returns which results of the body of a call or scan are needed for these of the equation.

    A result that a scan carries is needed if the next iteration needs it.
    """
    wanted, body = list(wanted), jaxprs.inner(eqn).jaxpr
    if eqn.primitive.name != "scan":
        return wanted
    start, count = jaxprs.state_of(eqn)
    while True:
        used = differentiated(body, wanted)
        state = [v in used for v in body.invars[start : start + count]]
        more = [a or b for a, b in zip(wanted[:count], state, strict=True)] + wanted[count:]
        if more == wanted:
            return wanted
        wanted = more


def made_of(jaxpr: jex.Jaxpr, inputs: set[jex.Var]) -> set[jex.Var]:
    """Returns the variables made of these inputs and constants alone, and the inputs."""
    made, constant = set(inputs), set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        operands = set(jaxprs.variables([eqn]))
        if operands <= made | constant:
            (made if operands & made else constant).update(eqn.outvars)
    return made


def executed(
    jaxpr: jex.Jaxpr, wanted: Sequence[bool] | None = None
) -> Iterator[tuple[jex.JaxprEqn, int]]:
    """Yields equations on which the `wanted` results, by default all, depend, at every depth.

    Each comes with the number of times that it is executed.
    """
    wanted = wanted or [True] * len(jaxpr.outvars)
    results = itertools.compress(jaxpr.outvars, wanted)
    used = needed(jaxpr.eqns, results, _of_differentiated)
    for eqn in jaxpr.eqns:
        made = [v in used for v in eqn.outvars]
        if any(made):
            yield eqn, 1
            length, is_call = eqn.params.get("length", 1), eqn.primitive.name in CALLS
            for body in jex.jaxprs_in_params(eqn.params):
                for inside, times in executed(body, made if is_call else None):
                    yield inside, times * length
