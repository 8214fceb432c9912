"""A region taken apart: the operations for one matrix of a stack.

The region's operations run on a stack of one, matrix `index`. A value without stack dim where the
region's own values had one (a constant, a factor for each matrix) is sliced to that one.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.matrix_updates.regions import DECOMPOSITIONS, Region
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.evaluator import Evaluator
from zero_jax.tracing.jaxpr import CALLS, ELEMENTWISE, REDUCTIONS, dtype_of, is_var, shape_of
from zero_jax.tracing.sharded_dims import Dim, sharded_dims

# Operations whose parameters name dims, but no sizes.
_WITHOUT_SIZES = REDUCTIONS | DECOMPOSITIONS | {"transpose", "squeeze", "argmax", "argmin"}
# A device receives for one matrix at most this many times the elements of the largest input:
# Shampoo has three, GaLore four.
_TOGETHER = 4


class _NotSeparableError(Exception):
    """An operation of a region needs several matrices of a stack."""


def _require(separable: bool) -> None:
    if not separable:
        raise _NotSeparableError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Slice:
    """One matrix of a stack.

    Attributes:
      array: The value.
      stack: The dim that is 1 here and counts matrices in the region.
    """

    array: jax.Array
    stack: int = field(metadata={"static": True})


_Value = jax.Array | _Slice


@dataclass(frozen=True)
class Units:
    """A region as matrices that are computed one by one.

    Attributes:
      region: The region.
      count: Number of matrices; 1 where the whole region is one.
      one: The operations for one of them, traced: (index, *sharded, *replicated) to results, with
        stacks of 1.
      stacks: The dim that counts matrices, or None, of each of `sharded` and of `results`.
    """

    region: Region
    count: int
    one: jex.ClosedJaxpr
    stacks: tuple[tuple[Dim, ...], tuple[Dim, ...]]

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
    def program(self) -> tuple[Hashable, ...]:
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
            return _taken_apart(region, max(counts), [0] * len(shapes))
        except _NotSeparableError:
            pass
    return _taken_apart(region, 1, [None] * len(shapes))


def _taken_apart(region: Region, count: int, stacks: list[Dim]) -> Units:
    of_results: list[Dim] = []
    inputs = region.closed.jaxpr.invars
    of_inputs = [*stacks, *[None] * len(region.replicated)]

    def run(index: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        values = list(map(_sliced, arrays, of_inputs))
        results = _OneByOne(index).evaluate(region.closed, values)
        of_results[:] = map(_stack, results)
        _require(count == 1 or None not in of_results)
        return list(map(_array, results))

    pairs = zip(inputs, of_inputs, strict=True)
    shapes = [jax.ShapeDtypeStruct(_with_one(shape_of(v), d), dtype_of(v)) for v, d in pairs]
    one = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), "int32"), *shapes)
    return Units(region, count, one, (tuple(stacks), tuple(of_results)))


def _sliced(array: jax.Array, stack: Dim) -> _Value:
    return array if stack is None else _Slice(array, stack)


def _array(value: _Value) -> jax.Array:
    return value.array if isinstance(value, _Slice) else value


def _stack(value: _Value | bool) -> Dim:
    return value.stack if isinstance(value, _Slice) else None


def _constants(jaxpr: jex.Jaxpr) -> list[jax.Array]:
    """Returns the arrays that the text of a jaxpr does not show."""
    inside, is_closed = list(jaxprs.nested(jaxpr)), lambda x: isinstance(x, jex.ClosedJaxpr)
    literals = [a for e in inside for a in e.invars if not is_var(a) and shape_of(a)]
    closed = filter(is_closed, jax.tree.leaves([e.params for e in inside], is_leaf=is_closed))
    return [*(jaxprs.read({}, a) for a in literals), *(x for c in closed for x in c.consts)]


class _OneByOne(Evaluator[_Value]):
    """Evaluates a region on one matrix of each stack."""

    inlined = CALLS

    def __init__(self, index: jax.Array):
        super().__init__()
        self._index = index

    def is_replaced(self, value: _Value) -> bool:
        return isinstance(value, _Slice)

    def agreed(self, values: list[_Value], like: Sequence[_Value | bool]) -> list[_Value]:
        _require(list(map(_stack, values)) == list(map(_stack, like)))
        return values

    def scan(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        start, carried = jaxprs.state_of(eqn)
        _require(not any(map(self.is_replaced, values[start + carried :])))
        results = super().scan(eqn, values)
        _require(not any(map(self.is_replaced, results[carried:])))
        return results

    def cond(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        _require(not self.is_replaced(values[0]))
        return super().cond(eqn, values)

    def default(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        name, stacks = eqn.primitive.name, list(map(_stack, values))
        of_results = [stacks[0]] * len(eqn.outvars)  # a decomposition's are stacked as its matrix
        if name not in DECOMPOSITIONS:
            of_results = sharded_dims(eqn, stacks)
        made = [d for d in of_results if d is not None]
        _require(len(made) == len(of_results))
        params, arrays = eqn.params, list(map(_array, values))
        if name in ELEMENTWISE:
            arrays = [self._beside(x, made[0]) for x in values]
        elif name == "dot_general":
            arrays = self._operands(eqn, values)
        elif name == "broadcast_in_dim":
            params = {**params, "shape": _with_one(params["shape"], made[0])}
        elif name == "reshape" and _keeps_stack(eqn, stacks[0], made[0]):
            params = {**params, "new_sizes": _with_one(shape_of(eqn.outvars[0]), made[0])}
        else:
            _require(name in _WITHOUT_SIZES and _keeps_matrices(eqn, stacks))
        outs = eqn.primitive.bind(*arrays, **params)
        return list(map(_sliced, outs if eqn.primitive.multiple_results else [outs], made))

    def _beside(self, value: _Value, stack: int) -> jax.Array:
        """Returns an operand of an elementwise operation beside one matrix."""
        if not isinstance(value, _Slice):
            at = self._index
            return jax.lax.dynamic_slice_in_dim(value, at, 1, stack) if jnp.ndim(value) else value
        _require(value.stack == stack)
        return value.array

    def _operands(self, eqn: jex.JaxprEqn, values: list[_Value]) -> list[jax.Array]:
        """Returns the operands of a product with one matrix of a stack, or with the same matrix."""
        _, batch = eqn.params["dimension_numbers"]
        arrays = list(map(_array, values))
        for at, value in enumerate(values):
            if isinstance(value, _Slice) and value.stack in batch[at]:
                partner = batch[1 - at][tuple(batch[at]).index(value.stack)]
                arrays[1 - at] = self._beside(values[1 - at], partner)
                return arrays
        _require(not all(map(self.is_replaced, values)))
        return arrays


def _keeps_stack(eqn: jex.JaxprEqn, stack: Dim, made: int) -> bool:
    """Returns True for a reshape that leaves a stack's dim alone."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    assert stack is not None
    return new[made] == old[stack] and math.prod(new[:made]) == math.prod(old[:stack])


def _keeps_matrices(eqn: jex.JaxprEqn, stacks: Sequence[Dim]) -> bool:
    """Returns True unless it decomposes matrices along the dim of a stack."""
    if eqn.primitive.name not in DECOMPOSITIONS:
        return True
    pairs = zip(eqn.invars, stacks, strict=True)
    return all(d is not None and d < len(shape_of(a)) - 2 for a, d in pairs)


def _with_one(shape: Sequence[int], dim: Dim) -> tuple[int, ...]:
    return tuple(1 if d == dim else n for d, n in enumerate(shape))
