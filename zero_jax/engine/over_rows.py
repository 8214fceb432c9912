"""Losses that sum the rows of a batch, or use statistics of one device's rows.

A device has some rows of the batch, and losses are averaged over devices. A loss that sums its rows
trains with 1/N of its gradient, and a row compared with the mean of all rows is compared with the
mean of one device's rows. Both follow from the dim of a value that has the rows, and from the
numbers that a sum over it is divided by: the dataflow facts `RowFact`. An unknown fact is never
wrong.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.tracing.dataflow import EQUAL_RESULTS, Forward
from zero_jax.tracing.jaxpr import LAYOUT, Atom, is_float, shape_of
from zero_jax.tracing.sharded_dims import Dim, index_dims, sharded_dims

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
_LINEAR |= {"gather"}
_ADD = frozenset(("add", "sub", "add_any"))
_CHOOSE = frozenset(("max", "min", "clamp", "select_n"))


def check(
    closed: jex.ClosedJaxpr,
    trained: Sequence[bool],
    batch: Sequence[bool],
    *,
    parts: int,
    weighted: bool,
    told: set[str],
) -> None:
    """Raises ValueError for a certain sum over rows; warns of a likely one, and of statistics.

    A batch has `parts` parts, devices times micro-batches. Warnings in `told` are not repeated.
    """
    if parts == 1:
        return
    loss, mixes = facts_of(closed, trained, batch)
    is_sum = loss.is_sum and not weighted
    if is_sum and loss.sure:
        raise ValueError(_SUM.format(doubt="returns", parts=parts))
    likely = _SUM.format(doubt="seems to return", parts=parts)
    for message, applies in ((likely, is_sum), (_MIXED.format(parts=parts), mixes)):
        if applies and message not in told:
            told.add(message)
            warnings.warn(message, stacklevel=2)


class RowFact(NamedTuple):
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

    def scaled_like(self, other: "RowFact") -> "RowFact":
        """Returns the fact of a value that is multiplied if another is."""
        made = self._replace(over=other.over, whole=other.whole, summed=other.summed)
        return made._replace(sure=other.sure, of_row=other.of_row)

    @property
    def is_sum(self) -> bool:
        """True if it is a sum over rows that no constant makes a mean."""
        return self.summed > 0 and not self.whole


def facts_of(
    closed: jex.ClosedJaxpr, trained: Sequence[bool], batch: Sequence[bool]
) -> tuple[RowFact, bool]:
    """Returns the fact of a loss, the first result, and True if it combines one device's rows.

    Inputs are `trained` leaves, arrays of the `batch` with the rows as dim 0, and others.

    >>> def of(loss):
    ...     return facts_of(jax.make_jaxpr(loss)(1.0, jnp.ones(6)), [True, False], [False, True])
    >>> of(lambda w, x: jnp.sum((w * x - 1) ** 2))[0].is_sum
    True
    >>> of(lambda w, x: jnp.mean((w * x - 1) ** 2))[0].is_sum
    False
    >>> of(lambda w, x: jnp.mean((w * (x - x.mean()) - 1) ** 2))[1]
    True
    """
    inputs = list(zip(closed.jaxpr.invars, trained, batch, strict=True))
    rows = {shape_of(v)[0] for v, _, of_batch in inputs if of_batch}
    if len(rows) != 1 or min(rows) < 2:  # one row is its own mean
        return RowFact(), False
    facts = [
        RowFact(dim=0 if of_batch else None, trained=is_trained, counts=not is_float(v))
        for v, is_trained, of_batch in inputs
    ]
    analysis = _Rows(rows.pop())
    return analysis.run(closed, facts)[0], analysis.mixes


class _Rows(Forward[RowFact]):
    """The lattice of `RowFact`, for a number of rows.

    Attributes:
      mixes: True if an operation combines rows of one device.
    """

    def __init__(self, rows: int):
        super().__init__()
        self._rows, self.mixes = rows, False

    def unknown(self) -> RowFact:
        return RowFact(sure=False)

    def constant(self, atom: Atom, value: Any) -> RowFact:
        known = not isinstance(value, jax.core.Tracer) and jnp.ndim(value) == 0
        of_kind = functools.partial(jnp.issubdtype, jnp.result_type(value))
        real = of_kind(jnp.floating) or of_kind(jnp.integer)
        counts = not of_kind(jnp.inexact)
        return RowFact(number=float(value) if known and real else None, counts=counts)

    def sliced(self, fact: RowFact) -> RowFact:
        if fact.dim == 0:
            return fact._replace(dim=None, of_row=True)
        return fact._replace(dim=None if fact.dim is None else fact.dim - 1)

    def stacked(self, fact: RowFact) -> RowFact:
        if fact.of_row:
            return fact._replace(dim=0, of_row=False)
        return fact._replace(dim=None if fact.dim is None else fact.dim + 1)

    def carried(self, state: RowFact, made: RowFact) -> RowFact:
        return state

    def while_loop(self, eqn: jex.JaxprEqn, values: list[RowFact]) -> Sequence[RowFact]:
        return [self.unknown()] * len(eqn.outvars)

    def join(self, one: RowFact, other: RowFact) -> RowFact:
        if one == other:
            return one
        fact, dims = _combined([one, other], _made_of([one, other])), {one.dim, other.dim} - {None}
        counts = one.counts and other.counts
        fact = fact._replace(dim=dims.pop() if len(dims) == 1 else None, counts=counts)
        if (one.over, one.summed) == (other.over, other.summed):
            return fact._replace(summed=one.summed)
        return fact._replace(over=1.0, sure=False)

    def default(self, eqn: jex.JaxprEqn, values: list[RowFact]) -> Sequence[RowFact]:
        if eqn.primitive.name in EQUAL_RESULTS | {"all_to_all"}:
            merged = [RowFact(dim=f.dim, sure=False, trained=f.trained) for f in values]
            return merged[: len(eqn.outvars)]
        dims, base = self._dims(eqn, values), _made_of(values)
        self.mixes = self.mixes or _mixes_rows(eqn, values)
        if None in dims and any(f.dim is not None for f in values):
            base = base._replace(reduced=True)
        if not any(map(is_float, eqn.outvars)):
            base = base._replace(counts=True)
        fact, made = self._scaled(eqn, values, base), []
        for var, dim in zip(eqn.outvars, dims, strict=True):
            if dim is None:
                is_mean = fact.summed > 0 and fact.whole
                made.append(fact._replace(dim=None, statistic=fact.statistic or is_mean))
            else:
                # Along a dim of fewer elements there are groups, whose rows are in another dim.
                sure = fact.sure and not 0 < shape_of(var)[dim] < self._rows
                made.append(fact._replace(summed=0, statistic=False, dim=dim, sure=sure))
        return made

    def _dims(self, eqn: jex.JaxprEqn, values: list[RowFact]) -> list[Dim]:
        """Returns the dim of each result that has the rows."""
        name, dims = eqn.primitive.name, [f.dim for f in values]
        if name == "gather":
            return [dict[Dim, int](enumerate(index_dims(eqn))).get(dims[1])]
        if name == "concatenate":
            dims = [next((d for d in dims if d is not None), None)] * len(dims)
        return sharded_dims(eqn, dims)

    def _scaled(self, eqn: jex.JaxprEqn, values: list[RowFact], base: RowFact) -> RowFact:
        """Returns the fact of a result, except for its dim."""
        name, first = eqn.primitive.name, values[0] if values else base
        if name in ("broadcast_in_dim", "convert_element_type") and first.number is not None:
            return first
        if name in ("square", "integer_pow") and not first.summed:
            power = min(eqn.params.get("y", 2), 8)
            return base.scaled_like(first)._replace(over=_bounded(first.over) ** power)
        if name in _LINEAR:
            first = next((f for f in values if f.dim is not None or f.summed), first)
            pending = first.pending if name == "convert_element_type" else 0
            return base.scaled_like(first)._replace(pending=pending)
        if name == "reduce_sum":
            axes, shape = eqn.params["axes"], shape_of(eqn.invars[0])
            summed = self._counted(eqn.invars[0], first, axes) or first.summed
            pending = 0 if summed else math.prod(shape[d] for d in axes)
            return base.scaled_like(first)._replace(summed=summed, pending=pending)
        with_rows = [f for f in values if f.dim is not None]
        if name in _ADD:  # one certain sum over rows among the addends makes it one
            sums = sorted((f for f in values if f.summed), key=lambda f: (not f.is_sum, not f.sure))
            return base.scaled_like(sums[0]) if sums else _combined(with_rows or values, base)
        if name in _CHOOSE:
            return _combined(with_rows, base)
        if name in ("mul", "div"):
            return self._multiplied(name, values, base)
        return self._product(eqn, values, base) if name == "dot_general" else base

    def _counted(self, atom: Atom, fact: RowFact, axes: Sequence[int]) -> int:
        """Returns the number of rows, or groups of rows, that a sum over these axes adds."""
        if fact.dim is None or fact.dim not in axes:
            return 0
        return min(self._rows, shape_of(atom)[fact.dim])

    def _multiplied(self, name: str, values: list[RowFact], base: RowFact) -> RowFact:
        one, other = values
        if name == "mul" and one.number is not None:
            one, other = other, one
        if other.number is None:
            return _times(one, other, base, divides=name == "div")
        if one.number is not None or other.number == 0 or not math.isfinite(other.number):
            return base._replace(sure=False)
        times, made = abs(other.number), base.scaled_like(one)
        times = times if name == "div" else 1 / times
        if one.pending > 1 and times == one.pending:  # a mean over features
            return made._replace(sure=made.sure and one.pending != self._rows)
        over, count = _bounded(one.over * times), one.summed or self._rows
        whole = one.whole or _is_multiple(times, count) or _is_multiple(over, count)
        # An unbiased variance divides by one less.
        unbiased = count > 2 and any(_is_multiple(n, count - 1) for n in (times, over))
        return made._replace(over=over, whole=whole, sure=made.sure and not unbiased)

    def _product(self, eqn: jex.JaxprEqn, values: list[RowFact], base: RowFact) -> RowFact:
        contracted = eqn.params["dimension_numbers"][0]
        summed = list(map(self._counted, eqn.invars, values, contracted))
        made = _times(values[0], values[1], base, divides=False)
        if all(summed):
            return made._replace(summed=summed[0])
        if any(summed):
            return base._replace(sure=False)
        # A sum over features contains no weight that counts the rows.
        sure = base.sure and all(f.sure for f in values)
        return made._replace(sure=sure) if any(f.trained for f in values) else made


def _made_of(values: Sequence[RowFact]) -> RowFact:
    """Returns the fact of a value that is made of others in an unknown way."""
    reduced = any(f.reduced for f in values)
    return RowFact(
        sure=not reduced,
        reduced=reduced,
        trained=any(f.trained for f in values),
        counts=all(f.counts or f.number is not None for f in values),
        of_row=any(f.of_row for f in values),
        statistic=any(f.statistic for f in values),
    )


def _combined(cases: Sequence[RowFact], base: RowFact) -> RowFact:
    """Returns the fact of a sum or a choice of values with rows."""
    alike = len({f.over for f in cases}) == 1
    over, sure = cases[0].over if alike else 1.0, alike and all(f.sure for f in cases)
    return base._replace(over=over, sure=sure, whole=any(f.whole for f in cases))


def _times(one: RowFact, other: RowFact, base: RowFact, *, divides: bool) -> RowFact:
    """Returns the fact of a product of two values, or of their quotient."""
    sums = [f for f in (one, other) if f.summed]
    if sums:
        # A trained factor leaves a sum a sum; another, or a divisor, may count the rows.
        rest = other if sums[0] is one else one
        known = len(sums) == 1 and rest.trained and not (rest.reduced or divides)
        return base.scaled_like(sums[0]) if known else base
    over = _bounded(one.over / other.over if divides else one.over * other.over)
    # Another factor may divide by the number of rows.
    scales_nothing = (f.trained or (f.counts and f.dim is not None) for f in (one, other))
    sure = base.sure and one.sure and other.sure and all(scales_nothing)
    return base._replace(over=over, sure=sure, whole=one.whole or other.whole)


def _mixes_rows(eqn: jex.JaxprEqn, values: list[RowFact]) -> bool:
    """Returns True for an operation that combines a device's rows with each other."""
    name = eqn.primitive.name
    rows = [f for f in values if f.dim is not None]
    if name in _ADD | {"mul", "div"} and len(rows) == 1:
        (other,) = (f for f in values if f.dim is None)
        softmax = name == "div" and other is values[1] and other.is_sum and not rows[0].counts
        return other.statistic or softmax
    if name == "dot_general" and len(rows) == 2:
        used = zip(*eqn.params["dimension_numbers"], strict=True)
        return all(f.dim not in (*c, *b) for f, (c, b) in zip(values, used, strict=True))
    return False


def _bounded(over: float) -> float:
    return min(max(over, 1e-30), 1e30)


def _is_multiple(value: float, count: int) -> bool:
    times = _bounded(value / count)
    return round(times) >= 1 and math.isclose(times, round(times), rel_tol=1e-3)
