"""What depends on what: from results back to what they are made of, and the other way round."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.jaxpr.equations import Atom, inner, is_var, variables

# Of an equation, and of which of its results are needed, which of its operands are.
Rule = Callable[[Any, list[bool]], Sequence[bool]]


def reads_all(eqn: jex.JaxprEqn, made: list[bool]) -> list[bool]:
    """Every result depends on every operand."""
    return [any(made)] * len(eqn.invars)


def needed(
    eqns: Sequence[jex.JaxprEqn], results: Iterable[Atom], rule: Rule = reads_all
) -> set[jex.Var]:
    """The variables on which these results depend, which are among them.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda a, b: (a * 2, a + b))(1.0, 2.0).jaxpr
    >>> [v in needed(program.eqns, program.outvars[:1]) for v in program.invars]
    [True, False]
    """
    found = set(filter(is_var, results))
    for eqn in reversed(eqns):
        used = rule(eqn, [v in found for v in eqn.outvars])
        found.update(filter(is_var, itertools.compress(eqn.invars, used)))
    return found


def read_inputs(jaxpr: jex.Jaxpr) -> list[bool]:
    """For each input of a jaxpr whether some result or effect depends on it."""

    def rule(eqn: jex.JaxprEqn, made: list[bool]) -> list[bool]:
        used = any(made) or bool(eqn.effects)
        if used and eqn.primitive.name == "custom_vjp_call":
            # Differentiated already: a call like any other.
            return read_inputs(inner(eqn).jaxpr)
        return [used] * len(eqn.invars)

    found = needed(jaxpr.eqns, jaxpr.outvars, rule)
    return [var in found for var in jaxpr.invars]


def made_of(jaxpr: jex.Jaxpr, inputs: set[jex.Var]) -> set[jex.Var]:
    """The variables that are made of these inputs and constants alone, and the inputs."""
    made, constant = set(inputs), set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        operands = set(variables([eqn]))
        if operands <= made | constant:
            (made if operands & made else constant).update(eqn.outvars)
    return made
