"""How a split over `model` spreads: through constraints too, which say it anew.

Weights and named activations say which of their dims is split.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.jaxpr import spread as any_axis
from zero_jax.jaxpr.spread import Dim
from zero_jax.sharding.mesh import MODEL


def spread(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> list[Dim]:
    """As `jaxpr.spread.spread`, of the axis `model`."""
    if eqn.primitive.name == "sharding_constraint":
        return [dim_of(eqn.params["sharding"].spec)]
    return any_axis.spread(eqn, given)


def dim_of(spec: Any) -> Dim:
    """The dim of a PartitionSpec that is over `model`."""
    entries = [e if isinstance(e, tuple) else (e,) for e in spec]
    return next((d for d, names in enumerate(entries) if MODEL in names), None)
