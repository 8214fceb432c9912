"""Small tools on jaxprs: what an equation runs, one equation as a function, calls written out."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

# Operations that only re-arrange a leaf: they wait until it is gathered for one that computes.
LAYOUT = frozenset(
    (
        *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev"),
        *("slice", "dynamic_slice", "convert_element_type", "copy", "name", "stop_gradient"),
    )
)
JIT = frozenset(("jit", "pjit", "closed_call", "core_call"))
REMAT = frozenset(("remat2", "checkpoint", "remat"))


def inner(eqn: Any) -> Any:
    """The jaxpr that a call-like equation runs on its inputs, one to one, or None."""
    if eqn.primitive.name not in JIT | REMAT | {"scan"}:
        return None
    found = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    return found if found is None or hasattr(found, "jaxpr") else jex.ClosedJaxpr(found, ())


def is_in(atom: Any, variables: Any) -> bool:
    """Whether an atom is one of these variables; literals are not."""
    return not isinstance(atom, jex.Literal) and atom in variables


def names_in(jaxpr: Any) -> set[str]:
    """Every name that values are marked with, at any depth."""
    found = {e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}
    for eqn in jaxpr.eqns:
        for param in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            body = getattr(param, "jaxpr", param)
            found |= names_in(body) if hasattr(body, "eqns") else set()
    return found


def function(eqn: Any) -> Callable[..., list[Any]]:
    """One equation as a function of its inputs."""
    invars = [jex.Var(a.aval) for a in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars]
    alone = eqn.replace(invars=invars, outvars=outvars)
    jaxpr = jex.Jaxpr((), invars, outvars, [alone], eqn.effects)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))


def written_out(closed: Any) -> Any:
    """The same jaxpr with its `jit` calls written out in place, at every depth of calls."""
    eqns: list[Any] = []
    consts: dict[Any, Any] = {}

    def run(body: Any, given: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        env = dict(zip(body.invars, given, strict=True))
        for var, const in zip(body.constvars, own, strict=True):
            env[var] = jex.Var(var.aval)
            consts[env[var]] = const

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else env[atom]

        for eqn in body.eqns:
            atoms = [read(a) for a in eqn.invars]
            if eqn.primitive.name in JIT:
                called = inner(eqn)
                outs = run(called.jaxpr, atoms, called.consts)
            else:
                outs = [jex.Var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=atoms, outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in body.outvars]

    body = closed.jaxpr
    outvars = run(body, body.invars, closed.consts)
    jaxpr = jex.Jaxpr(list(consts), body.invars, outvars, eqns, body.effects)
    return jex.ClosedJaxpr(jaxpr, list(consts.values()))


def without_derivative(jaxpr: Any) -> set[Any]:
    """The variables that are results of `stop_gradient`."""
    return {v for e in jaxpr.eqns if e.primitive.name == "stop_gradient" for v in e.outvars}


class Stretches:
    """Stretches of a jaxpr's equations as jaxprs of their own."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr
        self.last_read = {v: at for at, e in enumerate(jaxpr.eqns) for v in _variables([e])}
        returned = [a for a in jaxpr.outvars if not isinstance(a, jex.Literal)]
        self.last_read.update((v, len(jaxpr.eqns)) for v in returned)

    def __call__(self, part: Sequence[int]) -> Any:
        """From what these equations read to what is read after the last of them."""
        eqns = [self._jaxpr.eqns[at] for at in part]
        made = {v for e in eqns for v in e.outvars}
        given = list(dict.fromkeys(a for a in _variables(eqns) if a not in made))
        results = [v for e in eqns for v in e.outvars if self.last_read.get(v, -1) > part[-1]]
        effects = set().union(*(e.effects for e in eqns))
        return jex.ClosedJaxpr(jex.Jaxpr((), given, results, eqns, effects), ())


def _variables(eqns: Sequence[Any]) -> list[Any]:
    return [a for e in eqns for a in e.invars if not isinstance(a, jex.Literal)]


def read_inputs(jaxpr: Any) -> list[bool]:
    """For each input of a jaxpr whether some result depends on it."""
    needed = {a for a in jaxpr.outvars if not isinstance(a, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            read = [True] * len(eqn.invars)
            if eqn.primitive.name == "custom_vjp_call":
                # Differentiated already: a call like any other.
                read = read_inputs(eqn.params["call_jaxpr"].jaxpr)
            atoms = itertools.compress(eqn.invars, read)
            needed.update(a for a in atoms if not isinstance(a, jex.Literal))
    return [var in needed for var in jaxpr.invars]


def made_of(jaxpr: Any, inputs: set[Any]) -> set[Any]:
    """The variables that are made of these inputs and constants alone, and the inputs."""
    made, constant = set(inputs), set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        read = set(_variables([eqn]))
        if read <= made | constant:
            (made if read & made else constant).update(eqn.outvars)
    return made


def scan_parts(eqn: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many its carry; slices are the rest.

    Told by rank, since the names of a scan's parameters differ between versions of JAX.
    """
    body = inner(eqn).jaxpr
    carried = sum(
        len(a.aval.shape) == len(b.aval.shape)
        for a, b in zip(body.outvars, eqn.outvars, strict=True)
    )
    sliced = sum(
        len(a.aval.shape) < len(b.aval.shape) for a, b in zip(body.invars, eqn.invars, strict=True)
    )
    return len(eqn.invars) - sliced - carried, carried


def products(jaxpr: Any) -> list[int]:
    """Of each equation the multiplications in matrix products, loops and calls looked into."""
    return [_products(eqn) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns]


def _products(eqn: Any) -> int:
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in summed)
    if eqn.primitive.name == "conv_general_dilated":
        outputs = eqn.params["dimension_numbers"].rhs_spec[0]
        kernel = eqn.invars[1].aval.shape
        return math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(kernel[outputs], 1)
    bodies = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
    bodies += eqn.params.get("branches", ())
    return eqn.params.get("length", 1) * max((sum(products(b)) for b in bodies), default=0)
