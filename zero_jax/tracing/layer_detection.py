"""Detection of unrolled layers: stretches of a trace that repeat with other parameters.

Layers are adjacent: the same equations again and again, each time on other parameters. The boundary
of two layers is where the fewest bytes are alive: at a layer's input, not within the norm that
follows. Recomputing any stretch of a program gives the same values, so the layers decide on memory
and overlap, never on results.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from zero_jax.tracing.forms import Form, follow, uses
from zero_jax.tracing.jaxpr import bytes_of, is_in, last_reads, state_of

# A stretch whose own parts repeat over so much of it is several layers.
_MOST = 0.5


def runs_of(jaxpr: jex.Jaxpr, forms: dict[jex.Var, Form]) -> list[list[list[int]]]:
    """Returns the runs of adjacent layers, in order: for each layer the positions of its equations,
    without those that only rearrange parameters.

    Args:
      jaxpr: With inlined calls.
      forms: The variables that are parameters, or slices of them.
    """
    forms = dict(forms)
    computes, reads, stops = [], [], set()
    for at, eqn in enumerate(jaxpr.eqns):
        mine = [forms[a] for a in eqn.invars if is_in(a, forms)]
        if mine and follow(eqn, forms):
            continue
        if eqn.primitive.name == "stop_gradient":
            stops.add(at)  # belongs to its reader, and is no part of the repetition
            continue
        computes.append(at)
        # Layers differ by their matrices.
        reads.append(frozenset(form.leaf for form in mine if form.rank > 1))
    marks: dict[Any, int] = {}
    keys = [_key(jaxpr.eqns[at], forms) for at in computes]
    kinds = np.array([marks.setdefault(key, len(marks)) for key in keys], np.int64)
    alive = _alive(jaxpr, forms)
    found = _within(kinds, reads, [alive[at] for at in computes], 0, len(computes))
    own = stops.union(computes)

    def equations(a: int, b: int) -> list[int]:
        first = computes[a - 1] + 1 if a else 0
        return [at for at in range(first, computes[b - 1] + 1) if at in own]

    return [[equations(a, b) for a, b in run] for run in found]


def scans_of(jaxpr: jex.Jaxpr, forms: Mapping[jex.Var, Form]) -> list[int]:
    """Returns the equations that scan over parameters, given the variables that are parameters."""
    forms, found = dict(forms), []
    for at, eqn, _ in uses(jaxpr, forms):
        if eqn.primitive.name == "scan":
            stacks = eqn.invars[sum(state_of(eqn)) :]
            if any(is_in(a, forms) and forms[a].may_slice for a in stacks):
                found.append(at)
    return found


def _key(eqn: jex.JaxprEqn, forms: dict[jex.Var, Form]) -> Any:
    """Returns the properties of an equation that are the same in every layer."""
    given = tuple((is_in(a, forms), str(a.aval)) for a in eqn.invars)
    return eqn.primitive.name, given, tuple(str(v.aval) for v in eqn.outvars)


def _within(
    kinds: np.ndarray, reads: Sequence[frozenset[int]], alive: Sequence[int], start: int, stop: int
) -> list[list[tuple[int, int]]]:
    """Returns runs of layers between two operations, each as (first, after the last) operation."""
    best = _longest(kinds[start:stop], reads[start:stop])
    if best is None:
        return []
    period, first, last = best[0], start + best[1], start + best[2]
    layers = _cut(alive, period, first, last, start, stop)
    a, b = layers[1]
    inner = _within(kinds, reads, alive, a, b)
    covered = sum(run[-1][1] - run[0][0] for run in inner)
    # The more numerous ones are the layers.
    if covered > _MOST * (b - a) and max(map(len, inner)) > len(layers):
        own = [run for a, b in layers for run in _within(kinds, reads, alive, a, b)]
    else:
        own = [layers]
    before = _within(kinds, reads, alive, start, layers[0][0])
    after = _within(kinds, reads, alive, layers[-1][1], stop)
    return [*before, *own, *after]


def _longest(kinds: np.ndarray, reads: Sequence[frozenset[int]]) -> tuple[int, int, int] | None:
    """Returns (period, start, stop) of the longest repetition, with the shortest such period."""
    alike: dict[int, list[int]] = {}
    for at, leaves in enumerate(reads):
        if leaves:
            alike.setdefault(int(kinds[at]), []).append(at)
    periods = {
        b - a
        for places in alike.values()
        for i, a in enumerate(places)
        for b in places[i + 1 :]
        if reads[a].isdisjoint(reads[b]) and 2 * (b - a) <= len(kinds)
    }
    best, most = None, 0
    for period in sorted(periods):
        for start, stop in _repeated(kinds, period):
            if stop - start > most and _other_leaves(reads, period, start, stop):
                best, most = (period, start, stop), stop - start
    return best


def _repeated(kinds: np.ndarray, period: int) -> list[tuple[int, int]]:
    """Returns the stretches of at least two periods in which every operation repeats."""
    same = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
    return [(int(a), int(b) + period) for a, b in edges if b - a >= period]


def _other_leaves(reads: Sequence[frozenset[int]], period: int, start: int, stop: int) -> bool:
    """Returns whether each period reads a parameter that the previous one does not."""
    for a in range(start, stop - 2 * period + 1, period):
        one = frozenset().union(*reads[a : a + period])
        two = frozenset().union(*reads[a + period : a + 2 * period])
        if not two - one:
            return False
    return True


def _cut(
    alive: Sequence[int], period: int, first: int, last: int, low: int, high: int
) -> list[tuple[int, int]]:
    """Returns layers of one period, split where the fewest bytes are alive between two."""
    starts = range(first, min(first + period, last - 2 * period + 1))
    begin = min(starts, key=lambda at: alive[at + period])
    bounds = list(range(begin, last + 1, period))
    # The first layer may begin in another way: what is before the cut belongs to it.
    if 2 * (begin - first) > period:
        before = max(low, begin - period - period // 2)
        bounds.insert(0, min(range(before, first + 1), key=lambda at: alive[at]))
    # And the last may go on.
    if 2 * (last - bounds[-1]) > period and bounds[-1] + period <= high:
        bounds.append(bounds[-1] + period)
    return list(itertools.pairwise(bounds))


def _alive(jaxpr: jex.Jaxpr, weights: dict[jex.Var, Form]) -> list[int]:
    """Returns the bytes of live activations before each equation, and after the last."""
    last = last_reads(jaxpr)
    change = [0] * (len(jaxpr.eqns) + 2)
    for i, eqn in enumerate(jaxpr.eqns):
        for var in eqn.outvars:
            if var in last and var not in weights and hasattr(var.aval, "dtype"):
                change[i + 1] += bytes_of(var)
                change[last[var] + 1] -= bytes_of(var)
    alive = [0]
    for step in change[1:-1]:
        alive.append(alive[-1] + step)
    return alive
