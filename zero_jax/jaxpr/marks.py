"""Which results of a traced program depend on which of its inputs, loops and branches looked into.

A mark says something of a value that goes over to what is made of it: that it differs between
devices, or that a parameter changes it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax.extend.core as jex

from zero_jax.jaxpr import equations

T = TypeVar("T")
# Facts of a loop's carry converge within a few iterations, or are given up.
_TURNS = 8
_ALIKE = frozenset(("psum", "psum_invariant", "pmax", "pmin", "all_gather"))


@dataclasses.dataclass(frozen=True)
class Rule:
    """How marks go through an operation that is no loop or branch.

    Attributes:
      through: of an equation and of whether one of its operands is marked, whether its results are.
      whole: calls that are one operation to it, whatever is inside.
    """

    through: Callable[[Any, bool], bool]
    whole: frozenset[str] = frozenset()


def marked(closed: jex.ClosedJaxpr, marks: Sequence[bool], rule: Rule) -> list[bool]:
    """Which results are marked.

    Args:
      closed: the program.
      marks: which of its inputs are.
      rule: how marks go through an operation.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda a, b: (a + 1, a * b))(1.0, 2.0)
    >>> marked(program, [False, True], Rule(lambda eqn, given: given))
    [False, True]
    """
    env = spread(closed, marks, rule)
    return [_is_marked(a, env) for a in closed.jaxpr.outvars]


def spread(closed: jex.ClosedJaxpr, marks: Sequence[bool], rule: Rule) -> dict[jex.Var, bool]:
    """The same of all its variables."""
    env = dict(zip(closed.jaxpr.invars, marks, strict=True))
    for eqn in closed.jaxpr.eqns:
        made = _through(eqn, [_is_marked(a, env) for a in eqn.invars], rule)
        env.update(zip(eqn.outvars, made, strict=True))
    return env


def _is_marked(atom: equations.Atom, env: dict[jex.Var, bool]) -> bool:
    return equations.is_var(atom) and env.get(atom, False)


class Facts(Generic[T]):
    """The same walk for facts that are more than a mark; a subclass says how they spread."""

    def of_literal(self, value: Any) -> T:
        """The fact of a constant."""
        raise NotImplementedError

    def through(self, eqn: jex.JaxprEqn, given: list[T]) -> list[T]:
        """Those of the results of an operation that is no call, loop or branch."""
        raise NotImplementedError

    def joined(self, one: T, other: T) -> T:
        """The fact of a value that is one of two."""
        raise NotImplementedError

    def sliced(self, fact: T) -> T:
        """Returns the fact of a slice along dim 0, given that of the stack."""
        raise NotImplementedError

    def stacked(self, fact: T) -> T:
        """Returns the fact of a stack, given that of each slice."""
        raise NotImplementedError

    def unknown(self) -> T:
        """Returns the fact of an unknown value."""
        raise NotImplementedError

    def results(self, closed: jex.ClosedJaxpr, given: Sequence[T]) -> list[T]:
        """Those of a program's results, given those of its inputs."""
        body = closed.jaxpr
        env: dict[jex.Var, T] = dict(zip(body.invars, given, strict=True))
        env.update(zip(body.constvars, map(self.of_literal, closed.consts), strict=True))

        def read(atom: Any) -> T:
            return env[atom] if equations.is_var(atom) else self.of_literal(atom.val)

        for eqn in body.eqns:
            env.update(
                zip(eqn.outvars, self._through(eqn, list(map(read, eqn.invars))), strict=True)
            )
        return list(map(read, body.outvars))

    def _through(self, eqn: jex.JaxprEqn, given: list[T]) -> list[T]:
        name = eqn.primitive.name
        if name == "cond":
            cases = [self.results(branch, given[at:]) for branch, at in equations.bodies(eqn)]
            return [functools.reduce(self.joined, each) for each in zip(*cases, strict=True)]
        if name == "scan":
            return self._scanned(eqn, given)
        if name == "while":
            return [self.unknown()] * len(eqn.outvars)
        called = equations.called(eqn)
        return self.through(eqn, given) if called is None else self.results(called, given)

    def _scanned(self, eqn: jex.JaxprEqn, given: list[T]) -> list[T]:
        body, (consts, carried) = equations.inner(eqn), equations.state_of(eqn)
        fixed, state = given[:consts], given[consts : consts + carried]
        slices = list(map(self.sliced, given[consts + carried :]))
        for _ in range(_TURNS):
            made = self.results(body, [*fixed, *state, *slices])
            more = list(map(self.joined, state, made[:carried]))
            if more == state:
                return [*state, *map(self.stacked, made[carried:])]
            state = more
        return [self.unknown()] * len(eqn.outvars)


def _through(eqn: jex.JaxprEqn, given: list[bool], rule: Rule) -> list[bool]:
    runs = equations.bodies(eqn)
    if eqn.primitive.name == "cond":
        branches = [marked(branch, given[first:], rule) for branch, first in runs]
        return [given[0] or any(each) for each in zip(*branches, strict=True)]
    if runs:
        ((body, first),), (start, count) = runs, equations.state_of(eqn)
        inside = at_rest(body, given[first:], start - first, count, rule)
        if eqn.primitive.name == "scan":
            return marked(body, inside, rule)
        state, test = inside[start - first :], eqn.params["cond_jaxpr"]
        ends = marked(test, given[:first] + state, rule)
        return [m or any(ends) for m in state]
    called = equations.called(eqn)
    if called is not None and eqn.primitive.name not in rule.whole:
        return marked(called, given, rule)
    return [rule.through(eqn, any(given))] * len(eqn.outvars)


def at_rest(
    body: jex.ClosedJaxpr, given: Sequence[bool], consts: int, carried: int, rule: Rule
) -> list[bool]:
    """Marks of a loop's inputs, those of its state spread until there are no more."""
    given = list(given)
    while True:
        made = marked(body, given, rule)
        state = given[consts : consts + carried]
        more = [a or b for a, b in zip(state, made[:carried], strict=True)]
        if more == state:
            return given
        given[consts : consts + carried] = more


def differs(axes: Sequence[str]) -> Rule:
    """Of what differs between devices of these axes; a sum over all of them does not."""

    def through(eqn: jex.JaxprEqn, given: bool) -> bool:
        if eqn.primitive.name == "axis_index":
            return True
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        over = over if isinstance(over, (tuple, list, frozenset)) else (over,)
        whole = eqn.params.get("axis_index_groups") is None
        alike = eqn.primitive.name in _ALIKE and set(axes) <= set(over) and whole
        return given and not alike

    return Rule(through)


def _has_gradient(eqn: jex.JaxprEqn, given: bool) -> bool:
    floats = any(map(equations.is_float, eqn.outvars))
    return given and floats and eqn.primitive.name != "stop_gradient"


# Of what a gradient goes through. A function with a gradient of its own may round or compare where
# its gradient does not: its body says nothing about it.
HAS_GRADIENT = Rule(_has_gradient, equations.OWN_GRADIENT)
