"""A region taken apart: what it does to one matrix of a stack, if each is computed by itself.

The region's own operations run on a stack of one, matrix `index`; what has no stack dim where the
region's own values had one (a constant, a factor for each matrix) is cut to that one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.jaxpr import equations
from zero_jax.jaxpr.equations import CALLS, is_var, shape_of
from zero_jax.jaxpr.operations import ELEMENTWISE
from zero_jax.jaxpr.spread import Dim, spread
from zero_jax.owners.regions import DECOMPOSITIONS, Region

_REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
)
# Operations whose parameters name dims, but no sizes.
_AS_IT_IS = _REDUCTIONS | DECOMPOSITIONS | {"transpose", "squeeze", "argmax", "argmin"}
# As many matrices as the largest an owner may get for one: Shampoo has three, GaLore four.
_TOGETHER = 4


class _Together(Exception):
    """Something that a region computes needs several matrices of a stack."""


class _Value(NamedTuple):
    """A value of one matrix; see the fields."""

    array: Any
    stack: Dim  # the dim that is 1 here and counts matrices in the region


@dataclass(frozen=True)
class Units:
    """A region as matrices that are computed one by one.

    Attributes:
      region: the region.
      count: how many there are; 1 where the whole region is one.
      one: what is done for one of them, traced: of (index, dealt, same) to what is made.
      stacks: of what is dealt, then of what is made, the dim that counts them, or None.
    """

    region: Region
    count: int
    one: jex.ClosedJaxpr
    stacks: tuple[tuple[Dim, ...], tuple[Dim, ...]]

    def run(self, index: Any, dealt: Sequence[Any], same: Sequence[Any]) -> list[Any]:
        """What is made for matrix `index`, stacks being 1."""
        return [v.array for v in _of_one(self.region, index, dealt, same, self.stacks[0])]

    @property
    def flops(self) -> int:
        """Of one matrix, about: two for each multiplication of a product, and a decomposition as if
        it were a product; at least 1."""
        return max(2 * (sum(equations.products(self.one.jaxpr)) + _decomposed(self.one.jaxpr)), 1)

    @property
    def program(self) -> tuple[Any, ...]:
        """Equal for two regions that do the same to matrices of the same shapes."""
        return str(self.one.jaxpr), *map(id, _constants(self.region.eqns))

    def pays(self, owners: int) -> bool:
        """Whether less is sent by owners than by XLA, and no owner works on more than it should:
        on a stack that can't be told apart, or on what several leaves need of each other."""
        sizes = [math.prod(shape_of(v)) for v in self.region.dealt]
        stacks = [math.prod(shape_of(v)[:-2]) for v in self.region.dealt]
        if sum(sizes) > _TOGETHER * max(sizes) or (self.count == 1 and max(stacks) > 1):
            return False
        sent = sum(sizes) + sum(math.prod(shape_of(v)) for v in self.region.made)
        return self.region.moved > -(-self.count // owners) * sent / self.count


def units(region: Region) -> Units:
    """Takes a region apart along dim 0 of what is dealt, if it can be."""
    shapes = [shape_of(v) for v in region.dealt]
    counts = {s[0] if len(s) > 2 else 1 for s in shapes}
    if counts == {max(counts)} and max(counts) > 1:
        try:
            return _made(region, max(counts), [0] * len(shapes))
        except _Together:
            pass
    return _made(region, 1, [None] * len(shapes))


def _of_one(
    region: Region, index: Any, dealt: Any, same: Any, stacks: Sequence[Dim]
) -> list["_Value"]:
    given = [*map(_Value, dealt, stacks), *(_Value(x, None) for x in same)]
    return _Run(index).closed(region.closed, given)


def _made(region: Region, count: int, stacks: list[Dim]) -> Units:
    found: list[Dim] = []

    def run(index: Any, dealt: Sequence[Any], same: Sequence[Any]) -> list[Any]:
        made = _of_one(region, index, dealt, same, stacks)
        if count > 1 and any(v.stack is None for v in made):
            raise _Together
        found.extend(v.stack for v in made)
        return [v.array for v in made]

    def of_one(var: jex.Var, stack: Dim) -> jax.ShapeDtypeStruct:
        aval: Any = var.aval
        shape = tuple(1 if d == stack else n for d, n in enumerate(aval.shape))
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    dealt = [of_one(v, d) for v, d in zip(region.dealt, stacks, strict=True)]
    same = [of_one(v, None) for v in region.same]
    one = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), "int32"), dealt, same)
    return Units(region, count, one, (tuple(stacks), tuple(found)))


def _decomposed(jaxpr: jex.Jaxpr) -> int:
    """What decompositions multiply, about: rows times columns times the fewer of both."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in DECOMPOSITIONS:
            shape = shape_of(eqn.invars[0])
            found += math.prod(shape) * min(shape[-2:])
        found += sum(map(_decomposed, jex.jaxprs_in_params(eqn.params)))
    return found


def _constants(eqns: Sequence[jex.JaxprEqn]) -> list[Any]:
    """The arrays that a jaxpr's text does not tell apart."""
    found = []
    for eqn in eqns:
        found += [equations.read({}, a) for a in eqn.invars if not is_var(a) and shape_of(a)]
        flat = jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, jex.ClosedJaxpr))
        for inside in (x for x in flat if isinstance(x, jex.ClosedJaxpr)):
            found += [*inside.consts, *_constants(inside.jaxpr.eqns)]
    return found


class _Run:
    """Runs a jaxpr on one matrix."""

    def __init__(self, index: Any):
        self._index = index

    def closed(self, closed: jex.ClosedJaxpr, given: Sequence[_Value]) -> list[_Value]:
        flat = equations.written_out(closed, CALLS)
        env = dict(zip(flat.jaxpr.invars, given, strict=True))
        consts = zip(flat.jaxpr.constvars, flat.consts, strict=True)
        env |= {v: _Value(const, None) for v, const in consts}

        def of(atom: equations.Atom) -> _Value:
            return env[atom] if is_var(atom) else _Value(equations.read({}, atom), None)

        for eqn in flat.jaxpr.eqns:
            made = self._one(eqn, [of(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, made, strict=True))
        return [of(atom) for atom in flat.jaxpr.outvars]

    def _one(self, eqn: jex.JaxprEqn, given: list[_Value]) -> list[_Value]:
        stacks, name = [v.stack for v in given], eqn.primitive.name
        if all(d is None for d in stacks):
            arrays = equations.function(eqn)(*(v.array for v in given))
            return [_Value(x, None) for x in arrays]
        if name in _LOOPS:
            return _LOOPS[name](self, eqn, given)
        made = _stacks_of(eqn, stacks)
        if None in made:
            raise _Together
        if name in ELEMENTWISE:
            arrays = [self._elements(v, made[0]) for v in given]
        elif name == "dot_general":
            arrays = self._operands(eqn, given)
        elif name in _SIZES or (name in _AS_IT_IS and _keeps_matrices(eqn, stacks)):
            arrays = [v.array for v in given]
        else:
            raise _Together
        params = _SIZES[name](eqn, stacks, made[0]) if name in _SIZES else eqn.params
        outs = eqn.primitive.bind(*arrays, **params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        return list(map(_Value, outs, made))

    def _elements(self, value: _Value, stack: Dim) -> Any:
        """What stands beside one matrix in an elementwise operation."""
        if value.stack is None and jnp.ndim(value.array):
            return self._cut(value.array, stack)
        if value.stack not in (None, stack):
            raise _Together
        return value.array

    def _cut(self, array: Any, dim: Dim) -> Any:
        assert dim is not None
        return jax.lax.dynamic_slice_in_dim(array, self._index, 1, dim)

    def _operands(self, eqn: jex.JaxprEqn, given: list[_Value]) -> list[Any]:
        """Of a product: stacks are multiplied one by one, or one is by the same matrix."""
        _, batch = eqn.params["dimension_numbers"]
        (lhs, rhs), stacks = [v.array for v in given], [v.stack for v in given]
        pairs = list(zip(*batch, strict=True))
        if stacks[0] in batch[0]:
            partner = dict(pairs)[stacks[0]]
            return self._partners([lhs, rhs], stacks[1], partner, 1)
        if stacks[1] in batch[1]:
            partner = {b: a for a, b in pairs}[stacks[1]]
            return self._partners([lhs, rhs], stacks[0], partner, 0)
        if None not in stacks:
            raise _Together
        return [lhs, rhs]

    def _partners(self, operands: list[Any], stack: Dim, partner: int, at: int) -> list[Any]:
        if stack is None:
            operands[at] = self._cut(operands[at], partner)
        elif stack != partner:
            raise _Together
        return operands

    def _function(self, closed: jex.ClosedJaxpr, stacks: Sequence[Dim], kept: Sequence[Dim]) -> Any:
        """A loop's body as a function of arrays whose results' stacks are those of `kept`."""

        def run(*arrays: Any) -> list[Any]:
            made = self.closed(closed, list(map(_Value, arrays, stacks)))
            if [v.stack for v in made] != list(kept):
                raise _Together
            return [v.array for v in made]

        return run

    def _scan(self, eqn: jex.JaxprEqn, given: list[_Value]) -> list[_Value]:
        first, carried = equations.state_of(eqn)
        arrays, stacks = [v.array for v in given], [v.stack for v in given]
        last, more = first + carried, len(eqn.outvars) - carried
        if any(d is not None for d in stacks[last:]):
            raise _Together
        kept = [*stacks[first:last], *[None] * more]
        body = self._function(equations.inner(eqn), stacks, kept)

        def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            made = body(*arrays[:first], *carry, *xs)
            return made[:carried], made[carried:]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        state, rows = jax.lax.scan(turn, arrays[first:last], arrays[last:], **options)
        return list(map(_Value, [*state, *rows], kept))

    def _while(self, eqn: jex.JaxprEqn, given: list[_Value]) -> list[_Value]:
        arrays, stacks = [v.array for v in given], [v.stack for v in given]
        tests, first = eqn.params["cond_nconsts"], equations.state_of(eqn)[0]
        state = stacks[first:]
        test = self._function(eqn.params["cond_jaxpr"], [*stacks[:tests], *state], [None])
        body = self._function(eqn.params["body_jaxpr"], stacks[tests:], state)
        out = jax.lax.while_loop(
            lambda own: test(*arrays[:tests], *own)[0],
            lambda own: body(*arrays[tests:first], *own),
            arrays[first:],
        )
        return list(map(_Value, out, state))

    def _branch(self, eqn: jex.JaxprEqn, given: list[_Value]) -> list[_Value]:
        which, *others = given
        if which.stack is not None:
            raise _Together
        stacks = [v.stack for v in others]
        kept = _branch_stacks(self, eqn, others)
        cases = [self._function(b, stacks, kept) for b, _ in equations.bodies(eqn)]
        out = jax.lax.switch(which.array, cases, *(v.array for v in others))
        return list(map(_Value, out, kept))


def _branch_stacks(run: _Run, eqn: jex.JaxprEqn, given: list[_Value]) -> list[Dim]:
    found: list[Dim] = []

    def first(*arrays: Any) -> list[Any]:
        body, _ = equations.bodies(eqn)[0]
        made = run.closed(body, list(map(_Value, arrays, [v.stack for v in given])))
        found.extend(v.stack for v in made)
        return [v.array for v in made]

    jax.eval_shape(first, *(v.array for v in given))
    return found


def _stacks_of(eqn: jex.JaxprEqn, stacks: Sequence[Dim]) -> list[Dim]:
    """Of each result; those of a decomposition are stacked as its matrix is."""
    if eqn.primitive.name in DECOMPOSITIONS:
        return [stacks[0]] * len(eqn.outvars)
    return spread(eqn, stacks)


def _keeps_matrices(eqn: jex.JaxprEqn, stacks: Sequence[Dim]) -> bool:
    """Whether a decomposition leaves the stack's dim alone."""
    pairs = zip(eqn.invars, stacks, strict=True)
    inside = any(d is not None and d >= len(shape_of(a)) - 2 for a, d in pairs)
    together = None in stacks and eqn.primitive.name in DECOMPOSITIONS
    return eqn.primitive.name not in DECOMPOSITIONS or not (inside or together)


def _broadcast_to_one(eqn: jex.JaxprEqn, stacks: Sequence[Dim], made: Dim) -> Mapping[str, Any]:
    return {**eqn.params, "shape": _with_one(eqn.params["shape"], made)}


def _reshaped_to_one(eqn: jex.JaxprEqn, stacks: Sequence[Dim], made: Dim) -> Mapping[str, Any]:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    assert made is not None and stacks[0] is not None
    if new[made] != old[stacks[0]] or math.prod(new[:made]) != math.prod(old[: stacks[0]]):
        raise _Together
    return {**eqn.params, "new_sizes": _with_one(new, made)}


def _with_one(shape: Sequence[int], dim: Dim) -> tuple[int, ...]:
    return tuple(1 if d == dim else n for d, n in enumerate(shape))


_Loop = Callable[[_Run, jex.JaxprEqn, list[_Value]], list[_Value]]
_LOOPS: dict[str, _Loop] = {
    "scan": _Run._scan,
    "while": _Run._while,
    "cond": _Run._branch,
}
# What an operation's parameters are for a stack of one.
_SIZES: dict[str, Callable[[jex.JaxprEqn, Sequence[Dim], Dim], Mapping[str, Any]]] = {
    "broadcast_in_dim": _broadcast_to_one,
    "reshape": _reshaped_to_one,
}
