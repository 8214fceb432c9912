"""Jaxprs of all supported JAX releases: reading equations, building, walking and rewriting jaxprs.

The parameters of `scan`, `cond`, `while`, calls and custom derivatives differ between releases, and
are read and written here alone. `Walk` visits equations in order: `Rewriter` makes a new jaxpr with
it, `interpreter.Interpreter` evaluates with it.

Most analyses read a jaxpr with inlined calls (`written_out`). The engine inlines `jit` alone, since
a `jax.checkpoint` is a layer and a `custom_vjp` has a gradient. Programs that are not
differentiated any more have all calls inlined.
"""

import copy
import itertools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, TypeGuard, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from zero_jax.tracing.sources import line_of

T = TypeVar("T")
Atom = jex.Var | jex.Literal
AnyJaxpr = jex.Jaxpr | jex.ClosedJaxpr
# Operations that only rearrange a parameter: they are deferred until it is gathered.
LAYOUT = frozenset(
    "transpose reshape squeeze expand_dims broadcast_in_dim rev slice dynamic_slice "
    "convert_element_type copy name stop_gradient".split()
)
JIT = frozenset(("jit", "pjit", "closed_call", "core_call"))
REMAT = frozenset(("remat2", "checkpoint", "remat"))
OWN_GRADIENT = frozenset(("custom_jvp_call", "custom_vjp_call"))
CALLS = JIT | REMAT | OWN_GRADIENT
# Operations that compute for a piece of an array the piece of their result.
ELEMENTWISE = frozenset(
    "add add_any sub mul div rem neg sign abs square max min pow integer_pow sqrt rsqrt cbrt exp "
    "exp2 log log1p expm1 tanh logistic sin cos tan asin acos atan atan2 sinh cosh asinh acosh "
    "atanh erf erfc erf_inv floor ceil round clamp select_n is_finite eq ne lt le gt ge and or xor "
    "not nextafter reduce_precision convert_element_type copy real imag conj complex stop_gradient "
    "population_count shift_left shift_right_logical shift_right_arithmetic".split()
)
# Operations that combine elements along some dims of an array.
REDUCTIONS = frozenset(f"reduce_{name}" for name in ("sum", "prod", "max", "min", "and", "or"))


def is_var(atom: Atom) -> TypeGuard[jex.Var]:
    """Returns True for a variable, False for a literal."""
    return not isinstance(atom, jex.Literal)


def is_in(atom: Atom, variables: Container[object]) -> TypeGuard[jex.Var]:
    """Returns True for one of these variables, False for literals."""
    return is_var(atom) and atom in variables


def is_float(atom: Atom) -> bool:
    """Returns True for an array that can have a derivative."""
    return hasattr(atom.aval, "dtype") and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Returns the shape of an atom; that of a token is ()."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> np.dtype[np.generic]:
    """Returns the dtype of an atom that is an array."""
    return getattr(atom.aval, "dtype")  # noqa: B009


def bytes_of(atom: Atom) -> int:
    """Returns the bytes of an atom; keys and tokens, which have no itemsize, count 4 each."""
    dtype = getattr(atom.aval, "dtype", None)
    size = dtype.itemsize if dtype is not None and jnp.issubdtype(dtype, jnp.generic) else 4
    return math.prod(shape_of(atom)) * size


def read(env: Mapping[jex.Var, Any], atom: Atom) -> Any:
    """Returns the value of an atom, given those of variables; it has a shape and a dtype.

    >>> program = jax.make_jaxpr(lambda x: (x, False))(1.0)
    >>> read({}, program.jaxpr.outvars[1]).dtype
    dtype('bool')
    """
    return typed(atom.val, atom) if isinstance(atom, jex.Literal) else env[atom]


def typed(value: Any, atom: Atom) -> Any:
    """Returns the value of an atom with a shape and a dtype: JAX passes a `bool` unchanged."""
    if not isinstance(value, (bool, int, float, complex)):
        return value
    return np.asarray(value, dtype_of(atom))


def variables(eqns: Iterable[jex.JaxprEqn]) -> list[jex.Var]:
    """Returns the variables that equations read."""
    return [a for e in eqns for a in e.invars if is_var(a)]


def last_reads(jaxpr: jex.Jaxpr) -> dict[jex.Var, int]:
    """Returns the last equation that reads each variable; results are read after all equations."""
    last = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in variables([eqn])}
    return last | {a: len(jaxpr.eqns) for a in jaxpr.outvars if is_var(a)}


def takes_elements(eqn: jex.JaxprEqn) -> bool:
    """Returns True for a slice along dim 0 alone."""
    shape = shape_of(eqn.invars[0])
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    others = zip(starts[1:], stops[1:], shape[1:], strides[1:], strict=True)
    return all((a, b, s) == (0, n, 1) for a, b, n, s in others)


def rows_taken(eqn: jex.JaxprEqn) -> int:
    """Returns the number of rows that a gather takes of a matrix, 0 for any other operation.

    >>> program = jax.make_jaxpr(lambda table, at: table.at[at].get(mode="clip"))
    >>> rows_taken(program(jax.numpy.ones((9, 2)), jax.numpy.ones((3, 4), int)).jaxpr.eqns[-1])
    12
    """
    if eqn.primitive.name != "gather":
        return 0
    (table, indices), dims = map(shape_of, eqn.invars), eqn.params["dimension_numbers"]
    batch = len(indices) - 1
    numbers = dims.offset_dims, dims.collapsed_slice_dims, dims.start_index_map
    plain = numbers == ((batch,), (0,), (0,)) and not dims.operand_batching_dims
    full_rows = len(table) == 2 and tuple(eqn.params["slice_sizes"]) == (1, table[1])
    return math.prod(indices[:-1]) if plain and full_rows else 0


def runs_on_pieces(eqn: jex.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Returns True if it is elementwise along arrays of that shape, with scalars as the rest."""
    if shape == () or any(shape_of(var) != shape for var in eqn.outvars):
        return False
    shapes = {shape_of(atom) for atom in eqn.invars}
    if eqn.primitive.name == "broadcast_in_dim":
        return shapes == {()}
    return eqn.primitive.name in ELEMENTWISE and bool(shapes) and shapes <= {shape, ()}


def as_closed(jaxpr: AnyJaxpr) -> jex.ClosedJaxpr:
    """Returns a closed jaxpr as it is, and any other with no constants."""
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())


def inner(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Returns the jaxpr that a call or a scan runs on its inputs, one to one."""
    return as_closed(eqn.params[_key(eqn)])


def called(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """Returns the same where gradients go through it; None for any other operation.

    The body of a function with a custom derivative says nothing about its gradient.
    """
    return inner(eqn) if eqn.primitive.name in JIT | REMAT | {"scan"} else None


def with_inner(eqn: jex.JaxprEqn, body: jex.ClosedJaxpr) -> jex.JaxprEqn:
    """Returns the call or scan with another jaxpr."""
    key = _key(eqn)
    is_closed = hasattr(eqn.params[key], "jaxpr")
    return eqn.replace(params={**eqn.params, key: body if is_closed else body.jaxpr})


def _key(eqn: jex.JaxprEqn) -> str:
    return "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"


def bodies(eqn: jex.JaxprEqn) -> list[tuple[jex.ClosedJaxpr, int]]:
    """Returns the jaxprs of a loop or a branch, each with the position of its first input."""
    if eqn.primitive.name == "cond":
        return [(branch, 1) for branch in eqn.params["branches"]]
    if eqn.primitive.name == "while":
        return [(eqn.params["body_jaxpr"], eqn.params["cond_nconsts"])]
    return [(inner(eqn), 0)] if eqn.primitive.name == "scan" else []


def state_of(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Returns the position of a loop's first carried input, and the number of carried inputs.

    Before a scan's come constants, after them slices. They are found by rank, since the names of a
    scan's parameters differ between releases of JAX.
    """
    carried, sliced = len(eqn.outvars), 0
    if eqn.primitive.name == "scan":
        body = inner(eqn).jaxpr
        carried = sum(map(operator.eq, map(_rank, body.outvars), map(_rank, eqn.outvars)))
        sliced = sum(map(operator.lt, map(_rank, body.invars), map(_rank, eqn.invars)))
    return len(eqn.invars) - sliced - carried, carried


def _rank(atom: Atom) -> int:
    return len(shape_of(atom))


def nested(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a jaxpr, each followed by those of the jaxprs in its parameters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in jex.jaxprs_in_params(eqn.params):
            yield from nested(body)


def names_in(jaxpr: jex.Jaxpr) -> set[str]:
    """Returns the names that values are marked with, at any depth."""
    return {e.params["name"] for e in nested(jaxpr) if e.primitive.name == "name"}


def is_product(eqn: jex.JaxprEqn) -> bool:
    """Returns whether it is a matrix product; one in fp8 is a function with its own gradient."""
    if eqn.primitive.name != "custom_vjp_call":
        return eqn.primitive.name == "dot_general"
    return any(e.primitive.name == "dot_general" and _in_fp8(e) for e in inner(eqn).jaxpr.eqns)


def _in_fp8(eqn: jex.JaxprEqn) -> bool:
    return all(dtype_of(a).name.startswith("float8") for a in eqn.invars)


def products(jaxpr: jex.Jaxpr) -> list[int]:
    """Returns the multiplications in matrix products of each equation, loops and calls included."""
    return [_products(eqn) for eqn in jaxpr.eqns]


def _products(eqn: jex.JaxprEqn) -> int:
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        shape = shape_of(eqn.invars[0])
        return math.prod(shape_of(eqn.outvars[0])) * math.prod(shape[d] for d in summed)
    if eqn.primitive.name == "conv_general_dilated":
        outputs = eqn.params["dimension_numbers"].rhs_spec[0]
        kernel = shape_of(eqn.invars[1])
        return math.prod(shape_of(eqn.outvars[0])) * math.prod(kernel) // max(kernel[outputs], 1)
    inside = (sum(products(body)) for body in jex.jaxprs_in_params(eqn.params))
    return eqn.params.get("length", 1) * max(inside, default=0)


def new_jaxpr(
    invars: Sequence[jex.Var],
    outvars: Sequence[Atom],
    eqns: Sequence[jex.JaxprEqn],
    effects: Set[jex.Effect] = frozenset(),
    constvars: Sequence[jex.Var] = (),
) -> jex.Jaxpr:
    """Builds a jaxpr from equations of other jaxprs.

    JAX deprecates a jaxpr without debug info, and raises under `-W error`.

    >>> body = jax.make_jaxpr(jnp.sin)(1.0).jaxpr
    >>> str(new_jaxpr(body.invars, body.outvars, body.eqns)) == str(body)
    True
    """
    made_of = jex.DebugInfo("zero_jax", "<equations of a traced function>", None, None)
    return jex.Jaxpr(constvars, invars, outvars, eqns, effects, debug_info=made_of)


def alone(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Returns one equation as a jaxpr of its operands, literals included."""
    invars = [jex.Var(a.aval) for a in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars]
    eqn = eqn.replace(invars=list[Atom](invars), outvars=outvars)
    return jex.ClosedJaxpr(new_jaxpr(invars, outvars, [eqn], eqn.effects), ())


def function(eqn: jex.JaxprEqn) -> Callable[..., list[Any]]:
    """Returns one equation as a function of its inputs."""
    return as_function(alone(eqn))


def as_function(closed: jex.ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """Returns a jaxpr as a function, whose results all have a shape and a dtype."""
    run, outvars = jex.jaxpr_as_fun(closed), closed.jaxpr.outvars
    return lambda *args: [typed(x, a) for x, a in zip(run(*args), outvars, strict=True)]


def as_if_from(closed: jex.ClosedJaxpr, eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Returns the same jaxpr with the source line of `eqn`, which compiled programs name."""
    body = closed.jaxpr
    eqns = [e.replace(source_info=eqn.source_info) for e in body.eqns]
    jaxpr = new_jaxpr(body.invars, body.outvars, eqns, body.effects, body.constvars)
    return jex.ClosedJaxpr(jaxpr, closed.consts)


def equation(fun: Callable[..., object], atoms: Sequence[Atom]) -> jex.JaxprEqn:
    """Returns the equation that applies a function of one operation to these atoms."""
    (eqn,) = jax.make_jaxpr(fun)(*(a.aval for a in atoms)).jaxpr.eqns
    return eqn.replace(invars=list(atoms), outvars=[jex.Var(v.aval) for v in eqn.outvars])


class Stretches:
    """Stretches of a jaxpr's equations as jaxprs."""

    def __init__(self, jaxpr: jex.Jaxpr):
        self._jaxpr = jaxpr
        self.last_read = last_reads(jaxpr)

    def __call__(self, part: Sequence[int]) -> jex.ClosedJaxpr:
        """Returns these equations as a jaxpr, whose results are read after the last of them."""
        eqns = [self._jaxpr.eqns[at] for at in part]
        results = [v for e in eqns for v in e.outvars if self.last_read.get(v, -1) > part[-1]]
        return stretch(eqns, results)


def stretch(
    eqns: Sequence[jex.JaxprEqn],
    results: Sequence[jex.Var],
    inputs: Sequence[jex.Var] | None = None,
) -> jex.ClosedJaxpr:
    """Returns equations as a jaxpr of their inputs, by default in the order in which they read."""
    effects = set().union(*(e.effects for e in eqns))
    inputs = inputs_of(eqns) if inputs is None else inputs
    return jex.ClosedJaxpr(new_jaxpr(inputs, results, eqns, effects), ())


def inputs_of(eqns: Sequence[jex.JaxprEqn]) -> list[jex.Var]:
    """Returns the variables that equations read and do not make, each once, in order."""
    made = {v for e in eqns for v in e.outvars}
    return [v for v in dict.fromkeys(variables(eqns)) if v not in made]


class Walk(Generic[T]):
    """Visits the equations of a jaxpr in order, with a value for each variable.

    A subclass gives the values of constants and of the results of an equation.
    """

    def constant(self, atom: Atom, value: ArrayLike) -> T:
        """Returns the value of a constant of a closed jaxpr, and unless overridden of a literal."""
        raise NotImplementedError

    def literal(self, atom: jex.Literal) -> T:
        return self.constant(atom, atom.val)

    def equation(self, eqn: jex.JaxprEqn, values: list[T]) -> Sequence[T]:
        """Returns the values of an equation's results, given those of its inputs."""
        raise NotImplementedError

    def environment(self, closed: jex.ClosedJaxpr, values: Sequence[T]) -> dict[jex.Var, T]:
        """Returns the values of all variables, given those of the inputs."""
        body = closed.jaxpr
        env: dict[jex.Var, T] = dict(zip(body.invars, values, strict=True))
        for var, const in zip(body.constvars, closed.consts, strict=True):
            env[var] = self.constant(var, const)
        for eqn in body.eqns:
            made = self.equation(eqn, self._all(env, eqn.invars))
            env.update(zip(eqn.outvars, made, strict=True))
        return env

    def run(self, closed: jex.ClosedJaxpr, values: Sequence[T]) -> list[T]:
        """Returns the values of the results, given those of the inputs."""
        return self._all(self.environment(closed, values), closed.jaxpr.outvars)

    def _all(self, env: Mapping[jex.Var, T], atoms: Sequence[Atom]) -> list[T]:
        return [self.literal(a) if isinstance(a, jex.Literal) else env[a] for a in atoms]


class Rewriter(Walk[Atom]):
    """Copies a jaxpr; a subclass puts other equations in place of some.

    A jaxpr or an equation in which nothing changes stays the same object, for JAX's caches.
    """

    def __call__(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """Returns the jaxpr rewritten."""
        body, part = closed.jaxpr, copy.copy(self)
        part.eqns, part.consts, part._defined = [], {}, set(body.invars)
        outvars = part.run(closed, body.invars)
        new, old = [*part.eqns, *outvars], [*body.eqns, *body.outvars]
        if len(new) == len(old) and all(map(operator.is_, new, old)):
            return closed
        jaxpr = new_jaxpr(body.invars, outvars, part.eqns, body.effects, list(part.consts))
        return jex.ClosedJaxpr(jaxpr, list(part.consts.values()))

    eqns: list[jex.JaxprEqn]
    consts: dict[jex.Var, ArrayLike]
    _defined: set[jex.Var]

    def literal(self, atom: jex.Literal) -> Atom:
        return atom

    def constant(self, atom: Atom, value: ArrayLike) -> Atom:
        assert is_var(atom)
        (new,) = self._fresh([atom])
        self.consts[new] = value
        return new

    def equation(self, eqn: jex.JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        return self.append(self.inside(eqn), values)

    def append(self, eqn: jex.JaxprEqn, atoms: Sequence[Atom]) -> Sequence[Atom]:
        """Adds an equation that reads these atoms; returns its results."""
        outs = self._fresh(eqn.outvars)
        if not all(map(operator.is_, (*atoms, *outs), (*eqn.invars, *eqn.outvars))):
            eqn = eqn.replace(invars=list(atoms), outvars=outs)
        self.eqns.append(eqn)
        return outs

    def inside(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        """Returns an equation with the jaxprs among its parameters rewritten."""
        params = {key: self._parameter(value) for key, value in eqn.params.items()}
        same = all(params[key] is value for key, value in eqn.params.items())
        return eqn if same else eqn.replace(params=params)

    def _parameter(self, value: object) -> object:
        if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
            closed = as_closed(value)
            new = self(closed)
            return value if new is closed else new if value is closed else new.jaxpr
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            items = [self._parameter(item) for item in value]
            return value if all(map(operator.is_, items, value)) else type(value)(items)
        return value

    def _fresh(self, variables: Sequence[jex.Var]) -> list[jex.Var]:
        """Returns the variables, new ones for those that the new jaxpr has already."""
        new = [jex.Var(v.aval) if v in self._defined else v for v in variables]
        self._defined.update(new)
        return new


def written_out(
    closed: jex.ClosedJaxpr, calls: frozenset[str] = JIT, *, branches: bool = False
) -> jex.ClosedJaxpr:
    """Inlines these calls, also calls in calls, but no loops.

    With `branches` those of a `cond` are inlined too: all are computed, and one result is selected.

    >>> program = jax.make_jaxpr(lambda x: jax.checkpoint(jax.jit(jnp.sin))(x) + 1)(1.0)
    >>> [eqn.primitive.name for eqn in written_out(program, CALLS).jaxpr.eqns]
    ['sin', 'add']
    """
    return _Inliner(calls, branches)(closed)


def inlined_from(
    closed: jex.ClosedJaxpr, at: int, calls: frozenset[str], *, branches: bool
) -> jex.JaxprEqn:
    """Returns the equation of a jaxpr that equation `at` of `written_out` comes from."""

    def count(eqn: jex.JaxprEqn) -> int:
        alone = stretch([eqn], eqn.outvars)
        return len(written_out(alone, calls, branches=branches).jaxpr.eqns)

    ends = itertools.accumulate(map(count, closed.jaxpr.eqns))
    return next(eqn for eqn, end in zip(closed.jaxpr.eqns, ends, strict=True) if at < end)


class _Inliner(Rewriter):
    def __init__(self, calls: frozenset[str], branches: bool):
        self._calls, self._branches = calls, branches
        self._call: jex.JaxprEqn | None = None

    def equation(self, eqn: jex.JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        eqn = self._with_line(eqn)
        if eqn.primitive.name in self._calls:
            outer, self._call = self._call, eqn
            made = self.run(inner(eqn), values)
            self._call = outer
            return made
        if eqn.primitive.name == "cond" and self._branches:
            cases = [self.run(branch, values[first:]) for branch, first in bodies(eqn)]
            chosen = [
                equation(jax.lax.select_n, [values[0], *case]) for case in zip(*cases, strict=True)
            ]
            return [v for eqn in chosen for v in self.append(eqn, eqn.invars)]
        return self.append(eqn, values)

    def _with_line(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        """Gives an equation of a library's function, as jnp.cumsum, the line that calls it."""
        if self._call is None or line_of(eqn):
            return eqn
        frames = self._call.source_info.traceback
        return eqn.replace(source_info=eqn.source_info.replace(traceback=frames))


def by_equation(jaxpr: jex.Jaxpr, fun: Callable[[jex.JaxprEqn], T | None]) -> dict[int, T]:
    """Returns the values of a function that are not None, by the equation's position."""
    values = map(fun, jaxpr.eqns)
    return {at: value for at, value in enumerate(values) if value is not None}
