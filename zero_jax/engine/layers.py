"""Layers, scanned or unrolled, as one `jax.custom_vjp` with explicit forward and backward passes.

One iteration serves both. Python calls it for unrolled layers, and for the first and the last
layers of a scan; `jax.lax.scan` calls it for the layers between them.

  forward    run layer i, while the parameters of layer i+1 are gathered
  backward   reduce-scatter the gradients of layer i+1, then gather the parameters of layer i-1,
             while layer i is run again, as the remat policy says, and its gradients are computed

A loop carries the gathered parameters of the next layer and the full gradients of the previous one.
`optimization_barrier` keeps iterations apart: without it XLA gathers all unrolled layers at once,
and it starts a collective when its result is needed, not when its operand exists. Therefore the
gradients of a layer's matrices are required when the matmuls of the iteration after it reach
`replay.MIDWAY`. Vectors are reduced in fp32 and may arrive at the end of that iteration. Saved
activations pass no barrier in a loop: XLA would copy them.

Two iterations share a loop body. In a body with one, XLA copies whatever the loop carries. The
number of layers in a loop is therefore even, and up to three layers are outside of it. A forward
pass that saves activations in host memory has one iteration in its body.

Parameters that are last used after the layers, the heads, are gathered while the last layer runs,
and their gradients are reduced during its backward pass. A small last layer of a model
stays gathered between the passes: then layers of Ψ parameters send 3Ψ - Ψ/L elements.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim

from zero_jax.collectives.barriers import Arrays, known, together
from zero_jax.engine.layer_block import Block, Gradients, backward, has_gradient, small
from zero_jax.engine.lazy_param import Param
from zero_jax.engine.replay import How
from zero_jax.remat.recompute import Held, Known

# Two iterations share a loop body.
UNROLL = 2
# The last layer stays gathered while the loss is computed if it has at most this many bytes. For a
# layer of 403 MB that took 0.39 of 4.70 GB and saved 0.3 % of the step (7.5b on 64 H100, unrolled,
# compiled by jax 0.12.0.1, modelled).
MOST_KEPT_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class LayerNode:
    """One layer among others. Values are known by numbers.

    Attributes:
      block: The layer.
      reads: Its inputs.
      types: The types of these.
      makes: Its results.
      floats: True for results that are floats.
      ordered: Inputs that barriers order; others are read by several layers.
      saves: Positions of inputs that are saved for this layer alone.
      group: The position of its shards among those of all layers.
      index: The position in stacks of shards, inputs and results; None for an unrolled layer.
    """

    block: Block
    reads: Sequence[int]
    types: Sequence[Any]
    makes: Sequence[int]
    floats: Sequence[bool]
    ordered: Sequence[int]
    saves: Sequence[int]
    group: int
    index: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ExplicitLayers:
    """Layers that follow on each other.

    Attributes:
      links: The layers.
      given: What exists before the first.
      results: What is read after the last.
      how: How equations are run.
      loop: Positions of layers that a loop runs: scanned ones, of one block.
      unroll: True if no loop runs them in a pass that is differentiated.
      stacks: Inputs and results that are stacks of those of the layers.
      moved: Returns the values with a gradient in each layer of a scan, given the inputs and the
        arrays of shards that have one.
      heads: Parameters that are last used after the layers.
    """

    links: Sequence[LayerNode]
    heads: Block
    given: Sequence[int]
    results: Sequence[int]
    how: How
    loop: range = range(0)
    unroll: bool = False
    stacks: frozenset[int] = frozenset()
    moved: Callable[[set[int], Sequence[Sequence[bool]]], set[int]] | None = None

    def run(self, arrays: Arrays, shards: Sequence[Any]) -> list[Any]:
        """Returns the results, then the gathered heads.

        Args:
          arrays: The given ones.
          shards: For each group and parameter; the last group are the heads.
        """
        wrapped = jax.custom_vjp(self._primal)
        wrapped.defvjp(self._forward, self._backward, symbolic_zeros=True)
        return wrapped(list(arrays), shards)

    @property
    def _differentiated(self) -> "ExplicitLayers":
        return dataclasses.replace(self, loop=range(0)) if self.unroll else self

    @property
    def nodes(self) -> list[LayerNode]:
        """The layers and the heads."""
        group = max(link.group for link in self.links) + 1
        return [*self.links, LayerNode(self.heads, (), (), (), (), (), (), group)]

    def _primal(self, arrays: Arrays, shards: Sequence[Any]) -> list[Any]:
        return _Forward(self, shards, None).run(arrays)

    def _forward(self, arrays: Any, shards: Any) -> tuple[list[Any], Any]:
        moved = {n for n, x in zip(self.given, arrays, strict=True) if has_gradient(x)}
        moving = [[list(map(has_gradient, own)) for own in group] for group in shards]
        arrays, shards = jax.tree.map(
            lambda x: x.value, (arrays, shards), is_leaf=lambda x: hasattr(x, "value")
        )
        if self.moved is not None:
            moved = self.moved(moved, moving[0])
        passes = _Forward(self._differentiated, shards, (moved, moving))
        outs = passes.run(arrays)
        saved = {n for link in self.links for n in link.reads}
        saved -= {link.reads[at] for link in self.links for at in link.saves}
        kept = {n: x for n, x in zip(self.given, arrays, strict=True) if n in saved}
        static = Known((tuple(passes.gradients), tuple(passes.again)))
        return outs, (static, kept, shards, passes.saved, passes.looped, passes.last)

    def _backward(self, residuals: Any, cotangents: Any) -> tuple[list[Any], list[Any]]:
        static, *arrays = residuals
        passes = _Backward(self._differentiated, *static.value, *arrays)
        return passes.run(list(map(known, cotangents)))

    def shards_of(
        self, shards: Sequence[Any], link: LayerNode, i: Any, which: Container[int]
    ) -> list[Any]:
        """Returns a layer's shards for these parameters, and None for others."""
        return [
            [_slice(x, i) for x in own] if at in which else None
            for at, own in enumerate(shards[link.group])
        ]

    def params(self, shards: Sequence[Any], link: LayerNode, i: Any, gathered: Arrays) -> list[Any]:
        """Returns the parameters of a layer, given those that were gathered ahead."""
        own = {at for at, x in enumerate(gathered) if x is None} - link.block.remote
        made = link.block.gather(self.shards_of(shards, link, i, own))
        return [b if a is None else a for a, b in zip(gathered, made, strict=True)]

    def inputs(self, link: LayerNode, env: Mapping[int, Any], i: Any) -> list[Any]:
        """Returns the inputs of a layer."""
        return [_slice(env[n], i) if n in self.stacks else env[n] for n in link.reads]

    def over_loop(
        self,
        iteration: Callable[..., Any],
        state: Any,
        *,
        back: bool = False,
        unroll: int = UNROLL,
    ) -> Any:
        """Runs an iteration for all layers of the loop; returns the state and the stacked rest."""
        first, last = (self.links[at].index or 0 for at in (self.loop[0], self.loop[-1]))
        indices = jnp.arange(min(first, last), max(first, last) + 1)
        reverse = (last < first) != back
        return jax.lax.scan(iteration, state, indices, reverse=reverse, unroll=unroll)


def _slice(x: jax.Array, i: Any) -> jax.Array:
    return x if i is None else dynamic_index_in_dim(x, i, keepdims=False)


def _put(stack: Any, x: Any, i: Any) -> Any:
    """Returns the stack with element i replaced, unless that is None; without an index, x."""
    if i is None or x is None:
        return x if i is None else stack
    return dynamic_update_index_in_dim(stack, x.astype(stack.dtype), i, 0)


@dataclasses.dataclass(eq=False)
class _Forward:
    """The forward pass.

    Attributes:
      layers: The layers.
      shards: For each group and parameter.
      moves: Values, and arrays of shards, that have a gradient; None to save nothing.
      gradients, again: For each layer which arguments have gradients, and which parameters the
        backward pass reads.
      saved: What the backward pass reads of each layer outside of the loop.
      looped: The same of the layers in the loop, stacked.
      last: The gathered parameters of the last layer, if they are saved.
    """

    layers: ExplicitLayers
    shards: Sequence[Any]
    moves: tuple[set[int], Sequence[Any]] | None
    gradients: list[Gradients] = dataclasses.field(default_factory=list)
    again: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    saved: dict[int, Held] = dataclasses.field(default_factory=dict)
    looped: Held | None = None
    last: list[Any] | None = None

    def run(self, arrays: Arrays) -> list[Any]:
        """Returns the results, then the gathered heads."""
        nodes = self.layers.nodes
        links = nodes[:-1]
        self._stay: dict[int, list[bool]] = {}
        env = dict(zip(self.layers.given, arrays, strict=True))
        pieces: dict[int, dict[int, Any]] = {n: {} for n in self.layers.results}
        params = links[0].block.gather(self._remote(links[0], links[0].index))
        for at, link in enumerate(links):
            if self.moves is not None:
                self._settle(link)
            if at in self.layers.loop:
                if at == self.layers.loop[0]:
                    params = self._loop(link, env, params, pieces)
                if self.moves is not None:
                    self.again.append(self._read_again(link))
                continue
            following = self._remote(nodes[at + 1], nodes[at + 1].index)
            following, used, outs, held = self._layer(link, link.index, env, params, following)
            if held is not None:
                (outs, following), self.saved[at] = held.on_its_way((outs, following))
                self.again.append(self._read_again(link))
            for n, x in zip(link.makes, outs, strict=True):
                if n in self.layers.stacks:
                    pieces[n][link.index or 0] = x[None]
                else:
                    env[n] = x
            params = nodes[at + 1].block.gather(following)
            if at + 1 == len(links) and held is not None and self.layers.how.keep_last:
                again = [i in self.again[-1] for i in range(len(used))]
                most = min(self.layers.how.bucket_bytes, MOST_KEPT_BYTES)
                self.last = small(used, again, most)
        if self.moves is not None:
            self._settle(nodes[-1])
        for n, own in pieces.items():
            if n in self.layers.stacks:
                env[n] = jnp.concatenate([own[i] for i in sorted(own)])
        return [*(env[n] for n in self.layers.results), *params]

    def _settle(self, link: LayerNode) -> None:
        """Finds out which arguments of a layer have gradients."""
        assert self.moves is not None
        moved, moving = self.moves
        inputs = tuple(at for at, n in enumerate(link.reads) if n in moved)
        arrays, params = link.block.trained(moving[link.group])
        self.gradients.append(Gradients(arrays, params, inputs, len(arrays)))
        if self.layers.moved is None and self.gradients[-1].trained:
            moved.update(n for n, own in zip(link.makes, link.floats, strict=True) if own)

    def _loop(
        self, link: LayerNode, env: dict[int, Any], params: Any, pieces: dict[int, dict[int, Any]]
    ) -> Any:
        """Runs the layers of the loop; returns the parameters gathered for the one after them."""
        layers, step = self.layers, _step(self.layers)
        carried = [n for n in link.makes if n not in layers.stacks]

        def body(state: Any, i: Any) -> Any:
            params, carry = state
            own = env | dict(zip(carried, carry, strict=True))
            following, _, outs, held = self._layer(
                link, i, own, params, self._remote(link, i + step)
            )
            carry, ys = outs[: len(carried)], outs[len(carried) :]
            return (link.block.gather(following), carry), (ys, held)

        state = params, [env[n] for n in carried]
        # XLA for GPUs does not compile a loop that joins the saved values of two iterations in host
        # memory (jaxlib 0.10.2 and 0.12.0.1). The layers before the loop save alike.
        saved = [x for held in self.saved.values() for x in held.arrays]
        hosted = any(jax.typeof(x).memory_space == jax.memory.Space.Host for x in saved)
        unroll = 1 if hosted else UNROLL
        (params, carry), (ys, self.looped) = layers.over_loop(body, state, unroll=unroll)
        env.update(zip(carried, carry, strict=True))
        for n, y in zip(link.makes[len(carried) :], ys, strict=True):
            pieces[n][link.index or 0] = y
        return params

    def _layer(
        self, link: LayerNode, i: Any, env: Mapping[int, Any], params: Any, following: Any
    ) -> tuple[Any, list[Any], list[Any], Held | None]:
        """Runs layer i, while what follows is gathered.

        Returns:
          `following`, available when the layer's inputs are; its parameters; its results; what is
          saved.
        """
        if self.layers.unroll and self.moves is not None:
            # A slice of a stack that is made after the barrier is fused into the operation that
            # reads it, and XLA does not make that operation part of a matmul then.
            params = self.layers.params(self.shards, link, i, params)
        if link.ordered:
            own = {n: env[n] for n in link.ordered}
            following, params, own = together((following, params, own))
            env = {**env, **own}
        params = self.layers.params(self.shards, link, i, params)
        args = [*params, *self.layers.inputs(link, env, i)]
        if self.moves is None:
            return following, params, link.block.run(args, lambda x, _: x, (), False), None
        trained, count = self.gradients[-1].trained, len(params)
        layer = link.block.layer([*map(jax.typeof, params), *link.types])
        outs, kept = layer.keep_all(args, trained)
        if link.group not in self._stay:
            self._stay[link.group] = layer.reads(trained, kept, outs)
        saves = {count + at for at in link.saves} | {*range(len(args), len(kept))}
        pairs = enumerate(self._stay[link.group])
        return following, params, outs, Held.of(kept, [own and at in saves for at, own in pairs])

    def _remote(self, link: LayerNode, i: Any) -> list[Any]:
        return self.layers.shards_of(self.shards, link, i, link.block.remote)

    def _read_again(self, link: LayerNode) -> tuple[int, ...]:
        stay = self._stay[link.group]
        return tuple(at for at in sorted(link.block.remote) if stay[at])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """What a backward iteration hands to the next one.

    Attributes:
      cotangents: Cotangents of values.
      params: Parameters gathered for the layer, None for those that it does not read or has.
      pending: Gradients of the layer after it, not reduced yet.
      stacks: Stacked gradients of inputs that are stacks.
      shards: Gradients of the shards that have one, for each group and trained parameter.
    """

    cotangents: dict[int, Any]
    params: list[Any]
    pending: list[Any]
    stacks: dict[int, Any]
    shards: list[Any]


@dataclasses.dataclass(eq=False)
class _Backward:
    """The backward pass; attributes as of `_Forward`, but `env` has the inputs read by all.

    `_ahead` is the layer that is gathered already, `_after` the one whose gradients are pending: at
    first the heads.
    """

    layers: ExplicitLayers
    all_gradients: Sequence[Gradients]
    again: Sequence[tuple[int, ...]]
    env: dict[int, Any]
    shards: Sequence[Any]
    saved: Mapping[int, Held]
    looped: Held | None
    last: list[Any] | None
    _ahead: int | None = None

    def run(self, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of the given arrays and of the shards."""
        layers, stacks = self.layers, self.layers.stacks
        results = dict(zip(layers.results, cotangents, strict=False))
        self._results = {n: c for n, c in results.items() if n in stacks}
        heads, end = cotangents[len(layers.results) :], len(layers.links)
        last = self.all_gradients[-1]
        last = dataclasses.replace(
            last, params=tuple(i for i in last.params if heads[i] is not None)
        )
        self.gradients = [*self.all_gradients[:-1], last]
        self.nodes, self._after = layers.nodes, end
        own = {n: c for n, c in results.items() if n not in stacks and c is not None}
        self._ahead = end - 1 if self.last is not None else None
        pending = [heads[i] for i in last.params]
        state = _State(own, self.last or [], pending, *self._empty())
        for at in reversed(range(end)):
            if at not in layers.loop:
                state = self._outside(at, state)
            elif at == layers.loop[-1] and self._after < end:
                state, _ = layers.over_loop(self._in_loop, state, back=True)
                self._after, self._ahead = layers.loop[0], layers.loop[0] - 1
        shards: list[Any] = [[[None] * len(own) for own in group] for group in self.shards]
        state = self._written(
            state, self._after, self.nodes[self._after].index, self._reduce(state)
        )
        of_group = {k.group: own for k, own in zip(self.nodes, self.gradients, strict=True)}
        for group, gradients in of_group.items():
            gradients.fill(shards[group], state.shards[group])
        found = state.cotangents | state.stacks
        return [found.get(n) for n in layers.given], shards

    def _in_loop(self, state: _State, i: Any) -> tuple[_State, None]:
        at = self.layers.loop[0]
        first = min(self.layers.links[at].index or 0 for at in self.layers.loop)
        held = jax.tree.map(lambda x: _slice(x, i - first), self.looped)
        _, state = self._kept_apart(at, state, None)
        # All layers of the loop are alike.
        reduced = self._reduce(state, at)
        state, reduced = self._run(at, i, i - _step(self.layers), state, held, reduced)
        return self._written(state, at, i + _step(self.layers), reduced), None

    def _outside(self, at: int, state: _State) -> _State:
        """Runs a layer backward outside of the loop, unless nothing in it has a gradient."""
        link, before = self.layers.links[at], self.layers.links[max(at - 1, 0)].index
        if not self.gradients[at].trained or all(
            c is None for c in self._enters(at, state, link.index)
        ):
            return state
        if self._ahead != at:
            shards = self.layers.shards_of(self.shards, link, link.index, self.again[at])
            shards, found = together((shards, state.cotangents))
            state = dataclasses.replace(state, cotangents=found, params=link.block.gather(shards))
        # In one computation with the forward pass XLA would keep what lies between the passes.
        held, state = self._kept_apart(at, state, self.saved[at])
        reduced = self._reduce(state)
        state, reduced = self._run(at, link.index, before, state, held, reduced)
        state = self._written(state, self._after, self.nodes[self._after].index, reduced)
        self._after, self._ahead = at, at - 1
        return state

    def _kept_apart(self, at: int, state: _State, held: Held | None) -> tuple[Any, _State]:
        """Keeps iterations apart: nothing of a layer begins before the layer after it ends."""
        makes = self.layers.links[at].makes
        own = {n: state.cotangents[n] for n in makes if n in state.cotangents}
        own, params, pending, held = together((own, state.params, state.pending, held))
        found = state.cotangents | own
        return held, dataclasses.replace(state, cotangents=found, params=params, pending=pending)

    def _enters(self, at: int, state: _State, i: Any) -> list[Any]:
        """Returns the cotangents of a layer's results that are floats."""
        link = self.layers.links[at]
        names = [n for n, own in zip(link.makes, link.floats, strict=True) if own]
        stacked = {n: c for n in names if (c := self._results.get(n)) is not None}
        return [_slice(stacked[n], i) if n in stacked else state.cotangents.get(n) for n in names]

    def _run(
        self, at: int, i: Any, before: Any, state: _State, held: Held, reduced: Any
    ) -> tuple[_State, Any]:
        """Runs layer i backward; meanwhile `reduced` arrives, then layer `before` is gathered."""
        layers, link, gradients = self.layers, self.layers.links[at], self.gradients[at]
        kept, count = held.all(), len(link.block.params)
        params = layers.params(self.shards, link, i, state.params)
        # Parameters that are not read are zeros.
        kept[:count] = [kept[k] if x is None else x for k, x in enumerate(params)]
        for k, n in enumerate(link.reads):
            if k not in link.saves:
                kept[count + k] = _slice(self.env[n], i if n in layers.stacks else None)
        layer = link.block.layer([*map(jax.typeof, kept[:count]), *link.types])
        ahead = layers.links[at - 1] if at else None
        upcoming = layers.shards_of(self.shards, ahead, before, self.again[at - 1]) if ahead else []
        pending, inputs, reduced, upcoming = backward(
            *(layer, gradients, kept, self._enters(at, state, i), reduced, upcoming)
        )
        found = {n: c for n, c in state.cotangents.items() if n not in link.makes}
        stacks = dict(state.stacks)
        for k, x in zip(gradients.inputs, inputs, strict=True):
            n = link.reads[k]
            if n in layers.stacks:
                stacks[n] = _put(stacks[n], x, i)
            else:
                found[n] = found[n] + x if n in found else x
        params = ahead.block.gather(upcoming) if ahead else []
        return _State(found, params, pending, stacks, state.shards), reduced

    def _reduce(self, state: _State, at: int | None = None) -> list[list[Any]]:
        """Returns the reduced gradients of the layer that are pending."""
        at = self._after if at is None else at
        return self.gradients[at].reduce(self.nodes[at].block, state.pending)

    def _written(self, state: _State, at: int, i: Any, reduced: Sequence[Arrays]) -> _State:
        """Stores the reduced gradients of a layer."""
        shards, group = list(state.shards), self.nodes[at].group
        pairs = zip(shards[group], reduced, strict=True)
        shards[group] = [[_put(s, x, i) for s, x in zip(*own, strict=True)] for own in pairs]
        return dataclasses.replace(state, shards=shards)

    def _empty(self) -> tuple[dict[int, Any], list[Any]]:
        """Returns stacks of zeros for gradients of inputs and of shards; None without stacks."""
        stacks: dict[int, Any] = {}
        shards: list[Any] = [[] for _ in self.shards]
        for link, gradients in zip(self.nodes, self.gradients, strict=True):
            names = [n for k in gradients.inputs if (n := link.reads[k]) in self.layers.stacks]
            stacks.update((n, jnp.zeros_like(self.env[n])) for n in names if n not in stacks)
            shards[link.group] = [
                [
                    None if link.index is None else jnp.zeros_like(x)
                    for x, own in zip(
                        self.shards[link.group][at], gradients.arrays[at], strict=True
                    )
                    if own
                ]
                for at in gradients.params
            ]
        return stacks, shards


def _step(layers: ExplicitLayers) -> int:
    """Returns the difference of the indices of two layers that follow on each other."""
    first, second = (layers.links[at].index or 0 for at in layers.loop[:2])
    return second - first


def heads_of(params: Sequence[Param]) -> Block:
    """Returns parameters as a layer that is only gathered and reduced."""
    return Block(lambda *_: [], params, {}, set(), set(range(len(params))))
