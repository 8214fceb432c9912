"""What the backward pass keeps and what it computes again, by named policy.

  none    activations are kept
  dots    in each scanned layer, only the results of matrix products are kept
  block   of each scanned layer, only its input is kept (12x less for a GPT, for 1/3 more FLOPs)

No policy keeps a weight that a touch opens: each touch is fused with the operation that uses it
under `jax.checkpoint`, so what is saved is the shard, and the backward pass gathers again: there
the third Ψ of stage 3's 3Ψ words comes from (ZeRO, section 7.2.2). At stage 2 it reads the copy of
the step again, instead of keeping a second one layer by layer. (A loop, a cond or a custom_vjp
that is handed a gathered weight keeps it: see `_KEEP`.)

Models do not know of any of this: their loss is traced, and its jaxpr evaluated with the layers
(scans over parameters) and the touches wrapped. Layers that a model already wraps in
`nn.remat` or `jax.checkpoint` are left as they are.
"""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
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
_JIT = frozenset(("jit", "pjit", "closed_call", "core_call"))
_REMAT = frozenset(("remat2", "checkpoint", "remat"))
# Operations that keep a gathered weight they are given: a loop over it would otherwise be run
# again as a whole, and a custom_vjp (a chunked loss) decides for itself what it keeps.
_KEEP = frozenset(("scan", "while", "cond", "custom_vjp_call"))


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
        known = {var: name for var, name in pairs if name is not None}
        outs = _check_shards(closed.jaxpr, known)
        returned = [name for name in outs if name is not None]
        if returned:
            raise ValueError(
                f"parameter {returned[0]} is returned while it is only this device's shard: "
                "return zero_jax.gather(...) of it, or read it with zero.full(params)"
            )
        out = [_now(x) for x in _evaluate(closed, flat, set(params_vars), policy)]
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


@dataclasses.dataclass(frozen=True)
class _Later:
    """A gathered leaf that is not gathered yet: it will be, together with what uses it."""

    shards: Sequence[Any]
    gather: Callable[..., Any]

    def then(self, fun: Callable[[Any], Any]) -> "_Later":
        return _Later(self.shards, lambda *shards: fun(self.gather(*shards)))

    def now(self) -> Any:
        return self.gather(*self.shards)


def _now(value: Any) -> Any:
    return value.now() if isinstance(value, _Later) else value


def _inner(eqn: Any) -> Any:
    """The jaxpr that a call-like equation runs on its inputs, one to one, or None."""
    if eqn.primitive.name not in _JIT | _REMAT | {"scan"}:
        return None
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    return inner if inner is None or hasattr(inner, "jaxpr") else jex.ClosedJaxpr(inner, ())


def _evaluate(
    closed: Any, args: Sequence[Any], touched: set[Any], policy: str, *, in_scan: bool = False
) -> list[Any]:
    """Evaluates a jaxpr equation by equation, wrapping touches and layers.

    Args:
      closed: the jaxpr.
      args: its inputs, arrays or `_Later`.
      touched: its variables that are parameters.
      policy: what layers keep.
      in_scan: whether this is the body of a scan. Outside of one, forward and backward stand in
        one computation, where XLA would merge their two gathers and keep the copy in between:
        there `jax.checkpoint` puts a barrier between them.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    touched = set(touched)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(a) for a in eqn.invars]
        outs = _equation(eqn, values, touched, policy, in_scan)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _equation(
    eqn: Any, values: list[Any], touched: set[Any], policy: str, in_scan: bool
) -> list[Any]:
    """The results of one equation; extends `touched` by re-arranged parameters."""
    name, run = eqn.primitive.name, _function(eqn)
    later = [v for v in values if isinstance(v, _Later)]
    if not eqn.outvars and not eqn.effects:  # jax 0.10 leaves emptied calls behind
        return []
    if eqn.params.get("name") in (GATHER_TOUCH, COPY_TOUCH):
        return [_Later(values, lambda *shards: run(*shards)[0])]
    uses_params = any(_in(a, touched) for a in eqn.invars)
    if name in _LAYOUT and len(later) == len(values) == 1:
        return [later[0].then(lambda full: run(full)[0])]
    if name in _LAYOUT and uses_params:
        touched.update(eqn.outvars)
    if name in _JIT and (later or uses_params):
        inner = _inner(eqn)
        return _evaluate(inner, values, _inside(inner, eqn, touched), policy, in_scan=in_scan)
    if name == "scan" and uses_params:
        eqn = _wrap_scan(eqn, touched, policy)
        return _function(eqn)(*map(_now, values))
    if name in _KEEP or not later:
        return run(*map(_now, values))
    return _gather_twice(run, values, prevent_cse=not in_scan)


def _function(eqn: Any) -> Callable[..., list[Any]]:
    """One equation as a function of its inputs."""
    invars = [jex.Var(a.aval) for a in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars]
    alone = eqn.replace(invars=invars, outvars=outvars)
    jaxpr = jex.Jaxpr((), invars, outvars, [alone], eqn.effects)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))


def _gather_twice(
    run: Callable[..., list[Any]], values: list[Any], *, prevent_cse: bool
) -> list[Any]:
    """Runs an operation on gathered leaves so that its backward pass gathers them again."""
    counts = [len(v.shards) if isinstance(v, _Later) else 1 for v in values]

    def gather_and_run(*flat: Any) -> list[Any]:
        it = iter(flat)
        given = [[next(it) for _ in range(count)] for count in counts]
        pairs = zip(values, given, strict=True)
        return run(*(v.gather(*g) if isinstance(v, _Later) else g[0] for v, g in pairs))

    flat = [x for v in values for x in (v.shards if isinstance(v, _Later) else [v])]
    return jax.checkpoint(gather_and_run, prevent_cse=prevent_cse)(*flat)


def _wrap_scan(eqn: Any, touched: set[Any], policy: str) -> Any:
    """A scan over parameters with its layer, or the touches in it, under `jax.checkpoint`."""
    inner = _inner(eqn)
    layered = policy != "none" and not _has_remat(inner.jaxpr)
    inside = _inside(inner, eqn, touched)

    def body(*args: Any) -> list[Any]:
        if layered:
            return jex.jaxpr_as_fun(inner)(*args)
        return [_now(x) for x in _evaluate(inner, args, inside, policy, in_scan=True)]

    if layered:
        keep = jax.checkpoint_policies.dots_saveable if policy == "dots" else None
        # No CSE barrier is needed: forward and backward of a scan are loops of their own.
        body = jax.checkpoint(body, policy=keep, prevent_cse=False)
    new = jax.make_jaxpr(body)(*(v.aval for v in inner.jaxpr.invars))
    return eqn.replace(params={**eqn.params, "jaxpr": new})


def _inside(inner: Any, eqn: Any, touched: set[Any]) -> set[Any]:
    """The parameters as the variables of the jaxpr that an equation runs."""
    pairs = zip(inner.jaxpr.invars, eqn.invars, strict=True)
    return {var for var, atom in pairs if _in(atom, touched)}


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


def _check_shards(jaxpr: Any, shards: dict[Any, str]) -> list[str | None]:
    """Raises if a shard reaches an operation that would take it for the full leaf.

    Returns for each output the path of the parameter that it is a shard of, or None.
    """
    shards = dict(shards)
    for eqn in jaxpr.eqns:
        used = [a for a in eqn.invars if _in(a, shards)]
        touch = eqn.params.get("name") in (GATHER_TOUCH, COPY_TOUCH)
        if touch and eqn.outvars and not used:  # the transpose of a touch has its name
            raise ValueError(
                "the loss function differentiates with respect to parameters that it has not "
                "gathered, whose gradients are shards already summed over devices. Gather first: "
                "w = zero_jax.gather(params); jax.grad(f)(w)"
            )
        branches = _branches(eqn)
        if touch or not (used or branches):
            continue
        if eqn.primitive.name in _LAYOUT:
            shards.update((v, shards[used[0]]) for v in eqn.outvars)
            continue
        if not branches:
            raise ValueError(
                f"parameter {shards[used[0]]} is used by {eqn.primitive.name!r} while it is only "
                "this device's shard, which would give a wrong result. Open it first: "
                "w = zero_jax.gather(params), then use w (Flax modules do so by themselves)."
            )
        for inner, given in branches:
            pairs = zip(inner.jaxpr.invars, given, strict=True)
            inside = {v: shards[a] for v, a in pairs if _in(a, shards)}
            outs = _check_shards(inner.jaxpr, inside)
            made = zip(eqn.outvars, outs, strict=True)
            shards.update((var, name) for var, name in made if name is not None)
    return [shards[a] if _in(a, shards) else None for a in jaxpr.outvars]
