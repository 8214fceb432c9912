"""Rewrites of a traced loss that depend on nothing but the trace."""

from collections.abc import Sequence

import jax
import jax.extend.core as jex
from jax.experimental.layout import Layout, with_layout_constraint

from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import HasGradient, body_results, differentiated
from zero_jax.tracing.jaxpr import Atom, Rewriter, is_in


def without_dead_derivatives(
    closed: jex.ClosedJaxpr, trained: Sequence[bool], wanted: Sequence[bool]
) -> jex.ClosedJaxpr:
    """Reads values through `stop_gradient` if nobody needs their derivative.

    These are values that no `trained` input changes, or on which no result `wanted` depends. JAX
    drops such derivatives by itself, but a layer is one function with a custom gradient, behind
    which all of its inputs and results look alike. Without this, a metric added up from layer to
    layer has a gradient of zero times infinity, and a `while_loop` over data beside the activations
    one that JAX does not have. No number changes, and `stop_gradient` compiles to nothing.

    >>> program = jax.make_jaxpr(lambda w: (w * w, jax.numpy.sqrt(w)))(1.0)
    >>> settled = without_dead_derivatives(program, [True], [True, False])
    >>> [e.primitive.name for e in settled.jaxpr.eqns]
    ['mul', 'stop_gradient', 'sqrt', 'stop_gradient']
    """
    return _WithoutDeadDerivatives(closed, trained, wanted)(closed)


class _WithoutDeadDerivatives(Rewriter):
    def __init__(self, closed: jex.ClosedJaxpr, trained: Sequence[bool], wanted: Sequence[bool]):
        facts = HasGradient().environment(closed, trained)
        self._changed = {v for v, changed in facts.items() if changed}
        self._used, self._wanted = differentiated(closed.jaxpr, wanted), wanted

    def run(self, closed: jex.ClosedJaxpr, values: Sequence[Atom]) -> list[Atom]:
        # To return a value is to read it.
        pairs = zip(super().run(closed, values), self._wanted, strict=True)
        return [
            self._stopped(a) if is_in(a, self._changed) and not wanted else a for a, wanted in pairs
        ]

    def equation(self, eqn: jex.JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        alive = any(map(self._counts, eqn.outvars))
        body = jaxprs.called(eqn)
        if alive and body is not None:
            eqn = jaxprs.with_inner(eqn, self._body(eqn, body))
        floats = any(map(jaxprs.is_float, eqn.outvars))
        atoms = [
            self._stopped(a) if floats and not (alive and self._counts(a)) else a for a in values
        ]
        return self.append(eqn, atoms)

    def _body(self, eqn: jex.JaxprEqn, body: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        changed = list(map(self._counts, eqn.invars))
        if eqn.primitive.name == "scan":
            changed = HasGradient().body(eqn, changed)[0]
        wanted = body_results(eqn, [v in self._used for v in eqn.outvars])
        return without_dead_derivatives(body, changed, wanted)

    def _counts(self, atom: Atom) -> bool:
        return is_in(atom, self._changed) and atom in self._used

    def _stopped(self, atom: Atom) -> Atom:
        if isinstance(atom, jex.Literal) or not jaxprs.is_float(atom):
            return atom
        stop = jaxprs.equation(jax.lax.stop_gradient, [atom])
        return self.append(stop, [atom])[0]


def with_row_major_ffts(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Makes operands and results of FFTs row-major, at every depth.

    The FFT of XLA for CPUs fails on any other layout, which an array gathered along its last dim
    may have (jaxlib 0.10 to 0.12). The gradient of a result has its layout, and is the operand of
    an FFT in the backward pass.

    >>> from zero_jax.tracing.jaxpr import written_out
    >>> program = with_row_major_ffts(jax.make_jaxpr(jax.numpy.fft.fft)(jax.numpy.ones(4)))
    >>> names = [eqn.primitive.name for eqn in written_out(program).jaxpr.eqns]
    >>> names[names.index("fft") - 1], names[names.index("fft") + 1]
    ('layout_constraint', 'layout_constraint')
    """
    return _RowMajorFFTs()(closed)


class _RowMajorFFTs(Rewriter):
    def equation(self, eqn: jex.JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        if eqn.primitive.name != "fft":
            return super().equation(eqn, values)
        return self._row_major(self.append(eqn, self._row_major(values)))

    def _row_major(self, atoms: Sequence[Atom]) -> Sequence[Atom]:
        return self.append(jaxprs.equation(_row_major, atoms), atoms)


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
