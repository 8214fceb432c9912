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
from zero_jax.tracing.graph import Graph
from zero_jax.tracing.jaxpr import CALLS, ELEMENTWISE, Atom, is_in, is_var, shape_of
from zero_jax.tracing.sharded_dims import Dim, Dims, ShardedDims

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
    """Operations that need full matrices, and all between them.

    Attributes:
      sharded: Sharded inputs, which are sent to the assigned devices.
      replicated: Other inputs, which each device has in full.
      results: Results that others read.
      closed: The operations as a jaxpr: (sharded, replicated) to results.
      made: Values that are computed here and nowhere else.
      moved: Elements that a device would receive for the operations, as XLA partitions them.
    """

    sharded: tuple[jex.Var, ...]
    replicated: tuple[jex.Var, ...]
    results: tuple[jex.Var, ...]
    closed: jex.ClosedJaxpr
    made: frozenset[jex.Var]
    moved: float


class ShardedProgram:
    """An update, and the communication that its operations need.

    Args:
      closed: The update; its calls are inlined.
      dims: The sharded dims of its inputs.

    Attributes:
      closed: The update, with inlined calls.
      graph: The uses of its variables.
      dims: The sharded dims of each sharded variable.
      moved: The equations that need full matrices, each with the elements that a device would
        receive for it from XLA: the results of a sum, twice, or an operand.
      across: Those of them that regions are made of: all but branches, each of which has regions
        of its own.
    """

    def __init__(self, closed: jex.ClosedJaxpr, dims: Sequence[Dims]):
        self.closed = closed = jaxprs.written_out(closed, CALLS)
        self.graph = Graph(closed.jaxpr)
        self._none: Dims = (None,) * len(dims[0]) if dims else ()
        self._analysis = ShardedDims(len(self._none))
        env = self._analysis.environment(closed, dims)
        self.dims = {v: d for v, d in env.items() if d != self._none}
        self.moved: dict[int, float] = {}
        for at in self.graph.where(lambda eqn: any(is_in(a, self.dims) for a in eqn.invars)):
            if moved := self._moved(self.graph.eqns[at]):
                self.moved[at] = moved
        branches = self.graph.where(lambda eqn: eqn.primitive.name == "cond")
        self.across = [at for at in self.moved if at not in branches]
        self._core = set(self.graph.between(self.across))
        self._below = set(self.graph.made(self.graph.after(self._core)))

    def of(self, atom: Atom) -> Dims:
        """Returns the sharded dims of a value."""
        return self.dims.get(atom, self._none) if is_var(atom) else self._none

    def _moved(self, eqn: jex.JaxprEqn) -> float:
        runs, name, values = jaxprs.bodies(eqn), eqn.primitive.name, list(map(self.of, eqn.invars))
        if not runs:
            return sum(_moved_for(eqn, dims) for dims in zip(*values, strict=True))
        inputs = values[1:] if name == "cond" else self._analysis.body(eqn, values)[0]
        times = {"scan": eqn.params.get("length", 1), "while": _ITERATIONS, "cond": 1}[name]
        return times * max(sum(ShardedProgram(body, inputs).moved.values()) for body, _ in runs)

    def regions(self) -> Iterator[Region]:
        """Yields the regions. No region reads its results through other equations."""
        for core in self.graph.connected(self._core):
            after = _grown(core, self._after(core), lambda s: _bytes(self.graph.results(s)))
            full = _grown(after, self._before(after), lambda s: _bytes(self._sharded(s)))
            sharded, part = self._sharded(full), self.graph.part(full)
            if not sharded:
                continue  # a product of vectors
            replicated = [v for v in jaxprs.inputs_of(part) if v not in sharded]
            # Operations included before the core are computed outside too, for other readers.
            results = self.graph.results(after)
            yield Region(
                tuple(sharded),
                tuple(replicated),
                tuple(results),
                jaxprs.stretch(part, results, [*sharded, *replicated]),
                frozenset(self.graph.made(after)),
                sum(self.moved.get(at, 0) for at in core),
            )

    def _after(self, core: set[int]) -> list[int]:
        """Returns elementwise equations behind the core that read its values and full ones."""
        had = {*self.graph.made(core), *self._sharded(core)}
        positions = []
        for at in self.graph.positions[min(core) + 1 :]:
            eqn = self.graph.eqns[at]
            read = jaxprs.variables([eqn])
            known = all(v in had or self._is_outside(v) for v in read)
            if at not in self._core and _is_simple(eqn) and known and not had.isdisjoint(read):
                positions.append(at)
                had.update(eqn.outvars)
        return positions

    def _is_outside(self, var: jex.Var) -> bool:
        """Returns True if every device has it in full before any region has run."""
        return var not in self.dims and var not in self._below

    def _before(self, region: set[int]) -> list[int]:
        """Returns equations that a region could include before its first one, the last first."""
        wanted, positions = set(self._sharded(region)), []
        for at in reversed(range(max(region))):
            eqn = self.graph.eqns[at]
            if at not in self._core and _is_simple(eqn) and not wanted.isdisjoint(eqn.outvars):
                positions.append(at)
                wanted.update(v for v in jaxprs.variables([eqn]) if v in self.dims)
        return [at for at in positions if at not in region]

    def _sharded(self, region: set[int]) -> list[jex.Var]:
        """Returns the sharded inputs, except for small ones, which all devices can have in full."""
        read = jaxprs.inputs_of(self.graph.part(region))
        cut = [v for v in read if v in self.dims]
        most = max(map(jaxprs.bytes_of, cut), default=0)
        return [v for v in cut if len(shape_of(v)) > 1 and jaxprs.bytes_of(v) * _SMALL > most]


def _moved_for(eqn: jex.JaxprEqn, dims: Sequence[Dim]) -> float:
    """Returns the elements that a device receives for an operation on operands sharded so."""
    if eqn.primitive.name == "dot_general":
        return sum(math.prod(shape_of(atom)) for atom in _received(eqn, dims))
    pairs = zip(eqn.invars, dims, strict=True)
    of_matrices = any(d is not None and d >= len(shape_of(a)) - 2 for a, d in pairs)
    # Besides, all devices would do the same work.
    return math.inf if of_matrices and eqn.primitive.name in DECOMPOSITIONS else 0


def _received(eqn: jex.JaxprEqn, dims: Sequence[Dim]) -> Sequence[Atom]:
    """Returns what a device receives for a product of matrices sharded along these dims."""
    (lhs_sum, rhs_sum), (lhs_batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = dims
    if lhs is not None and lhs in lhs_batch:
        return []  # each device multiplies its own
    summed = lhs in lhs_sum, rhs in rhs_sum
    if summed == (True, True) or (True in summed and None in (lhs, rhs)):
        return eqn.outvars * 2  # an all-reduce of all results receives them twice
    if lhs is None or rhs is None:
        return []
    return [eqn.invars[0 if summed[0] else 1]]


def _grown(region: set[int], more: list[int], sent: Callable[[set[int]], int]) -> set[int]:
    """Returns a region with as many more equations, in order, as minimise the bytes sent."""
    return min(itertools.accumulate(more, lambda s, at: s | {at}, initial=region), key=sent)


def _bytes(atoms: Iterable[Atom]) -> int:
    return sum(map(jaxprs.bytes_of, atoms))


def _is_simple(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in ELEMENTWISE | jaxprs.LAYOUT | {"dot_general"}
