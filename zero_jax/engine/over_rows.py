"""Losses that sum the rows of a batch, or use statistics of one device's rows.

A device has some rows of the batch, and losses are averaged over devices. A loss that sums its rows
trains with 1/N of its gradient, and a row compared with the mean of all rows is compared with the
mean of one device's rows. Both follow from the dim of a value that has the rows, and from the
numbers that a sum over it is divided by: the dataflow facts `RowFact`. An unknown fact is never
wrong.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.tracing.dataflow import EQUAL_RESULTS, Dim, Forward, index_dims, sharded_dims
from zero_jax.tracing.jaxpr import LAYOUT, Atom, is_float, shape_of

_SUM = (
    "the loss function {doubt} a sum over the rows of the batch (dim 0). Losses are averaged "
    "over {parts} parts of the batch (devices x micro-batches), so its value and gradients would "
    "be 1/{parts} of those of one device. Return a mean, jnp.mean(errors), or "
    "zero_jax.Weighted(jnp.sum(errors), weight), where `weight` is the number of rows or tokens"
)
_MIXED = (
    "the loss function uses a mean over rows (normalised advantages, a softmax over the batch, "
    "batch norm, products of all pairs of rows). Each device and micro-batch has its own, over "
    "1/{parts} of the batch. Use jax.lax.pmean(jnp.mean(x, 0), zero.batch_axes) for the mean "
    "over all devices, and jax.lax.all_gather for their rows. Compute values without a gradient "
    "before the loss. See docs/models.md, Statistics over rows"
)
# Operations whose result is multiplied if their operand is.
_LINEAR = LAYOUT | {"neg", "abs", "reduce_precision", "real", "concatenate", "pad", "cumsum"}
_ADD = frozenset(("add", "sub", "add_any"))
_CHOOSE = frozenset(("max", "min", "clamp", "select_n"))
_MERGED = EQUAL_RESULTS | {"all_to_all"}


def check(
    closed: jex.ClosedJaxpr,
    trained: Sequence[bool],
    batch: Sequence[bool],
    *,
    parts: int,
    weighted: bool,
    told: set[str],
) -> None:
    """Warns, once a loss, of a likely sum over rows and of statistics; see `facts_of`.

    Args:
      parts: Devices times micro-batches.
      weighted: True if the loss is `Weighted`.
      told: Warnings given before; extended.

    Raises:
      ValueError: The loss certainly is a sum over rows.
    """
    if parts == 1:
        return
    loss, mixed = facts_of(closed, trained, batch)
    is_sum = loss.is_sum and not weighted
    if is_sum and loss.sure:
        raise ValueError(_SUM.format(doubt="returns", parts=parts))
    likely = _SUM.format(doubt="seems to return", parts=parts)
    for message, applies in ((likely, is_sum), (_MIXED.format(parts=parts), mixed)):
        if applies and message not in told:
            told.add(message)
            warnings.warn(message, stacklevel=2)


@dataclasses.dataclass(frozen=True)
class RowFact:
    """The rows of a value, and sums over them.

    Attributes:
      dim: Dim that has the rows.
      over: Product of the constants that it was divided by.
      whole: True if one of these constants, or their product, is a multiple of the number of rows.
      pending: Number of features that it was summed over just before.
      summed: Number of rows or groups of rows in the sum; 0 if it is no such sum, or unknown.
      sure: True if `over` is everything that it was multiplied with, except for trained leaves.
      statistic: True if it is made of a mean over rows, of this device alone.
      trained: True if it depends on trained leaves.
      counts: True if it is made of integers and comparisons alone: a mask, a count.
      number: Value of a constant.
      of_row: True if it belongs to one row, in a loop over rows.
      reduced: True if it is made of a reduction over rows, so that it may normalise them.
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

    def but(self, **changes: Any) -> "RowFact":
        """Returns the fact with other values of some fields."""
        return dataclasses.replace(self, **changes)

    @property
    def is_mean(self) -> bool:
        """True if a sum over rows was divided by their number, or a multiple of it."""
        return self.summed > 0 and self.whole

    @property
    def is_sum(self) -> bool:
        """True if it is a sum over rows that no constant makes a mean."""
        return self.summed > 0 and not self.is_mean


def facts_of(
    closed: jex.ClosedJaxpr, trained: Sequence[bool], batch: Sequence[bool]
) -> tuple[RowFact, Sequence[jex.JaxprEqn]]:
    """Returns the fact of a loss, the first result, and operations that combine a device's rows.

    `trained` is True for inputs that are trained leaves, `batch` for arrays with the rows as dim 0.

    >>> def of(loss):
    ...     return facts_of(jax.make_jaxpr(loss)(1.0, jnp.ones(6)), [True, False], [False, True])
    >>> of(lambda w, x: jnp.sum((w * x - 1) ** 2))[0].is_sum
    True
    >>> of(lambda w, x: jnp.mean((w * x - 1) ** 2))[0].is_sum
    False
    >>> len(of(lambda w, x: jnp.mean((w * (x - x.mean()) - 1) ** 2))[1])
    1
    """
    inputs = list(zip(closed.jaxpr.invars, trained, batch, strict=True))
    rows = {shape_of(v)[0] for v, _, of_batch in inputs if of_batch}
    if len(rows) != 1 or min(rows) < 2:  # one row is its own mean
        return RowFact(), ()
    facts = [
        RowFact(dim=0 if of_batch else None, trained=is_trained, counts=not is_float(v))
        for v, is_trained, of_batch in inputs
    ]
    analysis = _Rows(rows.pop())
    return analysis.run(closed, facts)[0], analysis.mixed


class _Rows(Forward[RowFact]):
    """The lattice of `RowFact`, for a number of rows.

    Attributes:
      mixed: Operations that combine rows of one device.
    """

    def __init__(self, rows: int):
        super().__init__()
        self._rows = rows
        self.mixed: list[jex.JaxprEqn] = []

    def unknown(self) -> RowFact:
        return RowFact(sure=False)

    def constant(self, atom: Atom, value: Any) -> RowFact:
        known = not isinstance(value, jax.core.Tracer) and jnp.ndim(value) == 0
        real = any(jnp.issubdtype(jnp.result_type(value), k) for k in (jnp.floating, jnp.integer))
        counts = not jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        return RowFact(number=float(value) if known and real else None, counts=counts)

    def sliced(self, fact: RowFact) -> RowFact:
        if fact.dim == 0:
            return fact.but(dim=None, of_row=True)
        return fact.but(dim=None if fact.dim is None else fact.dim - 1)

    def stacked(self, fact: RowFact) -> RowFact:
        if fact.of_row:
            return fact.but(dim=0, of_row=False)
        return fact.but(dim=None if fact.dim is None else fact.dim + 1)

    def carried(self, state: RowFact, made: RowFact) -> RowFact:
        return state

    def while_loop(self, eqn: jex.JaxprEqn, values: list[RowFact]) -> Sequence[RowFact]:
        return [self.unknown()] * len(eqn.outvars)

    def join(self, one: RowFact, other: RowFact) -> RowFact:
        if one == other:
            return one
        dims = {d for d in (one.dim, other.dim) if d is not None}
        alike = (one.over, one.summed) == (other.over, other.summed)
        return RowFact(
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

    def default(self, eqn: jex.JaxprEqn, values: list[RowFact]) -> Sequence[RowFact]:
        if eqn.primitive.name in _MERGED:
            merged = [RowFact(dim=f.dim, sure=False, trained=f.trained) for f in values]
            return merged[: len(eqn.outvars)]
        dims = self._dims(eqn, values)
        if _mixes_rows(eqn, values):
            self.mixed.append(eqn)
        reduced = any(f.reduced for f in values)
        summed = any(f.dim is not None for f in values) and None in dims
        counts = all(f.counts or f.number is not None for f in values)
        base = RowFact(
            sure=not reduced,
            reduced=reduced or summed,
            trained=any(f.trained for f in values),
            counts=counts or not any(map(is_float, eqn.outvars)),
            of_row=any(f.of_row for f in values),
            statistic=any(f.statistic or f.is_mean for f in values),
        )
        fact, made = self._scaled(eqn, values, base), []
        for var, dim in zip(eqn.outvars, dims, strict=True):
            if dim is None:
                made.append(fact.but(dim=None))
            else:
                # Along a dim of fewer elements there are groups, whose rows are in another dim.
                sure = fact.sure and not 0 < shape_of(var)[dim] < self._rows
                made.append(fact.but(summed=0, statistic=False, dim=dim, sure=sure))
        return made

    def _dims(self, eqn: jex.JaxprEqn, values: list[RowFact]) -> list[Dim]:
        """Returns the dim of each result that has the rows."""
        name, dims = eqn.primitive.name, [f.dim for f in values]
        if name == "gather":
            looked_up = enumerate(index_dims(eqn))
            return [next((d for at, d in looked_up if at == dims[1]), None)]
        if name == "concatenate" and dims[0] is None:
            dim = next((d for d in dims if d is not None), None)
            return [None if dim == eqn.params["dimension"] else dim]
        return sharded_dims(eqn, dims)

    def _scaled(self, eqn: jex.JaxprEqn, values: list[RowFact], base: RowFact) -> RowFact:
        """Returns the fact of a result, except for its dim."""
        name = eqn.primitive.name
        if name in ("broadcast_in_dim", "convert_element_type") and values[0].number is not None:
            return values[0]
        if name in _LINEAR or name == "gather":
            first = next((f for f in values if f.dim is not None or f.summed), values[0])
            pending = first.pending if name == "convert_element_type" else 0
            return _with(base, first).but(pending=pending)
        if name == "reduce_sum":
            made = _with(base, values[0]).but(summed=self._summed(eqn, values[0]))
            features = math.prod(shape_of(eqn.invars[0])[d] for d in eqn.params["axes"])
            return made.but(pending=0 if made.summed else features)
        if name in ("square", "integer_pow") and not values[0].summed:
            over = _bounded(values[0].over) ** min(eqn.params.get("y", 2), 8)
            return _with(base, values[0]).but(over=over)
        if name in _ADD:
            return _added(values, base)
        if name in _CHOOSE:
            return _combined([f for f in values if f.dim is not None], base)
        if name in ("mul", "div"):
            return self._multiplied(name, values, base)
        if name == "dot_general":
            return self._product(eqn, values, base)
        return base

    def _summed(self, eqn: jex.JaxprEqn, fact: RowFact) -> int:
        """Returns the number of rows, or groups of rows, in a sum."""
        if fact.dim is None or fact.dim not in eqn.params["axes"]:
            return fact.summed
        return min(self._rows, shape_of(eqn.invars[0])[fact.dim])

    def _multiplied(self, name: str, values: list[RowFact], base: RowFact) -> RowFact:
        one, other = values
        if name == "mul" and one.number is not None:
            one, other = other, one
        if other.number is not None:
            if one.number is not None or other.number == 0 or not math.isfinite(other.number):
                return base.but(sure=False)
            times = abs(other.number)
            return self._divided(one, times if name == "div" else 1 / times, base)
        return self._times(one, other, base, divides=name == "div")

    def _divided(self, fact: RowFact, times: float, base: RowFact) -> RowFact:
        """Returns the fact of a value divided by a constant."""
        made = _with(base, fact)
        if fact.pending > 1 and times == fact.pending:  # a mean over features
            return made.but(sure=made.sure and fact.pending != self._rows)
        over, count = _bounded(fact.over * times), fact.summed or self._rows
        whole = fact.whole or _is_multiple(times, count) or _is_multiple(over, count)
        # An unbiased variance divides by one less.
        unbiased = count > 2 and any(_is_multiple(n, count - 1) for n in (times, over))
        return made.but(over=over, whole=whole, sure=made.sure and not unbiased)

    def _times(self, one: RowFact, other: RowFact, base: RowFact, *, divides: bool) -> RowFact:
        """Returns the fact of a product of two values, or of their quotient."""
        sums = [f for f in (one, other) if f.summed]
        if sums:
            # A trained factor leaves a sum a sum; another, or a divisor, may count the rows.
            rest = other if sums[0] is one else one
            known = len(sums) == 1 and rest.trained and not (rest.reduced or divides)
            return _with(base, sums[0]) if known else base
        over = _bounded(one.over / other.over if divides else one.over * other.over)
        # Another factor may divide by the number of rows.
        scales_nothing = (f.trained or (f.counts and f.dim is not None) for f in (one, other))
        sure = base.sure and one.sure and other.sure and all(scales_nothing)
        return base.but(over=over, sure=sure, whole=one.whole or other.whole)

    def _product(self, eqn: jex.JaxprEqn, values: list[RowFact], base: RowFact) -> RowFact:
        one, other = values
        contracted = eqn.params["dimension_numbers"][0]
        inside = [f.dim is not None and f.dim in d for f, d in zip(values, contracted, strict=True)]
        made = self._times(one, other, base, divides=False)
        if not any(inside):
            # A sum over features contains no weight that counts the rows.
            features = one.trained or other.trained
            sure = base.sure and one.sure and other.sure
            return made.but(sure=sure) if features else made
        if not all(inside):
            return base.but(sure=False)
        size = shape_of(eqn.invars[0])[one.dim] if one.dim is not None else 0
        return made.but(summed=min(self._rows, size))


def _mixes_rows(eqn: jex.JaxprEqn, values: list[RowFact]) -> bool:
    """Returns True for an operation that combines a device's rows with each other."""
    name = eqn.primitive.name
    rows = [f for f in values if f.dim is not None]
    if name in _ADD | {"mul", "div"} and len(rows) == 1:
        (other,) = (f for f in values if f.dim is None)
        softmax = name == "div" and other is values[1] and other.is_sum and not rows[0].counts
        return other.statistic or other.is_mean or softmax
    if name == "dot_general" and len(rows) == 2:
        contracted, batched = eqn.params["dimension_numbers"]
        pairs = zip(values, contracted, batched, strict=True)
        return all(f.dim not in (*c, *b) for f, c, b in pairs)
    return False


def _bounded(over: float) -> float:
    return min(max(over, 1e-30), 1e30)


def _is_multiple(value: float, count: int) -> bool:
    times = _bounded(value / count)
    return round(times) >= 1 and math.isclose(times, round(times), rel_tol=1e-3)


def _with(base: RowFact, fact: RowFact) -> RowFact:
    """Returns a fact with the scale of another."""
    scale = {"over": fact.over, "whole": fact.whole, "summed": fact.summed}
    return base.but(**scale, sure=fact.sure, of_row=fact.of_row)


def _added(values: list[RowFact], base: RowFact) -> RowFact:
    """Returns the fact of a sum: one certain sum over rows among the addends makes it one."""
    sums = sorted((f for f in values if f.summed), key=lambda f: (not f.is_sum, not f.sure))
    if sums:
        return _with(base, sums[0])
    return _combined([f for f in values if f.dim is not None] or values, base)


def _combined(cases: Sequence[RowFact], base: RowFact) -> RowFact:
    """Returns the fact of a sum or a choice of values with rows."""
    alike = len({f.over for f in cases}) == 1
    over, sure = cases[0].over if alike else 1.0, alike and all(f.sure for f in cases)
    return base.but(over=over, sure=sure, whole=any(f.whole for f in cases))
