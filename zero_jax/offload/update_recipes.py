"""Takes an optimizer's update apart, so that each leaf can be updated a piece at a time.

The update is traced once, on logical shapes, and its operations are sorted by what they read:

  global     needs no streamed state: the norm of all gradients, a schedule, a step counter.
             Computed first, once, on the whole arrays, as without offload.
  piecewise  elementwise along one leaf: the moments, the update. Run on pieces, where a piece
             of the result depends on the same piece of the operands and on global values.

What is neither (a norm of the updates, a factored moment, a matrix product with streamed state)
can't be done in pieces and is refused by name. No values are looked at: what streams is exact,
because the very same operations run on every element.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from zero_jax.jaxpr.operations import ELEMENTWISE, Atom, Constant, Operation, Slot, flatten

PyTree = Any


class NotPiecewise(ValueError):
    """An operation needs the whole of a streamed state."""


@dataclass(frozen=True)
class Recipe:
    """How one leaf's results are made from pieces.

    Attributes:
      inputs: positions of the program's inputs that are cut into pieces.
      wholes: further values of the leaf's shape, computed first, that are cut as well.
      scalars: global values.
      outputs: positions of the program's outputs that it makes.
    """

    inputs: tuple[int, ...]
    wholes: tuple[Slot, ...]
    scalars: tuple[Slot, ...]
    outputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    slots: tuple[Slot, ...]
    results: tuple[Atom, ...]

    def run(
        self,
        shape: tuple[int, ...],
        pieces: Sequence[Any],
        wholes: Sequence[Any],
        scalars: Sequence[Any],
    ) -> list[Any]:
        """The outputs' pieces, of this shape, in the order of `outputs`."""
        env: dict[Atom, Any] = dict(zip(self.slots, pieces, strict=True))
        env.update(zip(self.wholes, wholes, strict=True))
        env.update(zip(self.scalars, scalars, strict=True))
        for operation in self.operations:
            values = [_value(env, atom) for atom in operation.inputs]
            env.update(zip(operation.outputs, operation.on_piece(values, shape), strict=True))
        return [jnp.broadcast_to(_value(env, atom), shape) for atom in self.results]


class Program:
    """A traced function told apart into global values and recipes for leaves.

    Args:
      fn: a function of flat arrays that returns flat arrays.
      avals: its arguments, abstract.
      leaf_of: for each argument, which leaf it belongs to, or None.
      streamed: for each argument, whether it comes in pieces only.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        avals: Sequence[Any],
        leaf_of: Sequence[int | None],
        streamed: Sequence[bool],
    ):
        flat = flatten(fn, avals)
        self.inputs, self.outputs, self.operations = flat.inputs, flat.outputs, flat.operations
        self._leaf_of = dict(zip(self.inputs, leaf_of, strict=True))
        self._streamed = {s for s, held in zip(self.inputs, streamed, strict=True) if held}
        for operation in self.operations:
            if not self._streamed.isdisjoint(operation.inputs):
                self._streamed.update(operation.outputs)
        self._made_by = {slot: o for o in self.operations for slot in o.outputs}

    def recipe(self, leaf: int, outputs: Sequence[int], shape: tuple[int, ...]) -> Recipe:
        """How these outputs, all of one leaf's shape, are made from pieces of it.

        Raises:
          NotPiecewise: an operation on streamed state is not elementwise along that leaf.
        """
        results = [self.outputs[at] for at in outputs]
        inputs, wholes, scalars = list[Slot](), list[Slot](), list[Slot]()
        needed = {atom for atom in results if isinstance(atom, Slot)}
        kept = list[Operation]()
        for operation in reversed(self.operations):
            wanted = [slot for slot in operation.outputs if slot in needed]
            if not wanted:
                continue
            if self._runs_on_pieces(operation, shape):
                kept.append(operation)
                needed.update(a for a in operation.inputs if isinstance(a, Slot))
                continue
            if not self._streamed.isdisjoint(wanted):
                raise NotPiecewise(self._culprit())
            (wholes if wanted[0].shape == shape else scalars).extend(wanted)
        made = set(self._made_by)
        for slot in (s for s in self.inputs if s in needed and s not in made):
            if slot.shape == () and slot not in self._streamed:
                scalars.append(slot)
            elif self._leaf_of[slot] == leaf and slot.shape == shape:
                inputs.append(slot)
            elif slot in self._streamed or slot.shape != shape:
                raise NotPiecewise("another leaf's state")
            else:
                wholes.append(slot)
        for slot in scalars:
            if slot.shape != ():
                raise NotPiecewise(f"a value of shape {slot.shape}")
        return Recipe(
            inputs=tuple(self.inputs.index(s) for s in inputs),
            wholes=tuple(wholes),
            scalars=tuple(scalars),
            outputs=tuple(outputs),
            operations=tuple(reversed(kept)),
            slots=tuple(inputs),
            results=tuple(results),
        )

    def _runs_on_pieces(self, operation: Operation, shape: tuple[int, ...]) -> bool:
        """Whether it is elementwise along a leaf of that shape, with scalars as the rest."""
        if any(slot.shape != shape for slot in operation.outputs) or shape == ():
            return False
        shapes = {atom.shape for atom in operation.inputs}
        if operation.name == "broadcast_in_dim":
            return shapes == {()}
        return operation.name in ELEMENTWISE and bool(shapes) and shapes <= {shape, ()}

    def _culprit(self) -> str:
        """The first operation that makes something else than pieces of streamed state."""
        return next(
            o.name
            for o in self.operations
            if not self._streamed.isdisjoint(o.inputs)
            and not all(self._runs_on_pieces(o, slot.shape) for slot in o.outputs)
        )

    def evaluate(self, slots: Sequence[Atom], given: Mapping[Atom, Any]) -> list[Any]:
        """Global values, from the whole arrays that are given for inputs."""
        needed = {s for s in slots if isinstance(s, Slot)}
        kept = list[Operation]()
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.outputs):
                kept.append(operation)
                needed.update(a for a in operation.inputs if isinstance(a, Slot))
        env: dict[Atom, Any] = dict(given)
        for operation in reversed(kept):
            values = [_value(env, atom) for atom in operation.inputs]
            env.update(zip(operation.outputs, operation.run(*values), strict=True))
        return [_value(env, atom) for atom in slots]

    def is_global(self, output: int) -> bool:
        """Whether an output needs no streamed state."""
        return self.outputs[output] not in self._streamed


def _value(env: Mapping[Atom, Any], atom: Atom) -> Any:
    return atom.value if isinstance(atom, Constant) else env[atom]
