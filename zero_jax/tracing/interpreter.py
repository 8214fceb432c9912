"""The interpreter of jaxprs: one table of handlers, which every transformation extends.

A handler receives an equation and the values of its inputs, and returns those of its results.
"""

from collections.abc import Callable, Sequence

import jax.extend.core as jex

from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.jaxpr import T, Walk


class Interpreter(Walk[T]):
    """Visits a jaxpr and handles each equation by its kind; values may be of any type.

    Unless a subclass has other handlers, calls, rematerialised functions and functions with custom
    derivatives are interpreted in place, and loops and branches are operations like any other.

    Attributes:
      handlers: By the name of the primitive; others are handled by `default`.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[jex.JaxprEqn, list[T]], Sequence[T]]] = {
            "scan": self.scan,
            "while": self.while_loop,
            "cond": self.cond,
            **dict.fromkeys(jaxprs.JIT, self.call),
            **dict.fromkeys(jaxprs.REMAT, self.remat),
            **dict.fromkeys(jaxprs.OWN_GRADIENT, self.custom_derivative),
        }

    def equation(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        return self.handlers.get(eqn.primitive.name, self.default)(eqn, values)

    def default(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        raise NotImplementedError

    def scan(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        return self.default(eqn, values)

    def while_loop(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        return self.default(eqn, values)

    def cond(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        return self.default(eqn, values)

    def call(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        return self.run(jaxprs.inner(eqn), values)

    def remat(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        return self.call(eqn, values)

    def custom_derivative(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        return self.call(eqn, values)
