"""Row-major operands for FFTs: the FFT of XLA for CPUs fails on any other layout.

An array that is gathered along its last dim may have another one (jaxlib 0.10 to 0.12).
"""

from typing import Any

import jax
import jax.extend.core as jex
from jax.experimental.layout import Layout, with_layout_constraint

from zero_jax.jaxpr import equations


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _has_fft(jaxpr: jex.Jaxpr) -> bool:
    return any(
        eqn.primitive.name == "fft" or any(map(_has_fft, jex.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def with_row_major_ffts(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same jaxpr, in which operands and results of FFTs are row-major, at every depth.

    A result's gradient has the layout of the result, and is the operand of an FFT backward.

    >>> program = with_row_major_ffts(jax.make_jaxpr(jax.numpy.fft.fft)(jax.numpy.ones(4)))
    >>> names = [eqn.primitive.name for eqn in equations.written_out(program).jaxpr.eqns]
    >>> names[names.index("fft") - 1], names[names.index("fft") + 1]
    ('layout_constraint', 'layout_constraint')
    """
    if not _has_fft(closed.jaxpr):
        return closed
    return jex.ClosedJaxpr(_within(closed.jaxpr), closed.consts)


def _within(body: jex.Jaxpr) -> jex.Jaxpr:
    eqns: list[jex.JaxprEqn] = []
    for eqn in body.eqns:
        if eqn.primitive.name == "fft":
            before = equations.equation(_row_major, eqn.invars)
            result = jex.Var(eqn.outvars[0].aval)
            after = equations.equation(_row_major, [result])
            alone = eqn.replace(invars=list[equations.Atom](before.outvars), outvars=[result])
            eqns += [before, alone, after.replace(outvars=eqn.outvars)]
        elif any(map(_has_fft, jex.jaxprs_in_params(eqn.params))):
            eqns.append(eqn.replace(params={key: _param(x) for key, x in eqn.params.items()}))
        else:
            eqns.append(eqn)
    return equations.new_jaxpr(body.invars, body.outvars, eqns, body.effects, body.constvars)


def _param(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_param, value)) if type(value) in (tuple, list) else value
    if isinstance(value, jex.ClosedJaxpr) and hasattr(value, "consts"):
        return with_row_major_ffts(value)
    return _within(value) if isinstance(value, jex.Jaxpr) and _has_fft(value) else value
