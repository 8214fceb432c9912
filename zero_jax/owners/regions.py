"""Which parts of an update need whole matrices: read from its trace.

A product that sums over a dim that is cut, or multiplies rows of one cut matrix by columns of
another, needs more than a device holds, and so does a decomposition. A region is such operations
and all that lies between them. What it reads and makes at its edges is what has to travel, so it
takes in neighbours where less travels then.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax.extend.core as jex

from zero_jax.jaxpr import equations
from zero_jax.jaxpr.equations import CALLS, LAYOUT, bytes_of, is_in, is_var, shape_of, variables
from zero_jax.jaxpr.operations import ELEMENTWISE
from zero_jax.jaxpr.spread import Dim, spread

# Of a value, along which dim each group of mesh axes cuts it.
Dims = tuple[Dim, ...]
# Operations on matrices as a whole, stacked along all dims but the last two.
DECOMPOSITIONS = frozenset(
    (
        *("cholesky", "eig", "eigh", "geqrf", "geqp3", "hessenberg", "householder_product", "lu"),
        *("qr", "schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
    )
)
# Turns of a loop of unknown length.
_TURNS = 10
# What part of the largest value that is dealt out is so small that all devices have it whole.
_SMALL = 64


@dataclass(frozen=True)
class Region:
    """Operations that need whole matrices; see `regions`.

    Attributes:
      eqns: in their order.
      dealt: what they read that is cut, and goes to owners.
      same: what else they read, whole on each device.
      made: what is read of their results by others.
      moved: elements that a device would be sent for them, as XLA partitions them.
    """

    eqns: tuple[jex.JaxprEqn, ...]
    dealt: tuple[jex.Var, ...]
    same: tuple[jex.Var, ...]
    made: tuple[jex.Var, ...]
    moved: float

    @property
    def closed(self) -> jex.ClosedJaxpr:
        """As a function of what is dealt and what is the same."""
        effects = set().union(*(e.effects for e in self.eqns))
        given = [*self.dealt, *self.same]
        return jex.ClosedJaxpr(equations.new_jaxpr(given, self.made, self.eqns, effects), ())


class Walk:
    """Follows cuts through a jaxpr whose calls are written out.

    Args:
      jaxpr: the jaxpr.
      given: how each of its inputs is cut.

    Attributes:
      dims: of each variable that is cut.
      across: the positions of equations that need whole matrices, each with how many elements a
        device would be sent for it, as XLA has it: the results of a sum, twice, or an operand.
      apart: the same of branches with several regions, each a jaxpr of its own.
      results: how the jaxpr's results are cut.
    """

    def __init__(self, jaxpr: jex.Jaxpr, given: Sequence[Dims]):
        self.jaxpr, self._tracks = jaxpr, len(given[0]) if given else 0
        self.dims: dict[jex.Var, Dims] = {}
        self.across: dict[int, float] = {}
        self.apart: dict[int, float] = {}
        self._note(jaxpr.invars, given)
        for at, eqn in enumerate(jaxpr.eqns):
            made, moved = self._one(eqn, [self.of(a) for a in eqn.invars])
            self._note(eqn.outvars, made)
            if moved:
                (self.apart if self._is_apart(eqn) else self.across)[at] = moved
        self.results = [self.of(atom) for atom in jaxpr.outvars]

    def of(self, atom: equations.Atom) -> Dims:
        """How a value is cut."""
        none = (None,) * self._tracks
        return self.dims.get(atom, none) if is_var(atom) else none

    def _note(self, found: Iterable[jex.Var], dims: Iterable[Dims]) -> None:
        self.dims.update((v, d) for v, d in zip(found, dims, strict=True) if any_cut(d))

    def _one(self, eqn: jex.JaxprEqn, given: list[Dims]) -> tuple[list[Dims], float]:
        """How its results are cut, and what is sent for it."""
        if not any(map(any_cut, given)):
            return [(None,) * self._tracks] * len(eqn.outvars), 0
        if equations.bodies(eqn):
            return self._inside(eqn, given)
        tracks = list(zip(*given, strict=True))
        spreads = [spread(eqn, dims) for dims in tracks]
        return list(zip(*spreads, strict=True)), sum(_moved_for(eqn, dims) for dims in tracks)

    def _inside(self, eqn: jex.JaxprEqn, given: list[Dims]) -> tuple[list[Dims], float]:
        """Of a loop or a branch; a scan's slices lose their first dim, its results get one."""
        scan = eqn.primitive.name == "scan"
        first, carried = equations.state_of(eqn) if scan else (0, len(eqn.outvars))
        last = first + carried if scan else len(given)
        inside = [d if i < last else _shifted(d, -1) for i, d in enumerate(given)]
        bodies = equations.bodies(eqn)
        walks = [Walk(_written_out(body), inside[begin:]) for body, begin in bodies]
        outs = [d if i < carried else _shifted(d, 1) for i, d in enumerate(walks[0].results)]
        times = eqn.params["length"] if scan else _TURNS if eqn.primitive.name == "while" else 1
        moved = [sum((*walk.across.values(), *walk.apart.values())) for walk in walks]
        return outs, times * max(moved)

    def _is_apart(self, eqn: jex.JaxprEqn) -> bool:
        """Whether it is a branch of which all that is cut would travel, if it were part of a
        region, where what needs whole matrices is one of several things, or less than half."""
        if eqn.primitive.name != "cond":
            return False
        dims = [self.of(a) for a in eqn.invars[1:]]
        walks = [Walk(_written_out(body), dims) for body, _ in equations.bodies(eqn)]
        found = [regions(walk) for walk in walks]
        if any(walk.apart for walk in walks) or max(map(len, found)) > 1:
            return True
        inside = [v for own in found for region in own for v in (*region.dealt, *region.made)]
        everything = [a for a in (*eqn.invars, *eqn.outvars) if any_cut(self.of(a))]
        return _bytes(everything) > 2 * _bytes(inside)


def _written_out(closed: jex.ClosedJaxpr) -> jex.Jaxpr:
    return equations.written_out(closed, CALLS).jaxpr


def any_cut(dims: Dims) -> bool:
    """Whether any axes cut it."""
    return any(d is not None for d in dims)


def _shifted(dims: Dims, by: int) -> Dims:
    return tuple(None if d is None or d + by < 0 else d + by for d in dims)


def _moved_for(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> float:
    """The elements that a device is sent for an operation on what is cut along these dims."""
    if eqn.primitive.name == "dot_general":
        needed = multiplies_across(eqn, given)
        sent: dict[str | None, list[equations.Atom]]
        sent = {None: [], "sum": [eqn.outvars[0]] * 2, "lhs": eqn.invars[:1], "rhs": eqn.invars[1:]}
        return sum(math.prod(shape_of(atom)) for atom in sent[needed])
    pairs = zip(eqn.invars, given, strict=True)
    own = any(d is not None and d >= len(shape_of(a)) - 2 for a, d in pairs)
    # All devices would do the same work, besides.
    return math.inf if own and eqn.primitive.name in DECOMPOSITIONS else 0


def multiplies_across(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> str | None:
    """What devices need of a product of matrices that are cut along these dims.

    Returns:
      "sum": the results of all are added up. "lhs", "rhs": that operand as a whole. None: nothing.
    """
    (lhs_sum, rhs_sum), (lhs_batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = given
    if lhs is not None and lhs in lhs_batch:
        return None  # each device multiplies its own
    summed = lhs in lhs_sum, rhs in rhs_sum
    if summed == (True, True) or (True in summed and None in (lhs, rhs)):
        return "sum"
    if lhs is None or rhs is None:
        return None
    return "lhs" if summed[0] else "rhs"


def regions(walk: Walk) -> list[Region]:
    """The regions of a jaxpr, none of which reads what it makes through others."""
    return list(_Regions(walk).found())


class _Regions:
    def __init__(self, walk: Walk):
        self._walk, self._eqns = walk, walk.jaxpr.eqns
        self._core = self._between()
        self._below = {v for at in _reached(self._eqns, self._core) for v in self._outs(at)}
        self._readers: dict[jex.Var, list[int]] = {}
        for at, eqn in enumerate(self._eqns):
            for v in variables([eqn]):
                self._readers.setdefault(v, []).append(at)
        self._results = {a for a in walk.jaxpr.outvars if is_var(a)}

    def found(self) -> Iterator[Region]:
        for core in self._groups():
            after = self._grown(core, self._after(core), lambda s: _bytes(self._made(s)))
            whole = self._grown(after, self._before(after), lambda s: _bytes(self._dealt(s)))
            read, dealt = self._read(whole), self._dealt(whole)
            if not dealt:
                continue  # a product of vectors
            yield Region(
                tuple(self._eqns[at] for at in sorted(whole)),
                tuple(dealt),
                tuple(v for v in read if v not in dealt),
                # What was taken in before the core is still computed outside for who reads it.
                tuple(self._made(after)),
                sum(self._walk.across.get(at, 0) for at in core),
            )

    def _outs(self, at: int) -> list[jex.Var]:
        return list(self._eqns[at].outvars)

    def _between(self) -> set[int]:
        """The positions of what needs whole matrices, and of all that lies between two such."""
        across = set(self._walk.across)
        after = set(_reached(self._eqns, across))
        wanted: set[jex.Var] = set()
        core = set(across)
        for at in sorted(after, reverse=True):
            if at in across or not wanted.isdisjoint(self._outs(at)):
                core.add(at)
                wanted.update(variables([self._eqns[at]]))
        return core

    def _groups(self) -> list[set[int]]:
        """The core's parts that read nothing of each other."""
        made = {v for at in self._core for v in self._outs(at)}
        groups: list[tuple[set[int], set[jex.Var]]] = []
        for at in sorted(self._core):
            eqn = self._eqns[at]
            own = {v for v in variables([eqn]) if v in made}
            positions, touched = {at}, own | set(eqn.outvars)
            apart = []
            for group in groups:
                if touched.isdisjoint(group[1]):
                    apart.append(group)
                else:
                    positions, touched = positions | group[0], touched | group[1]
            groups = [*apart, (positions, touched)]
        return [positions for positions, _ in groups]

    def _after(self, core: set[int]) -> list[int]:
        """What could be taken in behind: elementwise, of what the region has and whole values."""
        had = {v for at in core for v in self._outs(at)} | set(self._dealt(core))
        found = []
        for at in range(min(core) + 1, len(self._eqns)):
            eqn, read = self._eqns[at], variables([self._eqns[at]])
            own = all(v in had or self._is_outside(v) for v in read)
            if at not in self._core and _is_simple(eqn) and own and not had.isdisjoint(read):
                found.append(at)
                had.update(eqn.outvars)
        return found

    def _is_outside(self, var: jex.Var) -> bool:
        """Whether every device has it whole before any region has run."""
        return var not in self._walk.dims and var not in self._below

    def _before(self, region: set[int]) -> list[int]:
        """What could be taken in before, the last first."""
        wanted, found = set(self._dealt(region)), []
        for at in reversed(range(max(region))):
            eqn = self._eqns[at]
            if at not in self._core and _is_simple(eqn) and not wanted.isdisjoint(eqn.outvars):
                found.append(at)
                wanted.update(v for v in variables([eqn]) if v in self._walk.dims)
        return [at for at in found if at not in region]

    def _grown(
        self, region: set[int], more: list[int], travels: Callable[[set[int]], int]
    ) -> set[int]:
        """With as many more, in their order, as make least travel; as few as do."""
        steps = itertools.accumulate(more, lambda s, at: s | {at}, initial=region)
        return min(steps, key=travels)

    def _read(self, region: set[int]) -> list[jex.Var]:
        made = {v for at in region for v in self._outs(at)}
        read = variables([self._eqns[at] for at in sorted(region)])
        return list(dict.fromkeys(v for v in read if v not in made))

    def _dealt(self, region: set[int]) -> list[jex.Var]:
        """What is cut of what is read, but factors and the like, which all can have whole."""
        cut = [v for v in self._read(region) if v in self._walk.dims]
        most = max(map(bytes_of, cut), default=0)
        return [v for v in cut if len(shape_of(v)) > 1 and bytes_of(v) * _SMALL > most]

    def _made(self, region: set[int]) -> list[jex.Var]:
        def leaves(v: jex.Var) -> bool:
            return v in self._results or any(r not in region for r in self._readers.get(v, ()))

        return [v for at in sorted(region) for v in self._outs(at) if leaves(v)]


def _bytes(found: Iterable[equations.Atom]) -> int:
    return sum(map(bytes_of, found))


def _reached(eqns: Sequence[jex.JaxprEqn], start: set[int]) -> list[int]:
    """The positions of these equations and of all that read what they make."""
    tainted: set[jex.Var] = set()
    found = []
    for at, eqn in enumerate(eqns):
        if at in start or any(is_in(a, tainted) for a in eqn.invars):
            found.append(at)
            tainted.update(eqn.outvars)
    return found


def _is_simple(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in ELEMENTWISE | LAYOUT | {"dot_general"}
