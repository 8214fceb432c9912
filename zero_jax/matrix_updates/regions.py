"""Parts of an update that need full matrices, found in its trace.

A product that sums over a sharded dim, or multiplies rows of one sharded matrix by columns of
another, needs more than a device has, and so does a decomposition. A region is such operations and
all that lie between them. Its inputs and results at the edges are communicated, so it includes
neighbours where that makes them smaller.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax.extend.core as jex

from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Dim, Dims, Graph, ShardedDims
from zero_jax.tracing.jaxpr import CALLS, ELEMENTWISE, Atom, Walk, is_var, shape_of

# Operations on full matrices, stacked along all dims but the last two.
DECOMPOSITIONS = frozenset(
    (
        *("cholesky", "eig", "eigh", "geqrf", "geqp3", "hessenberg", "householder_product", "lu"),
        *("qr", "schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
    )
)
# Iterations assumed for a loop of unknown length.
_ITERATIONS = 10
# Values smaller than the largest one by this factor are given to all devices in full.
_SMALL = 64


@dataclass(frozen=True)
class Region:
    """Operations that need full matrices; see `regions`.

    Attributes:
      eqns: The operations, in order.
      sharded: Sharded inputs, which are sent to the assigned devices.
      replicated: Other inputs, which each device has in full.
      results: Results that others read.
      moved: Elements that a device would receive for them, as XLA partitions them.
    """

    eqns: tuple[jex.JaxprEqn, ...]
    sharded: tuple[jex.Var, ...]
    replicated: tuple[jex.Var, ...]
    results: tuple[jex.Var, ...]
    moved: float

    @property
    def closed(self) -> jex.ClosedJaxpr:
        """The operations as a jaxpr: (sharded, replicated) to results."""
        return jaxprs.stretch(self.eqns, self.results, [*self.sharded, *self.replicated])


class ShardedProgram(Walk[Dims]):
    """An update, and the communication that its operations need.

    Args:
      closed: The update; its calls are inlined.
      given: The sharded dims of its inputs.

    Attributes:
      closed: The update, with inlined calls.
      graph: The uses of its variables.
      dims: The sharded dims of each sharded variable.
      across: The equations that need full matrices, each with the elements that a device would
        receive for it from XLA: the results of a sum, twice, or an operand.
      apart: The same for branches with several regions, each a jaxpr by itself.
    """

    def __init__(self, closed: jex.ClosedJaxpr, given: Sequence[Dims]):
        self.closed = closed = jaxprs.written_out(closed, CALLS)
        self.graph = Graph(closed.jaxpr)
        self._none: Dims = (None,) * len(given[0]) if given else ()
        self._analysis = ShardedDims(len(self._none))
        self.across: dict[int, float] = {}
        self.apart: dict[int, float] = {}
        self._positions = iter(range(len(closed.jaxpr.eqns)))
        env = self.environment(closed, given)
        self.dims = {v: dims for v, dims in env.items() if any_cut(dims)}

    def literal(self, atom: jex.Literal) -> Dims:
        return self._none

    def constant(self, var: jex.Var, value: object) -> Dims:
        return self._none

    def equation(self, eqn: jex.JaxprEqn, values: list[Dims]) -> Sequence[Dims]:
        made, at = self._analysis.equation(eqn, values), next(self._positions)
        if any(map(any_cut, values)) and (moved := self._moved(eqn, values)):
            (self.apart if _is_apart(eqn, values, made) else self.across)[at] = moved
        return made

    def of(self, atom: Atom) -> Dims:
        """Returns the sharded dims of a value."""
        return self.dims.get(atom, self._none) if is_var(atom) else self._none

    @property
    def moved(self) -> float:
        """Elements that a device would receive."""
        return sum((*self.across.values(), *self.apart.values()))

    def _moved(self, eqn: jex.JaxprEqn, values: list[Dims]) -> float:
        runs, name = jaxprs.bodies(eqn), eqn.primitive.name
        if not runs:
            return sum(_moved_for(eqn, dims) for dims in zip(*values, strict=True))
        inputs = values[1:] if name == "cond" else self._analysis.body(eqn, values)[0]
        times = {"scan": eqn.params.get("length", 1), "while": _ITERATIONS, "cond": 1}[name]
        return times * max(ShardedProgram(body, inputs).moved for body, _ in runs)


def _is_apart(eqn: jex.JaxprEqn, values: Sequence[Dims], made: Sequence[Dims]) -> bool:
    """Returns True for branches that are better interpreted than part of a region.

    In a region all of their sharded values would be sent. This is too much if they have several
    regions, or if the inputs and results of their regions are less than half of it.
    """
    if eqn.primitive.name != "cond":
        return False
    programs = [ShardedProgram(branch, values[1:]) for branch, _ in jaxprs.bodies(eqn)]
    inside = [regions(program) for program in programs]
    if any(program.apart for program in programs) or max(map(len, inside)) > 1:
        return True
    edges = [v for found in inside for region in found for v in (*region.sharded, *region.results)]
    pairs = zip((*eqn.invars, *eqn.outvars), (*values, *made), strict=True)
    return _bytes(a for a, dims in pairs if any_cut(dims)) > 2 * _bytes(edges)


def any_cut(dims: Dims) -> bool:
    """Returns True for a value that is sharded over any axes."""
    return any(d is not None for d in dims)


def _moved_for(eqn: jex.JaxprEqn, dims: Sequence[Dim]) -> float:
    """Returns the elements that a device receives for an operation on operands sharded so."""
    if eqn.primitive.name == "dot_general":
        needed = multiplies_across(eqn, dims)
        sent: dict[str | None, list[Atom]]
        sent = {None: [], "sum": [eqn.outvars[0]] * 2, "lhs": eqn.invars[:1], "rhs": eqn.invars[1:]}
        return sum(math.prod(shape_of(atom)) for atom in sent[needed])
    pairs = zip(eqn.invars, dims, strict=True)
    of_matrices = any(d is not None and d >= len(shape_of(a)) - 2 for a, d in pairs)
    # Besides, all devices would do the same work.
    return math.inf if of_matrices and eqn.primitive.name in DECOMPOSITIONS else 0


def multiplies_across(eqn: jex.JaxprEqn, dims: Sequence[Dim]) -> str | None:
    """Returns the communication for a product of matrices sharded along these dims.

    Returns:
      "sum": The sum of all results. "lhs", "rhs": That operand in full. None: Nothing.
    """
    (lhs_sum, rhs_sum), (lhs_batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = dims
    if lhs is not None and lhs in lhs_batch:
        return None  # each device multiplies its own
    summed = lhs in lhs_sum, rhs in rhs_sum
    if summed == (True, True) or (True in summed and None in (lhs, rhs)):
        return "sum"
    if lhs is None or rhs is None:
        return None
    return "lhs" if summed[0] else "rhs"


def regions(program: ShardedProgram) -> list[Region]:
    """Returns the regions of a program. No region reads its results through other equations."""
    return list(_Regions(program).found())


class _Regions:
    def __init__(self, program: ShardedProgram):
        self._program, self._graph = program, program.graph
        self._core = set(self._graph.between(program.across))
        self._below = set(self._graph.made(self._graph.after(self._core)))

    def found(self) -> Iterator[Region]:
        for core in self._groups():
            after = self._grown(core, self._after(core), lambda s: _bytes(self._graph.results(s)))
            full = self._grown(after, self._before(after), lambda s: _bytes(self._sharded(s)))
            read, sharded = self._read(full), self._sharded(full)
            if not sharded:
                continue  # a product of vectors
            yield Region(
                tuple(self._graph.part(full)),
                tuple(sharded),
                tuple(v for v in read if v not in sharded),
                # Operations included before the core are computed outside too, for other readers.
                tuple(self._graph.results(after)),
                sum(self._program.across.get(at, 0) for at in core),
            )

    def _groups(self) -> list[set[int]]:
        """Returns the core's parts that read nothing of each other."""
        made = set(self._graph.made(self._core))
        groups: list[tuple[set[int], set[jex.Var]]] = []
        for at in sorted(self._core):
            positions = {at}
            linked = {v for v in jaxprs.variables(self._graph.part(positions)) if v in made}
            linked.update(self._graph.made(positions))
            apart = []
            for group in groups:
                if linked.isdisjoint(group[1]):
                    apart.append(group)
                else:
                    positions, linked = positions | group[0], linked | group[1]
            groups = [*apart, (positions, linked)]
        return [positions for positions, _ in groups]

    def _after(self, core: set[int]) -> list[int]:
        """Returns elementwise equations behind the core that read its values and full ones."""
        had = {*self._graph.made(core), *self._sharded(core)}
        found = []
        for at in self._graph.positions[min(core) + 1 :]:
            eqn = self._graph.eqns[at]
            read = jaxprs.variables([eqn])
            known = all(v in had or self._is_outside(v) for v in read)
            if at not in self._core and _is_simple(eqn) and known and not had.isdisjoint(read):
                found.append(at)
                had.update(eqn.outvars)
        return found

    def _is_outside(self, var: jex.Var) -> bool:
        """Returns True if every device has it in full before any region has run."""
        return var not in self._program.dims and var not in self._below

    def _before(self, region: set[int]) -> list[int]:
        """Returns equations that a region could include before its first one, the last first."""
        wanted, found = set(self._sharded(region)), []
        for at in reversed(range(max(region))):
            eqn = self._graph.eqns[at]
            if at not in self._core and _is_simple(eqn) and not wanted.isdisjoint(eqn.outvars):
                found.append(at)
                wanted.update(v for v in jaxprs.variables([eqn]) if v in self._program.dims)
        return [at for at in found if at not in region]

    def _grown(
        self, region: set[int], more: list[int], sent: Callable[[set[int]], int]
    ) -> set[int]:
        """Returns a region with as many more equations, in order, as minimise the bytes sent."""
        steps = itertools.accumulate(more, lambda s, at: s | {at}, initial=region)
        return min(steps, key=sent)

    def _read(self, region: set[int]) -> list[jex.Var]:
        return jaxprs.inputs_of(self._graph.part(region))

    def _sharded(self, region: set[int]) -> list[jex.Var]:
        """Returns the sharded inputs, except for small ones, which all devices can have in full."""
        cut = [v for v in self._read(region) if v in self._program.dims]
        most = max(map(jaxprs.bytes_of, cut), default=0)
        return [v for v in cut if len(shape_of(v)) > 1 and jaxprs.bytes_of(v) * _SMALL > most]


def _bytes(atoms: Iterable[Atom]) -> int:
    return sum(map(jaxprs.bytes_of, atoms))


def _is_simple(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in ELEMENTWISE | jaxprs.LAYOUT | {"dot_general"}
