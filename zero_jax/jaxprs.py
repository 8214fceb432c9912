"""Small tools on jaxprs: what an equation runs, one equation as a function, calls written out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

# Operations that only re-arrange a leaf: a touch slides past them to the operation that uses it.
LAYOUT = frozenset(
    (
        *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev"),
        *("slice", "dynamic_slice", "convert_element_type", "copy", "name"),
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


def branches(eqn: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Every jaxpr that an equation runs, with the inputs it gets."""
    if eqn.primitive.name == "cond":
        return [(b, eqn.invars[1:]) for b in eqn.params["branches"]]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return [(eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"], eqn.invars)]
    found = inner(eqn)
    return [] if found is None else [(found, eqn.invars)]


def is_in(atom: Any, variables: Any) -> bool:
    """Whether an atom is one of these variables; literals are not."""
    return not isinstance(atom, jex.Literal) and atom in variables


def inside(body: Any, eqn: Any, variables: Any) -> set[Any]:
    """Those of the variables that an equation is given, as variables of the jaxpr it runs."""
    pairs = zip(body.jaxpr.invars, eqn.invars, strict=True)
    return {var for var, atom in pairs if is_in(atom, variables)}


def has_remat(jaxpr: Any) -> bool:
    """Whether a layer already decides for itself what its backward pass keeps."""
    if any(e.primitive.name in REMAT for e in jaxpr.eqns):
        return True
    return any((i := inner(e)) is not None and has_remat(i.jaxpr) for e in jaxpr.eqns)


def slices_its_inputs(eqn: Any, variables: Any) -> bool:
    """Whether it is a scan that hands its body one slice after another of these variables."""
    if eqn.primitive.name != "scan":
        return False
    pairs = zip(inner(eqn).jaxpr.invars, eqn.invars, strict=True)
    return any(is_in(a, variables) and len(v.aval.shape) < len(a.aval.shape) for v, a in pairs)


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


def written_out(closed: Any, but: Sequence[str]) -> Any:
    """The same jaxpr with its `jit` calls written out in place, at every depth of calls.

    Args:
      closed: the jaxpr.
      but: names of calls that stay.
    """
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
            if eqn.primitive.name in JIT and eqn.params.get("name") not in but:
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


def stretch(jaxpr: Any, part: range) -> Any:
    """Some equations as a jaxpr of their own: from what they read to what is read later."""
    eqns = jaxpr.eqns[part.start : part.stop]
    made = {v for e in eqns for v in e.outvars}
    given = list(dict.fromkeys(a for a in _variables(eqns) if a not in made))
    after = read_from(jaxpr, part.stop)
    results = [v for e in eqns for v in e.outvars if v in after]
    effects = set().union(*(e.effects for e in eqns))
    return jex.ClosedJaxpr(jex.Jaxpr((), given, results, eqns, effects), ())


def read_from(jaxpr: Any, at: int) -> set[Any]:
    """The variables that are read from an equation on, or returned."""
    returned = {a for a in jaxpr.outvars if not isinstance(a, jex.Literal)}
    return returned.union(_variables(jaxpr.eqns[at:]))


def first_read(jaxpr: Any, var: Any) -> int:
    """The first equation that reads a variable; their number if none does."""
    reads = (at for at, e in enumerate(jaxpr.eqns) if any(a is var for a in e.invars))
    return next(reads, len(jaxpr.eqns))


def _variables(eqns: Sequence[Any]) -> list[Any]:
    return [a for e in eqns for a in e.invars if not isinstance(a, jex.Literal)]


def read_inputs(jaxpr: Any) -> list[bool]:
    """For each input of a jaxpr whether some result depends on it."""
    needed = {a for a in jaxpr.outvars if not isinstance(a, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(_variables([eqn]))
    return [var in needed for var in jaxpr.invars]


def calls(jaxpr: Any, names: Sequence[str]) -> bool:
    """Whether it calls one of these functions itself."""
    return any(e.params.get("name") in names for e in jaxpr.eqns)


def touched_once(jaxpr: Any, var: Any, names: Sequence[str], scanned: bool = False) -> bool:
    """Whether one scan reads a variable slice by slice and hands each slice to one of these calls.

    Args:
      jaxpr: what has the variable as an input.
      var: the variable.
      names: of the calls.
      scanned: whether it is a slice already.
    """
    reads = [(e, i) for e in jaxpr.eqns for i, a in enumerate(e.invars) if a is var]
    if len(reads) != 1 or any(a is var for a in jaxpr.outvars):
        return False
    eqn, at = reads[0]
    if eqn.params.get("name") in names:
        return scanned
    body = inner(eqn)
    if body is None or len(body.jaxpr.invars) != len(eqn.invars):
        return False
    own = body.jaxpr.invars[at]
    if eqn.primitive.name == "scan":
        sliced = len(own.aval.shape) < len(var.aval.shape)
        return not scanned and sliced and touched_once(body.jaxpr, own, names, True)
    return touched_once(body.jaxpr, own, names, scanned)


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


def in_pieces(closed: Any, kept: Mapping[int, Any]) -> Callable[..., list[Any]]:
    """A jaxpr as a function of its inputs, which shows some results on the way.

    Args:
      closed: the jaxpr.
      kept: by equation, what is told together with its result.

    Returns:
      A function of (inputs, tap): `tap(result, told)` gives what goes on in the result's place.
    """
    jaxpr, start, parts = closed.jaxpr, 0, []
    for stop in [*(i + 1 for i in sorted(kept)), len(jaxpr.eqns)]:
        parts.append((stretch(jaxpr, range(start, stop)), kept.get(stop - 1), stop - 1))
        start = stop

    def run(args: Sequence[Any], tap: Callable[[Any, Any], Any]) -> list[Any]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, closed.consts, strict=True))
        for part, told, last in parts:
            outs = jex.jaxpr_as_fun(part)(*(env[v] for v in part.jaxpr.invars))
            env.update(zip(part.jaxpr.outvars, outs, strict=True))
            var = jaxpr.eqns[last].outvars[0] if told is not None else None
            if var in env:
                env[var] = tap(env[var], told)
        return [a.val if isinstance(a, jex.Literal) else env[a] for a in jaxpr.outvars]

    return run
