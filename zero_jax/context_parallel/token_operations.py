"""The facts of operations on tokens: elementwise, lookups, products, padding, collectives.

Rules for one operand are in `token_facts.py`, loops and calls in `token_dims.py`.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from zero_jax.context_parallel import token_facts
from zero_jax.context_parallel.token_facts import (
    ADD,
    CARRY,
    GATHERED,
    MERGED,
    MODEL,
    OTHER,
    RANDOM,
    STEPS,
    TIMES,
    TOKENS,
    Drawn,
    MixedError,
    Source,
    TokenFact,
)
from zero_jax.sharding.mesh import CONTEXT
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Forward, collective_axes, needed
from zero_jax.tracing.jaxpr import CALLS, ELEMENTWISE, Atom, shape_of
from zero_jax.tracing.sharded_dims import index_dims, kept_dims
from zero_jax.tracing.sources import line_of

# The calls and loops that an equation is in, and itself.
Around = tuple[jex.JaxprEqn, ...]
_ELEMENTWISE = ELEMENTWISE | {"square", "lgamma", "digamma", "clz", "bessel_i0e", "bessel_i1e"}
_ELEMENTWISE |= {"random_clone", "random_seed", "random_fold_in"}
_SUMS = frozenset(("psum", "psum_invariant"))
_COLLECTIVES = frozenset(
    "pmax pmin all_gather all_gather_invariant all_to_all ppermute pbroadcast reduce_scatter "
    "ragged_all_to_all psum_scatter".split()
)
# Arithmetic on constants, for divisors of means.
_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "max": max,
    "min": min,
    **dict.fromkeys(("convert_element_type", "copy", "stop_gradient"), float),
}
# Operations that run the equations of other jaxprs, which are checked instead.
_WITH_BODIES = CALLS | {"scan", "while", "cond"}
_FIXED = (
    "jnp.arange counts the positions of a row in a function with a custom derivative, where they "
    "cannot be made those of a device. Pass positions to the function as an argument"
)


class Operations(Forward[TokenFact]):
    """The facts of operations, for a number of tokens of one device.

    Attributes:
      positions: The iotas that are global positions, each by the path of its equation: the
        identities of the calls and loops that it is in, and its own. Also dims of random numbers.
      met: Those that are combined with tokens.
      numbers: Numbers in operations, and sizes of dims without tokens, with their equations.
    """

    def __init__(self, length: int, positions: frozenset[Source]):
        super().__init__()
        self._length, self.positions = length, positions
        self.met: set[Source] = set()
        self.numbers: list[tuple[float, Around]] = []
        self._around: Around = ()
        self._needed: set[jex.Var] = set()  # for the results of the jaxpr that is visited
        self._depth = 0  # of loops
        # Iotas in functions with a custom derivative, which has a trace of its own.
        self._fixed: set[Source] = set()
        self._custom = 0
        one = {name: functools.partial(_of_one, rule) for name, rule in token_facts.OF_ONE.items()}
        self.handlers |= {
            **one,
            **dict.fromkeys(_ELEMENTWISE, self._elementwise),
            **dict.fromkeys(_SUMS, self._psum),
            **dict.fromkeys(_COLLECTIVES, self._collective),
            "iota": self._iota,
            "axis_index": lambda eqn, values: [TokenFact()],
            "random_bits": self._random,
            "random_split": self._random,
            "random_wrap": self._wrap,
            "random_unwrap": self._unwrap,
            "bitcast_convert_type": self._bitcast,
            "pad": self._pad,
            "concatenate": self._concatenate,
            "stack": self._stack,
            "sort": self._sort,
            "dynamic_slice": self._dynamic_slice,
            "dynamic_update_slice": self._dynamic_update_slice,
            "gather": self._gather,
            "reduce": self._reduce,
            "reduce_sum": self._reduce_sum,
            "dot_general": self._product,
            "conv_general_dilated": self._convolution,
        }

    def facts(self, closed: jex.ClosedJaxpr, inputs: Sequence[TokenFact]) -> list[TokenFact]:
        """Returns the facts of the results; raises ValueError with the line of an error."""
        try:
            facts = self.run(closed, inputs)
            if any(fact.steps for fact in facts):
                raise MixedError(STEPS)
            if any(fact.times for fact in facts):
                raise MixedError(TIMES)
        except MixedError as error:
            raise ValueError(str(error)) from None
        return facts

    def environment(
        self, closed: jex.ClosedJaxpr, values: Sequence[TokenFact]
    ) -> dict[jex.Var, TokenFact]:
        before, self._needed = self._needed, needed(closed.jaxpr.eqns, closed.jaxpr.outvars)
        env = super().environment(closed, values)
        self._needed = before
        return env

    def equation(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        if self._needed.isdisjoint(eqn.outvars):  # unused, or prints
            return [TokenFact()] * len(eqn.outvars)
        before, self._around = self._around, (*self._around, eqn)
        try:
            if eqn.primitive.name not in _WITH_BODIES:
                check_sums(eqn, values)
                for atom, fact in zip(eqn.invars, values, strict=True):
                    self._note_sizes(shape_of(atom), fact)
                self.numbers += [(number, self._around) for number in _settings(eqn)]
            made = super().equation(eqn, values)
        except MixedError as error:
            line = line_of(eqn)
            if not line:  # known of the call or loop around it
                raise
            raise ValueError(f"{line}{error}") from None
        self._around = before
        return made

    def _note_sizes(self, shape: Sequence[int], fact: TokenFact) -> None:
        """Notes sizes that must not depend on the number of tokens."""
        sources = [(d, s) for d, s in fact.along if d >= 0 and shape[d] > 1]
        dims = {d for d, s in sources if s in (MODEL, OTHER) or token_facts.is_iota(s)}
        self.numbers += [(shape[d], self._around) for d in sorted(dims)]

    def _path(self) -> tuple[int, ...]:
        return tuple(map(id, self._around))

    def constant(self, atom: Atom, value: Any) -> TokenFact:
        shape = shape_of(atom)
        fact = TokenFact().plus([d for d, size in enumerate(shape) if size > 1], OTHER)
        known = isinstance(value, np.ndarray) or not shape
        if not known or isinstance(value, jax.core.Tracer) or not hasattr(atom.aval, "dtype"):
            return fact
        kind = jaxprs.dtype_of(atom)
        if not any(jnp.issubdtype(kind, x) for x in (jnp.floating, jnp.integer, jnp.bool_)):
            return fact
        elements = np.ravel(value)
        equal = elements.size > 0 and bool((elements == elements[0]).all())
        return TokenFact(number=float(elements[0])) if equal else fact

    def default(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        if any(fact.tokens for fact in values):
            raise MixedError(
                f"{token_facts.word(eqn)} of tokens is not known to compute each position of a row "
                "from that position alone. Compute it before the step and pass it in the batch, or "
                "use a mesh with context=1"
            )
        return [token_facts.opaque(len(shape_of(var))) for var in eqn.outvars]

    def _is_short(self, fact: TokenFact, shape: Sequence[int], dim: int) -> bool:
        """Returns True for a dim of a table with an entry for each token of this device."""
        entries = shape[dim] == self._length and not fact.tokens
        return entries and bool(fact.sources(dim) - {MODEL, MERGED, GATHERED})

    def _combined(
        self, eqn: jex.JaxprEqn, values: Sequence[TokenFact], shapes: Sequence[Sequence[int]]
    ) -> TokenFact:
        self._meets(token_facts.met(values, shapes))
        return token_facts.combined(eqn, values, shapes)

    def _meets(self, iotas: set[Source]) -> None:
        """Notes iotas and random numbers that are combined with tokens."""
        if iotas & self._fixed:
            raise MixedError(_FIXED)
        self.met |= iotas

    def _elementwise(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        name, shape = eqn.primitive.name, shape_of(eqn.outvars[0])
        shapes = list(map(shape_of, eqn.invars))
        # Dims of one element are broadcast.
        values = [
            fact.moved({d: d for d, size in enumerate(own) if size == shape[d]})
            for fact, own in zip(values, shapes, strict=True)
        ]
        if any(fact.running for fact in values):
            return [self._running(eqn, values, shapes)]
        fact = self._combined(eqn, values, shapes)
        if any(f.partial for f in values):
            return [_linear(eqn, values, fact)]
        number = _number(eqn, values)
        if number is None:
            self.numbers += [(f.number, self._around) for f in values if f.number is not None]
        return [fact._replace(zeros=_zero_padding(name, values), number=number)]

    def _running(
        self, eqn: jex.JaxprEqn, values: list[TokenFact], shapes: Sequence[Sequence[int]]
    ) -> TokenFact:
        """Returns the fact of a loop's sum after one more addend."""
        name = eqn.primitive.name
        if len(values) == 1 and name == "convert_element_type" and token_facts.keeps_a_sum(eqn):
            return values[0]
        sums = [fact for fact in values if fact.running]
        subtracted = name == "sub" and values[1].running
        if name not in ADD or len(sums) != 1 or subtracted or sums[0].running[0] != self._depth:
            raise MixedError(CARRY)
        (total,), (addend,) = sums, [fact for fact in values if not fact.running]
        if addend.number == 0:
            return total
        steps = total.steps or addend.steps or -self._depth not in addend.tokens
        along = frozenset(pair for pair in addend.along if pair[0] != -self._depth)
        rest = addend._replace(along=along)
        if (addend.tail and not addend.zeros) or (total.overs and total.tokens != rest.tokens):
            raise MixedError(CARRY)
        fact = self._combined(eqn, [total, rest], [shapes[0]] * 2)
        overs = token_facts.divisors([f for f in (total, addend) if f.overs])
        return fact._replace(running=total.running, overs=overs, steps=steps, zeros=True)

    def _psum(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        if CONTEXT not in collective_axes(eqn):
            return [fact._replace(number=None) for fact in values]
        grouped = eqn.params.get("axis_index_groups") is not None
        if grouped or any(fact.tokens for fact in values):
            raise token_facts.along_tokens(eqn)
        alike = [not fact.partial and fact.number is None for fact in values]
        return [TokenFact(f.along, times=t) for f, t in zip(values, alike, strict=True)]

    def _collective(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        if CONTEXT in collective_axes(eqn):
            hidden = [dim for fact in values for dim in fact.tokens if dim < 0]
            ranks = (len(shape_of(var)) for var in eqn.outvars)
            opaque = (token_facts.opaque(rank, GATHERED) for rank in ranks)
            return [fact.plus(hidden, TOKENS) for fact in opaque]
        if eqn.primitive.name in ("pmax", "pmin"):
            return [fact._replace(number=None, zeros=not fact.tail) for fact in values]
        return self.default(eqn, values)

    def _iota(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        dim, shape = eqn.params["dimension"], eqn.params["shape"]
        path = self._path()
        if path in self.positions:
            if shape[dim] != self._length:
                raise token_facts.of_a_table(eqn)
            return [TokenFact().plus([dim], TOKENS)]
        if self._custom:
            self._fixed.add(path)
        return [TokenFact().plus([dim], path) if shape[dim] > 1 else TokenFact()]

    def _random(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        key, shape = len(shape_of(eqn.invars[0])), shape_of(eqn.outvars[0])
        fact = values[0]
        for dim in range(key, len(shape)):
            drawn = Drawn(self._path(), dim)
            source: Source = RANDOM
            if drawn in self.positions and shape[dim] == self._length:
                source = TOKENS
            elif not (self._custom or drawn in self.positions):
                source = drawn
            fact = fact.plus([dim], source)
        return [fact]

    def _wrap(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        rank = len(shape_of(eqn.outvars[0]))
        last = range(rank, len(shape_of(eqn.invars[0])))
        return [token_facts.without_dims(values[0], last, rank + len(last))._replace(number=None)]

    def _unwrap(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        ranks = len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0]))
        return [values[0].plus(range(*ranks), OTHER)]

    def _bitcast(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        if shape_of(eqn.invars[0]) != shape_of(eqn.outvars[0]):
            return self.default(eqn, values)
        return [values[0]._replace(number=None, zeros=not values[0].tail)]

    def _pad(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        fact, value = values
        shape = shape_of(eqn.invars[0])
        for dim, (low, high, between) in enumerate(eqn.params["padding_config"]):
            if not (low or high or between):
                continue
            after = not (low or between) and high > 0
            if dim in fact.real(shape):
                if low or between or fact.inner > 1:
                    raise token_facts.along_tokens(eqn)
                fact = token_facts.with_tail(eqn, fact, dim, int(high), zero=value.number == 0)
            elif after and not (fact.tokens or fact.sources(dim) or shape[dim] % self._length):
                # Weights that are all one, say, padded as tokens are.
                rows, zeros = shape[dim] // self._length, value.number == 0
                fact = TokenFact(fact.along, rows=rows, tail=int(high), zeros=zeros)
                fact = fact.plus([dim], TOKENS)
            else:
                fact = token_facts.acting_along(eqn, fact, [dim])
        return [fact._replace(number=None)]

    def _concatenate(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        dim, shapes = eqn.params["dimension"], list(map(shape_of, eqn.invars))
        if any(dim in fact.real(shape) for fact, shape in zip(values, shapes, strict=True)):
            raise token_facts.along_tokens(eqn)
        values = [fact.mapped(lambda d, s: None if d == dim else (d, s)) for fact in values]
        return [self._together(eqn, values, shapes).plus([dim], OTHER)]

    def _stack(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        shapes, axis = list(map(shape_of, eqn.invars)), eqn.params["axis"]
        fact = self._together(eqn, values, shapes)
        places = {dim: dim + (dim >= axis) for dim in range(len(shapes[0]))}
        return [fact.moved(places).plus([axis], OTHER)]

    def _together(
        self, eqn: jex.JaxprEqn, values: list[TokenFact], shapes: Sequence[Sequence[int]]
    ) -> TokenFact:
        """Returns the fact of values next to each other."""
        fact = self._combined(eqn, values, shapes)
        if any(f.partial for f in values):
            return _added(eqn, values, fact)
        return fact._replace(zeros=_zero_padding("add", values))

    def _sort(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        dim, shapes = eqn.params["dimension"], list(map(shape_of, eqn.invars))
        fact = self._combined(eqn, values, shapes)
        return [token_facts.acting_along(eqn, fact, [dim])] * len(values)

    def _dynamic_slice(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        fact, *starts = values
        shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
        for dim, (size, full) in enumerate(zip(sizes, shape, strict=True)):
            if size == full:
                continue
            if dim in fact.real(shape):
                raise token_facts.along_tokens(eqn)
            fact = token_facts.cut(fact, dim)
        self.numbers += [(s.number, self._around) for s in starts if s.number is not None]
        moved = self._combined(eqn, [fact, *starts], [shape, *[()] * len(starts)])
        if fact.partial:
            if any(start.partial or start.tokens for start in starts):
                raise token_facts.of_a_sum(eqn)
            return [moved._replace(partial=True, overs=fact.overs)]
        return [moved._replace(zeros=fact.zeros)]

    def _dynamic_update_slice(
        self, eqn: jex.JaxprEqn, values: list[TokenFact]
    ) -> Sequence[TokenFact]:
        (fact, update, *starts), shapes = values, list(map(shape_of, eqn.invars))
        pairs = enumerate(zip(shapes[0], shapes[1], strict=True))
        parts = [dim for dim, (full, size) in pairs if full != size]
        if any(dim in fact.real(shapes[0]) | update.real(shapes[1]) for dim in parts):
            raise token_facts.along_tokens(eqn)
        update = update.mapped(lambda d, s: None if d in parts else (d, s))
        return [self._combined(eqn, [fact, update, *starts], shapes).plus(parts, OTHER)]

    def _gather(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        """Lookups: tokens may be in dims of the indices, and in full dims of the operand."""
        fact, indices = values
        shape, of_indices = map(shape_of, eqn.invars)
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        last = len(of_indices) - 1
        if last in indices.real(of_indices):
            raise token_facts.along_tokens(eqn)
        places = dict(enumerate(index_dims(eqn)))
        batch = dict(
            zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        )
        removed = (*numbers.collapsed_slice_dims, *batch)
        kept = [dim for dim in range(len(shape)) if dim not in removed]
        of_fact = dict(zip(kept, sorted(numbers.offset_dims), strict=True))
        of_fact |= {dim: places[at] for dim, at in batch.items()}
        for dim, (size, full) in enumerate(zip(sizes, shape, strict=True)):
            if dim in batch or size == full:
                continue
            if dim in fact.real(shape):
                raise token_facts.along_tokens(eqn)
            # A table for the tokens of one device has no entry for most positions of the row.
            if self._is_short(fact, shape, dim):
                raise token_facts.of_a_table(eqn)
            fact = token_facts.cut(fact, dim)
        moved, out = fact.moved(of_fact), shape_of(eqn.outvars[0])
        found = self._combined(eqn, [moved, indices.moved(places)], [out, out])
        return [found]

    def _product(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        """Products: tokens may be in batch dims, in free dims of one operand, or summed."""
        contracted, out = eqn.params["dimension_numbers"][0], shape_of(eqn.outvars[0])
        shape = [*out, *(shape_of(eqn.invars[0])[d] for d in contracted[0])]
        places = [
            kept | {d: len(out) + at for at, d in enumerate(summed)}
            for kept, summed in zip(kept_dims(eqn), contracted, strict=True)
        ]
        moved = [fact.moved(to) for fact, to in zip(values, places, strict=True)]
        fact = self._combined(eqn, moved, [shape] * 2)
        if any(f.partial for f in moved):
            fact = _scaled(eqn, moved, fact)
        fact = fact._replace(zeros=_zero_padding("mul", moved))
        return [self._summed(eqn, fact, range(len(out), len(shape)), shape)]

    def _reduce(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        """A reduction of arrays of one shape by some function."""
        count, shape, dims = len(eqn.outvars), shape_of(eqn.invars[0]), eqn.params["dimensions"]
        self.numbers += [(fact.number, self._around) for fact in values if fact.number is not None]
        fact = self._combined(eqn, values[:count], [shape] * count)
        fact = token_facts.acting_along(eqn, fact, dims)
        return [token_facts.without_dims(fact, dims, len(shape))] * count

    def _reduce_sum(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        return [self._summed(eqn, values[0], eqn.params["axes"], shape_of(eqn.invars[0]))]

    def _summed(
        self, eqn: jex.JaxprEqn, fact: TokenFact, axes: Sequence[int], shape: Sequence[int]
    ) -> TokenFact:
        made = token_facts.summed(eqn, fact, axes, shape)
        if not made.partial and made.number is None:
            # Along uniform dims a sum is a product with their size.
            sizes = (shape[dim] for dim in axes if not fact.sources(dim))
            self.numbers += [(size, self._around) for size in sizes]
        return made

    def _convolution(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        numbers, (fact, kernel) = eqn.params["dimension_numbers"], values
        shape, of_kernel = map(shape_of, eqn.invars)
        windows = zip(
            numbers.lhs_spec[2:],
            (of_kernel[dim] for dim in numbers.rhs_spec[2:]),
            eqn.params["window_strides"],
            eqn.params["padding"],
            eqn.params["lhs_dilation"],
            strict=True,
        )
        alone = {dim for dim, *window in windows if window == [1, 1, (0, 0), 1]}
        if eqn.params["batch_group_count"] == 1:
            alone.add(numbers.lhs_spec[0])
        mixed = fact.dims & fact.real(shape) - alone
        if mixed or kernel.dims:
            raise token_facts.along_tokens(eqn)
        to = dict(zip(numbers.lhs_spec, numbers.out_spec, strict=True))
        kept, out = {dim: to[dim] for dim in alone}, shape_of(eqn.outvars[0])
        made = self._combined(eqn, [fact.moved(kept), kernel.moved({})], [out] * 2)
        return [made.plus([to[dim] for dim in to if dim not in alone], OTHER)]


def _of_one(
    rule: Callable[[jex.JaxprEqn, TokenFact], TokenFact],
    eqn: jex.JaxprEqn,
    values: list[TokenFact],
) -> Sequence[TokenFact]:
    """Handles an operation that acts on each operand, or makes several results of one."""
    made = [rule(eqn, fact) for fact in values]
    return made * len(eqn.outvars) if len(made) == 1 else made


def _settings(eqn: jex.JaxprEqn) -> list[int]:
    """Returns numbers of an operation that are no operands."""
    if eqn.primitive.name == "integer_pow":
        return [int(eqn.params["y"])]
    return list(eqn.params["start_indices"]) if eqn.primitive.name == "slice" else []


def check_sums(eqn: jex.JaxprEqn, values: Sequence[TokenFact]) -> None:
    """Raises MixedError unless an operation may act on sums over the tokens of one device."""
    name = eqn.primitive.name
    if any(fact.times for fact in values) and not (name == "div" and values[1].number):
        raise MixedError(TIMES)
    if any(fact.steps for fact in values) and not any(fact.running for fact in values):
        raise MixedError(STEPS)
    if any(fact.running for fact in values) and name not in (
        *ADD,
        *token_facts.IDENTITY,
        "convert_element_type",
    ):
        raise MixedError(CARRY)
    if any(fact.partial for fact in values) and not (token_facts.keeps_a_sum(eqn) or name in _SUMS):
        raise token_facts.of_a_sum(eqn)


def _linear(eqn: jex.JaxprEqn, values: Sequence[TokenFact], fact: TokenFact) -> TokenFact:
    """Returns the fact of an elementwise operation on sums over the tokens of one device."""
    name = eqn.primitive.name
    if name in ADD:
        return _added(eqn, values, fact)
    if name == "mul" or name == "div":
        return _scaled(eqn, values, fact)
    if name == "select_n":
        if values[0].partial or values[0].tokens:
            raise token_facts.of_a_sum(eqn)
        return _added(eqn, values[1:], fact)
    return fact._replace(partial=True, overs=values[0].overs)


def _added(eqn: jex.JaxprEqn, values: Sequence[TokenFact], fact: TokenFact) -> TokenFact:
    """Returns the fact of a total of sums over tokens, and of zeros."""
    sums = [f for f in values if f.partial]
    unequal = len({f.tokens for f in sums}) > 1  # one would be added for each element of another
    if unequal or any(not f.partial and f.number != 0 for f in values):
        raise token_facts.of_a_sum(eqn)
    return fact._replace(partial=True, overs=token_facts.divisors(sums), zeros=True)


def _scaled(eqn: jex.JaxprEqn, values: Sequence[TokenFact], fact: TokenFact) -> TokenFact:
    """Returns the fact of a sum over tokens times a factor, or divided by it."""
    divides = eqn.primitive.name == "div"
    one, other = values if values[0].partial or divides else reversed(values)
    if not one.partial or other.partial or other.tokens:
        raise token_facts.of_a_sum(eqn)
    made = fact._replace(partial=True, overs=one.overs)
    if other.number is None:
        return made
    if other.number == 0:
        return made._replace(overs=frozenset()) if divides else TokenFact(number=0.0)
    return made.divided(other.number if divides else 1 / other.number)


def _zero_padding(name: str, values: Sequence[TokenFact]) -> bool:
    """Returns True if the padding of tokens in the result is zeros, or there is none."""
    padded = [fact.zeros for fact in values if fact.tail]
    others = [fact for fact in values if not fact.tail]
    if name == "mul" or name == "and":
        return any(padded) or not padded
    if name == "div":
        return (values[0].zeros and values[0].tail > 0) or not padded
    if name == "select_n" and values[0].tail and values[0].zeros:
        return values[1].number == 0 or (values[1].tail > 0 and values[1].zeros)
    keeps = (*ADD, "select_n", "neg", "abs", "convert_element_type", *token_facts.IDENTITY)
    choice = name == "select_n"
    zeros = all(fact.number == 0 for fact in (others[choice:] if choice else others))
    return (all(padded) and zeros and name in keeps) or not padded


def _number(eqn: jex.JaxprEqn, values: Sequence[TokenFact]) -> float | None:
    """Returns the value of an operation on constants, None if it is no constant."""
    numbers = [fact.number for fact in values]
    arithmetic = _ARITHMETIC.get(eqn.primitive.name)
    exact = eqn.primitive.name != "div" or jaxprs.is_float(eqn.outvars[0])
    if arithmetic is None or None in numbers or not exact:
        return None
    try:
        return arithmetic(*numbers)
    except (ZeroDivisionError, OverflowError):
        return None
