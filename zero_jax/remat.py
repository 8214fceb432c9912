"""What the backward pass keeps and what it computes again, by named policy.

  none    activations are kept
  dots    in each scanned layer, only the results of matrix products are kept
  block   of each scanned layer, only its input is kept (12x less for a GPT, for 1/3 more FLOPs)

No policy keeps a gathered weight at stage 3: each touch is fused with the operation that uses
it under `jax.checkpoint`, so what is saved is the shard, and the backward pass gathers again.
That is where the third Ψ of stage 3's 3Ψ words comes from (ZeRO, section 7.2.2).

Models do not know of any of this: their loss is traced, and its jaxpr evaluated with the layers
(scans over parameters) and the touches wrapped. Layers that a model already wraps in
`nn.remat` or `jax.checkpoint` are left as they are.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.collectives import COPY_TOUCH, GATHER_TOUCH

POLICIES = ("none", "dots", "block")

# Operations that only re-arrange a leaf: a touch slides past them to the operation that uses it.
_LAYOUT = frozenset(
    (
        *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev"),
        *("slice", "dynamic_slice", "convert_element_type", "copy", "name"),
    )
)
# Operations that hand their inputs, one to one, to a jaxpr of their own.
_CALLS = frozenset(
    ("jit", "pjit", "scan", "remat2", "checkpoint", "remat", "closed_call", "core_call")
)
_REMAT = frozenset(("remat2", "checkpoint", "remat"))


def check_policy(name: str) -> str:
    """Returns the name if it is a policy.

    Raises:
      ValueError: naming the nearest one.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(str(name), POLICIES, n=1, cutoff=0.0)[0]
        raise ValueError(f"remat={name!r}: use one of {', '.join(POLICIES)}; nearest: {near!r}")
    return name


def apply(fun: Callable[..., Any], policy: str, shards: Sequence[str | None]) -> Callable[..., Any]:
    """Wraps a function of parameters so that its backward pass follows the policy.

    Args:
      fun: a function whose first argument is a tree of parameter arrays.
      policy: one of `POLICIES`.
      shards: for each array of that tree: its path if it is a shard, which only a touch may use,
        or None.

    Returns:
      A function of the same signature and values.

    Raises:
      ValueError: if a shard is used without being gathered.
    """

    def wrapped(params: Any, *args: Any) -> Any:
        flat, treedef = jax.tree.flatten((params, args))

        def flat_fun(*flat: Any) -> Any:
            params, args = jax.tree.unflatten(treedef, flat)
            return fun(params, *args)

        closed, shape = jax.make_jaxpr(flat_fun, return_shape=True)(*flat)
        params_vars = closed.jaxpr.invars[: len(shards)]
        pairs = zip(params_vars, shards, strict=True)
        _check_shards(closed.jaxpr, {var: name for var, name in pairs if name is not None})
        out = _evaluate(closed, flat, set(params_vars), policy)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [a for a in dict.fromkeys(x for x in atoms if not isinstance(x, jex.Literal))]


def _inner(eqn: Any) -> Any:
    """The jaxpr that a call-like equation runs on its inputs, one to one, or None."""
    if eqn.primitive.name not in _CALLS:
        return None
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    return inner if inner is None or hasattr(inner, "jaxpr") else jex.ClosedJaxpr(inner, ())


def _evaluate(
    closed: Any, args: Sequence[Any], touched: set[Any], policy: str, *, in_scan: bool = False
) -> list[Any]:
    """Evaluates a jaxpr equation by equation, wrapping touches and layers.

    Outside a scan, forward and backward stand in one computation, where XLA would merge the two
    gathers and keep the copy in between: there, `jax.checkpoint` puts a barrier between them.
    `pending` maps the result of a touch to the equations that make it: they are not run where
    they stand but together with each equation that uses the result, under `jax.checkpoint`.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    touched = set(touched)
    pending: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        inputs = _variables(eqn.invars)
        waiting = _chain(pending, inputs)
        gathers = eqn.params.get("name") == GATHER_TOUCH
        if gathers or (waiting and eqn.primitive.name in _LAYOUT):
            pending.update((v, [*waiting, eqn]) for v in eqn.outvars)
            continue
        if not waiting and touched.intersection(inputs):
            if eqn.primitive.name in _LAYOUT:
                touched.update(eqn.outvars)
            eqn = _wrap_inside(eqn, touched, policy)
        part = _function(jaxpr, [*waiting, eqn], eqn.outvars)
        if waiting:
            part.run = jax.checkpoint(part.run, prevent_cse=not in_scan)
        part.into(env)
    for var in _variables(jaxpr.outvars):
        if var in pending:  # a parameter that is returned as it is
            _function(jaxpr, pending[var], [var]).into(env)
    return [a.val if isinstance(a, jex.Literal) else env[a] for a in jaxpr.outvars]


def _chain(pending: dict[Any, list[Any]], inputs: Sequence[Any]) -> list[Any]:
    eqns = [eqn for var in inputs if var in pending for eqn in pending[var]]
    return list({id(e): e for e in eqns}.values())


@dataclasses.dataclass
class _Part:
    """A few equations as one function of their free variables."""

    free: list[Any]
    outs: list[Any]
    run: Callable[..., Any]

    def into(self, env: dict[Any, Any]) -> None:
        values = self.run(*(env[v] for v in self.free))
        env.update(zip(self.outs, values, strict=True))


def _function(jaxpr: Any, eqns: Sequence[Any], outs: Sequence[Any]) -> _Part:
    made = {v for eqn in eqns for v in eqn.outvars}
    free = [v for v in _variables(a for eqn in eqns for a in eqn.invars) if v not in made]
    outs = [v for v in outs if not isinstance(v, jex.DropVar)]
    effects = set().union(*(e.effects for e in eqns))
    part = jaxpr.replace(constvars=(), invars=free, outvars=outs, eqns=list(eqns), effects=effects)
    return _Part(free, outs, jex.jaxpr_as_fun(jex.ClosedJaxpr(part, ())))


def _wrap_inside(eqn: Any, touched: set[Any], policy: str) -> Any:
    """The equation with the touches and layers inside it wrapped too."""
    inner = _inner(eqn)
    if inner is None or eqn.primitive.name in _REMAT:
        return eqn
    inside = {v for v, a in zip(inner.jaxpr.invars, eqn.invars, strict=True) if _in(a, touched)}
    is_scan = eqn.primitive.name == "scan"
    layered = is_scan and policy != "none" and not _has_remat(inner.jaxpr)

    def body(*args: Any) -> list[Any]:
        if layered:
            return jex.jaxpr_as_fun(inner)(*args)
        return _evaluate(inner, args, inside, policy, in_scan=is_scan)

    if layered:
        keep = jax.checkpoint_policies.dots_saveable if policy == "dots" else None
        # No CSE barrier is needed: forward and backward of a scan are loops of their own.
        body = jax.checkpoint(body, policy=keep, prevent_cse=False)
    avals = [v.aval for v in inner.jaxpr.invars]
    new = jax.make_jaxpr(body)(*avals)
    key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    return eqn.replace(params={**eqn.params, key: new})


def _in(atom: Any, variables: Any) -> bool:
    return not isinstance(atom, jex.Literal) and atom in variables


def _has_remat(jaxpr: Any) -> bool:
    """Whether the layer already decides for itself what its backward pass keeps."""
    if any(e.primitive.name in _REMAT for e in jaxpr.eqns):
        return True
    return any((i := _inner(e)) is not None and _has_remat(i.jaxpr) for e in jaxpr.eqns)


def _branches(eqn: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Every jaxpr that an equation runs, with the inputs it gets."""
    if eqn.primitive.name == "cond":
        return [(b, eqn.invars[1:]) for b in eqn.params["branches"]]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return [(eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"], eqn.invars)]
    inner = _inner(eqn)
    return [] if inner is None else [(inner, eqn.invars)]


def _check_shards(jaxpr: Any, shards: dict[Any, str]) -> None:
    """Raises if a shard reaches an operation that would take it for the full leaf."""
    shards = dict(shards)
    for eqn in jaxpr.eqns:
        used = [a for a in _variables(eqn.invars) if a in shards]
        if not used or eqn.params.get("name") in (GATHER_TOUCH, COPY_TOUCH):
            continue
        if eqn.primitive.name in _LAYOUT:
            shards.update((v, shards[used[0]]) for v in eqn.outvars)
            continue
        branches = _branches(eqn)
        if not branches:
            raise ValueError(
                f"parameter {shards[used[0]]} is used by {eqn.primitive.name!r} while it is only "
                "this device's shard, which would give a wrong result. Open it first: "
                "w = zero_jax.gather(params), then use w (Flax modules do so by themselves)."
            )
        for inner, given in branches:
            pairs = zip(inner.jaxpr.invars, given, strict=True)
            _check_shards(inner.jaxpr, {v: shards[a] for v, a in pairs if _in(a, shards)})
