"""Layers whose forward pass keeps little, and whose backward pass runs them again.

A layer's forward pass runs it and puts what is kept at its place: the layer's inputs, and the
results of equations that are kept. Its backward pass fetches them, runs the layer again with each
kept result in place of the one that is computed again, whose computation is then dead code as far
as nothing else needs it, and takes the gradient. `jax.checkpoint` would split a partitioned value
in the forward pass and gather it there too, since it splits one trace in two.

`layer` is one layer, of a scan say, which gathers its weights itself; `engine/chain.py` has runs of
layers that are not scanned.

Inputs that a scan hands over unchanged (weights, constants, keys) are kept as what they are: the
scan does not stack them a second time.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.collectives.barriers import Arrays, instead, is_float, known, together, waiting
from zero_jax.remat import activations
from zero_jax.remat.policies import DEVICE, Place
from zero_jax.tracing import dataflow as reads

# Runs a layer: given its inputs, what is told each kept result, with its place, and gives another,
# and which inputs have gradients, by position.
Run = Callable[[Arrays, Callable[[Any, Any], Any], Sequence[int]], list[Any]]


class Midway(enum.Enum):
    """What a layer's run is told of values on its way, by how much of its products comes before
    them: its gradient reaches the first one first."""

    FIRST = 2 / 3
    SECOND = 1 / 3


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as its forward and its backward pass see it.

    Attributes:
      run: the layer.
      likes: the types of its inputs.
      places: where some of its inputs are kept, by position; the others stay as they are.
    """

    run: Run
    likes: Sequence[Any]
    places: Mapping[int, Place]

    def keep_all(self, args: Arrays, trained: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Its results, and all that its backward pass may read, at its place: inputs first."""
        results: list[Any] = []

        def keep(x: Any, told: Any) -> Any:
            if not isinstance(told, Midway):
                results.append(activations.put(x, told))
            return x

        outs = self.run(args, keep, trained)
        inputs = [activations.put(x, self.places.get(i, DEVICE)) for i, x in enumerate(args)]
        return outs, [*inputs, *results]

    def gradients(
        self,
        trained: Sequence[int],
        kept: Arrays,
        cotangents: Arrays,
        due: Mapping[Midway, list[Any]] | None = None,
    ) -> Arrays:
        """Of those inputs, given the cotangents of the results that are floats.

        Args:
          trained: positions of inputs.
          kept: see `keep_all`.
          cotangents: of the results; None for one that has none, whose derivative may be infinite.
          due: arrays that are to be there by some point of the way back.
        """
        inputs = [
            activations.fetch(x, self.places.get(i, DEVICE), like)
            for i, (x, like) in enumerate(zip(kept, self.likes, strict=False))
        ]
        results = iter(kept[len(inputs) :])

        def again(*given: Any) -> list[Any]:
            full = list(inputs)
            for i, x in zip(trained, given, strict=True):
                full[i] = x

            def tap(x: Any, told: Any) -> Any:
                if isinstance(told, Midway):
                    return waiting(x, due[told]) if due and due[told] else x
                return instead(x, activations.fetch(next(results), told, x))

            floats = [x for x in self.run(full, tap, trained) if is_float(x)]
            return [x for x, c in zip(floats, cotangents, strict=True) if c is not None]

        given = [c for c in cotangents if c is not None]
        return jax.vjp(again, *(inputs[i] for i in trained))[1](given)

    def reads(self, trained: Sequence[int], kept: Arrays, outs: Arrays) -> list[bool]:
        """Which of all that is kept the backward pass reads, or can't be told without."""
        floats = [x for x in outs if is_float(x)]
        again = jax.make_jaxpr(functools.partial(self.gradients, trained))(kept, floats)
        read = reads.read_inputs(again.jaxpr)
        # Keys and counts stay too: they have no zero to stand in for them.
        return [r or not is_float(x) for r, x in zip(read, kept, strict=False)]


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
        own = Layer(run, [jax.typeof(x) for x in args], places)

        @jax.custom_vjp
        def wrapped(*args: Any) -> list[Any]:
            return run(args, lambda x, _: x, ())

        def forward(*given: Any) -> tuple[list[Any], Any]:
            args = [x.value for x in given]
            # A copy that was gathered beside its shard has no gradient, nor has a frozen leaf.
            trained = tuple(i for i, x in enumerate(given) if x.perturbed and is_float(x.value))
            outs, kept = own.keep_all(args, trained)
            held = Held.of(kept, own.reads(trained, kept, outs))
            if barrier:
                outs, held = held.on_its_way(outs)
            return outs, (Known(trained), held)

        def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
            trained, held = residuals[0].value, residuals[1]
            cotangents = [known(c) for c in cotangents if is_float(c)]
            if barrier:
                held, cotangents = together((held, cotangents))
            found = own.gradients(trained, held.all(), cotangents)
            pairs = zip(trained, found, strict=True)
            found = [together(x) if i in within else x for i, x in pairs]
            ready = dict(zip(trained, together(found) if barrier else found, strict=True))
            return tuple(ready.get(i) for i in range(len(args)))

        wrapped.defvjp(forward, backward, symbolic_zeros=True)
        return wrapped(*args)

    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Known:
    """What the backward pass is told beside arrays."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """What a layer keeps from forward to backward.

    Attributes:
      arrays: those of all values that the backward pass reads.
      shapes: of all values shape and dtype, or None for one that is among the arrays.
    """

    arrays: list[Any]
    shapes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, kept: Arrays, stay: Sequence[bool]) -> "Held":
        """Of all that may be kept, what stays."""
        pairs = list(zip(kept, stay, strict=True))
        shapes = tuple(None if s else (x.shape, x.dtype) for x, s in pairs)
        return cls([x for x, s in pairs if s], shapes)

    def all(self) -> list[Any]:
        """Everything again, zeros for what nobody reads."""
        it = iter(self.arrays)
        return [next(it) if s is None else jnp.zeros(*s) for s in self.shapes]

    def on_its_way(self, outs: list[Any]) -> tuple[list[Any], "Held"]:
        """On its way to the host while this layer computes, there before the next one does: else
        XLA's scheduler waits with it until the backward pass wants it back."""
        if any(map(activations.is_in_host, self.arrays)):
            return together((outs, self))
        return outs, self
