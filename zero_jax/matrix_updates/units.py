"""A region taken apart: the operations for one matrix of a stack.

The region's operations run on a stack of one, matrix `index`. A value without stack dim where the
region's own values had one (a constant, a factor for each matrix) is sliced to that one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.matrix_updates.regions import DECOMPOSITIONS, Region
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Dim, sharded_dims
from zero_jax.tracing.interpreter import Evaluator
from zero_jax.tracing.jaxpr import CALLS, ELEMENTWISE, is_var, shape_of

_REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
)
# Operations whose parameters name dims, but no sizes.
_WITHOUT_SIZES = _REDUCTIONS | DECOMPOSITIONS | {"transpose", "squeeze", "argmax", "argmin"}
# A device receives for one matrix at most this many times the elements of the largest input:
# Shampoo has three, GaLore four.
_TOGETHER = 4


class _NotSeparableError(Exception):
    """An operation of a region needs several matrices of a stack."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Slice:
    """One matrix of a stack.

    Attributes:
      array: The value.
      stack: The dim that is 1 here and counts matrices in the region.
    """

    array: Any
    stack: int = field(metadata={"static": True})


@dataclass(frozen=True)
class Units:
    """A region as matrices that are computed one by one.

    Attributes:
      region: The region.
      count: Number of matrices; 1 where the whole region is one.
      one: The operations for one of them, traced: (index, sharded, replicated) to results.
      stacks: The dim that counts matrices, or None, of each of `sharded` and of `results`.
    """

    region: Region
    count: int
    one: jex.ClosedJaxpr
    stacks: tuple[tuple[Dim, ...], tuple[Dim, ...]]

    def run(self, index: Any, sharded: Sequence[Any], replicated: Sequence[Any]) -> list[Any]:
        """Returns the results for matrix `index`, with stacks of 1."""
        return [_array(x) for x in _of_one(self.region, index, sharded, replicated, self.stacks[0])]

    @property
    def flops(self) -> int:
        """FLOPs of one matrix, at least 1: two for each multiplication of a product.

        A decomposition counts as a product: rows times columns times the fewer of both.
        """
        decomposed = 0
        for eqn in jaxprs.nested(self.one.jaxpr):
            if eqn.primitive.name in DECOMPOSITIONS:
                shape = shape_of(eqn.invars[0])
                decomposed += math.prod(shape) * min(shape[-2:])
        return max(2 * (sum(jaxprs.products(self.one.jaxpr)) + decomposed), 1)

    @property
    def program(self) -> tuple[Any, ...]:
        """Equal for two regions with the same operations on matrices of the same shapes."""
        return str(self.one.jaxpr), *map(id, _constants(self.region.closed.jaxpr))

    def pays(self, devices: int) -> bool:
        """Returns True if less is sent to assigned devices than by XLA, with balanced work.

        A device must not work on a stack that cannot be taken apart, or on operations that combine
        several leaves.
        """
        sizes = [math.prod(shape_of(v)) for v in self.region.sharded]
        stacks = [math.prod(shape_of(v)[:-2]) for v in self.region.sharded]
        if sum(sizes) > _TOGETHER * max(sizes) or (self.count == 1 and max(stacks) > 1):
            return False
        sent = sum(sizes) + sum(math.prod(shape_of(v)) for v in self.region.results)
        return self.region.moved > -(-self.count // devices) * sent / self.count


def units(region: Region) -> Units:
    """Takes a region apart along dim 0 of its sharded inputs, if possible."""
    shapes = [shape_of(v) for v in region.sharded]
    counts = {s[0] if len(s) > 2 else 1 for s in shapes}
    if counts == {max(counts)} and max(counts) > 1:
        try:
            return _made(region, max(counts), [0] * len(shapes))
        except _NotSeparableError:
            pass
    return _made(region, 1, [None] * len(shapes))


def _made(region: Region, count: int, stacks: list[Dim]) -> Units:
    of_results: list[Dim] = []

    def run(index: Any, sharded: Sequence[Any], replicated: Sequence[Any]) -> list[Any]:
        made = _of_one(region, index, sharded, replicated, stacks)
        of_results[:] = map(_stack, made)
        if count > 1 and None in of_results:
            raise _NotSeparableError
        return list(map(_array, made))

    def of_one(var: jex.Var, stack: Dim) -> jax.ShapeDtypeStruct:
        aval: Any = var.aval
        return jax.ShapeDtypeStruct(_with_one(aval.shape, stack), aval.dtype)

    sharded = [of_one(v, d) for v, d in zip(region.sharded, stacks, strict=True)]
    replicated = [of_one(v, None) for v in region.replicated]
    one = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), "int32"), sharded, replicated)
    return Units(region, count, one, (tuple(stacks), tuple(of_results)))


def _of_one(
    region: Region, index: Any, sharded: Any, replicated: Any, stacks: Sequence[Dim]
) -> list[Any]:
    return _OneByOne(index).evaluate(region.closed, [*map(_sliced, sharded, stacks), *replicated])


def _sliced(array: Any, stack: Dim) -> Any:
    return array if stack is None else _Slice(array, stack)


def _array(value: Any) -> Any:
    return value.array if isinstance(value, _Slice) else value


def _stack(value: Any) -> Dim:
    return value.stack if isinstance(value, _Slice) else None


def _constants(jaxpr: jex.Jaxpr) -> list[Any]:
    """Returns the arrays that the text of a jaxpr does not show."""
    found = []
    for eqn in jaxprs.nested(jaxpr):
        found += [jaxprs.read({}, a) for a in eqn.invars if not is_var(a) and shape_of(a)]
        parameters = jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, jex.ClosedJaxpr))
        for closed in parameters:
            found += closed.consts if isinstance(closed, jex.ClosedJaxpr) else ()
    return found


class _OneByOne(Evaluator):
    """Evaluates a region on one matrix of each stack."""

    inlined = CALLS

    def __init__(self, index: Any):
        super().__init__()
        self._index = index

    def is_replaced(self, value: Any) -> bool:
        return isinstance(value, _Slice)

    def agreed(self, values: list[Any], like: Sequence[Any]) -> list[Any]:
        if list(map(_stack, values)) != list(map(_stack, like)):
            raise _NotSeparableError
        return values

    def scan(self, eqn: jex.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if any(map(self.is_replaced, values[sum(jaxprs.state_of(eqn)) :])):
            raise _NotSeparableError
        made = super().scan(eqn, values)
        if any(map(self.is_replaced, made[jaxprs.state_of(eqn)[1] :])):
            raise _NotSeparableError
        return made

    def cond(self, eqn: jex.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if self.is_replaced(values[0]):
            raise _NotSeparableError
        return super().cond(eqn, values)

    def default(self, eqn: jex.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        name, stacks = eqn.primitive.name, list(map(_stack, values))
        made = [stacks[0]] * len(eqn.outvars)  # those of a decomposition are stacked as its matrix
        if name not in DECOMPOSITIONS:
            made = sharded_dims(eqn, stacks)
        if None in made:
            raise _NotSeparableError
        params, arrays = eqn.params, list(map(_array, values))
        if name in ELEMENTWISE:
            arrays = [self._beside(x, made[0]) for x in values]
        elif name == "dot_general":
            arrays = self._operands(eqn, values)
        elif name == "broadcast_in_dim":
            params = {**params, "shape": _with_one(params["shape"], made[0])}
        elif name == "reshape" and _keeps_stack(eqn, stacks[0], made[0]):
            params = {**params, "new_sizes": _with_one(shape_of(eqn.outvars[0]), made[0])}
        elif name not in _WITHOUT_SIZES or not _keeps_matrices(eqn, stacks):
            raise _NotSeparableError
        outs = eqn.primitive.bind(*arrays, **params)
        return list(map(_sliced, outs if eqn.primitive.multiple_results else [outs], made))

    def _beside(self, value: Any, stack: Dim) -> Any:
        """Returns an operand of an elementwise operation beside one matrix."""
        if not isinstance(value, _Slice):
            return self._of_index(value, stack) if jnp.ndim(value) else value
        if value.stack != stack:
            raise _NotSeparableError
        return value.array

    def _of_index(self, array: Any, dim: Dim) -> Any:
        assert dim is not None
        return jax.lax.dynamic_slice_in_dim(array, self._index, 1, dim)

    def _operands(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Returns the operands of a product with one matrix of a stack, or with the same matrix."""
        _, batch = eqn.params["dimension_numbers"]
        for at, value in enumerate(values):
            if _stack(value) in batch[at]:
                partner = batch[1 - at][tuple(batch[at]).index(value.stack)]
                arrays = list(map(_array, values))
                arrays[1 - at] = self._beside(values[1 - at], partner)
                return arrays
        if all(map(self.is_replaced, values)):
            raise _NotSeparableError
        return list(map(_array, values))


def _keeps_stack(eqn: jex.JaxprEqn, stack: Dim, made: Dim) -> bool:
    """Returns True for a reshape that leaves a stack's dim alone."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    assert made is not None and stack is not None
    return new[made] == old[stack] and math.prod(new[:made]) == math.prod(old[:stack])


def _keeps_matrices(eqn: jex.JaxprEqn, stacks: Sequence[Dim]) -> bool:
    """Returns True unless it decomposes matrices along the dim of a stack."""
    if eqn.primitive.name not in DECOMPOSITIONS:
        return True
    pairs = zip(eqn.invars, stacks, strict=True)
    return all(d is not None and d < len(shape_of(a)) - 2 for a, d in pairs)


def _with_one(shape: Sequence[int], dim: Dim) -> tuple[int, ...]:
    return tuple(1 if d == dim else n for d, n in enumerate(shape))
