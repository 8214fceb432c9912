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

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.jaxpr.equations import (
    CALLS,
    Atom,
    as_function,
    is_var,
    new_jaxpr,
    read,
    shape_of,
    variables,
    written_out,
)
from zero_jax.jaxpr.operations import on_piece, runs_on_pieces
from zero_jax.jaxpr.reads import needed

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
    wholes: tuple[jex.Var, ...]
    scalars: tuple[jex.Var, ...]
    outputs: tuple[int, ...]
    eqns: tuple[jex.JaxprEqn, ...]
    variables: tuple[jex.Var, ...]
    results: tuple[Atom, ...]

    def run(
        self,
        shape: tuple[int, ...],
        pieces: Sequence[Any],
        wholes: Sequence[Any],
        scalars: Sequence[Any],
    ) -> list[Any]:
        """The outputs' pieces, of this shape, in the order of `outputs`."""
        env: dict[Any, Any] = dict(zip(self.variables, pieces, strict=True))
        env.update(zip(self.wholes, wholes, strict=True))
        env.update(zip(self.scalars, scalars, strict=True))
        for eqn in self.eqns:
            values = [read(env, atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, on_piece(eqn, values, shape), strict=True))
        return [jnp.broadcast_to(read(env, atom), shape) for atom in self.results]


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
        flat = written_out(jax.make_jaxpr(fn)(*avals), CALLS, branches=True)
        self.inputs, self._eqns = flat.jaxpr.invars, flat.jaxpr.eqns
        self._known = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        self.outputs = [self._variable(atom) for atom in flat.jaxpr.outvars]
        self._leaf_of = dict(zip(self.inputs, leaf_of, strict=True))
        self._streamed = {v for v, held in zip(self.inputs, streamed, strict=True) if held}
        for eqn in self._eqns:
            if self._reads_streamed(eqn):
                self._streamed.update(eqn.outvars)

    def _variable(self, atom: Atom) -> jex.Var:
        """A result; one that is a literal is a constant like those that are closed over."""
        if is_var(atom):
            return atom
        var = jex.Var(atom.aval)
        self._known[var] = read({}, atom)
        return var

    def _reads_streamed(self, eqn: jex.JaxprEqn) -> bool:
        return not self._streamed.isdisjoint(variables([eqn]))

    def recipe(self, leaf: int, outputs: Sequence[int], shape: tuple[int, ...]) -> Recipe:
        """How these outputs, all of one leaf's shape, are made from pieces of it.

        Raises:
          NotPiecewise: an operation on streamed state is not elementwise along that leaf.
        """
        results = [self.outputs[at] for at in outputs]
        inputs, wholes, scalars = list[jex.Var](), list[jex.Var](), list[jex.Var]()
        wanted, kept = set(results), list[Any]()
        for eqn in reversed(self._eqns):
            made = [var for var in eqn.outvars if var in wanted]
            if made and runs_on_pieces(eqn, shape):
                kept.append(eqn)
                wanted.update(variables([eqn]))
            elif not self._streamed.isdisjoint(made):
                raise NotPiecewise(self._culprit())
            else:
                (wholes if made and shape_of(made[0]) == shape else scalars).extend(made)
        for var in (v for v in (*self.inputs, *self._known) if v in wanted):
            if shape_of(var) == () and var not in self._streamed:
                scalars.append(var)
            elif self._leaf_of.get(var) == leaf and shape_of(var) == shape:
                inputs.append(var)
            elif var in self._streamed or shape_of(var) != shape:
                raise NotPiecewise("another leaf's state")
            else:
                wholes.append(var)
        for var in scalars:
            if shape_of(var) != ():
                raise NotPiecewise(f"a value of shape {shape_of(var)}")
        return Recipe(
            inputs=tuple(self.inputs.index(v) for v in inputs),
            wholes=tuple(wholes),
            scalars=tuple(scalars),
            outputs=tuple(outputs),
            eqns=tuple(reversed(kept)),
            variables=tuple(inputs),
            results=tuple(results),
        )

    def _culprit(self) -> str:
        """The first operation that makes something else than pieces of streamed state."""
        return next(
            eqn.primitive.name
            for eqn in self._eqns
            if self._reads_streamed(eqn)
            and not all(runs_on_pieces(eqn, shape_of(var)) for var in eqn.outvars)
        )

    def evaluate(self, wanted: Sequence[jex.Var], given: Mapping[Atom, Any]) -> list[Any]:
        """Global values, from the whole arrays that are given for inputs."""
        found = needed(self._eqns, wanted)
        eqns = [eqn for eqn in self._eqns if not found.isdisjoint(eqn.outvars)]
        known = self._known | dict(given)
        jaxpr = new_jaxpr(list(known), list(wanted), eqns)
        return as_function(jex.ClosedJaxpr(jaxpr, ()))(*known.values())

    def dtype_of(self, output: int) -> Any:
        """The dtype of an output."""
        aval: Any = self.outputs[output].aval
        return aval.dtype

    def is_global(self, output: int) -> bool:
        """Whether an output needs no streamed state."""
        return self.outputs[output] not in self._streamed
