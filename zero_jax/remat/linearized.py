"""A layer and its derivative as one jaxpr, for the remat policies of JAX."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex

from zero_jax.collectives.barriers import Arrays, is_float, known
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing import jaxpr as equations


@dataclasses.dataclass(frozen=True)
class Linear:
    """A layer, and the residuals of its backward pass: the factors of derivatives.

    Attributes:
      closed: Computes the layer's results, and then the residuals.
      count: Number of results.
      moving: Positions of the inputs that have gradients.
      form: Structure of the linear function, whose leaves are the residuals. It maps tangents of
        the inputs to those of the results.
    """

    closed: jex.ClosedJaxpr
    count: int
    moving: Sequence[int]
    form: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, body: jex.ClosedJaxpr, moving: Sequence[int]) -> "Linear":
        """Linearises a jaxpr with inlined calls, with respect to some inputs.

        >>> layer = Linear.of(jax.make_jaxpr(jax.numpy.sin)(1.0), [0])
        >>> len(layer.closed.jaxpr.outvars), layer.count  # sin and its residual, cos
        (2, 1)
        """

        def both(*values: jax.Array) -> tuple[list[jax.Array], PyTree]:
            def layer(*args: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
                moved = dict(zip(moving, args, strict=True))
                outs = equations.as_function(body)(*(moved.get(i, x) for i, x in enumerate(values)))
                return [x for x in outs if is_float(x)], outs

            _, tangents, outs = jax.linearize(layer, *(values[i] for i in moving), has_aux=True)
            return outs, tangents

        likes = [v.aval for v in body.jaxpr.invars]
        closed, (_, tangents) = jax.make_jaxpr(both, return_shape=True)(*likes)
        form = jax.tree.structure(tangents)
        return cls(equations.written_out(closed), len(body.jaxpr.outvars), moving, form)

    def run(
        self,
        evaluate: Callable[[Arrays], list[jax.Array]],
        values: Arrays,
        *,
        again: bool = False,
    ) -> list[jax.Array]:
        """Returns the layer's results.

        Args:
          evaluate: Evaluates `closed`. It is not differentiated: `linked` has the gradient.
          values: The layer's inputs.
          again: True under a second derivative, which differentiates `evaluate` too, because
            `stop_gradient` would stop that one. Then `linked` drops the share of the first one.
        """
        outs = evaluate(list(values) if again else [jax.lax.stop_gradient(x) for x in values])
        likes = [jax.typeof(values[i]) for i in self.moving]

        @jax.custom_vjp
        def linked(values: Arrays, outs: Arrays, residuals: Arrays) -> Arrays:
            return outs

        def forward(_: PyTree, outs: PyTree, residuals: PyTree) -> tuple[Arrays, Arrays]:
            return [x.value for x in outs], [x.value for x in residuals]

        def backward(
            residuals: Arrays, cotangents: Arrays
        ) -> tuple[list[jax.Array | None], None, None]:
            tangents = jax.tree.unflatten(self.form, residuals)
            floats = [known(c) for c in cotangents if is_float(c)]
            live = [i for i, c in enumerate(floats) if c is not None]

            def of_live(*moving: jax.Array) -> list[jax.Array]:
                results = tangents(*moving)
                return [results[i] for i in live]

            grads = jax.linear_transpose(of_live, *likes)([floats[i] for i in live])
            by_input = dict(zip(self.moving, grads, strict=True))
            return [by_input.get(i) for i in range(len(values))], None, None

        linked.defvjp(forward, backward, symbolic_zeros=True)
        return list(linked(list(values), outs[: self.count], outs[self.count :]))
