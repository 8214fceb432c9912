"""One layer whose forward pass keeps little, and whose backward pass runs it again.

One `custom_vjp` for every policy, for scanned and unrolled layers. Its forward pass runs the layer
and puts what is kept at its place: the layer's inputs, and the results of equations that are
kept. Its backward pass fetches them, runs the layer again with each kept result in place of the
one that is computed again, whose computation is then dead code as far as nothing else needs it, and
takes the gradient. `jax.checkpoint` would split a partitioned value in the forward pass and
gather it there too, since it splits one trace in two.

Inputs that a scan hands over unchanged (weights, constants, keys) are kept as what they are: the
scan does not stack them a second time.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax import activations, jaxprs
from zero_jax.policies import DEVICE, Place

Arrays = Sequence[Any]
# Runs a layer; its second argument is told each kept result, with its place, and gives another.
Run = Callable[[Arrays, Callable[[Any, Place], Any]], list[Any]]


def layer(
    run: Run, places: Mapping[int, Place], *, barrier: bool, within: Sequence[int] = ()
) -> Callable[..., list[Any]]:
    """Wraps a layer.

    Args:
      run: the layer.
      places: where some of its inputs are kept, by position; the others stay as they are.
      barrier: whether forward and backward stand in one computation. There XLA would merge the
        two runs and keep what lies between; and it would send the gradients of all layers
        together, which keeps them all alive. So the second run waits for the cotangents, and the
        next layer's for this one's gradients.
      within: inputs, by position, whose gradients XLA must finish with the layer. Those that a loop
        only writes into a stack it may hand to the next turn as they are before they are summed.

    Returns:
      A function of the layer's inputs, flat, that returns its results.
    """

    def call(*args: Any) -> list[Any]:
        likes = [jax.typeof(x) for x in args]

        @jax.custom_vjp
        def wrapped(*args: Any) -> list[Any]:
            return run(args, lambda x, _: x)

        def keep_all(*args: Any) -> tuple[list[Any], list[Any]]:
            results: list[Any] = []

            def keep(x: Any, place: Place) -> Any:
                results.append(activations.put(x, place))
                return x

            outs = run(args, keep)
            inputs = [activations.put(x, places.get(i, DEVICE)) for i, x in enumerate(args)]
            return outs, [*inputs, *results]

        def gradients(trained: Sequence[int], kept: Arrays, cotangents: Arrays) -> Arrays:
            inputs = [
                activations.fetch(x, places.get(i, DEVICE), like)
                for i, (x, like) in enumerate(zip(kept, likes, strict=False))
            ]
            results = iter(kept[len(inputs) :])

            def again(*given: Any) -> list[Any]:
                full = list(inputs)
                for i, x in zip(trained, given, strict=True):
                    full[i] = x
                outs = run(full, lambda x, p: instead(x, activations.fetch(next(results), p, x)))
                return [x for x in outs if is_float(x)]

            found = jax.vjp(again, *(inputs[i] for i in trained))[1](list(cotangents))
            pairs = zip(trained, found, strict=True)
            return [_together(x) if i in within else x for i, x in pairs]

        def forward(*given: Any) -> tuple[list[Any], Any]:
            args = [x.value for x in given]
            # A copy that was gathered beside its shard has no gradient, nor has a frozen leaf.
            trained = tuple(i for i, x in enumerate(given) if x.perturbed and is_float(likes[i]))
            outs, kept = keep_all(*args)
            floats = [x for x in outs if is_float(x)]
            again = jax.make_jaxpr(functools.partial(gradients, trained))(kept, floats)
            read = jaxprs.read_inputs(again.jaxpr)
            # Keys and counts stay too: they have no zero to stand in for them.
            stay = tuple(r or not is_float(x) for r, x in zip(read, kept, strict=False))
            shapes = tuple((x.shape, x.dtype) for x in kept)
            held = [x for x, s in zip(kept, stay, strict=True) if s]
            if barrier and any(map(activations.is_in_host, held)):
                # On its way to the host while this layer computes, there before the next one does:
                # else XLA's scheduler waits with it until the backward pass wants it back.
                outs, held = _together((outs, held))
            return outs, (_Known((trained, stay, shapes)), held)

        def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
            known, held = residuals
            trained, stay, shapes = known.value
            cotangents = [_made(c) for c in cotangents if is_float(c)]
            if barrier:
                held, cotangents = _together((held, cotangents))
            it = iter(held)
            kept = [
                next(it) if s else jnp.zeros(*shape) for s, shape in zip(stay, shapes, strict=True)
            ]
            found = gradients(trained, kept, cotangents)
            own = dict(zip(trained, _together(found) if barrier else found, strict=True))
            return tuple(own.get(i) for i in range(len(args)))

        wrapped.defvjp(forward, backward, symbolic_zeros=True)
        return wrapped(*args)

    return call


def summed_within(jaxpr: Any, touches: Sequence[str], bucket_bytes: float) -> list[int]:
    """Inputs of a layer whose gradients are summed over devices before its loop goes on.

    XLA for GPUs sums a layer's gradients while the next layer computes: all of them, unsummed, are
    held that long. What fits in a bucket travels together, when the last of it is there. Of a layer
    that gathers more, those of the matrices that are used last come first, with the rest of its own
    backward pass to hide behind: up to half of the layer is not left to the next.

    Args:
      jaxpr: a scanned layer.
      touches: names of the calls that open a parameter.
      bucket_bytes: the most that collectives move at once.

    Returns:
      Positions among its inputs, for `layer`.
    """
    opened = [e for e in jaxpr.eqns if e.params.get("name") in touches]
    # All may be opened before the first is used.
    opened.sort(key=lambda e: jaxprs.first_read(jaxpr, e.outvars[0]))
    sizes = {
        e.outvars[0]: e.outvars[0].aval.size * e.outvars[0].aval.dtype.itemsize for e in opened
    }
    left = sum(sizes.values()) / 2
    if 2 * left <= bucket_bytes:
        return []
    positions = {var: i for i, var in enumerate(jaxpr.invars)}
    found = list[int]()
    # Never that of the first matrix: it comes last, and would be summed in the open.
    for eqn in reversed([e for e in opened if e.outvars[0].aval.ndim > 1][1:]):
        own = [positions[a] for a in eqn.invars if jaxprs.is_in(a, positions)]
        if own and sizes[eqn.outvars[0]] <= left:
            left -= sizes[eqn.outvars[0]]
            found += own
    return found


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Known:
    """What the backward pass is told beside arrays."""

    value: Any


def _made(cotangent: Any) -> Any:
    """A cotangent as an array, also where it is a zero that nobody made."""
    known = isinstance(cotangent, jax.Array)
    return cotangent if known else jnp.zeros(cotangent.shape, cotangent.dtype)


def is_float(like: Any) -> bool:
    return jnp.issubdtype(like.dtype, jnp.inexact)


@jax.custom_vjp
def tied(arrays: list[Any]) -> list[Any]:
    """The same arrays; their gradients are there only when all of them are.

    So that the gradients of a layer are sent before the layer before it runs backward, and not
    those of all layers together.
    """
    return arrays


def _tied_forward(arrays: list[Any]) -> tuple[list[Any], None]:
    return [x.value for x in arrays], None


def _tied_backward(_: None, cotangents: Any) -> tuple[list[Any]]:
    known = [i for i, c in enumerate(cotangents) if isinstance(c, jax.Array)]
    own = dict(zip(known, _together([cotangents[i] for i in known]), strict=True))
    return ([own.get(i) for i in range(len(cotangents))],)


tied.defvjp(_tied_forward, _tied_backward, symbolic_zeros=True)


@jax.custom_vjp
def instead(computed: Any, stored: Any) -> Any:
    """The stored value; its gradient goes to the computed one, which is dead code otherwise."""
    return stored


instead.defvjp(lambda computed, stored: (stored, None), lambda _, cotangent: (cotangent, None))


def _together(tree: Any) -> Any:
    """Ties arrays together: none is there before all are."""
    leaves, treedef = jax.tree.flatten(tree)
    tied = [i for i, x in enumerate(leaves) if _is_number(x)]
    barred = jax.lax.optimization_barrier([leaves[i] for i in tied])
    for i, x in zip(tied, barred, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _is_number(x: Any) -> bool:
    return x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
