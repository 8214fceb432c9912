"""Parameters inside the traced loss, gathered just before the first operation that computes.

The loss is traced with full arrays. When the trace is executed, a `LazyParam` replaces each
parameter. Operations that only rearrange it are deferred until it is gathered, by the rules of
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


@dataclasses.dataclass(frozen=True, eq=False)
class Param:
    """A parameter on this device; equal only to itself, so that it is gathered once for several.

    Attributes:
      arrays: Its shard, or a copy with its shard beside it.
      full: Gathers the full parameter from the arrays, in the compute dtype; differentiable.
      free: True if that neither communicates nor computes (stages 0 and 1).
      rows_of: For a table that is looked up: returns the rows that a gather takes, given the
        arrays, the gather's indices and its parameters.
      local: True if `full` does not communicate, since every device has a copy (stages 0 to 2).
      reduce: Returns the gradients of the arrays, None for an array without one, given the
        gradient of the full parameter.
    """

    arrays: tuple[Any, ...]
    full: Callable[..., Any]
    free: bool
    rows_of: Callable[..., Any] | None = None
    local: bool = False
    reduce: Callable[[Any], tuple[Any, ...]] = lambda gradient: (gradient,)

    def of(self, arrays: Arrays) -> "Param":
        """Returns the parameter with other arrays."""
        return dataclasses.replace(self, arrays=tuple(arrays))

    def gather(self) -> Any:
        """Returns the full parameter."""
        return self.full(*self.arrays)


def full(array: Any) -> Param:
    """Returns a full array as a parameter."""
    return Param((array,), lambda x: x, free=True, local=True)


@dataclasses.dataclass(frozen=True)
class LazyParam:
    """A parameter in a program before it is gathered.

    Attributes:
      param: The parameter.
      form: What has become of it.
      after: The operations that are deferred until it is full.
    """

    param: Param
    form: Form
    after: tuple[Callable[[Any], Any], ...] = ()

    def of(self, arrays: Arrays) -> "LazyParam":
        """Returns the same with other arrays."""
        return dataclasses.replace(self, param=self.param.of(arrays))

    def sliced(self) -> "LazyParam":
        """Returns the parameter in the body of a loop, where its arrays are slices."""
        return dataclasses.replace(self, form=self.form.sliced())

    def finish(self, full: Any) -> Any:
        """Applies the deferred operations to the full parameter."""
        for fun in self.after:
            full = fun(full)
        return full

    def rows(self, eqn: jex.JaxprEqn, indices: Any) -> Any:
        """Returns the rows that a gather takes of a table that is looked up.

        The deferred operations are casts, and apply to rows as to the table.
        """
        assert self.param.rows_of is not None
        return self.finish(self.param.rows_of(self.param.arrays, indices, eqn.params))

    def through(self, eqn: jex.JaxprEqn) -> list["LazyParam"] | None:
        """Returns the result of an operation that only rearranges it, None for any other."""
        made = put_off(eqn, self.form)
        if made is None:
            return None
        (how, form), arrays = made, self.param.arrays
        if how == "unstack":
            parts: Any = zip(*(jax.numpy.unstack(x, axis=0) for x in arrays), strict=True)
            return [dataclasses.replace(self.of(own), form=form) for own in parts]
        if how == "slice":
            return [dataclasses.replace(self.of([_slice(eqn, x) for x in arrays]), form=form)]
        after = (*self.after, _deferred(eqn))
        return [dataclasses.replace(self, form=form, after=after)]


def _deferred(eqn: jex.JaxprEqn) -> Callable[[Any], Any]:
    """Returns an operation as a function; a cast takes arrays of any shape."""
    if eqn.primitive.name == "convert_element_type":
        return lambda full: full.astype(eqn.params["new_dtype"])
    run = function(eqn)
    return lambda full: run(full)[0]


def _slice(eqn: jex.JaxprEqn, x: Any) -> Any:
    if eqn.primitive.name == "squeeze":
        return jax.lax.squeeze(x, (0,))
    start, stop = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
    strides = eqn.params["strides"]
    return jax.lax.slice_in_dim(x, start, stop, strides[0] if strides else 1)


class Operands:
    """Operands of operations, arrays and parameters, and what they are made of.

    Attributes:
      values: The operands.
      plain: Those that are arrays.
      params: The parameters, each once.
    """

    def __init__(self, values: Sequence[Any]):
        self.values = values
        self.plain = [v for v in values if not isinstance(v, LazyParam)]
        self.params = list(dict.fromkeys(v.param for v in values if isinstance(v, LazyParam)))

    @property
    def free(self) -> bool:
        """True if to gather all of them neither communicates nor computes."""
        return all(param.free for param in self.params)

    @property
    def arrays(self) -> list[Any]:
        """The arrays of all parameters."""
        return [x for param in self.params for x in param.arrays]

    @property
    def flat(self) -> list[Any]:
        """All arrays: plain ones first."""
        return [*self.plain, *self.arrays]

    def rebuilt(self, flat: Arrays) -> list[Any]:
        """Returns the operands with other arrays, in the order of `flat`."""
        it = iter(flat[len(self.plain) :])
        own = [param.of([next(it) for _ in param.arrays]) for param in self.params]
        return self.of(flat[: len(self.plain)], own)

    def of(self, plain: Arrays, params: Sequence[Param]) -> list[Any]:
        """Returns the operands with other arrays and parameters."""
        it, known = iter(plain), dict(zip(self.params, params, strict=True))
        return [
            dataclasses.replace(v, param=known[v.param]) if isinstance(v, LazyParam) else next(it)
            for v in self.values
        ]


class GatherOnce:
    """Makes arrays of operands; gathers each parameter once for all of them."""

    def __init__(self) -> None:
        self._known: dict[Param, Any] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, LazyParam):
            return value
        if value.param not in self._known:
            self._known[value.param] = value.param.gather()
        return value.finish(self._known[value.param])


def gathered(value: Any) -> Any:
    """Returns an operand as an array."""
    return GatherOnce()(value)
