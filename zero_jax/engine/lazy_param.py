"""Parameters inside the traced loss, gathered just before the first operation that computes.

The loss is traced with full arrays. When the trace is executed, a `Weight` replaces each parameter.
Operations that only rearrange it are deferred until it is gathered, by the rules of
`tracing/forms.py`, which `param_plan.py` follows too: so plan and execution agree.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.collectives.barriers import Arrays
from zero_jax.tracing.forms import Form, put_off
from zero_jax.tracing.jaxpr import function


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a weight comes from; equal only to itself, so that it can be opened once for several.

    Attributes:
      arrays: what it is made of: a shard, or a copy with its shard beside it.
      make: makes the leaf of them, in the compute dtype, differentiably.
      free: whether that sends nothing and makes nothing (stages 0 and 1).
      rows: of a table that is looked up: makes the rows that a gather takes, of the arrays, the
        gather's indices and its parameters.
      local: whether making it communicates nothing, since every device has a copy (stages 0 to 2).
      back: makes gradients of the arrays of that of the leaf, None for an array without.
    """

    arrays: tuple[Any, ...]
    make: Callable[..., Any]
    free: bool
    rows: Callable[..., Any] | None = None
    local: bool = False
    back: Callable[[Any], tuple[Any, ...]] = lambda gradient: (gradient,)

    def of(self, arrays: Arrays) -> "Source":
        """The same, made of other arrays."""
        return dataclasses.replace(self, arrays=tuple(arrays))

    def open(self) -> Any:
        """The whole leaf."""
        return self.make(*self.arrays)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A leaf that is not there yet.

    Attributes:
      source: its arrays, and what opens them.
      form: what became of it so far.
      after: what waits until it is whole.
    """

    source: Source
    form: Form
    after: tuple[Callable[[Any], Any], ...] = ()

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.source.arrays

    def of(self, arrays: Arrays) -> "Weight":
        """The same, made of other arrays."""
        return dataclasses.replace(self, source=self.source.of(arrays))

    def sliced(self) -> "Weight":
        """As the body of a loop sees it, once its arrays are slices."""
        return dataclasses.replace(self, form=self.form.sliced())

    def finish(self, whole: Any) -> Any:
        """What waited for the whole leaf."""
        for fun in self.after:
            whole = fun(whole)
        return whole

    def open(self) -> Any:
        """The array."""
        return self.finish(self.source.open())

    def rows(self, eqn: jex.JaxprEqn, indices: Any) -> Any:
        """The rows that a gather takes of a table that is looked up. What waited for the table
        casts: it does the same to them."""
        assert self.source.rows is not None
        return self.finish(self.source.rows(self.arrays, indices, eqn.params))

    def through(self, eqn: jex.JaxprEqn) -> list["Weight"] | None:
        """What an operation that only re-arranges it makes of it; None if it does more."""
        made = put_off(eqn, self.form)
        if made is None:
            return None
        how, form = made
        if how == "unstack":
            parts = [jax.numpy.unstack(x, axis=0) for x in self.arrays]
            arrays: Any = zip(*parts, strict=True)
            return [dataclasses.replace(self.of(own), form=form) for own in arrays]
        if how == "slice":
            own = [_slice(eqn, x) for x in self.arrays]
            return [dataclasses.replace(self.of(own), form=form)]
        after = (*self.after, _waiting(eqn))
        return [dataclasses.replace(self, form=form, after=after)]


def _waiting(eqn: jex.JaxprEqn) -> Callable[[Any], Any]:
    """An operation on a leaf, of whatever shape if it is a cast."""
    if eqn.primitive.name == "convert_element_type":
        return lambda whole: whole.astype(eqn.params["new_dtype"])
    run = function(eqn)
    return lambda whole: run(whole)[0]


def _slice(eqn: jex.JaxprEqn, x: Any) -> Any:
    if eqn.primitive.name == "squeeze":
        return jax.lax.squeeze(x, (0,))
    start, stop = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
    strides = eqn.params["strides"]
    return jax.lax.slice_in_dim(x, start, stop, strides[0] if strides else 1)


class Apart:
    """Values taken apart into plain arrays and the sources of weights, and put together again."""

    def __init__(self, values: Sequence[Any]):
        self.values = values
        self.plain = [v for v in values if not isinstance(v, Weight)]
        # Several values may come from one source: it is opened once for all of them.
        self.sources = list(dict.fromkeys(v.source for v in values if isinstance(v, Weight)))

    @property
    def free(self) -> bool:
        """Whether to open all of them sends nothing and makes nothing."""
        return all(source.free for source in self.sources)

    @property
    def arrays(self) -> list[Any]:
        """Those of all sources."""
        return [x for source in self.sources for x in source.arrays]

    @property
    def flat(self) -> list[Any]:
        """All arrays: plain ones first."""
        return [*self.plain, *self.arrays]

    def together(self, flat: Arrays) -> list[Any]:
        """The values, made of other arrays."""
        it = iter(flat[len(self.plain) :])
        own = [s.of([next(it) for _ in s.arrays]) for s in self.sources]
        return self.of(flat[: len(self.plain)], own)

    def of(self, plain: Arrays, sources: Sequence["Source"]) -> list[Any]:
        """The values, of other arrays and sources."""
        it, known = iter(plain), dict(zip(self.sources, sources, strict=True))
        return [
            dataclasses.replace(v, source=known[v.source]) if isinstance(v, Weight) else next(it)
            for v in self.values
        ]


def whole(array: Any) -> Source:
    """A source that is the leaf itself."""
    return Source((array,), lambda x: x, free=True, local=True)


class Opener:
    """Opens each source once for all that read it: within a layer, run again as a whole."""

    def __init__(self) -> None:
        self._known: dict[Source, Any] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Weight):
            return value
        if value.source not in self._known:
            self._known[value.source] = value.source.open()
        return value.finish(self._known[value.source])


def opened(value: Any) -> Any:
    """The array, of whatever."""
    return value.open() if isinstance(value, Weight) else value
