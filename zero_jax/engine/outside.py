"""Derivatives of a global loss, and of its gradients, taken by the caller.

The engine differentiates a loss with respect to the trained leaves alone: its trace reads all that
they do not change through `stop_gradient` (`tracing/passes.py`). `jax.grad` of a result with
respect to the batch, an extra argument, a captured array, a frozen leaf, or once more with respect
to the trained leaves, needs the rest too. JAX asks for it through a `custom_jvp` rule: only then is
the same trace prepared again, without those stops. A program that nobody differentiates is
unchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from zero_jax.collectives.barriers import is_float
from zero_jax.engine.device_step import Result
from zero_jax.engine.trace import Traced


def differentiable(
    program: Callable[[Traced], Callable[..., Result]], traced: Traced
) -> Callable[..., Result]:
    """Returns a function whose results have derivatives with respect to all of its arguments.

    Args:
      program: makes the function of a traced loss.
      traced: the loss as the engine differentiates it.
    """

    def run(*args: Any) -> Result:
        flat, treedef = jax.tree.flatten(args)

        def results(traced: Traced, flat: Any) -> Result:
            return program(traced)(*jax.tree.unflatten(treedef, flat))

        @jax.custom_jvp
        def call(*flat: Any) -> Result:
            return results(traced, flat)

        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Result, Result]:
            moved = [
                i
                for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
                if is_float(x) and not isinstance(t, SymbolicZero)
            ]

            def linearized(aux: bool) -> tuple[Result, list[Any]]:
                """The results, and the tangents of those that are floats."""
                again = traced.from_outside(aux)

                def some(*own: Any) -> tuple[list[Any], Result]:
                    full = list(primals)
                    for i, x in zip(moved, own, strict=True):
                        full[i] = x
                    out = results(again, full)
                    wanted = out.aux if aux else out
                    return [x for x in jax.tree.leaves(wanted) if is_float(x)], out

                _, push, out = jax.linearize(some, *(primals[i] for i in moved), has_aux=True)
                return out, push(*(tangents[i] for i in moved))

            out, made = linearized(False)
            moving = _filled(out, made)
            # A metric may have infinite derivatives, which must not reach the loss's as 0 * inf.
            if any(map(is_float, jax.tree.leaves(out.aux))):
                moving.aux[:] = _filled(out.aux, linearized(True)[1])
            return out, moving

        call.defjvp(rule, symbolic_zeros=True)
        return call(*flat)

    return run


def _filled(like: Any, tangents: list[Any]) -> Any:
    """The tangents of a tree, of those of its floats."""
    it = iter(tangents)
    leaves, treedef = jax.tree.flatten(like)
    return jax.tree.unflatten(
        treedef,
        [next(it) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves],
    )
