"""Runs layers that are not scanned, as the remat policy says: one by one, in groups, as a chain."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.engine import chain
from zero_jax.engine.replay import How, replay
from zero_jax.engine.weights import Apart, Weight, whole
from zero_jax.jaxpr import equations
from zero_jax.remat import layer_groups, policies, recompute
from zero_jax.remat.activations import can_move

_BLOCK = policies.parse("block")


def run_layers(
    layers: Sequence[Sequence[int]],
    env: dict[Any, Any],
    stretch: equations.Stretches,
    fixed: set[jex.Var],
    how: How,
) -> None:
    """Runs layers that are not scanned; extends `env` by their results.

    Args:
      layers: of each its equations.
      env: what is known before the first.
      stretch: makes a jaxpr of equations.
      fixed: variables that are there from the beginning, and stay.
      how: how equations are run.
    """
    if how.policy.kind == "none":
        for body in map(stretch, layers):
            apart = Apart([env[v] for v in body.jaxpr.invars])
            apart = apart if apart.free else apart.tied()
            outs = how.evaluate(body, apart.values, how)
            env.update(zip(body.jaxpr.outvars, outs, strict=True))
    elif how.policy.kind == "block_sqrt":
        for group in layer_groups.neighbours(layers):
            _group(group, env, stretch, fixed, how)
    else:
        _chain(layers, env, stretch, fixed, how)


def _own_inputs(
    body: jex.ClosedJaxpr, layer: Sequence[int], stretch: equations.Stretches, fixed: set[jex.Var]
) -> set[jex.Var]:
    """What a layer reads that nothing after it does: its input."""
    given = [v for v in body.jaxpr.invars if v not in fixed and can_move(v.aval)]
    return {v for v in given if stretch.last_read[v] <= layer[-1]}


def _group(
    layers: Sequence[Sequence[int]],
    env: dict[Any, Any],
    stretch: equations.Stretches,
    fixed: set[jex.Var],
    how: How,
) -> None:
    """Runs neighbouring layers, which are run again as a whole, and then each by itself."""
    body = stretch([at for layer in layers for at in layer])
    values = [env[v] for v in body.jaxpr.invars]
    apart = Apart(values)
    own = _own_inputs(body, layers[-1], stretch, fixed)
    plain = [v for v in body.jaxpr.invars if not isinstance(env[v], Weight)]
    places = {i: how.policy.inputs for i, v in enumerate(plain) if v in own}
    starts = [sum(map(len, layers[:i])) for i in range(len(layers))]
    inner = [range(a, a + len(layer)) for a, layer in zip(starts, layers, strict=True)]

    def run(flat: Sequence[Any], *_: Any) -> list[Any]:
        inside = dataclasses.replace(how, policy=_BLOCK)
        return how.evaluate(body, apart.together(flat), inside, runs=[inner])

    outs = recompute.layer(run, places, barrier=True)(*apart.flat)
    env.update(zip(body.jaxpr.outvars, outs, strict=True))


def _chain(
    layers: Sequence[Sequence[int]],
    env: dict[Any, Any],
    stretch: equations.Stretches,
    fixed: set[jex.Var],
    how: How,
) -> None:
    """Runs layers that gather while the one before them computes."""
    links, shards = [], []
    for layer in layers:
        body = stretch(layer)
        given = body.jaxpr.invars
        weights = {v for v in given if isinstance(env.get(v), Weight)}
        apart = Apart([env[v] for v in given if v in weights])
        reads = [v for v in given if v not in weights]
        own = _own_inputs(body, layer, stretch, fixed)
        places = {i: how.policy.inputs for i, v in enumerate(reads) if v in own}

        def values(flat: Sequence[Any], given: Any = given, apart: Any = apart) -> list[Any]:
            count = len(apart.sources)
            leaves, rest = iter(apart.of([], list(map(whole, flat[:count])))), iter(flat[count:])
            return [next(leaves) if isinstance(env.get(v), Weight) else next(rest) for v in given]

        run = replay(body, values, weights, how, in_loop=False, midway=True)
        links.append(chain.Link(run, apart.sources, reads, body.jaxpr.outvars, places))
        shards.append(apart.arrays)
    made = {v for link in links for v in link.makes}
    given = list(dict.fromkeys(v for link in links for v in link.reads if v not in made))
    results = [v for v in made if stretch.last_read[v] > layers[-1][-1]]
    outs = chain.chain(links, given, results)([env[v] for v in given], shards)
    env.update(zip(results, outs, strict=True))
