"""One layer as a function of gathered parameters, which gradients it has, and its backward pass."""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax

from zero_jax.collectives.barriers import Arrays, is_float, together
from zero_jax.engine.lazy_param import LazyParam, Operands, Param
from zero_jax.remat import recompute
from zero_jax.remat.policies import Place


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer, a function of its gathered parameters and then of its inputs.

    Attributes:
      run: The function.
      params: The parameters.
      places: Where inputs are saved, by position among all arguments. Others stay where they are.
      stopped: Parameters without a gradient.
      remote: Positions of parameters that are gathered ahead; others are full on every device.
    """

    run: recompute.Run
    params: Sequence[Param]
    places: Mapping[int, Place]
    stopped: Container[Param]
    remote: set[int]

    def trained(
        self, moving: Sequence[Sequence[bool]]
    ) -> tuple[tuple[tuple[bool, ...], ...], tuple[int, ...]]:
        """Returns which arrays of each parameter have a gradient, and which parameters."""
        own = tuple(
            tuple(m and param not in self.stopped for m in flags)
            for param, flags in zip(self.params, moving, strict=True)
        )
        return own, tuple(i for i, flags in enumerate(own) if any(flags))

    def layer(self, types: Sequence[Any]) -> recompute.Layer:
        """Returns the layer for arguments of these types."""
        return recompute.Layer(self.run, types, self.places)

    def gather(self, shards: Sequence[Arrays | None]) -> list[Any]:
        """Returns the full parameters of those that are given their shards."""
        return [
            None if own is None else param.of(own).gather()
            for param, own in zip(self.params, shards, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Which arguments of a layer have gradients.

    Attributes:
      arrays: For each parameter, which of its arrays.
      params: The parameters, by position.
      inputs: The inputs, by position.
      first_input: The number of parameters.
    """

    arrays: tuple[tuple[bool, ...], ...]
    params: tuple[int, ...]
    inputs: tuple[int, ...]
    first_input: int

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions among all arguments."""
        return (*self.params, *(self.first_input + i for i in self.inputs))

    def reduce(self, block: Block, gradients: Arrays) -> list[list[Any]]:
        """Returns the gradients of the arrays that have one, for each of `params`."""
        made = [block.params[i].reduce(g) for i, g in zip(self.params, gradients, strict=True)]
        pairs = zip(self.params, made, strict=True)
        return [[x for x, m in zip(own, self.arrays[i], strict=True) if m] for i, own in pairs]

    def fill(self, shards: list[list[Any]], values: Sequence[Arrays]) -> None:
        """Puts values in place of the arrays that have a gradient."""
        for at, own in zip(self.params, values, strict=True):
            moving = (k for k, m in enumerate(self.arrays[at]) if m)
            for k, x in zip(moving, own, strict=True):
                shards[at][k] = x


def has_gradient(x: Any) -> bool:
    """Returns True for an argument with a gradient."""
    return x.perturbed and is_float(x.value)


def stopped(values: Operands) -> set[Param]:
    """Returns the parameters whose every use is behind a `stop_gradient`."""
    moved = {v.param for v in values.values if isinstance(v, LazyParam) and not v.form.stopped}
    return {*values.params} - moved


def small(params: Arrays, which: Sequence[bool], most_bytes: float) -> list[Any] | None:
    """Returns the parameters that stay gathered between the passes; None if they are large."""
    kept = [x if own else None for x, own in zip(params, which, strict=True)]
    return kept if sum(x.nbytes for x in jax.tree.leaves(kept)) <= most_bytes else None


def backward(
    layer: recompute.Layer,
    gradients: Gradients,
    kept: Arrays,
    cotangents: Arrays,
    reduced: Any,
    upcoming: Any,
) -> tuple[list[Any], list[Any], Any, Any]:
    """One backward iteration, after its barrier.

    Args:
      layer: The layer.
      gradients: Which arguments have gradients.
      kept: See `recompute.Layer.keep_all`.
      cotangents: Those of the results that are floats, or None.
      reduced: The reduced gradients of the layer after this one.
      upcoming: Shards to be gathered next.

    Returns:
      The gradients of the parameters and of the inputs, `reduced`, `upcoming`.
    """
    # One after the other: a vector would wait for parameters that are gathered before it.
    reduced, upcoming = together((reduced, upcoming))
    arrays, treedef = jax.tree.flatten(reduced)
    due = [x for x in arrays if x.ndim > 1]
    found = list(layer.gradients(gradients.trained, kept, cotangents, due))
    count = len(gradients.params)
    inputs, arrays = together((found[count:], arrays))
    return found[:count], inputs, jax.tree.unflatten(treedef, arrays), upcoming
