"""Forms of a parameter before a traced program computes with it: casts, slices, layout.

Parameters are gathered late. Operations that only rearrange a parameter wait until it is full; one
slice of a stack of layers is the same slice of its shards.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax.extend.core as jex

from zero_jax.tracing.jaxpr import LAYOUT, is_in, takes_elements

# Operations that do the same to a slice as to the full array.
_CASTS = frozenset(("convert_element_type", "copy", "name", "stop_gradient"))


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a parameter at some point of a program.

    Attributes:
      leaf: The index of the parameter.
      rank: The number of dims, after slices along dim 0.
      cut: The sharded dim, counted from the end, or None.
      arranged: True if a deferred operation does more than cast. Then no slice can be taken
        before it.
      parted: True for a slice that the program takes, other than that of a loop.
      stopped: True if a deferred `stop_gradient` removes its derivative.
    """

    leaf: int
    rank: int
    cut: int | None
    arranged: bool = False
    parted: bool = False
    stopped: bool = False

    @property
    def may_slice(self) -> bool:
        """True if slices along dim 0 are the same slices of its shards."""
        return not self.arranged and self.rank > 0 and self.cut != -self.rank

    def sliced(self) -> "Form":
        """Returns the form of one element along dim 0."""
        return dataclasses.replace(self, rank=self.rank - 1)


def put_off(eqn: jex.JaxprEqn, form: Form) -> tuple[str, Form] | None:
    """Returns how an operation on a parameter alone is deferred, and its result's form; or None.

    "slice" and "unstack" apply to the shards at once, "later" applies to the gathered array.
    """
    name = eqn.primitive.name
    if name == "unstack" and eqn.params["axis"] == 0 and form.may_slice:
        return "unstack", dataclasses.replace(form.sliced(), parted=True)
    if name not in LAYOUT or len(eqn.invars) != 1:
        return None
    if form.may_slice:
        if name == "slice" and takes_elements(eqn):
            return "slice", dataclasses.replace(form, parted=True)
        if name == "squeeze" and tuple(eqn.params["dimensions"]) == (0,):
            return "slice", dataclasses.replace(form.sliced(), parted=True)
    arranged, stopped = name not in _CASTS, name == "stop_gradient"
    return "later", dataclasses.replace(
        form, arranged=form.arranged or arranged, stopped=form.stopped or stopped
    )


def follow(eqn: jex.JaxprEqn, forms: dict[jex.Var, Form]) -> bool:
    """Adds the results of an equation that only rearranges a parameter; returns whether it does."""
    mine = [a for a in eqn.invars if is_in(a, forms)]
    made = put_off(eqn, forms[mine[0]]) if len(mine) == 1 == len(eqn.invars) else None
    if made is not None:
        forms.update((v, made[1]) for v in eqn.outvars)
    return made is not None


class Use(NamedTuple):
    """An equation that computes with parameters.

    Attributes:
      at: Its position.
      eqn: The equation.
      forms: The parameters among its operands.
    """

    at: int
    eqn: jex.JaxprEqn
    forms: list[Form]


def uses(jaxpr: jex.Jaxpr, forms: dict[jex.Var, Form]) -> Iterator[Use]:
    """Yields the equations that compute with parameters, in order.

    Args:
      jaxpr: With inlined calls.
      forms: The variables that are parameters; those that are made of them are added.
    """
    for at, eqn in enumerate(jaxpr.eqns):
        mine = [forms[a] for a in eqn.invars if is_in(a, forms)]
        if mine and not follow(eqn, forms):
            yield Use(at, eqn, mine)
