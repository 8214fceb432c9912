"""Rematerialised layers: the forward pass saves little, the backward pass runs the layer again.

The forward pass of a layer stores its inputs, and the results of equations that the policy saves,
at their places. The backward pass fetches them and runs the layer again, with each saved result in
place of the recomputed one, so that computations that only lead to saved results are dead code.
Then it takes the gradient. `jax.checkpoint` splits one trace in two, and would therefore shard a
partitioned value in the forward pass and gather it there too.

`layer` wraps a single layer, such as the body of a scan, which gathers its weights itself.
`engine/layers.py` runs layers whose parameters are gathered ahead.

Inputs that a scan hands over unchanged (weights, constants, keys) are saved as they are: the scan
does not stack them a second time.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from zero_jax.collectives.barriers import Arrays, instead, is_float, known, together, waiting
from zero_jax.remat.policies import DEVICE, Place
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing import dataflow as reads

Results = TypeVar("Results")


# Called with an intermediate value and the place where it is saved, or None for a value that is not
# saved but marks a point midway in the layer; returns the value that the layer continues with.
Tap = Callable[[jax.Array, Place | None], jax.Array]
# Runs a layer, given its inputs, a tap, the positions of the inputs that have gradients, and True
# if this run is differentiated by these.
Run = Callable[[Arrays, Tap, Sequence[int], bool], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with its forward and backward pass.

    Attributes:
      run: The layer.
      likes: The types of its inputs.
      places: Where inputs are saved, by position; others are saved on the device.
    """

    run: Run
    likes: Sequence[jax.Array | jax.core.ShapedArray]
    places: Mapping[int, Place]

    def keep_all(
        self, args: Arrays, trained: Sequence[int]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the results, and all that the backward pass may read as stored: inputs first."""
        saved: list[jax.Array] = []

        def tap(x: jax.Array, at: Place | None) -> jax.Array:
            if at is not None:
                saved.append(at.put(x))
            return x

        outs = self.run(args, tap, trained, False)
        inputs = [self.places.get(i, DEVICE).put(x) for i, x in enumerate(args)]
        return outs, [*inputs, *saved]

    def gradients(
        self,
        trained: Sequence[int],
        kept: Arrays,
        cotangents: Sequence[jax.Array | None],
        due: Arrays = (),
    ) -> Arrays:
        """Returns the gradients of inputs.

        Args:
          trained: Positions of the inputs.
          kept: The values that `keep_all` returns.
          cotangents: Cotangents of the float results; None for a symbolic zero, since 0 times an
            infinite derivative is NaN.
          due: Arrays that must be available when the backward pass is midway, see `Tap`.
        """
        inputs = [
            self.places.get(i, DEVICE).fetch(x, like)
            for i, (x, like) in enumerate(zip(kept, self.likes, strict=False))
        ]
        saved = iter(kept[len(inputs) :])

        def again(*moving: jax.Array) -> list[jax.Array]:
            full = list(inputs)
            for i, x in zip(trained, moving, strict=True):
                full[i] = x

            def tap(x: jax.Array, at: Place | None) -> jax.Array:
                if at is None:
                    return waiting(x, due) if due else x
                return instead(x, at.fetch(next(saved), x))

            floats = [x for x in self.run(full, tap, trained, True) if is_float(x)]
            return [x for x, c in zip(floats, cotangents, strict=True) if c is not None]

        nonzero = [c for c in cotangents if c is not None]
        return jax.vjp(again, *(inputs[i] for i in trained))[1](nonzero)

    def reads(self, trained: Sequence[int], kept: Arrays, outs: Arrays) -> list[bool]:
        """Returns True for each kept value that the backward pass needs."""
        floats = [x for x in outs if is_float(x)]
        again = jax.make_jaxpr(functools.partial(self.gradients, trained))(kept, floats)
        read = reads.read_inputs(again.jaxpr)
        # Keys and counters are needed too: zeros can't replace them.
        return [r or not is_float(x) for r, x in zip(read, kept, strict=False)]


def layer(
    run: Run, places: Mapping[int, Place], *, barrier: bool
) -> Callable[..., list[jax.Array]]:
    """Wraps a layer so that its backward pass runs it again.

    Args:
      run: The layer.
      places: Where inputs are saved, by position; others are saved on the device.
      barrier: True if forward and backward pass are in one computation. XLA would merge the two
        runs there and keep the values in between, and would send the gradients of all layers
        together, which keeps them all alive. So the second run waits for the cotangents, and the
        backward pass of the previous layer for the gradients of this one.

    Returns:
      A function of the layer's inputs, flat, that returns its results.
    """

    def call(*args: jax.Array) -> list[jax.Array]:
        own = Layer(run, [jax.typeof(x) for x in args], places)

        @jax.custom_vjp
        def wrapped(*args: jax.Array) -> list[jax.Array]:
            return run(args, lambda x, _: x, (), False)

        def forward(*primals: PyTree) -> tuple[list[jax.Array], PyTree]:
            args = [x.value for x in primals]
            # A copy that was gathered beside its shard has no gradient, nor has a frozen leaf.
            trained = tuple(i for i, x in enumerate(primals) if x.perturbed and is_float(x.value))
            outs, kept = own.keep_all(args, trained)
            held = Held.of(kept, own.reads(trained, kept, outs))
            if barrier:
                outs, held = held.on_its_way(outs)
            return outs, (Known(trained), held)

        def backward(residuals: PyTree, cotangents: PyTree) -> tuple[jax.Array | None, ...]:
            trained, held = residuals[0].value, residuals[1]
            cotangents = [known(c) for c in cotangents if is_float(c)]
            if barrier:
                held, cotangents = together((held, cotangents))
            grads = own.gradients(trained, held.all(), cotangents)
            ready = dict(zip(trained, together(grads) if barrier else grads, strict=True))
            return tuple(ready.get(i) for i in range(len(args)))

        wrapped.defvjp(forward, backward, symbolic_zeros=True)
        return wrapped(*args)

    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Known:
    """A value for the backward pass that is not an array."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """The values of a layer that are stored between forward and backward pass.

    Attributes:
      arrays: The values that the backward pass reads.
      shapes: Shape and dtype of the others, and None for a value in `arrays`, in order.
    """

    arrays: list[jax.Array]
    shapes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, kept: Arrays, stay: Sequence[bool]) -> "Held":
        """Selects the values that stay."""
        pairs = list(zip(kept, stay, strict=True))
        shapes = tuple(None if s else (x.shape, x.dtype) for x, s in pairs)
        return cls([x for x, s in pairs if s], shapes)

    def all(self) -> list[jax.Array]:
        """Returns all values, with zeros for those that the backward pass does not read."""
        it = iter(self.arrays)
        return [next(it) if s is None else jnp.zeros(*s) for s in self.shapes]

    def on_its_way(self, outs: Results) -> tuple[Results, "Held"]:
        """Ties values in host memory to the layer's results, a tree of arrays.

        XLA's scheduler would otherwise delay the copies to the host until the backward pass.
        """
        is_on_host = [jax.typeof(x).memory_space == jax.memory.Space.Host for x in self.arrays]
        return together((outs, self)) if any(is_on_host) else (outs, self)
