"""Which results of a traced program depend on which of its inputs, loops and branches looked into.

A mark says something of a value that goes over to what is made of it: that it differs between
devices, or that a parameter changes it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.jaxpr import equations

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


def marked(closed: Any, marks: Sequence[bool], rule: Rule) -> list[bool]:
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
    outs = getattr(closed, "jaxpr", closed).outvars
    return [not isinstance(a, jex.Literal) and env.get(a, False) for a in outs]


def spread(closed: Any, marks: Sequence[bool], rule: Rule) -> dict[Any, bool]:
    """The same of all its variables."""
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict(zip(jaxpr.invars, marks, strict=True))

    def read(atom: Any) -> bool:
        return not isinstance(atom, jex.Literal) and env.get(atom, False)

    for eqn in jaxpr.eqns:
        made = _through(eqn, [read(a) for a in eqn.invars], rule)
        env.update(zip(eqn.outvars, made, strict=True))
    return env


def _through(eqn: Any, given: list[bool], rule: Rule) -> list[bool]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carried = equations.scan_parts(eqn)
        body = equations.inner(eqn)
        return marked(body, at_rest(body, given, consts, carried, rule), rule)
    if name == "while":
        return _while(params, given, rule)
    if name == "cond":
        branches = [marked(b, given[1:], rule) for b in params["branches"]]
        return [given[0] or any(each) for each in zip(*branches, strict=True)]
    body = equations.inner(eqn) or params.get("call_jaxpr") or params.get("fun_jaxpr")
    known = body is not None and len(getattr(body, "jaxpr", body).invars) == len(given)
    if known and name not in rule.whole:
        return marked(body, given, rule)
    return [rule.through(eqn, any(given))] * len(eqn.outvars)


def at_rest(body: Any, given: Sequence[bool], consts: int, carried: int, rule: Rule) -> list[bool]:
    """Marks of a loop's inputs, those of its state spread until there are no more."""
    given = list(given)
    while True:
        made = marked(body, given, rule)
        state = given[consts : consts + carried]
        more = [a or b for a, b in zip(state, made[:carried], strict=True)]
        if more == state:
            return given
        given[consts : consts + carried] = more


def _while(params: Any, given: list[bool], rule: Rule) -> list[bool]:
    tests, fixed = params["cond_nconsts"], params["body_nconsts"]
    state = given[tests + fixed :]
    made = at_rest(params["body_jaxpr"], given[tests:], fixed, len(state), rule)[fixed:]
    ends = marked(params["cond_jaxpr"], given[:tests] + made, rule)
    return [m or any(ends) for m in made]


def differs(axes: Sequence[str]) -> Rule:
    """Of what differs between devices of these axes; a sum over all of them does not."""

    def through(eqn: Any, given: bool) -> bool:
        if eqn.primitive.name == "axis_index":
            return True
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        over = over if isinstance(over, (tuple, list, frozenset)) else (over,)
        whole = eqn.params.get("axis_index_groups") is None
        alike = eqn.primitive.name in _ALIKE and set(axes) <= set(over) and whole
        return given and not alike

    return Rule(through)


def _has_gradient(eqn: Any, given: bool) -> bool:
    floats = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    return given and floats and eqn.primitive.name != "stop_gradient"


# Of what a gradient goes through. A function with a gradient of its own may round or compare where
# its gradient does not: its body says nothing about it.
HAS_GRADIENT = Rule(_has_gradient, frozenset(("custom_jvp_call", "custom_vjp_call")))
