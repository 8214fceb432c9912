"""Facts about the tokens in a value, and how operations on one value or element by element act.

A device of `context` has some tokens of each row. A value has token dims, whose elements belong to
these tokens, in their order. Dims of a loop count too: inside a loop over chunks of tokens, a chunk
belongs to the tokens of one iteration. Such a dim is a negative number, the depth of the loop.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.extend.core as jex

from zero_jax.tracing.jaxpr import is_float, shape_of

# What the elements along a dim come from. A dim without a source is uniform: all are equal.
TOKENS, RANDOM = "tokens", "random"
ONE = "one"  # tokens, along a dim of one element: of chunks, of which there may be more elsewhere
MODEL = "model"  # a full dim of a parameter, or of an array of the batch without tokens
MERGED = "merged"  # rows, or elements of each token, that were merged with tokens
GATHERED = "gathered"  # the result of a collective over `context`
OTHER = "other"


class Drawn(NamedTuple):
    """A dim of random numbers, or of keys: the path of their equation, and the dim there."""

    path: tuple[int, ...]
    dim: int


# A tuple of numbers is an iota: the path of its equation, see `token_dims.py`.
Source = str | tuple[int, ...] | Drawn
Along = frozenset[tuple[int, Source]]
ADD = frozenset(("add", "sub", "add_any"))
# Operations with the same elements in their result.
IDENTITY = frozenset(
    "copy copy_p name stop_gradient optimization_barrier sharding_constraint layout_constraint "
    "pvary pcast device_put".split()
)
_PART = "each device of the context axis has a part of the row"
_WAY = "Compute it before the step and pass it in the batch, or use a mesh with context=1"
_LOOKUP = "jnp.take_along_axis(logits, labels[..., None], -1)"
_SUM = "a sum over the tokens of one device's part of the row"
_PSUM = "Use jax.lax.psum(x, 'context') for the sum over the row"
CARRY = (
    "a loop over the tokens of a row carries more than a sum from one iteration to the next, but "
    "each device of the context axis has a part of the row. Start a sum at zero and only add to "
    "it, or use a mesh with context=1"
)
STEPS = (
    "a loop over the tokens of one device's part of a row counts its iterations. Use "
    "jnp.sum(jnp.ones_like(labels)) for the number of tokens"
)
TIMES = (
    "psum over 'context' of a value that does not come from tokens, and is equal on the devices of "
    "this axis: the sum would count it once for each. Leave 'context' out of the axes, or use "
    "jax.lax.pmean"
)
_WORDS = {
    "dot_general": "matrix product",
    "conv_general_dilated": "convolution",
    "rev": "reversal",
    "pad": "padding",
    "div": "division",
    "mul": "multiplication",
    "add": "addition",
    "sub": "subtraction",
    "select_n": "jnp.where",
    "max": "maximum",
    "min": "minimum",
    "broadcast_in_dim": "broadcast",
    "iota": "jnp.arange",
    "custom_vjp_call": "a function with a custom gradient",
}
# Sums in one loss that are divided by more different numbers have an unknown divisor.
_MOST_DIVISORS = 16


class MixedError(Exception):
    """An operation mixes positions of a row, or uses the sum over a part of it."""


def word(eqn: jex.JaxprEqn) -> str:
    """Returns the name of an operation in an error."""
    name = str(eqn.primitive.name)
    if name.startswith("reduce_") and name != "reduce_precision":
        return name.removeprefix("reduce_")
    return _WORDS.get(name, name)


def along_tokens(eqn: jex.JaxprEqn) -> MixedError:
    lookup = eqn.primitive.name == "gather"
    way = f"Look up labels with {_LOOKUP}. Or compute{_WAY[7:]}" if lookup else _WAY
    return MixedError(f"{word(eqn)} along the tokens of a row: {_PART}. {way}")


def of_pairs(eqn: jex.JaxprEqn) -> MixedError:
    return MixedError(
        f"{word(eqn)} of different positions of a row: {_PART}. Use zero_jax.attention, which "
        "exchanges tokens, or a mesh with context=1"
    )


def of_attention(eqn: jex.JaxprEqn) -> MixedError:
    return MixedError(
        f"{word(eqn)} exchanges tokens between the devices of the context axis, and requires them "
        "in the same order in dim 1 of queries, keys and values (batch, tokens, heads, head dim). "
        "Use jax.nn.dot_product_attention for values without tokens of a row"
    )


def of_a_sum(eqn: jex.JaxprEqn) -> MixedError:
    if eqn.primitive.name in ADD:
        return MixedError(
            f"{word(eqn)} of {_SUM} and another value. Multiply a penalty with the number of "
            "tokens, zero_jax.Weighted(sum + penalty * weight, weight), since sums are added over "
            f"devices. {_PSUM}"
        )
    return MixedError(
        f"{word(eqn)} of {_SUM}. {_PSUM}, or return zero_jax.Weighted(sum, weight) without it"
    )


def of_a_table(eqn: jex.JaxprEqn) -> MixedError:
    return MixedError(
        f"{word(eqn)}: an operand has the length of a row but does not come from the batch, and "
        f"{_PART}. Index a table with positions, table[positions], or pass it in the batch"
    )


class TokenFact(NamedTuple):
    """The tokens of a value, and sums over them.

    Together, in their order, the token dims are `rows` rows x tokens x `inner` elements of each,
    then `tail` elements of padding.

    Attributes:
      along: Pairs of a dim and a source of the elements along it.
      rows: Number of rows that a reshape merged with their tokens.
      inner: Number of elements that a reshape merged with each token.
      tail: Number of elements of padding at the end.
      zeros: True if the padding is zeros, or there is none.
      partial: True for a sum over the tokens of this device alone.
      overs: Products of the literal numbers that the addends of such a sum were divided by, each
        over the number of times that it adds the same value; empty if unknown.
      number: Value of a constant whose elements are all equal.
      running: The loop over tokens that carries it as a sum, and its place there; () elsewhere.
      steps: True if it counts iterations of a loop over tokens.
      times: True for a sum over devices of values that are equal on those of `context`, before it
        is divided by their number, as in `jax.lax.pmean`.
    """

    along: Along = frozenset()
    rows: int = 1
    inner: int = 1
    tail: int = 0
    zeros: bool = True
    partial: bool = False
    overs: frozenset[float] = frozenset((1.0,))
    number: float | None = None
    running: tuple[int, ...] = ()
    steps: bool = False
    times: bool = False

    @property
    def tokens(self) -> frozenset[int]:
        """Token dims, those of loops included."""
        return frozenset(dim for dim, source in self.along if source in (TOKENS, ONE))

    @property
    def wide(self) -> frozenset[int]:
        """Token dims except for those of one element."""
        return frozenset(dim for dim, source in self.along if source == TOKENS)

    @property
    def dims(self) -> frozenset[int]:
        """Dims of the array that consist of tokens."""
        return frozenset(dim for dim in self.tokens if dim >= 0)

    @property
    def over(self) -> float | None:
        """Product of the literal numbers that a sum was divided by, None if unknown or several."""
        return next(iter(self.overs)) if len(self.overs) == 1 else None

    @property
    def layout(self) -> tuple[int, int, int]:
        """Rows, elements of each token, and padding of the token dims."""
        return self.rows, self.inner, self.tail

    def real(self, shape: Sequence[int]) -> frozenset[int]:
        """Returns the token dims without those of one element, which every value has."""
        return frozenset(dim for dim in self.tokens if dim < 0 or shape[dim] > 1)

    def sources(self, dim: int) -> set[Source]:
        """Returns the sources of the elements along a dim."""
        return {source for at, source in self.along if at == dim}

    def moved(self, places: Mapping[int, int]) -> "TokenFact":
        """Returns the fact of a value with dims in other places; those without one are gone."""
        return self.mapped(lambda dim, source: (places[dim], source) if dim in places else None)

    def mapped(self, change: Callable[[int, Source], tuple[int, Source] | None]) -> "TokenFact":
        """Returns the fact with other sources along the dims of the array."""
        pairs = ((dim, source) if dim < 0 else change(dim, source) for dim, source in self.along)
        return self._replace(along=frozenset(pair for pair in pairs if pair is not None))

    def plus(self, dims: Iterable[int], source: Source) -> "TokenFact":
        """Returns the fact with one more source along these dims."""
        return self._replace(along=self.along | {(dim, source) for dim in dims})

    def divided(self, by: float) -> "TokenFact":
        """Returns the fact of a sum divided by a number."""
        return self._replace(overs=frozenset(over * by for over in self.overs))

    def settled(self) -> "TokenFact":
        """Returns the fact of a value that may have no token dims left."""
        return self if self.tokens else self._replace(rows=1, inner=1, tail=0, zeros=True)


def is_table(source: Source) -> bool:
    """Returns True if elements from this source cannot be those of a device's tokens."""
    return source not in (TOKENS, ONE, RANDOM) and not isinstance(source, tuple)


def is_iota(source: Source) -> bool:
    return isinstance(source, tuple) and not isinstance(source, Drawn)


def opaque(rank: int, source: Source = OTHER) -> TokenFact:
    """Returns the fact of an array without tokens that differs along all dims."""
    return TokenFact().plus(range(rank), source)


def divisors(sums: Sequence[TokenFact]) -> frozenset[float]:
    """Returns the divisors of a total of sums; empty if one is unknown, or there are many."""
    overs = frozenset().union(*(fact.overs for fact in sums))
    known = all(fact.overs for fact in sums) and len(overs) <= _MOST_DIVISORS
    return overs if known else frozenset()


def combined(
    eqn: jex.JaxprEqn, facts: Sequence[TokenFact], shapes: Sequence[Sequence[int]]
) -> TokenFact:
    """Returns the fact of values combined element by element.

    Values with tokens must have them in the same dims and order. Along these the others have to be
    uniform, random, or made of an iota. Padding is taken for nonzero.
    """
    with_tokens = [(f, f.real(shape)) for f, shape in zip(facts, shapes, strict=True) if f.tokens]
    along = frozenset[tuple[int, Source]]().union(*(fact.along for fact in facts))
    if not with_tokens:
        return TokenFact(along)
    (first, dims), *others = with_tokens
    if any(fact.layout != first.layout or real != dims for fact, real in others):
        raise of_pairs(eqn)
    if any(dim in dims and is_table(source) for dim, source in along):
        raise along_tokens(eqn) if eqn.primitive.name == "dot_general" else of_a_table(eqn)
    of_tokens = frozenset(pair for pair in along if pair[1] in (TOKENS, ONE))
    tokens = {dim for dim, _ in of_tokens}
    rest = of_tokens | {(dim, source) for dim, source in along if dim not in tokens}
    rows, inner, tail = first.layout
    return TokenFact(rest, rows, inner, tail, zeros=not tail)


def met(facts: Sequence[TokenFact], shapes: Sequence[Sequence[int]]) -> set[Source]:
    """Returns the iotas and random numbers that meet tokens where these values are combined."""
    pairs = list(zip(facts, shapes, strict=True))
    tokens = frozenset[int]().union(*(fact.real(shape) for fact, shape in pairs))
    along = frozenset[tuple[int, Source]]().union(*(fact.along for fact in facts))
    return {source for dim, source in along if dim in tokens and isinstance(source, tuple)}


# Operations on one value: the fact of the result.


def broadcast(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    places, old = eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
    new = shape_of(eqn.outvars[0])
    return fact.moved({d: at for d, at in enumerate(places) if old[d] == new[at]}).settled()


def transposed(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    order = list(eqn.params["permutation"])
    real = fact.real(shape_of(eqn.invars[0]))
    moved = [dim for dim in order if dim in real]
    if moved != sorted(moved):
        raise along_tokens(eqn)
    return fact.moved({dim: at for at, dim in enumerate(order)})


def without_dims(fact: TokenFact, removed: Iterable[int], rank: int) -> TokenFact:
    """Returns the fact of a value without these dims."""
    gone = set(removed)
    kept = [dim for dim in range(rank) if dim not in gone]
    return fact.moved({dim: at for at, dim in enumerate(kept)})


def squeezed(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    rank = len(shape_of(eqn.invars[0]))
    return without_dims(fact, eqn.params["dimensions"], rank).settled()


def reshaped(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    """Merges and splits dims; rows and elements merged with tokens can be split off again."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    real, along = fact.real(old), {pair for pair in fact.along if pair[0] < 0}
    rows, inner, tail = fact.layout
    for before, after in _groups(old, new):
        tokens = [dim for dim in before if dim in real]
        if not tokens:
            sources = {source for dim in before for source in fact.sources(dim)}
            # Of one element, tokens may be; nothing else.
            along |= {(d, s) for d in after for s in sources if (new[d] == 1) == (s == ONE)}
            continue
        lead = math.prod(old[before[0] : tokens[0]])
        between = math.prod(old[dim] for dim in range(tokens[0], tokens[-1]) if dim not in real)
        trail = math.prod(old[tokens[-1] + 1 : before[-1] + 1])
        first = tokens[0] == min(real) and not tail
        last = tokens[-1] == max(real)
        if between > 1 or (lead > 1 and not first) or (trail > 1 and not last):
            raise along_tokens(eqn)
        rows, inner, tail = rows * lead, inner * trail, tail * trail
        sizes = [new[dim] for dim in after]
        head = _leading(sizes, rows) if first else 0
        end = _leading(sizes[head:][::-1], inner) if last else 0
        if head:
            rows = 1
        if end:
            if tail % inner:
                raise along_tokens(eqn)
            inner, tail = 1, tail // inner
        rest = after[head : len(after) - end]
        along |= {(dim, MERGED) for dim in after if dim not in rest}
        along |= {(dim, TOKENS if new[dim] > 1 else ONE) for dim in rest}
    return fact._replace(along=frozenset(along), rows=rows, inner=inner, tail=tail)


def _leading(sizes: Sequence[int], count: int) -> int:
    """Returns how many of the first dims, but not all, have exactly `count` elements; or 0.

    >>> _leading([2, 3, 4], 6), _leading([2, 3, 4], 4), _leading([2, 3], 6)
    (2, 0, 0)
    """
    products = list(itertools.accumulate(sizes[:-1], operator.mul))
    return products.index(count) + 1 if count > 1 and count in products else 0


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yields the smallest groups of dims of two shapes that have as many elements."""
    at = to = 0
    while at < len(old) or to < len(new):
        start, begin = at, to
        at, to = min(at + 1, len(old)), min(to + 1, len(new))
        while math.prod(old[start:at]) != math.prod(new[begin:to]):
            if to < len(new) and math.prod(new[begin:to]) < math.prod(old[start:at]):
                to += 1
            elif at < len(old):
                at += 1
            else:  # arrays without elements
                to = len(new)
                break
        yield range(start, at), range(begin, to)


def acting_along(eqn: jex.JaxprEqn, fact: TokenFact, dims: Iterable[int]) -> TokenFact:
    """Returns the fact of an operation that is not elementwise along these dims."""
    dims = set(dims)
    if dims & fact.real(shape_of(eqn.invars[0])):
        raise along_tokens(eqn)
    rest = fact.mapped(lambda dim, source: None if dim in dims else (dim, source))
    return rest.plus(dims, OTHER)._replace(number=None)


def sliced(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    """Slices; along tokens a slice may remove their padding."""
    shape, params = shape_of(eqn.invars[0]), eqn.params
    strides = params["strides"] or (1,) * len(shape)
    slices = zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True)
    for dim, (start, limit, stride, size) in enumerate(slices):
        if (start, limit, stride) == (0, size, 1):
            continue
        if dim in fact.real(shape):
            if (start, stride) != (0, 1):
                raise along_tokens(eqn)
            fact = with_tail(eqn, fact, dim, limit - size, zero=True)
        else:
            fact = cut(fact, dim)
    return fact


def cut(fact: TokenFact, dim: int) -> TokenFact:
    """Returns the fact of some of the elements along a dim without tokens."""

    def kept(source: Source) -> bool:
        return source == RANDOM or isinstance(source, Drawn)

    return fact.mapped(lambda at, s: (at, s if at != dim or kept(s) else OTHER))


def with_tail(eqn: jex.JaxprEqn, fact: TokenFact, dim: int, count: int, *, zero: bool) -> TokenFact:
    """Returns the fact with `count` more elements after the tokens, or less: all of them."""
    if fact.real(shape_of(eqn.invars[0])) != {dim} or not (count > 0 or -count == fact.tail):
        raise along_tokens(eqn)
    tail = fact.tail + count
    return fact._replace(tail=tail, zeros=not tail or (fact.zeros and zero))


def reduced(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    """Reductions other than sums."""
    rank, axes = len(shape_of(eqn.invars[0])), eqn.params["axes"]
    number = fact.number if eqn.primitive.name in ("reduce_max", "reduce_min") else None
    return without_dims(acting_along(eqn, fact, axes), axes, rank)._replace(number=number)


def summed(
    eqn: jex.JaxprEqn, fact: TokenFact, axes: Sequence[int], shape: Sequence[int]
) -> TokenFact:
    """Returns the fact of a sum over these dims of a value of that shape."""
    if fact.real(shape) & set(axes):
        if fact.tail and not fact.zeros:
            raise MixedError(
                f"{word(eqn)} over padding of tokens that may not be zero: the padding of every "
                "device would be added. Multiply with weights that are padded with zeros"
            )
        fact = fact._replace(partial=True)
    if fact.partial:
        # Along uniform dims a sum is multiplied by their size, which may be the number of tokens.
        uniform = [shape[dim] for dim in axes if not fact.sources(dim)]
        fact = fact.divided(1 / max(math.prod(uniform), 1))
    if fact.number is not None and not fact.tokens:
        fact = fact._replace(number=fact.number * math.prod(shape[dim] for dim in axes))
    return without_dims(fact, axes, len(shape)).settled()


def unstacked(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    axis, shape = eqn.params["axis"], shape_of(eqn.invars[0])
    if axis in fact.real(shape):
        raise along_tokens(eqn)
    return without_dims(fact, [axis], len(shape)).settled()


def split(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    axis = eqn.params["axis"]
    if axis in fact.real(shape_of(eqn.invars[0])):
        raise along_tokens(eqn)
    return cut(fact, axis)


def tiled(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    repeated = {dim for dim, times in enumerate(eqn.params["reps"]) if times > 1}
    shape = shape_of(eqn.invars[0])
    broadcast = {dim for dim in repeated if shape[dim] == 1}
    fact = fact.mapped(lambda dim, source: None if dim in broadcast else (dim, source))
    uniform = {dim for dim in repeated if not fact.sources(dim)}
    number = fact.number
    return acting_along(eqn, fact, repeated - uniform)._replace(number=number)


def transformed(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    """Fourier transforms."""
    rank = len(shape_of(eqn.invars[0]))
    return acting_along(eqn, fact, range(rank - len(eqn.params["fft_lengths"]), rank))


def ranked(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    """The largest elements."""
    axis = eqn.params.get("axis", -1)
    return acting_along(eqn, fact, [axis % len(shape_of(eqn.invars[0]))])


def along_axis(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    return acting_along(eqn, fact, [eqn.params["axis"]])


def reversed_(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    return acting_along(eqn, fact, eqn.params["dimensions"])


def same(eqn: jex.JaxprEqn, fact: TokenFact) -> TokenFact:
    return fact


OF_ONE: dict[str, Callable[[jex.JaxprEqn, TokenFact], TokenFact]] = {
    "broadcast_in_dim": broadcast,
    "transpose": transposed,
    "squeeze": squeezed,
    "reshape": reshaped,
    "slice": sliced,
    "unstack": unstacked,
    "split": split,
    "tile": tiled,
    "fft": transformed,
    "top_k": ranked,
    "rev": reversed_,
    **dict.fromkeys(IDENTITY, same),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), along_axis),
    **dict.fromkeys(
        ("argmax", "argmin", *(f"reduce_{name}" for name in ("max", "min", "prod", "and", "or"))),
        reduced,
    ),
}
# Those that may act on a sum over the tokens of one device, since they are linear.
LINEAR = IDENTITY | {
    *("broadcast_in_dim", "transpose", "squeeze", "reshape", "slice", "reduce_sum", "unstack"),
    *("split", "stack", "concatenate", "dynamic_slice", "dot_general", "neg", "mul", "div"),
    *("convert_element_type", "reduce_precision", "real", "select_n"),
    *ADD,
}


def keeps_a_sum(eqn: jex.JaxprEqn) -> bool:
    """Returns False for a cast that rounds a sum to an integer."""
    rounds = is_float(eqn.invars[0]) and not is_float(eqn.outvars[0])
    return eqn.primitive.name in LINEAR and not rounds
