"""Execution of a traced loss on shards: gathers, recomputation, saved activations and overlap.

A parameter is gathered just before the first equation that computes with it, and again in the
backward pass, which sends the third Ψ of stage 3's 3Ψ elements (ZeRO, section 7.2.2). Its use
decides how:

  slices of a scan         enter it as shards and are gathered layer by layer (scans.py)
  what a loop reads in     is gathered once before it; so is what a branch reads, since devices may
  every iteration          take different branches
  a matrix last used       is gathered during the last layer (layers.py)
  after the layers
  a table of which few     is not gathered: every device receives the rows that it asks for
  rows are read            (collectives/lookup.py)
  a layer                  gathers once, and is recomputed as the remat policy says: the body of a
                           scan, a repeated stretch, the model's own `jax.checkpoint`
  any other operation      is fused with its gather: the shard is saved
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.engine.lazy_param import LazyParam, Operands, Param, full, gathered
from zero_jax.engine.lifetimes import Positions
from zero_jax.engine.param_plan import is_own_remat
from zero_jax.engine.replay import BLOCK, NONE, How, Tap, place_of, replay
from zero_jax.engine.scans import LayerScan
from zero_jax.engine.unrolled import UnrolledLayers
from zero_jax.remat import policies, recompute
from zero_jax.remat.policies import Place, Remat
from zero_jax.tracing import jaxpr as equations

# Operations that choose their own residuals. A loop is too expensive to run again, and a function
# with its own gradient should not be.
_KEEPS = frozenset(("scan", "custom_vjp_call"))


def run(closed: jex.ClosedJaxpr, args: Sequence[Any], how: How, positions: Positions) -> list[Any]:
    """Runs a traced loss.

    Args:
      closed: Its jaxpr, with inlined calls.
      args: Its inputs, parameters and arrays.
      how: How equations are run.
      positions: Where its layers are.

    Raises:
      ValueError: A name of the remat policy marks nothing, or a parameter.
    """
    _check_names(closed.jaxpr, how.policy)
    return [gathered(x) for x in evaluate(closed, args, how, positions)]


def evaluate(
    closed: jex.ClosedJaxpr,
    args: Sequence[Any],
    how: How,
    positions: Positions = Positions(),  # noqa: B008
    *,
    kept: Mapping[int, Place] | None = None,
    tap: Tap | None = None,
) -> list[Any]:
    """Evaluates a jaxpr; equations without parameters run together, in stretches.

    Args:
      closed: The jaxpr, with inlined calls.
      args: Its inputs, arrays or parameters.
      how: How equations are run.
      positions: Where its layers are.
      kept: By equation, the place where its results are saved; they go through `tap`.
      tap: Returns the value that replaces a saved result.
    """
    kept, starts = kept or {}, {layers[0][0]: layers for layers in positions.unrolled}
    program = _Running(closed, args, how, positions)
    at = 0
    while at < len(closed.jaxpr.eqns):
        if at in starts:
            program.layers(starts[at])
            at = starts[at][-1][-1] + 1
            continue
        program.one(at)
        if at in kept and tap is not None:
            program.told(at, kept[at], tap)
        at += 1
    return program.results()


class _Running:
    """A program during its evaluation: known values, and equations that are run together later."""

    def __init__(
        self, closed: jex.ClosedJaxpr, args: Sequence[Any], how: How, positions: Positions
    ):
        self._jaxpr, self._how, self._positions = closed.jaxpr, how, positions
        self._env = dict(zip(self._jaxpr.invars, args, strict=True))
        # JAX's own functions are given arrays, where a trace may hold NumPy's.
        self._env.update(zip(self._jaxpr.constvars, map(jnp.asarray, closed.consts), strict=True))
        self._fixed = set(self._env)
        self._stretch = equations.Stretches(self._jaxpr)
        self._waiting: list[int] = []

    def one(self, at: int) -> None:
        """Runs an equation; one without parameters later, with its neighbours."""
        eqn = self._jaxpr.eqns[at]
        if not any(isinstance(self._env.get(a), LazyParam) for a in equations.variables([eqn])):
            self._waiting.append(at)
        elif eqn.outvars or eqn.effects:  # jax 0.10 leaves emptied calls behind
            self._flush()
            values = [equations.read(self._env, a) for a in eqn.invars]
            heads = self._heads_of(at)
            last, unroll = at == self._positions.last, at in self._positions.scans
            how = dataclasses.replace(self._how, keep_last=last, unroll=unroll)
            made = run_equation(eqn, values, how, heads.params)
            self._env.update(zip(eqn.outvars, made, strict=False))
            if len(made) > len(eqn.outvars):
                self._gathered(heads, made[len(eqn.outvars) :])

    def _gathered(self, heads: Operands, arrays: Sequence[Any]) -> None:
        """Replaces heads that were gathered during the last layer."""
        new = dict(zip(heads.params, map(full, arrays), strict=True))
        for var, x in self._env.items():
            if isinstance(x, LazyParam) and x.param in new:
                self._env[var] = dataclasses.replace(x, param=new[x.param])

    def layers(self, layers: Sequence[Sequence[int]]) -> None:
        """Runs unrolled layers, and the equations between them that only rearrange parameters."""
        own = {at for layer in layers for at in layer}
        for other in range(layers[0][0], layers[-1][-1] + 1):
            if other not in own:
                self.one(other)
        self._flush()
        how = dataclasses.replace(self._how, keep_last=layers[0][0] == self._positions.last)
        unrolled = UnrolledLayers(self._env, self._stretch, self._fixed, how)
        if how.policy.kind == "block_sqrt":
            unrolled.run_in_groups(layers)
        else:
            heads = self._heads_of(layers[-1][-1])
            self._gathered(heads, unrolled.run(layers, heads.params))

    def _heads_of(self, at: int) -> Operands:
        inputs = self._jaxpr.invars
        return Operands([self._env[inputs[i]] for i in self._positions.heads.get(at, ())])

    def told(self, at: int, place: Place, tap: Tap) -> None:
        """Replaces an equation's results by the values that `tap` returns."""
        self._flush()
        made = self._jaxpr.eqns[at].outvars
        for var in made:
            if not isinstance(self._env.get(var), (LazyParam, type(None))):
                self._env[var] = tap(self._env[var], place)

    def results(self) -> list[Any]:
        self._flush()
        return [equations.read(self._env, a) for a in self._jaxpr.outvars]

    def _flush(self) -> None:
        if self._waiting:
            part = self._stretch(self._waiting)
            outs = equations.as_function(part)(*(self._env[v] for v in part.jaxpr.invars))
            self._env.update(zip(part.jaxpr.outvars, outs, strict=True))
            self._waiting.clear()


def run_equation(
    eqn: jex.JaxprEqn,
    values: list[Any],
    how: How,
    heads: Sequence[Param] = (),
) -> list[Any]:
    """Returns the results of an equation, then the heads if they were gathered during it.

    Args:
      eqn: The equation.
      values: Its operands.
      how: How equations are run.
      heads: Parameters that are last used after it.
    """
    name, first = eqn.primitive.name, values[0]
    if len(values) == 1 and (made := first.through(eqn)) is not None:
        place_of(eqn, set(eqn.outvars), how.policy)  # raises for a name
        return made
    if name == "scan":
        return _scan(eqn, values, how, heads)
    if name == "gather" and isinstance(first, LazyParam) and first.param.rows_of is not None:
        return [first.rows(eqn, values[1])]
    if how.once is not None:
        return equations.function(eqn)(*map(how.once, values))
    policy = NONE if name in _KEEPS else BLOCK
    if is_own_remat(eqn):  # a layer with its own policy
        policy = policies.of_jax(eqn.params["policy"])
        return _recomputed(equations.written_out(equations.inner(eqn)), values, policy, how)
    return _recomputed(equations.alone(eqn), values, policy, how)


def _recomputed(body: jex.ClosedJaxpr, values: Sequence[Any], policy: Remat, how: How) -> list[Any]:
    """Runs operations with their gathers, which the backward pass repeats.

    Args:
      body: The operations.
      values: Their operands, parameters and arrays.
      policy: What they save; never parameters.
      how: How equations are run.
    """
    operands = Operands(values)
    if operands.free:
        return equations.as_function(body)(*map(gathered, values))
    pairs = zip(body.jaxpr.invars, values, strict=True)
    weights = {var for var, x in pairs if isinstance(x, LazyParam)}
    own = dataclasses.replace(how, policy=policy)

    def values_of(flat: Sequence[Any]) -> list[Any]:
        # JAX's rule for barriers gives integers a tangent, which its rule for `cond` does not take.
        return operands.rebuilt([_constant(x) if how.outside else x for x in flat])

    layer = replay(body, values_of, weights, own, in_loop=how.in_loop)
    return recompute.layer(layer, {}, barrier=not how.in_loop)(*operands.flat)


def _constant(x: Any) -> Any:
    """Returns the array, an integer or bool without a tangent: `bitwise_or` has no derivative."""
    discrete = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
    return jax.lax.bitwise_or(x, x) if discrete else x


def _scan(eqn: jex.JaxprEqn, values: list[Any], how: How, heads: Sequence[Param]) -> list[Any]:
    """Runs a scan: slices of shards are gathered layer by layer, other parameters before it."""
    if how.once is not None:
        inside = dataclasses.replace(how, policy=NONE, in_loop=True, once=None)
        scan = LayerScan(eqn, values, inside)
        return scan.run_by_jax(list(map(how.once, scan.operands)))
    scan = LayerScan(eqn, values, how)
    heads = heads if scan.is_explicit else ()

    def run(*operands: Any) -> list[Any]:
        return scan.explicit(operands, heads) if scan.is_explicit else scan.run_by_jax(operands)

    given = [*scan.operands, *(x for head in heads for x in head.arrays)]
    if Operands(given).free:
        return run(*map(gathered, given))
    others = [atom.aval for at, atom in enumerate(eqn.invars) if at not in scan.sliced]
    closed = jax.make_jaxpr(run)(*others, *given[scan.others :])
    return _recomputed(equations.written_out(closed), given, NONE, how)


def _check_names(jaxpr: jex.Jaxpr, policy: Remat) -> None:
    """Raises ValueError if a name marks no value."""
    marked = equations.names_in(jaxpr) if policy.names else set()
    for name, _ in policy.names:
        if name not in marked:
            known = ", ".join(sorted(marked)) or "none"
            raise ValueError(
                f"`remat`={str(policy)!r}: no value of the loss is marked {name!r}; marked names: "
                f"{known}. Mark values with jax.ad_checkpoint.checkpoint_name(x, {name!r})"
            )
