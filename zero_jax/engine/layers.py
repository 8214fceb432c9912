"""Layers, scanned or unrolled, as one `jax.custom_vjp` with explicit forward and backward passes.

One iteration serves both. Python calls it for unrolled layers, and for the first and the last
layers of a scan; `jax.lax.scan` calls it for the layers between them.

  forward    run layer i, while the parameters of layer i+1 are gathered
  backward   reduce-scatter the gradients of layer i+1, then gather the parameters of layer i-1,
             while layer i is run again and its gradients are computed

A loop carries the gathered parameters of the next layer and the full gradients of the previous one.
`optimization_barrier` keeps iterations apart: without it XLA gathers all unrolled layers at once,
and it starts a collective when its result is needed, not when its operand exists. Therefore the
gradients of a layer's matrices are required when the matmuls of the iteration after it reach
`Midway.FIRST`. Vectors are reduced in fp32 and may arrive at the end of that iteration. Saved
activations pass no barrier in a loop: XLA would copy them.

Two iterations share a loop body. In a body with one, XLA copies whatever the loop carries. The
number of layers in a loop is therefore even, and up to three layers are outside of it.

Parameters that are first used after the layers are prefetched with the last layer, and their
gradients are reduced during its backward pass. The last layer of a model stays gathered between the
passes if it has at most `bucket_bytes`: layers of Ψ parameters send 3Ψ - Ψ/L elements.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim

from zero_jax.collectives.barriers import Arrays, is_float, known, together
from zero_jax.engine import repeats
from zero_jax.engine.replay import How, replay
from zero_jax.engine.weights import Apart, Source, Weight, whole
from zero_jax.remat import recompute
from zero_jax.remat.policies import Place
from zero_jax.remat.recompute import Held, Known, Midway
from zero_jax.tracing import jaxpr as equations
from zero_jax.tracing.dataflow import HasGradient

# Switches from `loops`, `riders`, `chain`, `unrolled` and `layer_groups` to this module.
EXPLICIT = False
# Two iterations share a loop body.
UNROLL = 2
# Two layers and the gradients of one are held at once: not where a layer is larger than that.
MOST_BUCKETS = 4


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer, a function of its gathered parameters and then of its inputs.

    Attributes:
      run: The function.
      sources: The parameters, each made of its shards.
      places: Where inputs are saved, by position among all arguments. Others stay where they are.
      stopped: Sources without a gradient.
    """

    run: recompute.Run
    sources: Sequence[Source]
    places: Mapping[int, Place]
    stopped: Container[Source]

    def trained(
        self, moving: Sequence[Sequence[bool]]
    ) -> tuple[tuple[tuple[bool, ...], ...], tuple[int, ...]]:
        """Returns which arrays of each source have a gradient, and which parameters."""
        own = tuple(
            tuple(m and source not in self.stopped for m in flags)
            for source, flags in zip(self.sources, moving, strict=True)
        )
        return own, tuple(i for i, flags in enumerate(own) if any(flags))

    def layer(self, types: Sequence[Any]) -> recompute.Layer:
        """Returns the layer for arguments of these types."""
        return recompute.Layer(self.run, types, self.places)

    def gather(self, shards: Sequence[Arrays | None]) -> list[Any]:
        """Returns the full parameters of those sources that are given their shards."""
        return [
            None if own is None else source.of(own).open()
            for source, own in zip(self.sources, shards, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Which arguments of a layer have gradients.

    Attributes:
      arrays: For each source, which of its arrays.
      params: The parameters, by position.
      inputs: The inputs, by position.
      first_input: The number of parameters.
    """

    arrays: tuple[tuple[bool, ...], ...]
    params: tuple[int, ...]
    inputs: tuple[int, ...]
    first_input: int

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions among all arguments."""
        return (*self.params, *(self.first_input + i for i in self.inputs))

    def reduce(self, block: Block, gradients: Arrays) -> list[list[Any]]:
        """Returns the gradients of the arrays that have one, for each of `params`."""
        made = [block.sources[i].back(g) for i, g in zip(self.params, gradients, strict=True)]
        pairs = zip(self.params, made, strict=True)
        return [[x for x, m in zip(own, self.arrays[i], strict=True) if m] for i, own in pairs]

    def fill(self, shards: list[list[Any]], values: Sequence[Arrays]) -> None:
        """Puts values in place of the arrays that have a gradient."""
        for at, own in zip(self.params, values, strict=True):
            moving = (k for k, m in enumerate(self.arrays[at]) if m)
            for k, x in zip(moving, own, strict=True):
                shards[at][k] = x


def _moves(x: Any) -> bool:
    """Returns True for an argument with a gradient."""
    return x.perturbed and is_float(x.value)


def _stopped(values: Apart) -> set[Source]:
    """Returns the sources whose every use is behind a `stop_gradient`."""
    moved = {v.source for v in values.values if isinstance(v, Weight) and not v.form.stopped}
    return {*values.sources} - moved


def _small(params: Arrays, which: Sequence[bool], bucket_bytes: float) -> list[Any] | None:
    """Returns the parameters that stay gathered between the passes; None if they are large."""
    kept = [x if own else None for x, own in zip(params, which, strict=True)]
    return kept if sum(x.nbytes for x in jax.tree.leaves(kept)) <= bucket_bytes else None


def _backward(
    layer: recompute.Layer,
    gradients: Gradients,
    kept: Arrays,
    cotangents: Arrays,
    reduced: Any,
    upcoming: Any,
) -> tuple[list[Any], list[Any], Any, Any]:
    """One backward iteration, after its barrier.

    Args:
      layer: The layer.
      gradients: Which arguments have gradients.
      kept: See `recompute.Layer.keep_all`.
      cotangents: Those of the results that are floats, or None.
      reduced: The reduced gradients of the layer after this one.
      upcoming: Shards to be gathered next.

    Returns:
      The gradients of the parameters and of the inputs, `reduced`, `upcoming`.
    """
    arrays, treedef = jax.tree.flatten(reduced)
    matrices = [i for i, x in enumerate(arrays) if x.ndim > 1]
    due, upcoming = together(([arrays[i] for i in matrices], upcoming))
    for i, x in zip(matrices, due, strict=True):
        arrays[i] = x
    points = {Midway.FIRST: due, Midway.SECOND: []}
    found = list(layer.gradients(gradients.trained, kept, cotangents, points))
    count = len(gradients.params)
    inputs, arrays = together((found[count:], arrays))
    return found[:count], inputs, jax.tree.unflatten(treedef, arrays), upcoming


class ScannedLayers:
    """A scan over layers of sharded parameters.

    Attributes:
      operands: What `run` is given: operands that are not sliced parameters, then the shards of
        those, then the prefetched shards.

    Args:
      eqn: The scan.
      values: Its operands; those read in every iteration are gathered before `run`.
      prefetched: Shards of parameters that are first used after the scan.
      how: How equations are run.
    """

    def __init__(
        self, eqn: jex.JaxprEqn, values: Sequence[Any], prefetched: Sequence[Any], how: How
    ):
        self.eqn, self.how = eqn, how
        self.body = equations.written_out(equations.inner(eqn))
        self.consts, self.carried = equations.state_of(eqn)
        first = self.consts + self.carried
        self.sliced = {
            i
            for i, x in enumerate(values)
            if i >= first and isinstance(x, Weight) and x.form.may_slice
        }
        self.slices = Apart([values[i].sliced() for i in sorted(self.sliced)])
        others = [x for i, x in enumerate(values) if i not in self.sliced]
        self.others, self._prefetched = len(others), len(prefetched)
        self.operands = [*others, *self.slices.arrays, *prefetched]
        # Parameters that every device holds are inputs like any other.
        sources = [source for source in self.slices.sources if not source.free]
        start = len(sources) + self.consts
        places = {start + i: how.policy.inputs for i in range(self.carried)}
        weights = {self.body.jaxpr.invars[i] for i in self.sliced}
        run = replay(self.body, self._values, weights, how, in_loop=True, midway=True)
        self.block = Block(run, sources, places, _stopped(self.slices))
        length, step = eqn.params["length"], -1 if eqn.params["reverse"] else 1
        self.order, self.step = range(length)[::step], step
        peeled = 1 if length >= UNROLL + 2 else 0
        looped = (length - 2 * peeled) // UNROLL * UNROLL if peeled else 0
        self.loop = self.order[peeled : peeled + looped]

    def fallback(self) -> str | None:
        """Returns why an ordinary scan runs the layers instead, or None."""
        jaxpr = self.body.jaxpr
        weights = zip(sorted(self.sliced), self.slices.values, strict=True)
        forms = {jaxpr.invars[i]: weight.form for i, weight in weights}
        sizes = {form.leaf: equations.bytes_of(var) for var, form in forms.items()}
        if not self.block.sources:
            return "layers communicate nothing"
        if self.how.policy.kind == "block_sqrt":
            return "`remat`='block_sqrt' runs groups of layers"
        if repeats.scans_of(jaxpr, forms):
            return "a layer scans over parameters"
        if sum(sizes.values()) > MOST_BUCKETS * self.how.bucket_bytes:
            return f"a layer is larger than {MOST_BUCKETS} buckets"
        return None

    def _values(self, args: Arrays) -> list[Any]:
        """Returns the operands of the body, given the arguments of a layer."""
        params, at = iter(args[: len(self.block.sources)]), len(self.block.sources)
        others, held = iter(args[at : at + self.others]), iter(args[at + self.others :])
        own = [whole(next(held if source.free else params)) for source in self.slices.sources]
        slices = iter(self.slices.of([], own))
        both = range(len(self.body.jaxpr.invars))
        return [next(slices if i in self.sliced else others) for i in both]

    def run(self, operands: Arrays) -> list[Any]:
        """Returns the results of the scan, then the prefetched shards."""
        others, it = list(operands[: self.others]), iter(operands[self.others :])
        shards, held = [], []
        for source in self.slices.sources:
            own = [next(it) for _ in source.arrays]
            held.extend(own) if source.free else shards.append(own)
        wrapped = jax.custom_vjp(self._primal)
        wrapped.defvjp(self._forward, self._backward, symbolic_zeros=True)
        return wrapped([*others, *held], shards, list(it))

    def _primal(self, inputs: Arrays, shards: Sequence[Arrays], prefetched: Arrays) -> list[Any]:
        return _Forward(self, inputs, shards, None).run(prefetched)

    def _forward(self, inputs: Any, shards: Any, prefetched: Any) -> tuple[list[Any], Any]:
        gradients = self._gradients(
            list(map(_moves, inputs)), [list(map(_moves, own)) for own in shards]
        )
        inputs, prefetched = ([x.value for x in part] for part in (inputs, prefetched))
        shards = [[x.value for x in own] for own in shards]
        passes = _Forward(self, inputs, shards, gradients)
        outs = passes.run(prefetched)
        # The initial carry is not read again.
        start = self.consts
        inputs[start : start + self.carried] = [None] * self.carried
        static = Known((gradients, tuple(passes.stay)))
        return outs, (static, inputs, shards, passes.saved, passes.looped, passes.last)

    def _backward(self, residuals: Any, cotangents: Any) -> tuple[list[Any], list[Any], list[Any]]:
        static, *arrays = residuals
        passes = _Backward(self, *static.value, *arrays)
        return passes.run(list(map(known, cotangents)))

    def _gradients(self, inputs: Sequence[bool], shards: Sequence[Sequence[bool]]) -> Gradients:
        """Returns what has a gradient in a layer, given which operands have one."""
        arrays, params = self.block.trained(shards)
        trained = {self.block.sources[i] for i in params}
        free = [source for source in self.slices.sources if source.free]
        for source, moves in zip(free, inputs[self.others :], strict=True):
            if moves and source not in self.block.stopped:
                trained.add(source)
        weights = iter([w.source in trained and not w.form.stopped for w in self.slices.values])
        others = iter(inputs[: self.others])
        operands = range(len(self.eqn.invars))
        flags = [next(weights if i in self.sliced else others) for i in operands]
        flags = HasGradient().body(self.eqn, flags)[0]
        pairs = zip(flags, self.body.jaxpr.invars, strict=True)
        flags = [flag and equations.is_float(v) for flag, v in pairs]
        own = [flag for i, flag in enumerate(flags) if i not in self.sliced]
        own.extend(source in trained for source in free)
        return Gradients(
            arrays, params, tuple(i for i, flag in enumerate(own) if flag), len(arrays)
        )

    def shards_at(self, shards: Sequence[Arrays], i: Any, which: Container[int]) -> list[Any]:
        """Returns the shards of a layer for these sources, and None for others."""
        return [
            [dynamic_index_in_dim(x, i, keepdims=False) for x in own] if at in which else None
            for at, own in enumerate(shards)
        ]

    def args(self, params: Arrays, inputs: Arrays, carry: Arrays, i: Any) -> list[Any]:
        """Returns the arguments of layer i."""
        first = self.consts + self.carried
        xs = [dynamic_index_in_dim(x, i, keepdims=False) for x in inputs[first:]]
        return [*params, *inputs[: self.consts], *carry, *xs]

    def types(self, args: Arrays) -> list[Any]:
        """Returns the types of a layer's arguments; saved ones may be stored as other types."""
        start = len(self.block.sources) + self.consts
        variables = self.body.jaxpr.invars[self.consts : self.consts + self.carried]
        own = {start + k: var.aval for k, var in enumerate(variables)}
        return [own.get(at, jax.typeof(x)) for at, x in enumerate(args)]

    def over_loop(self, iteration: Callable[..., Any], state: Any, *, back: bool = False) -> Any:
        """Runs an iteration for all layers in the loop; returns the state and the stacked rest."""
        indices = jnp.arange(min(self.loop), max(self.loop) + 1)
        reverse = (self.step < 0) != back
        return jax.lax.scan(iteration, state, indices, reverse=reverse, unroll=UNROLL)

    @property
    def remote(self) -> set[int]:
        """The sources that are gathered, by position; others are whole on every device."""
        return {at for at, source in enumerate(self.block.sources) if not source.local}

    def with_local(self, params: Arrays, shards: Sequence[Arrays], i: Any) -> list[Any]:
        """Returns the parameters of layer i, given those that were gathered for it."""
        local = {*range(len(params))} - self.remote
        made = self.block.gather(self.shards_at(shards, i, local))
        return [b if a is None else a for a, b in zip(params, made, strict=True)]


class _Forward:
    """The forward pass over a scan's layers.

    Args:
      gradients: Which arguments of a layer have gradients; None saves nothing.

    Attributes:
      saved: What the backward pass reads of each layer outside of the loop, by its index.
      looped: The same of the layers in the loop, stacked.
      last: The gathered parameters of the last layer, if they are saved.
      stay: Which arguments and saved results of a layer the backward pass reads.
    """

    def __init__(
        self,
        scan: ScannedLayers,
        inputs: Arrays,
        shards: Sequence[Arrays],
        gradients: Gradients | None,
    ):
        self._scan, self._inputs, self._shards = scan, inputs, shards
        self._gradients = gradients
        self.saved: dict[int, Held] = {}
        self.looped: Held | None = None
        self.last: list[Any] | None = None
        self.stay: list[bool] = []

    def run(self, prefetched: Arrays) -> list[Any]:
        """Returns the carry, the stacked results and the prefetched shards."""
        scan = self._scan
        carry = list(self._inputs[scan.consts : scan.consts + scan.carried])
        state = scan.block.gather(self._following(scan.order[0])), carry
        ys: dict[int, list[Any]] = {}
        for i in scan.order[:-1]:
            if i not in scan.loop:
                state, (made, held) = self._iteration(state, i)
                if held is not None:
                    state, self.saved[i] = held.on_its_way(state)
                ys[i] = [y[None] for y in made]
            elif i == scan.loop[0]:
                state, (ys[i], self.looped) = scan.over_loop(self._iteration, state)
        i = scan.order[-1]
        prefetched, params, outs, held = self._run(i, state, prefetched)
        if held is not None:
            outs, self.saved[i] = held.on_its_way(outs)
        if self._gradients is not None and scan.how.keep_last:
            again = [at in scan.remote and self.stay[at] for at in range(len(params))]
            self.last = _small(params, again, scan.how.bucket_bytes)
        ys[i] = [y[None] for y in outs[scan.carried :]]
        stacks = zip(*(ys[i] for i in sorted(ys)), strict=True)
        return [*outs[: scan.carried], *map(jnp.concatenate, stacks), *prefetched]

    def _iteration(self, state: Any, i: Any) -> tuple[Any, Any]:
        following, _, outs, held = self._run(i, state, self._following(i + self._scan.step))
        count = self._scan.carried
        return (self._scan.block.gather(following), outs[:count]), (outs[count:], held)

    def _run(self, i: Any, state: Any, following: Any) -> Any:
        """Runs layer i.

        Returns:
          `following`, available when the layer's inputs are; its parameters; its results; what is
          saved.
        """
        scan = self._scan
        following, params, carry = together((following, *state))
        args = scan.args(scan.with_local(params, self._shards, i), self._inputs, carry, i)
        if self._gradients is None:
            return following, params, scan.block.run(args, lambda x, _: x, ()), None
        layer, trained = scan.block.layer(scan.types(args)), self._gradients.trained
        outs, kept = layer.keep_all(args, trained)
        if not self.stay:
            self.stay.extend(layer.reads(trained, kept, outs))
        start = len(params) + scan.consts
        own = {*range(start, start + scan.carried), *range(len(args), len(kept))}
        stay = [stays and at in own for at, stays in enumerate(self.stay)]
        return following, params, outs, Held.of(kept, stay)

    def _following(self, i: Any) -> list[Any]:
        return self._scan.shards_at(self._shards, i, self._scan.remote)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """What a backward iteration hands to the next one.

    Attributes:
      carry: Cotangents of the layer's results that the scan carries and that have one.
      params: Gathered parameters of the layer, None for those that it does not need or has.
      pending: Gradients of the layer after it, not reduced yet.
      consts: Gradients of the scan's constants, summed so far.
      slices: Stacked gradients of the other inputs of all layers.
      shards: Stacked gradients of the shards of all layers.
    """

    carry: list[Any]
    params: list[Any]
    pending: list[Any]
    consts: list[Any]
    slices: list[Any]
    shards: list[list[Any]]


class _Backward:
    """The backward pass over a scan's layers; the arguments are what the forward pass saved."""

    def __init__(
        self,
        scan: ScannedLayers,
        gradients: Gradients,
        stay: Sequence[bool],
        inputs: Arrays,
        shards: Sequence[Arrays],
        saved: Mapping[int, Held],
        looped: Held | None,
        last: list[Any] | None,
    ):
        self._scan, self._gradients, self._inputs, self._shards = scan, gradients, inputs, shards
        self._saved, self._looped, self._last = saved, looped, last
        self._again = {at for at in scan.remote if stay[at]}
        start, stop = scan.consts, scan.consts + scan.carried
        self._consts = [at for at in gradients.inputs if at < start]
        self._carry = [at for at in gradients.inputs if start <= at < stop]
        self._slices = [at for at in gradients.inputs if at >= stop]

    def run(self, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the gradients of all inputs, of the shards and of the prefetched shards."""
        scan, grads = self._scan, self._gradients
        found: list[Any] = [None] * len(self._inputs)
        shards: list[Any] = [[None] * len(own) for own in self._shards]
        count = len(scan.body.jaxpr.outvars)
        results, prefetched = cotangents[:count], cotangents[count:]
        if all(c is None for c in results) or not grads.trained:
            return found, shards, list(prefetched)
        self._ys = results[scan.carried :]
        state, arrived = self._last_layer(results, prefetched)
        for i in scan.order[-2::-1]:
            if i not in scan.loop:
                state = self._iteration(state, i, self._saved[i])
            elif i == scan.loop[0]:
                state, _ = scan.over_loop(self._in_loop, state, back=True)
        reduced = grads.reduce(scan.block, state.pending)
        state = self._written(state, reduced, scan.order[0])
        groups = (self._consts, state.consts), (self._carry, state.carry)
        for places, values in (*groups, (self._slices, state.slices)):
            for at, x in zip(places, values, strict=True):
                found[at] = x
        grads.fill(shards, state.shards)
        return found, shards, arrived

    def _last_layer(self, results: Sequence[Any], prefetched: Any) -> tuple[_State, Any]:
        """Runs the last layer, during which gradients of the prefetched shards are reduced."""
        scan, i = self._scan, self._scan.order[-1]
        types = [scan.body.jaxpr.outvars[at - scan.consts].aval for at in self._carry]
        carry = [
            jnp.zeros(like.shape, like.dtype) if (c := results[at - scan.consts]) is None else c
            for at, like in zip(self._carry, types, strict=True)
        ]
        params = self._last
        if params is None:
            own, carry = together((scan.shards_at(self._shards, i, self._again), carry))
            params = scan.block.gather(own)
        empty = [jnp.zeros_like(self._inputs[at]) for at in self._slices]
        shards = [
            [jnp.zeros_like(x) for x, m in zip(*pair, strict=True) if m]
            for pair in (
                (self._shards[at], self._gradients.arrays[at]) for at in self._gradients.params
            )
        ]
        state = _State(carry, params, [], [], empty, shards)
        held, state = _held_back(self._saved[i], state)
        return self._run(state, i, held, prefetched)

    def _in_loop(self, state: _State, i: Any) -> tuple[_State, None]:
        at = i - min(self._scan.loop)
        held = jax.tree.map(lambda x: dynamic_index_in_dim(x, at, keepdims=False), self._looped)
        return self._iteration(state, i, held), None

    def _iteration(self, state: _State, i: Any, held: Held) -> _State:
        """Reduces the gradients of the layer after layer i while that runs backward."""
        scan, after = self._scan, i + self._scan.step
        carry, params, pending = together((state.carry, state.params, state.pending))
        state = dataclasses.replace(state, carry=carry, params=params)
        if isinstance(i, int):
            held, state = _held_back(held, state)
        reduced = self._gradients.reduce(scan.block, pending)
        state, reduced = self._run(state, i, held, reduced)
        return self._written(state, reduced, after)

    @staticmethod
    def _written(state: _State, reduced: Sequence[Arrays], i: Any) -> _State:
        pairs = zip(state.shards, reduced, strict=True)
        shards = [[_put(s, x, i) for s, x in zip(*own, strict=True)] for own in pairs]
        return dataclasses.replace(state, shards=shards)

    def _run(self, state: _State, i: Any, held: Held, reduced: Any) -> tuple[_State, Any]:
        """Runs layer i backward; `reduced` arrives meanwhile, and then the layer before it."""
        scan, first = self._scan, self._scan.order[0]
        is_first = isinstance(i, int) and i == first
        params = scan.with_local(state.params, self._shards, i)
        kept = held.all()
        # Unneeded parameters are zeros, which nothing reads.
        params = [kept[at] if x is None else x for at, x in enumerate(params)]
        start = len(params) + scan.consts
        carry = kept[start : start + scan.carried]
        args = scan.args(params, self._inputs, carry, i)
        kept[: len(args)] = args
        layer = scan.block.layer(scan.types(args))
        upcoming = [] if is_first else scan.shards_at(self._shards, i - scan.step, self._again)
        pending, inputs, reduced, upcoming = _backward(
            *(layer, self._gradients, kept, self._cotangents(state.carry, i), reduced, upcoming)
        )
        parts, it = (self._consts, self._carry, self._slices), iter(inputs)
        consts, own, slices = ([next(it) for _ in part] for part in parts)
        if state.consts:
            consts = [a + b for a, b in zip(state.consts, consts, strict=True)]
        stacks = [_put(s, x, i) for s, x in zip(state.slices, slices, strict=True)]
        ahead = [] if is_first else scan.block.gather(upcoming)
        return _State(own, ahead, pending, consts, stacks, state.shards), reduced

    def _cotangents(self, carry: Sequence[Any], i: Any) -> list[Any]:
        """Returns the cotangents of a layer's results that are floats."""
        scan, known_carry = self._scan, dict(zip(self._carry, carry, strict=True))
        own = [known_carry.get(scan.consts + k) for k in range(scan.carried)]
        ys = [None if y is None else dynamic_index_in_dim(y, i, keepdims=False) for y in self._ys]
        pairs = zip([*own, *ys], scan.body.jaxpr.outvars, strict=True)
        return [c for c, v in pairs if equations.is_float(v)]


def _put(stack: jax.Array, x: jax.Array, i: Any) -> jax.Array:
    return dynamic_update_index_in_dim(stack, x.astype(stack.dtype), i, 0)


def _held_back(held: Held, state: _State) -> tuple[Held, _State]:
    """Makes what a layer saved available when it runs backward. Outside of loops XLA would merge
    both runs of the layer, and keep what lies between."""
    held, carry = together((held, state.carry))
    return held, dataclasses.replace(state, carry=carry)


@dataclasses.dataclass(frozen=True)
class Link:
    """One of several unrolled layers.

    Attributes:
      block: The layer.
      reads: Its inputs.
      makes: Its results.
      shards: The shards of its parameters, for each source.
    """

    block: Block
    reads: Sequence[jex.Var]
    makes: Sequence[jex.Var]
    shards: Sequence[Arrays]

    @classmethod
    def of(
        cls, body: jex.ClosedJaxpr, env: Mapping[jex.Var, Any], how: How, moves: Container[jex.Var]
    ) -> "Link":
        """Makes a layer of its jaxpr and of the values of variables.

        Args:
          body: The layer.
          env: The values of its inputs.
          how: How equations are run.
          moves: The inputs that are saved where the remat policy says.
        """
        variables = body.jaxpr.invars
        weights = {v for v in variables if isinstance(env[v], Weight)}
        apart = Apart([env[v] for v in variables if v in weights])
        reads = [v for v in variables if v not in weights]
        count = len(apart.sources)

        def values(args: Arrays) -> list[Any]:
            params, rest = iter(apart.of([], list(map(whole, args[:count])))), iter(args[count:])
            return [next(params if v in weights else rest) for v in variables]

        places = {count + i: how.policy.inputs for i, v in enumerate(reads) if v in moves}
        run = replay(body, values, weights, how, in_loop=False, midway=True)
        shards = [source.arrays for source in apart.sources]
        block = Block(run, apart.sources, places, _stopped(apart))
        return cls(block, reads, body.jaxpr.outvars, shards)


class UnrolledLayers:
    """Unrolled layers that follow on each other.

    Args:
      links: The layers.
      results: What is read after the last.
      how: How equations are run.

    Attributes:
      links: The layers.
      results: What is read after the last.
      inputs: What exists before the first.
    """

    def __init__(self, links: Sequence[Link], results: Sequence[jex.Var], how: How):
        self.links, self.results, self._how = links, results, how
        made = {v for link in links for v in link.makes}
        self.inputs = list(dict.fromkeys(v for k in links for v in k.reads if v not in made))

    def run(self, arrays: Arrays, prefetched: Arrays) -> list[Any]:
        """Returns the results, then the prefetched shards, given the inputs."""
        wrapped = jax.custom_vjp(self._primal)
        wrapped.defvjp(self._forward, self._backward, symbolic_zeros=True)
        return wrapped(list(arrays), [list(k.shards) for k in self.links], list(prefetched))

    def _primal(self, arrays: Arrays, shards: Sequence[Any], prefetched: Arrays) -> list[Any]:
        env = dict(zip(self.inputs, arrays, strict=True))
        params = self.links[0].block.gather(shards[0])
        for at, link in enumerate(self.links):
            following = prefetched if at + 1 == len(self.links) else shards[at + 1]
            following, args = self._ready(at, env, params, following)
            outs = link.block.run(args, lambda x, _: x, ())
            env.update(zip(link.makes, outs, strict=True))
            params = self._gather(at + 1, following)
        return [*(env[v] for v in self.results), *following]

    def _ready(
        self, at: int, env: Mapping[Any, Any], params: Arrays, following: Any
    ) -> tuple[Any, list[Any]]:
        """Returns `following`, available when the inputs of a layer are, and its arguments."""
        reads = self.links[at].reads
        others = {v for i, link in enumerate(self.links) if i != at for v in link.reads}
        own = [v for v in reads if v not in others]
        env = dict(env)
        if own:
            following, params, tied = together((following, params, [env[v] for v in own]))
            env.update(zip(own, tied, strict=True))
        return following, [*params, *(env[v] for v in reads)]

    def _gather(self, at: int, shards: Any) -> list[Any]:
        return self.links[at].block.gather(shards) if at < len(self.links) else []

    def _forward(self, arrays: Any, shards: Any, prefetched: Any) -> tuple[list[Any], Any]:
        moved = {v for v, x in zip(self.inputs, arrays, strict=True) if _moves(x)}
        moving = [[list(map(_moves, own)) for own in layer] for layer in shards]
        arrays, shards, following = jax.tree.map(
            lambda x: x.value, (arrays, shards, prefetched), is_leaf=lambda x: hasattr(x, "value")
        )
        prefetched, env = following, dict(zip(self.inputs, arrays, strict=True))
        params, saved, last = self.links[0].block.gather(shards[0]), [], None
        for at, link in enumerate(self.links):
            is_last = at + 1 == len(self.links)
            following = prefetched if is_last else shards[at + 1]
            following, args = self._ready(at, env, params, following)
            count = len(params)
            inputs = tuple(i for i, v in enumerate(link.reads) if v in moved)
            gradients = Gradients(*link.block.trained(moving[at]), inputs, count)
            layer = link.block.layer(list(map(jax.typeof, args)))
            outs, kept = layer.keep_all(args, gradients.trained)
            stay = layer.reads(gradients.trained, kept, outs)
            again = tuple(stay[:count])
            stay[:count] = [False] * count
            outs, held = Held.of(kept, stay).on_its_way(outs)
            env.update(zip(link.makes, outs, strict=True))
            if gradients.trained:
                moved.update(v for v in link.makes if equations.is_float(v))
            saved.append((Known((gradients, again)), held))
            if is_last and self._how.keep_last:
                last = _small(args[:count], again, self._how.bucket_bytes)
            params = self._gather(at + 1, following)
        return [*(env[v] for v in self.results), *following], (saved, shards, last)

    def _backward(self, residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        saved, shards, last = residuals
        cotangents = list(map(known, cotangents))
        count = len(self.results)
        back = _UnrolledBackward(self.links, saved, shards, last, cotangents[count:])
        for v, c in zip(self.results, cotangents[:count], strict=True):
            if equations.is_float(v) and c is not None:
                back.cotangents[v] = c
        for at in reversed(range(len(self.links))):
            back.layer(at)
        back.finish()
        return [back.cotangents.get(v) for v in self.inputs], back.shards, back.prefetched


class _UnrolledBackward:
    """The backward pass over unrolled layers.

    Attributes:
      cotangents: Those that are known, by variable.
      shards: Gradients of each layer's shards.
      prefetched: Gradients of the prefetched shards.
    """

    def __init__(
        self,
        links: Sequence[Link],
        saved: Sequence[tuple[Known, Held]],
        shards: Sequence[Any],
        last: list[Any] | None,
        prefetched: list[Any],
    ):
        self._links, self._saved, self._shards = links, saved, shards
        self.cotangents: dict[jex.Var, Any] = {}
        self.shards: list[Any] = [[[None] * len(own) for own in layer] for layer in shards]
        self.prefetched = prefetched
        # The layer that is gathered already, and its parameters.
        self._ahead = None if last is None else (len(links) - 1, last)
        # The layer whose gradients are not reduced yet, and these.
        self._pending: tuple[int, list[Any]] | None = None

    def layer(self, at: int) -> None:
        """Runs a layer backward, unless nothing in it has a gradient."""
        link, (gradients, _), held = self._links[at], self._saved[at][0].value, self._saved[at][1]
        enters = [self.cotangents.pop(v, None) for v in link.makes if equations.is_float(v)]
        if not gradients.trained or all(c is None for c in enters):
            return
        if self._ahead is None or self._ahead[0] != at:
            own, enters = together((self._read_again(at), enters))
            self._ahead = at, link.block.gather(own)
        params, pending = self._ahead[1], self._pending
        after = [] if pending is None else pending[1]
        held, enters, params, after = together((held, enters, params, after))
        reduced = self.prefetched if pending is None else self._reduced(pending[0], after)
        kept = held.all()
        kept[: len(params)] = [kept[i] if x is None else x for i, x in enumerate(params)]
        types = [*map(jax.typeof, kept[: len(params)]), *(v.aval for v in link.reads)]
        upcoming = self._read_again(at - 1) if at else []
        own, inputs, reduced, upcoming = _backward(
            *(link.block.layer(types), gradients, kept, enters, reduced, upcoming)
        )
        if pending is None:
            self.prefetched = reduced
        else:
            self._write(pending[0], reduced)
        self._pending = at, own
        self._ahead = (at - 1, self._links[at - 1].block.gather(upcoming)) if at else None
        for i, x in zip(gradients.inputs, inputs, strict=True):
            v = link.reads[i]
            self.cotangents[v] = self.cotangents[v] + x if v in self.cotangents else x

    def finish(self) -> None:
        """Reduces the gradients that are pending."""
        if self._pending is not None:
            self._write(self._pending[0], self._reduced(*self._pending))

    def _read_again(self, at: int) -> list[Any]:
        """Returns the shards of the parameters that the backward pass of a layer reads."""
        again = self._saved[at][0].value[1]
        return [own if a else None for own, a in zip(self._shards[at], again, strict=True)]

    def _reduced(self, at: int, gradients: Arrays) -> list[list[Any]]:
        return self._saved[at][0].value[0].reduce(self._links[at].block, gradients)

    def _write(self, at: int, reduced: Sequence[Arrays]) -> None:
        self._saved[at][0].value[0].fill(self.shards[at], reduced)
