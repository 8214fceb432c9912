"""Dataflow analysis of jaxprs: facts of values, derived forward or backward, and the graph of uses.

A forward analysis is an interpreter whose values are facts from a lattice. Loops are iterated until
the facts of their state no longer change. `engine/over_rows.py` has one more, of the rows of a
batch. Backward, `needed` finds the variables on which results depend.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax.extend.core as jex
from jax.typing import ArrayLike

from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.interpreter import Interpreter
from zero_jax.tracing.jaxpr import CALLS, REDUCTIONS, Atom, T, is_in, is_var, shape_of

Dim = int | None
Dims = tuple[Dim, ...]
# Facts of a loop's state converge within a few iterations, or are given up.
_ITERATIONS = 8
# Collectives whose results are equal on all devices of their axes.
EQUAL_RESULTS = frozenset(("psum", "psum_invariant", "pmax", "pmin", "all_gather"))


class Forward(Interpreter[T]):
    """A forward analysis: facts of results from facts of operands.

    A subclass is a lattice: it has `constants` (the fact of a constant), `default` (facts of the
    results of an operation), `join` and, where loops may not converge, `unknown`.
    """

    constants: T

    def constant(self, atom: Atom, value: ArrayLike) -> T:
        return self.constants

    def join(self, one: T, other: T) -> T:
        """Returns the fact of a value that is one of two."""
        raise NotImplementedError

    def unknown(self) -> T:
        """Returns the fact of an unknown value."""
        raise NotImplementedError

    def sliced(self, fact: T) -> T:
        """Returns the fact of a slice along dim 0, given that of the stack."""
        return fact

    def stacked(self, fact: T) -> T:
        """Returns the fact of a stack, given that of each slice."""
        return fact

    def selected(self, choice: T, fact: T) -> T:
        """Returns the fact of a value that depends on a branch taken, or on a loop's end."""
        return fact

    def carried(self, state: T, made: T) -> T:
        """Returns the fact of a scan's carry, given that of all iterations and of the last."""
        return made

    def body(self, eqn: jex.JaxprEqn, facts: Sequence[T]) -> tuple[list[T], list[T]]:
        """Returns facts of the inputs and results of a loop's body that hold in every iteration."""
        ((body, first),), (start, count) = jaxprs.bodies(eqn), jaxprs.state_of(eqn)
        fixed, state = facts[first:start], list(facts[start : start + count])
        slices = list(map(self.sliced, facts[start + count :]))
        for _ in range(max(_ITERATIONS, count + 1)):
            inputs = [*fixed, *state, *slices]
            made = self.run(body, inputs)
            before, state = state, list(map(self.join, state, made[:count]))
            if state == before:
                return inputs, made
        inputs = [*fixed, *[self.unknown()] * count, *slices]
        return inputs, self.run(body, inputs)

    def scan(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        (inputs, made), (start, count) = self.body(eqn, values), jaxprs.state_of(eqn)
        state = map(self.carried, inputs[start : start + count], made[:count])
        return [*state, *map(self.stacked, made[count:])]

    def while_loop(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        first, (start, _) = jaxprs.bodies(eqn)[0][1], jaxprs.state_of(eqn)
        state = self.body(eqn, values)[0][start - first :]
        (ends,) = self.run(eqn.params["cond_jaxpr"], [*values[:first], *state])
        return [self.selected(ends, fact) for fact in state]

    def cond(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        cases = [self.run(branch, values[first:]) for branch, first in jaxprs.bodies(eqn)]
        joined = (functools.reduce(self.join, each) for each in zip(*cases, strict=True))
        return [self.selected(values[0], fact) for fact in joined]


class _Marks(Forward[bool]):
    """A property that results have if an operand has it."""

    constants = False

    def join(self, one: bool, other: bool) -> bool:
        return one or other

    def selected(self, choice: bool, fact: bool) -> bool:
        return choice or fact


class HasGradient(_Marks):
    """True for values through which a gradient flows to marked inputs.

    The body of a function with a custom derivative says nothing about its gradient.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda a, b: (a + 1, jax.lax.stop_gradient(b), a * b))(1.0, 2.0)
    >>> HasGradient().run(program, [False, True])
    [False, False, True]
    """

    def default(self, eqn: jex.JaxprEqn, values: list[bool]) -> Sequence[bool]:
        floats = any(map(jaxprs.is_float, eqn.outvars)) and eqn.primitive.name != "stop_gradient"
        return [floats and any(values)] * len(eqn.outvars)

    def custom_derivative(self, eqn: jex.JaxprEqn, values: list[bool]) -> Sequence[bool]:
        return self.default(eqn, values)


class Varies(_Marks):
    """True for values that differ between devices of these axes; sums over them do not."""

    def __init__(self, axes: Sequence[str]):
        super().__init__()
        self._axes = axes

    def default(self, eqn: jex.JaxprEqn, values: list[bool]) -> Sequence[bool]:
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        over = over if isinstance(over, (tuple, list, frozenset)) else (over,)
        ungrouped = eqn.params.get("axis_index_groups") is None
        alike = eqn.primitive.name in EQUAL_RESULTS and set(self._axes) <= set(over) and ungrouped
        varies = eqn.primitive.name == "axis_index" or (any(values) and not alike)
        return [varies] * len(eqn.outvars)


class ShardedDims(Forward[Dims]):
    """The sharded dim of each value, for each of several groups of mesh axes."""

    def __init__(self, groups: int):
        super().__init__()
        self.constants: Dims = (None,) * groups

    def unknown(self) -> Dims:
        return self.constants

    def join(self, one: Dims, other: Dims) -> Dims:
        return tuple(b if a is None else a for a, b in zip(one, other, strict=True))

    def sliced(self, fact: Dims) -> Dims:
        return tuple(None if d is None or d == 0 else d - 1 for d in fact)

    def stacked(self, fact: Dims) -> Dims:
        return tuple(None if d is None else d + 1 for d in fact)

    def default(self, eqn: jex.JaxprEqn, values: list[Dims]) -> Sequence[Dims]:
        groups = [sharded_dims(eqn, dims) for dims in zip(*values, strict=True)]
        return list(zip(*groups, strict=True)) if groups else [self.constants] * len(eqn.outvars)


def sharded_dims(eqn: jex.JaxprEqn, dims: Sequence[Dim]) -> list[Dim]:
    """Returns the sharded dim of each result of an operation, or None.

    These are the rules of XLA's partitioner that decide about memory. A result is sharded if one of
    its dims comes from a sharded dim of an operand, and full if that dim was summed over. Source:
    GSPMD (arXiv:2105.04663), section 3.

    >>> import jax
    >>> product = jax.make_jaxpr(lambda a, b: a @ b)(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 8)))
    >>> sharded_dims(product.eqns[0], [None, 1]), sharded_dims(product.eqns[0], [1, 0])
    ([1], [None])
    """
    if all(d is None for d in dims):
        return [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if name == "dot_general":
        made = [of.get(d) for of, d in zip(kept_dims(eqn), dims, strict=True) if d is not None]
        return [next((d for d in made if d is not None), None)]
    if name == "gather":  # rows of a table: each device looks up its own, and they are summed
        return [None]
    if name in _RULES:
        return [None if dims[0] is None else _RULES[name](eqn, dims[0])] * len(eqn.outvars)
    pairs = zip(map(shape_of, eqn.invars), dims, strict=True)
    sharded = [(shape, d) for shape, d in pairs if d is not None]

    def alike(shape: tuple[int, ...]) -> Dim:
        """Elementwise: a result is sharded along a dim as long as that of an operand."""
        dims = (d for s, d in sharded if len(s) == len(shape) and s[d] == shape[d])
        return next(dims, None)

    return [alike(shape_of(v)) for v in eqn.outvars]


def kept_dims(eqn: jex.JaxprEqn) -> tuple[dict[int, int], dict[int, int]]:
    """Returns, for each operand of a product, the dims of the result that its dims become.

    Dims of the result: batch dims, free dims of the first operand, those of the second. Summed dims
    are in no result.
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (len(shape_of(a)) for a in eqn.invars)
    free = [d for d in range(lhs) if d not in (*lhs_sum, *lhs_batch)]
    columns = [d for d in range(rhs) if d not in (*rhs_sum, *rhs_batch)]
    left = {d: at for at, d in enumerate((*lhs_batch, *free))}
    right = {d: at for at, d in enumerate(rhs_batch)}
    right |= {d: len(left) + at for at, d in enumerate(columns)}
    return left, right


def index_dims(eqn: jex.JaxprEqn) -> list[int]:
    """Returns the dims of a gather's result that are those of its indices, in their order."""
    offsets = eqn.params["dimension_numbers"].offset_dims
    return [d for d in range(len(shape_of(eqn.outvars[0]))) if d not in offsets]


def _reshaped(eqn: jex.JaxprEqn, dim: int) -> Dim:
    """Returns the dim of the new shape that begins where the sharded one began."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    starts = (math.prod(new[:at]) == math.prod(old[:dim]) for at in range(len(new)))
    return next((at for at, same in enumerate(starts) if same and new[at] > 1), None)


def _without(removed: Sequence[int], dim: int) -> Dim:
    return None if dim in removed else dim - sum(d < dim for d in removed)


def _as_long(eqn: jex.JaxprEqn, dim: int) -> Dim:
    """Slices and pads: sharded where the dim's size is unchanged."""
    return dim if shape_of(eqn.invars[0])[dim] == shape_of(eqn.outvars[0])[dim] else None


# Operations whose first operand decides.
_RULES: dict[str, Callable[[jex.JaxprEqn, int], Dim]] = {
    "reshape": _reshaped,
    "broadcast_in_dim": lambda eqn, dim: eqn.params["broadcast_dimensions"][dim],
    "transpose": lambda eqn, dim: eqn.params["permutation"].index(dim),
    "squeeze": lambda eqn, dim: _without(eqn.params["dimensions"], dim),
    "unstack": lambda eqn, dim: _without([eqn.params["axis"]], dim),
    "stack": lambda eqn, dim: dim + (eqn.params["axis"] <= dim),
    **dict.fromkeys(
        (*REDUCTIONS, "argmax", "argmin"),
        lambda eqn, dim: _without(eqn.params["axes"], dim),
    ),
    **dict.fromkeys(("slice", "dynamic_slice", "pad", "split", "rev", "concatenate"), _as_long),
    **dict.fromkeys(
        ("scatter", "scatter-add", "dynamic_update_slice", "all_gather", "reduce_scatter", "psum"),
        lambda eqn, dim: dim,
    ),
    "cumsum": lambda eqn, dim: dim,
}


# Backward: what results depend on.

# Given an equation and which of its results are needed, returns which operands are.
Rule = Callable[[jex.JaxprEqn, list[bool]], Sequence[bool]]


def reads_all(eqn: jex.JaxprEqn, made: list[bool]) -> list[bool]:
    """Every result depends on every operand."""
    return [any(made)] * len(eqn.invars)


def needed(
    eqns: Sequence[jex.JaxprEqn], results: Iterable[Atom], rule: Rule = reads_all
) -> set[jex.Var]:
    """Returns the variables on which these results depend, the results included.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda a, b: (a * 2, a + b))(1.0, 2.0).jaxpr
    >>> [v in needed(program.eqns, program.outvars[:1]) for v in program.invars]
    [True, False]
    """
    reached = set(filter(is_var, results))
    for eqn in reversed(eqns):
        used = rule(eqn, [v in reached for v in eqn.outvars])
        reached.update(filter(is_var, itertools.compress(eqn.invars, used)))
    return reached


def read_inputs(jaxpr: jex.Jaxpr) -> list[bool]:
    """Returns for each input whether a result or an effect depends on it."""
    reached = needed(jaxpr.eqns, jaxpr.outvars, _of_differentiated)
    return [var in reached for var in jaxpr.invars]


def _of_differentiated(eqn: jex.JaxprEqn, made: list[bool]) -> list[bool]:
    used = any(made) or bool(eqn.effects)
    if used and eqn.primitive.name == "custom_vjp_call":
        # Differentiated already: a call like any other.
        return read_inputs(jaxprs.inner(eqn).jaxpr)
    return [used] * len(eqn.invars)


def differentiated(jaxpr: jex.Jaxpr, wanted: Sequence[bool]) -> set[jex.Var]:
    """Returns the variables through which a gradient flows to these results, or might.

    A function with a custom derivative depends on all of its inputs.
    """
    return needed(jaxpr.eqns, itertools.compress(jaxpr.outvars, wanted), _through_bodies)


def _through_bodies(eqn: jex.JaxprEqn, made: list[bool]) -> Sequence[bool]:
    body = jaxprs.called(eqn)
    if eqn.primitive.name == "stop_gradient":
        return [False]
    if body is None or not any(made):
        return reads_all(eqn, made)
    used = differentiated(body.jaxpr, body_results(eqn, made))
    return [v in used for v in body.jaxpr.invars]


def body_results(eqn: jex.JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
    """Returns which results of the body of a call or scan are needed for these of the equation.

    A result that a scan carries is needed if the next iteration needs it.
    """
    wanted, body = list(wanted), jaxprs.inner(eqn).jaxpr
    if eqn.primitive.name != "scan":
        return wanted
    start, count = jaxprs.state_of(eqn)
    while True:
        used = differentiated(body, wanted)
        state = [v in used for v in body.invars[start : start + count]]
        more = [a or b for a, b in zip(wanted[:count], state, strict=True)] + wanted[count:]
        if more == wanted:
            return wanted
        wanted = more


def made_of(jaxpr: jex.Jaxpr, inputs: set[jex.Var]) -> set[jex.Var]:
    """Returns the variables made of these inputs and constants alone, and the inputs."""
    made, constant = set(inputs), set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        operands = set(jaxprs.variables([eqn]))
        if operands <= made | constant:
            (made if operands & made else constant).update(eqn.outvars)
    return made


def executed(
    jaxpr: jex.Jaxpr, wanted: Sequence[bool] | None = None
) -> Iterator[tuple[jex.JaxprEqn, int]]:
    """Yields equations on which the `wanted` results, by default all, depend, at every depth.

    Each comes with the number of times that it is executed.
    """
    wanted = wanted or [True] * len(jaxpr.outvars)
    results = itertools.compress(jaxpr.outvars, wanted)
    used = needed(jaxpr.eqns, results, _of_differentiated)
    for eqn in jaxpr.eqns:
        made = [v in used for v in eqn.outvars]
        if any(made):
            yield eqn, 1
            length, is_call = eqn.params.get("length", 1), eqn.primitive.name in CALLS
            for body in jex.jaxprs_in_params(eqn.params):
                for inside, times in executed(body, made if is_call else None):
                    yield inside, times * length


class Graph:
    """The uses of a jaxpr's variables. Equations are given by their positions.

    Attributes:
      eqns: The equations.
      made_by: The equation that makes each variable.
    """

    def __init__(self, jaxpr: jex.Jaxpr):
        self.eqns: Sequence[jex.JaxprEqn] = jaxpr.eqns
        self.made_by = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._readers: dict[jex.Var, list[int]] = {}
        for at, eqn in enumerate(jaxpr.eqns):
            for v in dict.fromkeys(jaxprs.variables([eqn])):
                self._readers.setdefault(v, []).append(at)
        for v in dict.fromkeys(filter(is_var, jaxpr.outvars)):
            self._readers.setdefault(v, []).append(len(jaxpr.eqns))

    def readers(self, var: jex.Var) -> list[int]:
        """Returns the equations that read a variable; the number of equations if it is returned."""
        return self._readers.get(var, [])

    def only_reader(self, var: jex.Var) -> int | None:
        """Returns the equation that alone reads a variable, None if it is returned."""
        readers = self.readers(var)
        return readers[0] if len(readers) == 1 and readers[0] < len(self.eqns) else None

    def where(self, condition: Callable[[jex.JaxprEqn], bool]) -> list[int]:
        """Returns the equations that meet a condition."""
        return [at for at, eqn in enumerate(self.eqns) if condition(eqn)]

    @property
    def positions(self) -> range:
        """All equations."""
        return range(len(self.eqns))

    def part(self, at: Iterable[int]) -> list[jex.JaxprEqn]:
        """Returns equations in the order of the jaxpr."""
        return [self.eqns[i] for i in sorted(at)]

    def after(self, start: Iterable[int]) -> list[int]:
        """Returns these equations and all that depend on them."""
        reached, made = set(start), set[jex.Var]()
        for at, eqn in enumerate(self.eqns):
            if at in reached or any(is_in(a, made) for a in eqn.invars):
                reached.add(at)
                made.update(eqn.outvars)
        return sorted(reached)

    def between(self, start: Iterable[int]) -> list[int]:
        """Returns these equations and all that lie between two of them."""
        start, used = set(start), set[jex.Var]()
        reached = []
        for at in reversed(self.after(start)):
            if at in start or not used.isdisjoint(self.eqns[at].outvars):
                reached.append(at)
                used.update(jaxprs.variables([self.eqns[at]]))
        return reached[::-1]

    def connected(self, at: Iterable[int]) -> list[set[int]]:
        """Groups these equations: those of two groups read nothing of each other."""
        groups: list[set[int]] = []
        for i in sorted(at):
            makers = {self.made_by.get(v) for v in jaxprs.variables([self.eqns[i]])}
            joined = [group for group in groups if not group.isdisjoint(makers)]
            groups = [*(group for group in groups if group not in joined), {i}.union(*joined)]
        return groups

    def made(self, at: Iterable[int]) -> list[jex.Var]:
        """Returns the results of equations."""
        return [v for i in at for v in self.eqns[i].outvars]

    def results(self, at: Iterable[int]) -> list[jex.Var]:
        """Returns the results of equations that others read, or that are returned."""
        part = set(at)
        return [v for v in self.made(sorted(part)) if not part.issuperset(self.readers(v))]
