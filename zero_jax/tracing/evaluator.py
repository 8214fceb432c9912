"""Evaluation of jaxprs on arrays, and on pytrees in place of arrays."""

from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import ArrayLike

from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.interpreter import Interpreter
from zero_jax.tracing.jaxpr import Atom, T


class Evaluator(Interpreter[T]):
    """Evaluates a jaxpr on arrays, and on pytrees that replace some of them.

    An equation of arrays alone is run as it is. A subclass handles the others. Loops, branches and
    rematerialised functions of replaced arrays are built again around the interpreted body.
    """

    inlined = jaxprs.JIT  # calls that are inlined in the bodies of loops and branches

    def is_replaced(self, value: T) -> bool:
        """Returns True for a pytree in place of an array."""
        raise NotImplementedError

    def agreed(self, values: list[T], like: Sequence[T | bool]) -> list[T]:
        """Returns the results of an iteration or a branch, made like those of the first one."""
        return values

    def constant(self, atom: Atom, value: ArrayLike) -> T:
        return jaxprs.typed(value, atom)

    def evaluate(self, closed: jex.ClosedJaxpr, values: Sequence[T]) -> list[T]:
        """Returns the results of a jaxpr, its calls inlined."""
        return self.run(jaxprs.written_out(closed, self.inlined), values)

    def equation(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        if any(map(self.is_replaced, values)):
            return super().equation(eqn, values)
        return jaxprs.function(eqn)(*values)

    def scan(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        start, carried = jaxprs.state_of(eqn)
        fixed, stop = values[:start], start + carried

        def step(carry: list[T], slices: list[T]) -> tuple[list[T], list[T]]:
            made = self.evaluate(jaxprs.inner(eqn), [*fixed, *carry, *slices])
            return self.agreed(made[:carried], carry), made[carried:]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(step, values[start:stop], values[stop:], **options)
        return [*carry, *stacked]

    def while_loop(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        ((body, first),), (start, _) = jaxprs.bodies(eqn), jaxprs.state_of(eqn)
        of_test, fixed = values[:first], values[first:start]

        def continues(state: list[T]) -> T:
            made = self.evaluate(eqn.params["cond_jaxpr"], [*of_test, *state])
            return self.agreed(made, [True])[0]

        def step(state: list[T]) -> list[T]:
            return self.agreed(self.evaluate(body, [*fixed, *state]), state)

        return jax.lax.while_loop(continues, step, values[start:])

    def cond(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        first: list[T] = []

        def case(branch: jex.ClosedJaxpr) -> Callable[..., list[T]]:
            def run(*operands: T) -> list[T]:
                made = self.evaluate(branch, operands)
                first[:] = first or made
                return self.agreed(made, first)

            return run

        cases = [case(branch) for branch, _ in jaxprs.bodies(eqn)]
        return jax.lax.switch(values[0], cases, *values[1:])

    def remat(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        def run(*values: T) -> list[T]:
            return self.evaluate(jaxprs.inner(eqn), values)

        options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
        return jax.checkpoint(run, **options)(*values)


class Resized(Evaluator[jax.Array]):
    """Runs operations on arrays of other sizes than they were traced with.

    Args:
      shape: The shape of all results. By default elementwise operations have that of their
        operands; others must have no sizes among their parameters.
    """

    def __init__(self, shape: tuple[int, ...] | None = None):
        super().__init__()
        self._shape = shape

    def equation(self, eqn: jex.JaxprEqn, values: list[jax.Array]) -> Sequence[jax.Array]:
        name, shape = eqn.primitive.name, self._shape
        if shape is None and name in jaxprs.ELEMENTWISE:
            shape = next(x.shape for x in values if jnp.ndim(x))
        if shape is not None:
            values = [jnp.broadcast_to(value, shape) for value in values]
            if name == "broadcast_in_dim":
                return values
        return [eqn.primitive.bind(*values, **eqn.params)]
