"""Sums and statistics over the rows of a batch, found in a traced loss.

A device holds some rows of the batch, and losses are averaged over devices. So a loss that sums its
rows trains with 1/N of its gradient, and a row that is compared with the mean of all rows is
compared with the mean of one device's rows. Both follow from which dim of a value has the rows, and
from the numbers that a sum over it is divided by.

Each value has a `Fact`. An unknown one is never wrong.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.jaxpr import marks, spread
from zero_jax.jaxpr.equations import LAYOUT, is_float, shape_of
from zero_jax.jaxpr.spread import Dim

# Operations that give a multiple of a result for the same multiple of an operand.
_LINEAR = LAYOUT | {"neg", "abs", "reduce_precision", "real", "concatenate", "pad", "cumsum"}
_ADD = frozenset(("add", "sub", "add_any"))
_CHOOSE = frozenset(("max", "min", "clamp", "select_n"))
_MERGED = frozenset(("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_to_all"))


@dataclasses.dataclass(frozen=True)
class Fact:
    """The facts of a value, of rows and of sums over them.

    Attributes:
      dim: the dim that has the rows.
      over: the product of the constants that it was divided by.
      whole: whether one of these constants, or their product, is a multiple of the number of rows.
      pending: over so many features it was summed just before.
      summed: it is a sum over so many rows or groups of rows; 0 if it is not, or not known to be.
      sure: whether `over` is all that it was multiplied with, but for trained leaves.
      statistic: whether it is made of a mean over rows, of this device alone.
      trained: whether it depends on trained leaves.
      counts: whether it is made of integers and comparisons alone: a mask, a count.
      number: its value, for a constant.
      of_row: whether it belongs to one row, in a loop over rows.
      reduced: whether it is made of a reduction over rows, so that it may normalise them.
    """

    dim: Dim = None
    over: float = 1.0
    whole: bool = False
    pending: int = 0
    summed: int = 0
    sure: bool = True
    statistic: bool = False
    trained: bool = False
    counts: bool = False
    number: float | None = None
    of_row: bool = False
    reduced: bool = False

    @property
    def is_mean(self) -> bool:
        """True if a sum over rows was divided by their number, or a multiple of it."""
        return self.summed > 0 and self.whole

    @property
    def is_sum(self) -> bool:
        """True if it is a sum over rows which no constant turns into a mean."""
        return self.summed > 0 and not self.is_mean


class Found(NamedTuple):
    """The fact of a loss, and the operations that give rows a statistic of this device's rows."""

    loss: Fact
    mixed: Sequence[jex.JaxprEqn]


def read(closed: jex.ClosedJaxpr, trained: Sequence[bool], batch: Sequence[bool]) -> Found:
    """Reads a traced loss; its first result is the loss.

    Args:
      closed: the program.
      trained: which of its inputs are trained leaves.
      batch: which are arrays of the batch, with the rows as dim 0.

    >>> def of(loss):
    ...     return read(jax.make_jaxpr(loss)(1.0, jnp.ones(6)), [True, False], [False, True])
    >>> of(lambda w, x: jnp.sum((w * x - 1) ** 2)).loss.is_sum
    True
    >>> of(lambda w, x: jnp.mean((w * x - 1) ** 2)).loss.is_sum
    False
    >>> len(of(lambda w, x: jnp.mean((w * (x - x.mean()) - 1) ** 2)).mixed)
    1
    """
    body = closed.jaxpr
    rows = {shape_of(v)[0] for v, own in zip(body.invars, batch, strict=True) if own}
    if len(rows) != 1 or min(rows) < 2:  # one row is its own mean
        return Found(Fact(), ())
    given = [
        Fact(dim=0 if own else None, trained=t, counts=not is_float(v))
        for v, t, own in zip(body.invars, trained, batch, strict=True)
    ]
    facts = _Rows(rows.pop())
    return Found(facts.results(closed, given)[0], facts.mixed)


class _Rows(marks.Facts[Fact]):
    """How facts spread, for so many rows."""

    def __init__(self, rows: int):
        self._rows = rows
        self.mixed: list[jex.JaxprEqn] = []

    def unknown(self) -> Fact:
        return Fact(sure=False)

    def of_literal(self, value: Any) -> Fact:
        known = not isinstance(value, jax.core.Tracer) and jnp.ndim(value) == 0
        kind = jnp.result_type(value)
        real = jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
        counts = not jnp.issubdtype(kind, jnp.inexact)
        return Fact(number=float(value) if known and real else None, counts=counts)

    def sliced(self, fact: Fact) -> Fact:
        if fact.dim == 0:
            return dataclasses.replace(fact, dim=None, of_row=True)
        return dataclasses.replace(fact, dim=None if fact.dim is None else fact.dim - 1)

    def stacked(self, fact: Fact) -> Fact:
        if fact.of_row:
            return dataclasses.replace(fact, dim=0, of_row=False)
        return dataclasses.replace(fact, dim=None if fact.dim is None else fact.dim + 1)

    def joined(self, one: Fact, other: Fact) -> Fact:
        if one == other:
            return one
        dims = {d for d in (one.dim, other.dim) if d is not None}
        alike = (one.over, one.summed) == (other.over, other.summed)
        return Fact(
            dim=dims.pop() if len(dims) == 1 else None,
            over=one.over if alike else 1.0,
            whole=one.whole or other.whole,
            summed=one.summed if alike else 0,
            sure=alike and one.sure and other.sure,
            statistic=one.statistic or other.statistic,
            trained=one.trained or other.trained,
            counts=one.counts and other.counts,
            of_row=one.of_row or other.of_row,
            reduced=one.reduced or other.reduced,
        )

    def through(self, eqn: jex.JaxprEqn, given: list[Fact]) -> list[Fact]:
        name = eqn.primitive.name
        if name in _MERGED:
            merged = [Fact(dim=f.dim, sure=False, trained=f.trained) for f in given]
            return merged[: len(eqn.outvars)]
        dims = self._dims(eqn, given)
        self._look(eqn, given)
        counts = all(f.counts or f.number is not None for f in given)
        reduced = any(f.reduced for f in given)
        left = any(f.dim is not None for f in given) and None in dims
        base = Fact(
            sure=not reduced,
            reduced=reduced or left,
            trained=any(f.trained for f in given),
            counts=counts or not any(map(is_float, eqn.outvars)),
            of_row=any(f.of_row for f in given),
            statistic=any(f.statistic or f.is_mean for f in given),
        )
        own = self._scaled(eqn, given, base)
        per_row = dataclasses.replace(own, summed=0, statistic=False)
        sizes = [0 if d is None else shape_of(v)[d] for v, d in zip(eqn.outvars, dims, strict=True)]
        few = [0 < size < self._rows for size in sizes]  # groups, whose rows are in another dim
        return [
            dataclasses.replace(own if d is None else per_row, dim=d, sure=own.sure and not f)
            for d, f in zip(dims, few, strict=True)
        ]

    def _dims(self, eqn: jex.JaxprEqn, given: list[Fact]) -> list[Dim]:
        dims = [f.dim for f in given]
        if eqn.primitive.name == "gather":
            return [_looked_up(eqn, dims)]
        if eqn.primitive.name == "concatenate" and dims[0] is None:
            dims = [next((d for d in dims if d is not None), None)]
            return dims if dims[0] != eqn.params["dimension"] else [None]
        return spread.spread(eqn, dims)

    def _scaled(self, eqn: jex.JaxprEqn, given: list[Fact], base: Fact) -> Fact:
        """The fact of a result, but for its dim."""
        name = eqn.primitive.name
        if name in ("broadcast_in_dim", "convert_element_type") and given[0].number is not None:
            return given[0]
        if name in _LINEAR or name == "gather":
            first = next((f for f in given if f.dim is not None or f.summed), given[0])
            pending = first.pending if name == "convert_element_type" else 0
            return dataclasses.replace(_with(base, first), pending=pending)
        if name == "reduce_sum":
            made = _with(base, given[0], self._summed(eqn, given[0]))
            features = math.prod(shape_of(eqn.invars[0])[d] for d in eqn.params["axes"])
            return dataclasses.replace(made, pending=0 if made.summed else features)
        if name in ("square", "integer_pow") and not given[0].summed:
            over = _bounded(given[0].over) ** min(eqn.params.get("y", 2), 8)
            return dataclasses.replace(_with(base, given[0]), over=over)
        if name in _ADD:
            return _added(given, base)
        if name in _CHOOSE:
            cases = [f for f in given if f.dim is not None]
            alike = len({f.over for f in cases}) == 1
            over = cases[0].over if alike else 1.0
            sure = alike and all(f.sure for f in cases)
            return dataclasses.replace(
                base, over=over, sure=sure, whole=any(f.whole for f in cases)
            )
        if name in ("mul", "div"):
            return self._multiplied(name, given, base)
        if name == "dot_general":
            return self._product(eqn, given, base)
        return base

    def _summed(self, eqn: jex.JaxprEqn, fact: Fact) -> int:
        """Over how many rows, or groups of rows, a sum is."""
        if fact.dim is None or fact.dim not in eqn.params["axes"]:
            return fact.summed
        return min(self._rows, shape_of(eqn.invars[0])[fact.dim])

    def _multiplied(self, name: str, given: list[Fact], base: Fact) -> Fact:
        one, other = given
        if other.number is None and one.number is not None and name == "mul":
            one, other = other, one
        if other.number is not None:
            if one.number is not None or other.number == 0 or not math.isfinite(other.number):
                return dataclasses.replace(base, sure=False)
            times = abs(other.number)
            return self._divided(one, times if name == "div" else 1 / times, base)
        return self._times(one, other, base, divides=name == "div")

    def _divided(self, fact: Fact, times: float, base: Fact) -> Fact:
        """A value divided by a constant."""
        made = _with(base, fact)
        if fact.pending > 1 and times == fact.pending:  # a mean over features
            return dataclasses.replace(made, sure=made.sure and fact.pending != self._rows)
        over, count = _bounded(fact.over * times), fact.summed or self._rows
        whole = fact.whole or _is_multiple(times, count) or _is_multiple(over, count)
        # An unbiased variance divides by one less.
        unbiased = count > 2 and any(_is_multiple(n, count - 1) for n in (times, over))
        return dataclasses.replace(made, over=over, whole=whole, sure=made.sure and not unbiased)

    def _times(self, one: Fact, other: Fact, base: Fact, *, divides: bool) -> Fact:
        """A product of two values, or their quotient."""
        sums = [f for f in (one, other) if f.summed]
        if sums:
            # A trained factor leaves a sum a sum; another, or a divisor, may count the rows.
            rest = other if sums[0] is one else one
            known = len(sums) == 1 and rest.trained and not (rest.reduced or divides)
            return _with(base, sums[0]) if known else base
        over = _bounded(one.over / other.over if divides else one.over * other.over)
        sure = base.sure and one.sure and other.sure
        sure = sure and all(map(_scales_nothing, (one, other)))
        return dataclasses.replace(base, over=over, sure=sure, whole=one.whole or other.whole)

    def _product(self, eqn: jex.JaxprEqn, given: list[Fact], base: Fact) -> Fact:
        one, other = given
        contracted = eqn.params["dimension_numbers"][0]
        inside = [f.dim is not None and f.dim in d for f, d in zip(given, contracted, strict=True)]
        made = self._times(one, other, base, divides=False)
        if not any(inside):
            # Of features, not of rows: no weight that counts these is in it.
            features = one.trained or other.trained
            sure = base.sure and one.sure and other.sure
            return dataclasses.replace(made, sure=sure) if features else made
        if not all(inside):
            return dataclasses.replace(base, sure=False)
        size = shape_of(eqn.invars[0])[one.dim] if one.dim is not None else 0
        return dataclasses.replace(made, summed=min(self._rows, size))

    def _look(self, eqn: jex.JaxprEqn, given: list[Fact]) -> None:
        """Remembers an operation that mixes a device's rows."""
        name = eqn.primitive.name
        rows = [f for f in given if f.dim is not None]
        if name in _ADD | {"mul", "div"} and len(rows) == 1:
            (other,) = (f for f in given if f.dim is None)
            softmax = name == "div" and other is given[1] and other.is_sum and not rows[0].counts
            if other.statistic or other.is_mean or softmax:
                self.mixed.append(eqn)
        if name == "dot_general" and len(rows) == 2:
            contracted, batched = eqn.params["dimension_numbers"]
            pairs = zip(given, contracted, batched, strict=True)
            if all(f.dim not in (*c, *b) for f, c, b in pairs):
                self.mixed.append(eqn)


def _bounded(over: float) -> float:
    return min(max(over, 1e-30), 1e30)


def _is_multiple(value: float, count: int) -> bool:
    times = _bounded(value / count)
    return round(times) >= 1 and math.isclose(times, round(times), rel_tol=1e-3)


def _with(base: Fact, fact: Fact, summed: int | None = None) -> Fact:
    """A fact with the scale of another."""
    return dataclasses.replace(
        base,
        over=fact.over,
        whole=fact.whole,
        summed=fact.summed if summed is None else summed,
        sure=fact.sure,
        of_row=fact.of_row,
    )


def _scales_nothing(fact: Fact) -> bool:
    """Returns whether a factor is no weight that could divide by the number of rows."""
    return fact.trained or (fact.counts and fact.dim is not None)


def _added(given: list[Fact], base: Fact) -> Fact:
    """Returns the fact of a sum: one certain sum over rows among the addends makes it one."""
    sums = sorted((f for f in given if f.summed), key=lambda f: (not f.is_sum, not f.sure))
    if sums:
        return _with(base, sums[0])
    rows = [f for f in given if f.dim is not None] or given
    alike = len({f.over for f in rows}) == 1
    return dataclasses.replace(
        base,
        over=rows[0].over if alike else 1.0,
        sure=alike and all(f.sure for f in rows),
        whole=any(f.whole for f in rows),
    )


def _looked_up(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> Dim:
    """The dim of a gather's result that has the rows of its indices."""
    at = given[1]
    if at is None:
        return None
    offsets = eqn.params["dimension_numbers"].offset_dims
    batch = [d for d in range(len(shape_of(eqn.outvars[0]))) if d not in offsets]
    return batch[at] if at < len(batch) else None
