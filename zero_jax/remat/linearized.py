"""A layer with its derivative, as one jaxpr: what JAX's own remat policies are asked about."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.collectives.barriers import Arrays, is_float, known
from zero_jax.tracing import jaxpr as equations


@dataclasses.dataclass(frozen=True)
class Linear:
    """A layer, and what its backward pass reads: factors of derivatives, what a forward rule of the
    model's own hands over.

    Attributes:
      closed: makes the layer's results, and then what the backward pass reads.
      count: how many results there are.
      moving: positions of the inputs that have gradients.
      form: puts together the linear function of these that has the results' tangents.
    """

    closed: jex.ClosedJaxpr
    count: int
    moving: Sequence[int]
    form: Any

    @classmethod
    def of(cls, body: jex.ClosedJaxpr, moving: Sequence[int]) -> "Linear":
        """Of a jaxpr, its calls written out, for such inputs.

        >>> layer = Linear.of(jax.make_jaxpr(jax.numpy.sin)(1.0), [0])
        >>> [eqn.primitive.name for eqn in layer.closed.jaxpr.eqns]
        ['sin', 'cos']
        """
        likes = [v.aval for v in body.jaxpr.invars]
        form: Any = None

        def both(*values: Any) -> tuple[list[Any], list[Any]]:
            nonlocal form

            def layer(*given: Any) -> tuple[list[Any], list[Any]]:
                full = list(values)
                for i, x in zip(moving, given, strict=True):
                    full[i] = x
                outs = equations.as_function(body)(*full)
                return [x for x in outs if is_float(x)], outs

            _, tangents, outs = jax.linearize(layer, *(values[i] for i in moving), has_aux=True)
            read, form = jax.tree.flatten(tangents)
            return outs, read

        closed = equations.written_out(jax.make_jaxpr(both)(*likes))
        return cls(closed, len(body.jaxpr.outvars), moving, form)

    def run(
        self,
        evaluate: Callable[[Sequence[Any]], list[Any]],
        values: Arrays,
        *,
        again: bool = False,
    ) -> list[Any]:
        """The results, given what evaluates `closed`.

        That is not differentiated: `linked` has the gradient. Under a second derivative (`again`)
        it is: `stop_gradient` would stop that one too. Then `linked` drops the first one's share.
        """
        found = evaluate(list(values) if again else [jax.lax.stop_gradient(x) for x in values])

        likes = [jax.typeof(values[i]) for i in self.moving]

        @jax.custom_vjp
        def linked(values: Arrays, outs: list[Any], read: list[Any]) -> list[Any]:
            return outs

        def forward(_: Any, outs: Any, read: Any) -> tuple[list[Any], list[Any]]:
            return [x.value for x in outs], [x.value for x in read]

        def backward(read: list[Any], cotangents: list[Any]) -> tuple[list[Any], None, None]:
            tangents = jax.tree.unflatten(self.form, read)
            floats = [known(c) for c in cotangents if is_float(c)]
            live = [i for i, c in enumerate(floats) if c is not None]

            def some(*moving: Any) -> list[Any]:
                made = tangents(*moving)
                return [made[i] for i in live]

            found = jax.linear_transpose(some, *likes)([floats[i] for i in live])
            own = dict(zip(self.moving, found, strict=True))
            return [own.get(i) for i in range(len(values))], None, None

        linked.defvjp(forward, backward, symbolic_zeros=True)
        return linked(list(values), found[: self.count], found[self.count :])
