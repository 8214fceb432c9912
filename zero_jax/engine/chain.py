"""Layers that are not scanned, as one `custom_vjp` that gathers each while another computes.

Barriers leave one layer of slack. Forward, the gather of layer i+1 waits for the input of layer i.
Backward, the gather of layer i-1 waits for the cotangent that enters layer i, and the cotangent
that leaves layer i waits for the reduce-scatter of layer i+1, never for its own: tied to its own, a
reduce-scatter would have nothing to hide behind. Of that of layer i+1 one half is due by a third of
layer i's backward pass, the other by two thirds: XLA starts each as late as it thinks it may.
Without barriers XLA would gather all layers at once and keep what lies between forward and
backward.

Holds two gathered layers at a time, and one full gradient under way beside the one being computed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.collectives.barriers import Arrays, is_float, known, together
from zero_jax.engine.weights import Source
from zero_jax.remat.policies import Place
from zero_jax.remat.recompute import Held, Known, Layer, Midway, Run


@dataclasses.dataclass(frozen=True)
class Link:
    """One layer of a chain.

    Attributes:
      run: the layer, of its whole leaves and then of what it reads.
      sources: of its leaves.
      reads: names of the arrays it reads.
      makes: names of its results.
      places: where some of what it reads is kept, by position among `reads`.
    """

    run: Run
    sources: Sequence[Source]
    reads: Sequence[Any]
    makes: Sequence[Any]
    places: Mapping[int, Place]

    def opened(self, shards: Arrays) -> list[Any]:
        """Its leaves, of the arrays of their sources."""
        it = iter(shards)
        return [s.of([next(it) for _ in s.arrays]).open() for s in self.sources]

    def layer(self, leaves: Arrays, read: Arrays) -> Layer:
        """The layer with its leaves among its inputs, of which it is given the types."""
        places = {len(leaves) + i: place for i, place in self.places.items()}
        return Layer(self.run, [*map(jax.typeof, leaves), *read], places)


def chain(links: Sequence[Link], given: Sequence[Any], results: Sequence[Any]) -> Any:
    """Wraps a run of layers that follow on each other; the module's text has how they overlap.

    Args:
      links: the layers.
      given: names of arrays that are there before the first.
      results: names of those that are wanted after the last.

    Returns:
      A function of the given arrays and of each layer's shards that returns the results.
    """
    own = _Chain(links, given, results)
    wrapped = jax.custom_vjp(own.run)
    wrapped.defvjp(own.forward, own.backward, symbolic_zeros=True)
    return wrapped


@dataclasses.dataclass(frozen=True, eq=False)
class _Chain:
    """What `chain` was given, and its passes."""

    links: Sequence[Link]
    given: Sequence[Any]
    results: Sequence[Any]

    def run(self, arrays: Arrays, shards: Sequence[Arrays]) -> list[Any]:
        """Without a gradient."""
        env = dict(zip(self.given, arrays, strict=True))
        for link, leaves, read in _forward(self.links, env, shards):
            outs = link.run([*leaves, *read], lambda x, _: x, ())
            env.update(zip(link.makes, outs, strict=True))
        return [env[name] for name in self.results]

    def forward(self, arrays: Any, shards: Any) -> tuple[list[Any], Any]:
        """The results, and what the backward pass reads."""
        inputs = list(zip(self.given, arrays, strict=True))
        moved = {name for name, x in inputs if x.perturbed and is_float(x.value)}
        moving = [[x.perturbed and is_float(x.value) for x in own] for own in shards]
        shards = [[x.value for x in own] for own in shards]
        env = {name: x.value for name, x in inputs}
        turns = []
        for at, (link, leaves, read) in enumerate(_forward(self.links, env, shards)):
            turn = _Turn.of(link, moving[at], moved)
            layer = link.layer(leaves, list(map(jax.typeof, read)))
            outs, kept = layer.keep_all([*leaves, *read], turn.trained(leaves))
            # The leaves are gathered again, whatever reads them.
            stay = layer.reads(turn.trained(leaves), kept, outs)
            stay[: len(leaves)] = [False] * len(leaves)
            outs, held = Held.of(kept, stay).on_its_way(outs)
            env.update(zip(link.makes, outs, strict=True))
            moved.update(n for n, x in zip(link.makes, outs, strict=True) if turn and is_float(x))
            turns.append((Known(turn), held))
        names = (*self.given, *(n for link in self.links for n in link.makes))
        likes = {name: jax.typeof(env[name]) for name in names}
        return [env[name] for name in self.results], (turns, shards, Known(_Types(likes)))

    def backward(self, residuals: Any, cotangents: Any) -> Any:
        """The gradients of the given arrays, and of each layer's shards."""
        turns, shards, likes = residuals[0], residuals[1], residuals[2].value.of
        way = _WayBack(self.links, [t.value for t, _ in turns], shards, likes)
        for name, c in zip(self.results, cotangents, strict=True):
            if is_float(likes[name]) and known(c) is not None:
                way.found[name] = c
        for at in reversed(range(len(self.links))):
            way.layer(at, turns[at][1])
        way.settle(None)
        return [way.found.get(name) for name in self.given], way.grads


class _WayBack:
    """The layers' backward passes, last layer first.

    Attributes:
      found: cotangents by name, as far as they are known.
      grads: of each layer those of its shards.
      ahead: the layer that is gathered already, and its leaves.
      later: the layer whose gradients are on their way, and these.
    """

    def __init__(
        self,
        links: Sequence[Link],
        turns: Sequence["_Turn"],
        shards: Sequence[Arrays],
        likes: Mapping[Any, Any],
    ):
        self._links, self._turns, self._shards, self._likes = links, turns, shards, likes
        self.found: dict[Any, Any] = {}
        self.grads: list[list[Any]] = [[None] * len(own) for own in shards]
        self.ahead: tuple[int, _Opened] | None = None
        self.later: tuple[int, _Sums] | None = None

    def layer(self, at: int, held: Held) -> None:
        """One of them, while the layer before it is gathered and the one after it is summed."""
        link, turn = self._links[at], self._turns[at]
        enters = [self.found.pop(n, None) for n in link.makes if is_float(self._likes[n])]
        if not turn or all(c is None for c in enters):
            return
        opened, enters = self._opened(at, enters)
        held, enters = together((held, enters))
        leaves, kept = opened.leaves, held.all()
        kept[: len(leaves)] = leaves
        layer = link.layer(leaves, [self._likes[n] for n in link.reads])
        trained = turn.trained(leaves)
        due = self.later[1].due if self.later is not None else None
        leaving = together(list(layer.gradients(trained, kept, enters, due)))
        count = len(turn.leaves)
        leaving[count:] = self.settle(leaving[count:])
        self.later = at, opened.sums(leaving[:count])
        for i, x in zip(turn.reads, leaving[count:], strict=True):
            name = link.reads[i]
            self.found[name] = self.found[name] + x if name in self.found else x

    def _opened(self, at: int, enters: Arrays) -> tuple["_Opened", Any]:
        """A layer's leaves; the gather of the layer before it waits for what enters this one."""
        if self.ahead is None or self.ahead[0] != at:
            own, enters = together((self._shards[at], enters))
            self.ahead = at, _Opened.of(self._links[at], own, self._turns[at])
        opened = self.ahead[1]
        if at:
            before = at - 1
            own, opened.leaves, enters = together((self._shards[before], opened.leaves, enters))
            self.ahead = before, _Opened.of(self._links[before], own, self._turns[before])
        return opened, enters

    def settle(self, leaving: Any) -> Any:
        """Puts the gradients of the layer after into `grads`; what leaves this layer, None after
        the last one, waits for them."""
        if self.later is None:
            return leaving
        at, sums = self.later
        if leaving is not None:
            sums.arrays, leaving = together((sums.arrays, leaving))
        for i, x in zip(self._turns[at].shards, sums.arrays, strict=True):
            self.grads[at][i] = x
        return leaving


def _forward(links: Sequence[Link], env: dict[Any, Any], shards: Sequence[Arrays]) -> Any:
    """Each layer with its leaves and what it reads; its user puts the results into `env`."""
    ahead = links[0].opened(shards[0])
    for at, link in enumerate(links):
        leaves, read = ahead, [env[name] for name in link.reads]
        if at + 1 < len(links):
            others = {n for i, other in enumerate(links) if i != at for n in other.reads}
            own = [i for i, n in enumerate(link.reads) if n not in others]
            nexts, leaves, inputs = together((shards[at + 1], leaves, [read[i] for i in own]))
            for i, x in zip(own, inputs, strict=True):
                read[i] = x
            ahead = links[at + 1].opened(nexts if own else shards[at + 1])
        yield link, leaves, read


@dataclasses.dataclass(frozen=True)
class _Turn:
    """What of a layer in a chain has gradients: arrays of its shards, leaves, what it reads."""

    shards: tuple[int, ...]
    leaves: tuple[int, ...]
    reads: tuple[int, ...]

    @classmethod
    def of(cls, link: Link, moving: Sequence[bool], moved: set[jex.Var]) -> "_Turn":
        it = iter(moving)
        trained = [any([next(it) for _ in source.arrays]) for source in link.sources]
        return cls(
            tuple(i for i, m in enumerate(moving) if m),
            tuple(i for i, t in enumerate(trained) if t),
            tuple(i for i, name in enumerate(link.reads) if name in moved),
        )

    def __bool__(self) -> bool:
        return bool(self.leaves or self.reads)

    def trained(self, leaves: Arrays) -> tuple[int, ...]:
        """Positions among the layer's inputs: leaves, then what it reads."""
        return (*self.leaves, *(len(leaves) + i for i in self.reads))


class _Types:
    """Types by name; equal only to themselves."""

    def __init__(self, of: Mapping[Any, Any]):
        self.of = of


@dataclasses.dataclass
class _Opened:
    """A layer's leaves, and of each that is trained what makes gradients of its shards."""

    leaves: list[Any]
    backs: list[Callable[[Any], Sequence[Any]]]

    @classmethod
    def of(cls, link: Link, shards: Arrays, turn: _Turn) -> "_Opened":
        out, places = cls([], []), iter(range(len(shards)))
        for source in link.sources:
            own = [next(places) for _ in source.arrays]
            leaf, back = _opened(source, [shards[i] for i in own], [i in turn.shards for i in own])
            out.leaves.append(leaf)
            out.backs.append(back)
        out.backs = [out.backs[i] for i in turn.leaves]
        return out

    def sums(self, gradients: list[Any]) -> "_Sums":
        """Of the leaves' gradients over devices: of vectors, then of about half of the rest each.

        XLA starts a sum as late as it may, which is too late for all that a layer sends. It would
        merge the parts if one did not wait for the other; and sums of vectors, which travel in
        fp32, with those of the next layer, and then start the large ones later still.
        """
        parts = [[i for i, g in enumerate(gradients) if g.ndim < 2], *_halves(gradients)]
        made: dict[int, Sequence[Any]] = {}
        before: list[int] = []
        for part in parts:
            done, own = together(([made[i] for i in before], [gradients[i] for i in part]))
            made.update(zip(before, done, strict=True))
            made.update((i, self.backs[i](g)) for i, g in zip(part, own, strict=True))
            before = part
        first, second = (
            [x for part in some for i in part for x in made[i]] for some in (parts[:2], parts[2:])
        )
        arrays = [x for i in range(len(gradients)) for x in made[i]]
        return _Sums(arrays, {Midway.FIRST: first, Midway.SECOND: second})


@dataclasses.dataclass
class _Sums:
    """Gradients of a layer's shards, and which of them are to be there by when."""

    arrays: list[Any]
    due: dict[Midway, list[Any]]


def _opened(source: Source, arrays: Arrays, moving: Sequence[bool]) -> tuple[Any, Any]:
    """A leaf, and what makes gradients of those of its arrays that have one."""

    def opened(*given: Any) -> Any:
        it = iter(given)
        return source.of([next(it) if m else x for x, m in zip(arrays, moving, strict=True)]).open()

    return jax.vjp(opened, *(x for x, m in zip(arrays, moving, strict=True) if m))


def _halves(gradients: Arrays) -> tuple[list[int], list[int]]:
    """Positions of the matrices in two parts of about the same size."""
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    matrices = [i for i, g in enumerate(gradients) if g.ndim > 1]
    for i in sorted(matrices, key=lambda i: -gradients[i].size):
        smaller = sizes.index(min(sizes))
        halves[smaller].append(i)
        sizes[smaller] += gradients[i].size
    return halves
