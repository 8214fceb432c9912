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
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

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

    @jax.custom_vjp
    def wrapped(arrays: Arrays, shards: Sequence[Arrays]) -> list[Any]:
        env = dict(zip(given, arrays, strict=True))
        for link, leaves, read in _forward(links, env, shards):
            outs = link.run([*leaves, *read], lambda x, _: x, ())
            env.update(zip(link.makes, outs, strict=True))
        return [env[name] for name in results]

    def forward(arrays: Any, shards: Any) -> tuple[list[Any], Any]:
        moved = {n for n, x in zip(given, arrays, strict=True) if x.perturbed and is_float(x.value)}
        moving = [[x.perturbed and is_float(x.value) for x in own] for own in shards]
        shards = [[x.value for x in own] for own in shards]
        env = {name: x.value for name, x in zip(given, arrays, strict=True)}
        turns = []
        for at, (link, leaves, read) in enumerate(_forward(links, env, shards)):
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
        likes = {n: jax.typeof(env[n]) for n in (*given, *(n for li in links for n in li.makes))}
        return [env[name] for name in results], (turns, shards, Known(_Types(likes)))

    def backward(residuals: Any, cotangents: Any) -> Any:
        turns, shards, likes = residuals[0], residuals[1], residuals[2].value.of
        found: dict[Any, Any] = {}
        for name, c in zip(results, cotangents, strict=True):
            if is_float(likes[name]) and known(c) is not None:
                found[name] = c
        grads: list[Any] = [[None] * len(own) for own in shards]
        ahead: tuple[int, _Opened] | None = None
        later: tuple[int, _Sums, Callable[[Arrays], list[Any]]] | None = None
        for at in range(len(links) - 1, -1, -1):
            link, turn, held = links[at], turns[at][0].value, turns[at][1]
            floats = [n for n in link.makes if is_float(likes[n])]
            enters = [found.pop(n, None) for n in floats]
            if not turn or all(c is None for c in enters):
                continue
            if ahead is None or ahead[0] != at:
                own, enters = together((shards[at], enters))
                ahead = at, _Opened.of(link, own, turn)
            opened = ahead[1]
            if at:
                own, opened.leaves, enters = together((shards[at - 1], opened.leaves, enters))
                ahead = at - 1, _Opened.of(links[at - 1], own, turns[at - 1][0].value)
            held, enters = together((held, enters))
            kept = held.all()
            leaves = opened.leaves
            kept[: len(leaves)] = leaves
            layer = link.layer(leaves, [likes[n] for n in link.reads])
            trained = turn.trained(leaves)
            due = later[1].due if later is not None else None
            leaving = together(list(layer.gradients(trained, kept, enters, due)))
            count = sum(i < len(leaves) for i in trained)
            if later is not None:
                later[1].arrays, leaving[count:] = together((later[1].arrays, leaving[count:]))
                grads[later[0]] = later[2](later[1].arrays)
            later = (
                at,
                opened.sums(leaving[:count]),
                functools.partial(turn.placed, len(shards[at])),
            )
            for i, x in zip(trained[count:], leaving[count:], strict=True):
                name = link.reads[i - len(leaves)]
                found[name] = found[name] + x if name in found else x
        if later is not None:
            grads[later[0]] = later[2](later[1].arrays)
        return [found.get(name) for name in given], grads

    wrapped.defvjp(forward, backward, symbolic_zeros=True)
    return wrapped


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
    def of(cls, link: Link, moving: Sequence[bool], moved: set[Any]) -> "_Turn":
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

    def placed(self, count: int, sums: Arrays) -> list[Any]:
        """Gradients among all arrays of its shards."""
        own = dict(zip(self.shards, sums, strict=True))
        return [own.get(i) for i in range(count)]


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
