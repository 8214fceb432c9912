"""Where no derivative is wanted: of values that no trained parameter changes, or no loss reads.

JAX drops such derivatives by itself, but a layer is one function with a gradient of its own, behind
which all of its inputs and results look alike. A metric added up from layer to layer would get a
gradient of zero times infinity, and a `while_loop` over data that travels beside the activations
one that JAX does not have. So the trace says it: whoever reads such a value, or makes one, reads
through `stop_gradient`. That changes no number, and lowers to nothing.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.jaxpr import equations, marks, reads
from zero_jax.jaxpr.equations import is_float, is_var


def settled(
    closed: jex.ClosedJaxpr, trained: Sequence[bool], wanted: Sequence[bool]
) -> jex.ClosedJaxpr:
    """The same program; what has no derivative that anybody wants is read as a constant.

    Args:
      closed: its jaxpr.
      trained: which of its inputs have a gradient.
      wanted: which of its results are differentiated.

    >>> program = jax.make_jaxpr(lambda w: (w * w, jax.numpy.sqrt(w)))(1.0)
    >>> [e.primitive.name for e in settled(program, [True], [True, False]).jaxpr.eqns]
    ['mul', 'stop_gradient', 'sqrt', 'stop_gradient']
    """
    jaxpr = closed.jaxpr
    changed = marks.spread(closed, trained, marks.HAS_GRADIENT)
    used = _used(jaxpr, wanted)
    eqns: list[jex.JaxprEqn] = []

    def counts(atom: Any) -> bool:
        return is_var(atom) and changed.get(atom, False) and atom in used

    def read(atom: Any) -> Any:
        """The same without a derivative."""
        if not is_var(atom) or not is_float(atom):
            return atom
        eqns.append(equations.equation(jax.lax.stop_gradient, [atom]))
        return eqns[-1].outvars[0]

    for eqn in jaxpr.eqns:
        alive = any(map(counts, eqn.outvars))
        if alive and _body(eqn) is not None:
            eqn = _inside(eqn, list(map(counts, eqn.invars)), [v in used for v in eqn.outvars])
        floats = any(map(is_float, eqn.outvars))
        atoms = [read(a) if floats and not (alive and counts(a)) else a for a in eqn.invars]
        eqns.append(eqn.replace(invars=atoms))
    # To return a value is to read it.
    pairs = zip(jaxpr.outvars, wanted, strict=True)
    outvars = [
        a if own or not (is_var(a) and changed.get(a, False)) else read(a) for a, own in pairs
    ]
    new = equations.new_jaxpr(jaxpr.invars, outvars, eqns, jaxpr.effects, jaxpr.constvars)
    return jex.ClosedJaxpr(new, closed.consts)


def _body(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """What a call or a scan runs, but for functions that have gradients of their own."""
    own = eqn.primitive.name in equations.OWN_GRADIENT
    return None if own else equations.called(eqn)


def _inside(eqn: jex.JaxprEqn, given: list[bool], made: list[bool]) -> jex.JaxprEqn:
    """A call or a scan with a body that is settled."""
    body = equations.inner(eqn)
    if eqn.primitive.name == "scan":
        consts, carried = equations.state_of(eqn)
        given = marks.at_rest(body, given, consts, carried, marks.HAS_GRADIENT)
        made = _carried(body.jaxpr, made, consts, carried)
    return equations.with_inner(eqn, settled(body, given, made))


def _used(jaxpr: jex.Jaxpr, wanted: Sequence[bool]) -> set[jex.Var]:
    """The variables on which the wanted results depend."""
    return reads.needed(jaxpr.eqns, itertools.compress(jaxpr.outvars, wanted), _reads)


def _reads(eqn: jex.JaxprEqn, made: list[bool]) -> Sequence[bool]:
    """Which operands those results of an operation depend on."""
    body = _body(eqn)
    if body is None or not any(made):
        return reads.reads_all(eqn, made)
    if eqn.primitive.name == "scan":
        made = _carried(body.jaxpr, made, *equations.state_of(eqn))
    used = _used(body.jaxpr, made)
    return [v in used for v in body.jaxpr.invars]


def _carried(body: jex.Jaxpr, made: list[bool], consts: int, carried: int) -> list[bool]:
    """Which results of a loop's body are used: a state is where a used result depends on it."""
    while True:
        used = _used(body, made)
        state = [v in used for v in body.invars[consts : consts + carried]]
        more = [a or b for a, b in zip(made[:carried], state, strict=True)] + made[carried:]
        if more == made:
            return made
        made = more
