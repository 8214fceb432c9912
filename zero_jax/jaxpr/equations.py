"""Traces, equation by equation: which are calls and loops, what they run, and one of them alone.

A jaxpr with its calls written out is what everything else reads: the engine (`jit` calls only,
since a `jax.checkpoint` is a layer and a `custom_vjp` keeps its gradient), updates in pieces and
forecasts (all calls, since nothing is differentiated any more).
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

Atom = jex.Var | jex.Literal
AnyJaxpr = jex.Jaxpr | jex.ClosedJaxpr
# Operations that only re-arrange a leaf: they wait until it is gathered for one that computes.
LAYOUT = frozenset(
    (
        *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev"),
        *("slice", "dynamic_slice", "convert_element_type", "copy", "name", "stop_gradient"),
    )
)
JIT = frozenset(("jit", "pjit", "closed_call", "core_call"))
REMAT = frozenset(("remat2", "checkpoint", "remat"))
OWN_GRADIENT = frozenset(("custom_jvp_call", "custom_vjp_call"))
CALLS = JIT | REMAT | OWN_GRADIENT


def is_var(atom: Atom) -> TypeGuard[jex.Var]:
    """Whether an atom is a variable, not a literal."""
    return not isinstance(atom, jex.Literal)


def is_in(atom: Atom, variables: Container[Any]) -> TypeGuard[jex.Var]:
    """Whether an atom is one of these variables; literals are not."""
    return is_var(atom) and atom in variables


def is_float(atom: Atom) -> bool:
    """Whether an atom is an array that can have a derivative."""
    return hasattr(atom.aval, "dtype") and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def read(env: Mapping[Any, Any], atom: Atom) -> Any:
    """Returns the value of an atom, given those of variables; it has a shape and a dtype.

    >>> program = jax.make_jaxpr(lambda x: (x, False))(1.0)
    >>> read({}, program.jaxpr.outvars[1]).dtype
    dtype('bool')
    """
    return typed(atom.val, atom) if isinstance(atom, jex.Literal) else env[atom]


def typed(value: Any, atom: Atom) -> Any:
    """Returns the value of an atom with a shape and a dtype: JAX hands on a `bool` as it is."""
    if not isinstance(value, (bool, int, float, complex)):
        return value
    return np.asarray(value, getattr(atom.aval, "dtype"))  # noqa: B009


def variables(eqns: Iterable[jex.JaxprEqn]) -> list[Any]:
    """All that these equations read, but literals."""
    return [a for e in eqns for a in e.invars if is_var(a)]


def last_reads(jaxpr: jex.Jaxpr) -> dict[Any, int]:
    """Of each variable that is read the last equation that does; results are, after all of them."""
    last = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in variables([eqn])}
    return last | {a: len(jaxpr.eqns) for a in jaxpr.outvars if is_var(a)}


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of what it stands for; that of a token is ()."""
    return tuple(getattr(atom.aval, "shape", ()))


def bytes_of(atom: Atom) -> int:
    """What it takes in memory; keys and tokens, which have no itemsize, are small."""
    dtype = getattr(atom.aval, "dtype", None)
    size = dtype.itemsize if dtype is not None and jnp.issubdtype(dtype, jnp.generic) else 4
    return math.prod(shape_of(atom)) * size


def takes_elements(eqn: jex.JaxprEqn) -> bool:
    """Whether a slice takes whole elements along dim 0."""
    shape = shape_of(eqn.invars[0])
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    others = zip(starts[1:], stops[1:], shape[1:], strides[1:], strict=True)
    return all((a, b, s) == (0, n, 1) for a, b, n, s in others)


def rows_taken(eqn: jex.JaxprEqn) -> int:
    """How many whole rows of a matrix a gather takes, one after the other; 0 if it is none.

    >>> program = jax.make_jaxpr(lambda table, at: table.at[at].get(mode="clip"))
    >>> rows_taken(program(jax.numpy.ones((9, 2)), jax.numpy.ones((3, 4), int)).jaxpr.eqns[-1])
    12
    """
    if eqn.primitive.name != "gather":
        return 0
    (table, indices), dims = map(shape_of, eqn.invars), eqn.params["dimension_numbers"]
    batch = len(indices) - 1
    own = dims.offset_dims, dims.collapsed_slice_dims, dims.start_index_map
    plain = own == ((batch,), (0,), (0,)) and not dims.operand_batching_dims
    whole = len(table) == 2 and tuple(eqn.params["slice_sizes"]) == (1, table[1])
    return math.prod(indices[:-1]) if plain and whole else 0


# What calls, loops and branches run.


def as_closed(jaxpr: AnyJaxpr) -> jex.ClosedJaxpr:
    """A jaxpr without constants of its own as a closed one; a closed one as it is."""
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())


def inner(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """The jaxpr that a call or a scan runs on its inputs, one to one."""
    return as_closed(eqn.params[_key(eqn)])


def called(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The same, or None for any other operation."""
    return inner(eqn) if eqn.primitive.name in CALLS | {"scan"} else None


def with_inner(eqn: jex.JaxprEqn, body: jex.ClosedJaxpr) -> jex.JaxprEqn:
    """The call or scan that runs another jaxpr."""
    key = _key(eqn)
    is_closed = hasattr(eqn.params[key], "jaxpr")
    return eqn.replace(params={**eqn.params, key: body if is_closed else body.jaxpr})


def _key(eqn: jex.JaxprEqn) -> str:
    return "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"


def bodies(eqn: jex.JaxprEqn) -> list[tuple[jex.ClosedJaxpr, int]]:
    """What a loop or a branch runs, each with the first of the inputs that it is given."""
    if eqn.primitive.name == "cond":
        return [(branch, 1) for branch in eqn.params["branches"]]
    if eqn.primitive.name == "while":
        return [(eqn.params["body_jaxpr"], eqn.params["cond_nconsts"])]
    return [(inner(eqn), 0)] if eqn.primitive.name == "scan" else []


def state_of(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """The first of a loop's inputs that it carries from turn to turn, and how many it carries.

    Before a scan's come constants, after them slices. Told by rank, since the names of a scan's
    parameters differ between versions of JAX.
    """
    if eqn.primitive.name == "while":
        return len(eqn.invars) - len(eqn.outvars), len(eqn.outvars)
    body = inner(eqn).jaxpr
    carried = sum(
        len(shape_of(a)) == len(shape_of(b)) for a, b in zip(body.outvars, eqn.outvars, strict=True)
    )
    sliced = sum(
        len(shape_of(a)) < len(shape_of(b)) for a, b in zip(body.invars, eqn.invars, strict=True)
    )
    return len(eqn.invars) - sliced - carried, carried


def names_in(jaxpr: jex.Jaxpr) -> set[str]:
    """Every name that values are marked with, at any depth."""
    found = {e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}
    inside = (body for e in jaxpr.eqns for body in jex.jaxprs_in_params(e.params))
    return found.union(*map(names_in, inside))


def products(jaxpr: jex.Jaxpr) -> list[int]:
    """Of each equation the multiplications in matrix products, loops and calls looked into."""
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


# One equation, and jaxprs made of others' equations.


def new_jaxpr(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[jex.JaxprEqn],
    effects: Any = frozenset(),
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


def function(eqn: jex.JaxprEqn) -> Callable[..., list[Any]]:
    """One equation as a function of its inputs."""
    invars = [jex.Var(a.aval) for a in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars]
    alone = eqn.replace(invars=list[Atom](invars), outvars=outvars)
    jaxpr = new_jaxpr(invars, outvars, [alone], eqn.effects)
    return as_function(jex.ClosedJaxpr(jaxpr, ()))


def as_function(closed: jex.ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function, whose results all have a shape and a dtype."""
    run, outvars = jex.jaxpr_as_fun(closed), closed.jaxpr.outvars
    return lambda *args: [typed(x, a) for x, a in zip(run(*args), outvars, strict=True)]


def as_if_from(closed: jex.ClosedJaxpr, eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """The same jaxpr, of which a compiled program says that it stands where `eqn` does."""
    body = closed.jaxpr
    eqns = [own.replace(source_info=eqn.source_info) for own in body.eqns]
    jaxpr = new_jaxpr(body.invars, body.outvars, eqns, body.effects, body.constvars)
    return jex.ClosedJaxpr(jaxpr, closed.consts)


def equation(fun: Callable[..., Any], atoms: Sequence[Atom]) -> jex.JaxprEqn:
    """The equation that does to these atoms what a function of one operation does."""
    (eqn,) = jax.make_jaxpr(fun)(*(a.aval for a in atoms)).jaxpr.eqns
    return eqn.replace(invars=list(atoms), outvars=[jex.Var(v.aval) for v in eqn.outvars])


def written_out(
    closed: jex.ClosedJaxpr, calls: frozenset[str] = JIT, *, branches: bool = False
) -> jex.ClosedJaxpr:
    """The same jaxpr with its calls written out in place, at every depth of calls.

    Args:
      closed: the jaxpr.
      calls: the primitives that are written out. Loops never are.
      branches: whether those of a `cond` are too: all are computed, and of their results one is
        chosen, which changes no value.

    >>> program = jax.make_jaxpr(lambda x: jax.checkpoint(jax.jit(jnp.sin))(x) + 1)(1.0)
    >>> [eqn.primitive.name for eqn in written_out(program, CALLS).jaxpr.eqns]
    ['sin', 'add']
    """
    body, flat = closed.jaxpr, _Flat(calls, branches)
    outvars = flat.run(closed, body.invars)
    jaxpr = new_jaxpr(body.invars, outvars, flat.eqns, body.effects, list(flat.consts))
    return jex.ClosedJaxpr(jaxpr, list(flat.consts.values()))


@dataclass
class _Flat:
    """Equations that are written out one after the other, and the constants that they read."""

    calls: frozenset[str]
    branches: bool
    eqns: list[jex.JaxprEqn] = field(default_factory=list)
    consts: dict[Any, Any] = field(default_factory=dict)

    def run(self, closed: jex.ClosedJaxpr, given: Sequence[Atom]) -> list[Atom]:
        """Writes a jaxpr out on these inputs; returns its results."""
        body = closed.jaxpr
        env: dict[jex.Var, Atom] = dict(zip(body.invars, given, strict=True))
        for var, const in zip(body.constvars, closed.consts, strict=True):
            env[var] = jex.Var(var.aval)
            self.consts[env[var]] = const

        def own(atom: Atom) -> Atom:
            return env[atom] if is_var(atom) else atom

        for eqn in body.eqns:
            outs = self._one(eqn, [own(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [own(a) for a in body.outvars]

    def _one(self, eqn: jex.JaxprEqn, atoms: list[Atom]) -> Sequence[Atom]:
        if eqn.primitive.name in self.calls:
            return self.run(inner(eqn), atoms)
        if eqn.primitive.name == "cond" and self.branches:
            cases = [self.run(branch, atoms[first:]) for branch, first in bodies(eqn)]
            chosen = [
                equation(jax.lax.select_n, [atoms[0], *case]) for case in zip(*cases, strict=True)
            ]
            self.eqns += chosen
            return [eqn.outvars[0] for eqn in chosen]
        outs = [jex.Var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=atoms, outvars=outs))
        return outs


def without_derivative(jaxpr: jex.Jaxpr) -> set[jex.Var]:
    """The variables that are results of `stop_gradient`."""
    return {v for e in jaxpr.eqns if e.primitive.name == "stop_gradient" for v in e.outvars}


class Stretches:
    """Stretches of a jaxpr's equations as jaxprs of their own."""

    def __init__(self, jaxpr: jex.Jaxpr):
        self._jaxpr = jaxpr
        self.last_read = last_reads(jaxpr)

    def __call__(self, part: Sequence[int]) -> jex.ClosedJaxpr:
        """From what these equations read to what is read after the last of them."""
        eqns = [self._jaxpr.eqns[at] for at in part]
        made = {v for e in eqns for v in e.outvars}
        given = list(dict.fromkeys(a for a in variables(eqns) if a not in made))
        results = [v for e in eqns for v in e.outvars if self.last_read.get(v, -1) > part[-1]]
        effects = set().union(*(e.effects for e in eqns))
        return jex.ClosedJaxpr(new_jaxpr(given, results, eqns, effects), ())
