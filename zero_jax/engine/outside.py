"""Derivatives of a global loss, and of its gradients, taken by the caller.

The engine differentiates a loss with respect to the trained leaves alone: its trace reads all that
they do not change through `stop_gradient` (`tracing/passes.py`). `jax.grad` of a result with
respect to the batch, an extra argument, a captured array, a frozen leaf, or once more with respect
to the trained leaves, needs the rest too. JAX asks for it through a `custom_jvp` rule: only then is
the same trace prepared again, without those stops. A program that nobody differentiates is
unchanged.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from zero_jax.collectives.barriers import is_float
from zero_jax.engine.device_step import Result
from zero_jax.engine.trace import Traced
from zero_jax.sharding.paths import PyTree

Tangents = tuple[jax.Array | SymbolicZero, ...]


def differentiable(
    program: Callable[[Traced], Callable[..., Result]], traced: Traced
) -> Callable[..., Result]:
    """Returns `program(traced)` with derivatives with respect to all of its arguments."""

    def run(*args: PyTree) -> Result:
        flat, treedef = jax.tree.flatten(args)

        def results(traced: Traced, flat: Sequence[jax.Array]) -> Result:
            return program(traced)(*jax.tree.unflatten(treedef, flat))

        @jax.custom_jvp
        def call(*flat: jax.Array) -> Result:
            return results(traced, flat)

        @functools.partial(call.defjvp, symbolic_zeros=True)
        def rule(primals: tuple[jax.Array, ...], tangents: Tangents) -> tuple[Result, Result]:
            pairs = enumerate(zip(primals, tangents, strict=True))
            moving = {
                i: t for i, (x, t) in pairs if is_float(x) and not isinstance(t, SymbolicZero)
            }

            def linearized(aux: bool) -> tuple[Result, list[jax.Array]]:
                """Returns the results, and the tangents of those that are floats."""
                again = traced.from_outside(aux)

                def some(moved: dict[int, jax.Array]) -> tuple[list[jax.Array], Result]:
                    out = results(again, [moved.get(i, x) for i, x in enumerate(primals)])
                    wanted = out.aux if aux else out
                    return [x for x in jax.tree.leaves(wanted) if is_float(x)], out

                moved = {i: primals[i] for i in moving}
                _, push, out = jax.linearize(some, moved, has_aux=True)
                return out, push(moving)

            out, made = linearized(False)
            change = _filled(out, made)
            # A metric may have infinite derivatives, which must not reach the loss's as 0 * inf.
            if any(map(is_float, jax.tree.leaves(out.aux))):
                change.aux[:] = _filled(out.aux, linearized(True)[1])
            return out, change

        return call(*flat)

    return run


def _filled(like: PyTree, tangents: list[jax.Array]) -> PyTree:
    """Returns the tangents of a tree, given those of its floats."""
    it = iter(tangents)
    return jax.tree.map(
        lambda x: next(it) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0), like
    )
