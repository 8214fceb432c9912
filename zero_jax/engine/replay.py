"""A layer as a function of its arrays that can be run again, and how its equations are run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.engine.weights import Apart, Opener, Weight
from zero_jax.remat import policies, recompute
from zero_jax.remat.activations import can_move
from zero_jax.remat.linearized import Linear
from zero_jax.remat.policies import Place, Remat
from zero_jax.remat.recompute import Midway
from zero_jax.tracing import dataflow as reads
from zero_jax.tracing import jaxpr as equations

NONE, BLOCK = policies.parse("none"), policies.parse("block")
Tap = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class How:
    """How equations are run.

    Attributes:
      policy: what layers keep.
      in_loop: whether this is the body of a loop. Outside of one, forward and backward stand in one
        computation, where XLA would merge their two gathers and keep the copy in between.
      bucket_bytes: the most that collectives move at once; a scanned layer that gathers more does
        not hand all of its gradients to the next one to be summed there (but under "none").
      open: what opens weights once for a whole layer, which is run again by others; None where
        every operation gathers for itself.
      outside: whether the gradients are themselves differentiated, see `engine/outside.py`.
      keep_last: whether the last layer may stay gathered between the passes, see `layers.py`.
      evaluate: runs a jaxpr, see `rewrite`: loops and layers have bodies of their own.
    """

    evaluate: Callable[..., list[Any]]
    policy: Remat = NONE
    in_loop: bool = False
    bucket_bytes: float = math.inf
    open: Opener | None = None
    outside: bool = False
    keep_last: bool = False


def replay(
    body: jex.ClosedJaxpr,
    values_of: Callable[[Sequence[Any]], list[Any]],
    weights: set[jex.Var],
    how: How,
    *,
    in_loop: bool,
    midway: bool = False,
) -> recompute.Run:
    """A layer as a function of its arrays that tells which of its results are kept, and what it
    has midway."""
    if how.policy.policy is not None or how.policy.kind == "none":
        return _asked(body, values_of, weights, how, in_loop=in_loop)
    pure = reads.made_of(body.jaxpr, weights)
    kept: dict[int, Any] = _kept(body.jaxpr, pure, how.policy)
    if midway:
        kept |= _midway(body.jaxpr, pure, kept)

    def run(flat: Sequence[Any], tap: Tap, _: Sequence[int]) -> list[Any]:
        # One opener for each run: what one run opened is not there in another.
        once = Opener()
        inside = dataclasses.replace(how, policy=NONE, in_loop=in_loop, open=once)
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
    """The same for a policy of JAX's: like `jax.checkpoint`, it is asked about the derivative too.

    What it keeps goes straight to the linear backward pass, which has no way to point at.
    """
    inside = How(how.evaluate, in_loop=in_loop, outside=how.outside)

    def run(flat: Sequence[Any], tap: Tap, trained: Sequence[int]) -> list[Any]:
        values, moved = values_of(flat), {id(flat[i]) for i in trained}
        moving = [i for i, v in enumerate(values) if _moves(v, moved)]
        whole = list(map(Opener(), values))
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

        return layer.run(evaluate, whole, again=how.outside)

    return run


def _moves(value: Any, moved: set[int]) -> bool:
    """Whether a value has a gradient, given the identities of arrays that do."""
    stopped = isinstance(value, Weight) and value.form.stopped
    return not stopped and any(id(x) in moved for x in Apart([value]).flat)


def _kept(jaxpr: jex.Jaxpr, pure: set[jex.Var], policy: Remat) -> dict[int, Place]:
    """Of the equations whose results are kept, the place."""
    eqns = enumerate(jaxpr.eqns)
    return {i: place for i, e in eqns if (place := place_of(e, pure, policy)) is not None}


def _residuals(jaxpr: jex.Jaxpr, pure: set[jex.Var], results: int) -> dict[int, Place]:
    """Of the equations that make what the backward pass reads, the place."""
    read = {v for v in jaxpr.outvars[results:] if v not in pure}
    return {i: policies.DEVICE for i, e in enumerate(jaxpr.eqns) if not read.isdisjoint(e.outvars)}


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


def _midway(jaxpr: jex.Jaxpr, pure: set[jex.Var], kept: Mapping[int, Any]) -> dict[int, Midway]:
    """The equations by which so much of the layer's products is done."""
    done = list(itertools.accumulate(equations.products(jaxpr)))
    able = [
        at
        for at, e in enumerate(jaxpr.eqns)
        if at not in kept
        and len(e.outvars) == 1
        and e.outvars[0] not in pure
        and can_move(e.outvars[0].aval)
    ]
    found: dict[int, Midway] = {}
    for point in Midway:
        at = next((at for at in able if done[at] >= point.value * done[-1] > 0), None)
        if at is not None:
            found.setdefault(at, point)
    return found
