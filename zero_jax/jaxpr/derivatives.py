"""Where no derivative is wanted: of values that no trained parameter changes, or no loss reads.

JAX drops such derivatives by itself, but a layer is one function with a gradient of its own, behind
which all of its inputs and results look alike. A metric added up from layer to layer would get a
gradient of zero times infinity, and a `while_loop` over data that travels beside the activations
one that JAX does not have. So the trace says it: whoever reads such a value, or makes one, reads
through `stop_gradient`. That changes no number, and lowers to nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.jaxpr import equations, marks


def settled(closed: Any, trained: Sequence[bool], wanted: Sequence[bool]) -> Any:
    """The same program; what has no derivative that anybody wants is read as a constant.

    Args:
      closed: its jaxpr.
      trained: which of its inputs have a gradient.
      wanted: which of its results are differentiated.

    >>> program = jax.make_jaxpr(lambda w: (w * w, jnp.sqrt(w) + 1))(1.0)
    >>> [e.primitive.name for e in settled(program, [True], [True, False]).jaxpr.eqns]
    ['mul', 'stop_gradient', 'sqrt', 'stop_gradient', 'add']
    """
    jaxpr = closed.jaxpr
    changed = marks.spread(closed, trained, marks.HAS_GRADIENT)
    used = _used(jaxpr, wanted)
    eqns: list[Any] = []

    def counts(atom: Any) -> bool:
        return _is_var(atom) and changed.get(atom, False) and atom in used

    def read(atom: Any) -> Any:
        """The same without a derivative."""
        if not _is_var(atom) or not _is_float(atom):
            return atom
        (stop,) = jax.make_jaxpr(jax.lax.stop_gradient)(atom.aval).jaxpr.eqns
        made = jex.Var(atom.aval)
        eqns.append(stop.replace(invars=[atom], outvars=[made]))
        return made

    for eqn in jaxpr.eqns:
        alive = any(map(counts, eqn.outvars))
        if alive and equations.inner(eqn) is not None:
            eqn = _inside(eqn, list(map(counts, eqn.invars)), [v in used for v in eqn.outvars])
        floats = any(map(_is_float, eqn.outvars))
        atoms = [read(a) if floats and not (alive and counts(a)) else a for a in eqn.invars]
        eqns.append(eqn.replace(invars=atoms))
    # To return a value is to read it.
    pairs = zip(jaxpr.outvars, wanted, strict=True)
    outvars = [
        a if own or not (_is_var(a) and changed.get(a, False)) else read(a) for a, own in pairs
    ]
    new = jex.Jaxpr(jaxpr.constvars, jaxpr.invars, outvars, eqns, jaxpr.effects)
    return jex.ClosedJaxpr(new, closed.consts)


def _inside(eqn: Any, given: list[bool], made: list[bool]) -> Any:
    """A call or a scan with a body that is settled."""
    body = equations.inner(eqn)
    if eqn.primitive.name == "scan":
        consts, carried = equations.scan_parts(eqn)
        given = marks.at_rest(body, given, consts, carried, marks.HAS_GRADIENT)
        made = _carried(body.jaxpr, made, consts, carried)
    key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    own = settled(body, given, made)
    closed = hasattr(eqn.params[key], "jaxpr")
    return eqn.replace(params={**eqn.params, key: own if closed else own.jaxpr})


def _used(jaxpr: Any, wanted: Sequence[bool]) -> set[Any]:
    """The variables on which the wanted results depend."""
    used = {a for a, w in zip(jaxpr.outvars, wanted, strict=True) if w and _is_var(a)}
    for eqn in reversed(jaxpr.eqns):
        made = [v in used for v in eqn.outvars]
        if any(made):
            reads = zip(eqn.invars, _reads(eqn, made), strict=True)
            used.update(a for a, read in reads if read and _is_var(a))
    return used


def _reads(eqn: Any, made: list[bool]) -> list[bool]:
    """Which operands those results of an operation depend on."""
    body = equations.inner(eqn)
    if body is None:
        return [True] * len(eqn.invars)
    if eqn.primitive.name == "scan":
        made = _carried(body.jaxpr, made, *equations.scan_parts(eqn))
    used = _used(body.jaxpr, made)
    return [v in used for v in body.jaxpr.invars]


def _carried(body: Any, made: list[bool], consts: int, carried: int) -> list[bool]:
    """Which results of a loop's body are used: a state is where a used result depends on it."""
    while True:
        used = _used(body, made)
        state = [v in used for v in body.invars[consts : consts + carried]]
        more = [a or b for a, b in zip(made[:carried], state, strict=True)] + made[carried:]
        if more == made:
            return made
        made = more


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jex.Literal)


def _is_float(atom: Any) -> bool:
    return hasattr(atom.aval, "dtype") and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
