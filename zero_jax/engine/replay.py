"""Layers as functions of their arrays, to be recomputed, and options of their execution."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.engine.lazy_param import GatherOnce, LazyParam, Operands
from zero_jax.remat import policies, recompute
from zero_jax.remat.linearized import Linear
from zero_jax.remat.policies import Place, Remat, can_move
from zero_jax.tracing import dataflow as reads
from zero_jax.tracing import jaxpr as equations

NONE, BLOCK = policies.parse("none"), policies.parse("block")
Tap = Callable[[Any, Any], Any]
# The gradients of the layer after this one are required when so much of the products is left.
MIDWAY = 2 / 3


@dataclasses.dataclass(frozen=True)
class How:
    """How equations are run.

    Attributes:
      evaluate: Runs a jaxpr, see `execute.py`.
      policy: The remat policy of layers.
      in_loop: True in the body of a loop. Outside of one, forward and backward pass are in one
        computation, where XLA would merge their two gathers and keep the copy in between.
      bucket_bytes: The maximum bytes per collective.
      once: Gathers each parameter once for a full layer; None where every operation gathers for
        itself.
      outside: True if the gradients are differentiated again, see `outside.py`.
      keep_last: True if the last layer may stay gathered between the passes, see `layers.py`.
      unroll: True if the layers of a scan are unrolled, see `scans.unrolls`.
    """

    evaluate: Callable[..., list[Any]]
    policy: Remat = NONE
    in_loop: bool = False
    bucket_bytes: float = math.inf
    once: GatherOnce | None = None
    outside: bool = False
    keep_last: bool = False
    unroll: bool = False


def replay(
    body: jex.ClosedJaxpr,
    values_of: Callable[[Sequence[Any]], list[Any]],
    weights: set[jex.Var],
    how: How,
    *,
    in_loop: bool,
    midway: bool = False,
) -> recompute.Run:
    """Returns a layer as a function of its arrays, which calls `tap` with results that the policy
    saves, and with `midway` at points of the layer."""
    if how.policy.policy is not None or how.policy.kind == "none":
        return _asked(body, values_of, weights, how, in_loop=in_loop)
    pure = reads.made_of(body.jaxpr, weights)
    kept: dict[int, Any] = _kept(body.jaxpr, pure, how.policy)
    if midway:
        kept |= _midway(body.jaxpr, pure, kept)

    def run(flat: Sequence[Any], tap: Tap, *_: Any) -> list[Any]:
        # New in each run: its arrays belong to that run.
        once = GatherOnce()
        inside = dataclasses.replace(how, policy=NONE, in_loop=in_loop, once=once)
        return [once(x) for x in how.evaluate(body, values_of(flat), inside, kept=kept, tap=tap)]

    return run


def _asked(
    body: jex.ClosedJaxpr,
    values_of: Callable[[Sequence[Any]], list[Any]],
    weights: set[jex.Var],
    how: How,
    *,
    in_loop: bool,
) -> recompute.Run:
    """The same for policies of JAX, and for "none", which decide on the derivative's equations too.

    Saved values go straight to the linear backward pass, which has no points midway.
    """
    inside = How(how.evaluate, in_loop=in_loop, outside=how.outside)

    def run(
        flat: Sequence[Any], tap: Tap, trained: Sequence[int], differentiated: bool
    ) -> list[Any]:
        values, moved = values_of(flat), {id(flat[i]) for i in trained}
        pairs = zip(values, body.jaxpr.invars, strict=True)
        # A parameter may have been cast to integers.
        moving = [i for i, (x, v) in enumerate(pairs) if _moves(x, moved) and equations.is_float(v)]
        whole = list(map(GatherOnce(), values))
        if not moving:
            return how.evaluate(body, whole, inside)
        layer = Linear.of(body, moving)
        pairs = zip(body.jaxpr.invars, layer.closed.jaxpr.invars, strict=True)
        pure = reads.made_of(layer.closed.jaxpr, {own for var, own in pairs if var in weights})
        if how.policy.kind == "none":
            kept = _residuals(layer.closed.jaxpr, pure, layer.count)
        else:
            kept = _kept(layer.closed.jaxpr, pure, how.policy)

        def evaluate(values: Sequence[Any]) -> list[Any]:
            return how.evaluate(layer.closed, values, inside, kept=kept, tap=tap)

        if how.outside and not differentiated:
            # Only a second derivative sees this run, also with respect to inputs that do not move.
            return evaluate(whole)[: layer.count]
        return layer.run(evaluate, whole, again=how.outside)

    return run


def _moves(value: Any, moved: set[int]) -> bool:
    """Returns whether a value has a gradient, given the identities of arrays that do."""
    stopped = isinstance(value, LazyParam) and value.form.stopped
    return not stopped and any(id(x) in moved for x in Operands([value]).flat)


def _kept(jaxpr: jex.Jaxpr, pure: set[jex.Var], policy: Remat) -> dict[int, Place]:
    """Returns the place of each equation whose results are saved."""
    return equations.by_equation(jaxpr, lambda eqn: place_of(eqn, pure, policy))


def _residuals(jaxpr: jex.Jaxpr, pure: set[jex.Var], results: int) -> dict[int, Place]:
    """Returns the place of each equation whose results the backward pass reads."""
    read = {v for v in jaxpr.outvars[results:] if equations.is_var(v) and v not in pure}
    return equations.by_equation(
        jaxpr, lambda eqn: None if read.isdisjoint(eqn.outvars) else policies.DEVICE
    )


def place_of(eqn: jex.JaxprEqn, pure: set[jex.Var], policy: Remat) -> Place | None:
    """Returns where the results of an equation are saved, or None, as for gathered parameters."""
    place = policy.place_of(eqn)
    if place is None or not any(v in pure for v in eqn.outvars):
        return place
    if policy.kind != "names":
        return None
    raise ValueError(
        f"`remat`={str(policy)!r}: the value marked {eqn.params['name']!r} depends on parameters "
        "alone. Gathered parameters are never saved, they are gathered again. Mark activations "
        "instead, or remove that name"
    )


def _midway(jaxpr: jex.Jaxpr, pure: set[jex.Var], kept: Mapping[int, Place]) -> dict[int, None]:
    """Returns the first equation that can be tapped after two thirds of the layer's products."""

    def able(eqn: jex.JaxprEqn) -> bool | None:
        made = eqn.outvars
        moves = len(made) == 1 and made[0] not in pure and can_move(made[0].aval)
        return True if moves else None

    done = list(itertools.accumulate(equations.products(jaxpr)))
    least = MIDWAY * done[-1] if done else 0
    places = (at for at in equations.by_equation(jaxpr, able) if at not in kept)
    at = next((at for at in places if done[at] >= least > 0), None)
    return {} if at is None else {at: None}
