"""What the backward pass keeps and what it computes again: a policy applied to a traced loss.

Layers are the scans over parameters, and the stretches that layers.py finds where a model does not
scan. `policies.py` has the policies, `recompute.py` what becomes of a layer.

No policy keeps a weight that a touch opens: each touch is fused with the operation that uses it,
or with its layer, so what is saved is the shard, and the backward pass gathers again: there the
third Ψ of stage 3's 3Ψ words comes from (ZeRO, section 7.2.2). At stage 2 it reads the copy of the
step again, instead of keeping a second one layer by layer. (A loop, a cond or a custom_vjp outside
of layers that is handed a gathered weight keeps it: see `_KEEP`.)

Models do not know of any of this: their loss is traced, and its jaxpr evaluated with the layers
and the touches wrapped. Layers that a model already wraps in `nn.remat` or `jax.checkpoint` are
left as they are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax import grouped, jaxprs, layers, policies, recompute
from zero_jax.activations import can_move
from zero_jax.collectives import TOUCHES
from zero_jax.later import Later, now, opened
from zero_jax.policies import DEVICE, Place, Policy
from zero_jax.shards import check_shards

# Operations that keep a gathered weight they are given: a loop over it would otherwise be run
# again as a whole, and a custom_vjp (a chunked loss) decides for itself what it keeps.
_KEEP = frozenset(("scan", "while", "cond", "custom_vjp_call"))
_NONE = policies.parse("none")
_BLOCK = policies.parse("block")


def apply(
    fun: Callable[..., Any],
    policy: str,
    shards: Sequence[str | None],
    numbers: Sequence[int | None] | None = None,
    bucket_bytes: float = math.inf,
) -> Callable[..., Any]:
    """Wraps a function of parameters so that its backward pass follows the policy.

    Args:
      fun: a function whose first argument is a tree of parameter arrays.
      policy: see `policies.parse`.
      shards: for each array of that tree: its path if it is a shard, which only a touch may use,
        or None.
      numbers: for each, the number of the layer that it belongs to, or None; for layers that are
        not scanned.
      bucket_bytes: the most that collectives move at once; a scanned layer that gathers more does
        not hand all of its gradients to the next one to be summed there (but under "none").

    Returns:
      A function of the same signature and values.

    Raises:
      ValueError: if a shard is used without being gathered; for names that mark nothing, or a
        gathered weight; for layers that can't be grouped.
    """
    parsed = policies.parse(policy)

    def wrapped(params: Any, *args: Any) -> Any:
        flat, treedef = jax.tree.flatten((params, args))

        def flat_fun(*flat: Any) -> Any:
            params, args = jax.tree.unflatten(treedef, flat)
            return fun(params, *args)

        closed, shape = jax.make_jaxpr(flat_fun, return_shape=True)(*flat)
        params_vars = closed.jaxpr.invars[: len(shards)]
        pairs = zip(params_vars, shards, strict=True)
        outs = check_shards(closed.jaxpr, {var: name for var, name in pairs if name is not None})
        returned = [name for name in outs if name is not None]
        if returned:
            raise ValueError(
                f"parameter {returned[0]} is returned while it is only this device's shard: "
                "return zero_jax.gather(...) of it, or read it with zero.full(params)"
            )
        _check_names(closed.jaxpr, parsed)
        closed = jaxprs.written_out(closed, TOUCHES)
        known = [layers.OTHER if n is None else n for n in numbers or [None] * len(shards)]
        owner = dict(zip(params_vars, known, strict=True))
        found = layers.segments(closed.jaxpr, owner, TOUCHES)
        touched = set(params_vars)
        outs = _evaluate(closed, flat, touched, parsed, layers=found, bucket_bytes=bucket_bytes)
        out = [now(x) for x in outs]
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def _evaluate(
    closed: Any,
    args: Sequence[Any],
    touched: set[Any],
    policy: Policy,
    *,
    layers: Sequence[range] = (),
    in_scan: bool = False,
    bucket_bytes: float = math.inf,
) -> list[Any]:
    """Evaluates a jaxpr equation by equation, wrapping touches and layers.

    Args:
      closed: the jaxpr, its calls written out.
      args: its inputs, arrays or `Later`.
      touched: its variables that are parameters.
      policy: what layers keep.
      layers: those of its equations that are layers which are not scanned.
      in_scan: whether this is the body of a scan. Outside of one, forward and backward stand in
        one computation, where XLA would merge their two gathers and keep the copy in between:
        there `jax.checkpoint` puts a barrier between them.
      bucket_bytes: see `apply`.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    touched, inputs = set(touched), set(env)
    groups = grouped.neighbours(layers) if policy.kind == "block_sqrt" else [[r] for r in layers]
    starts = {group[0].start: group for group in groups}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    at = 0
    while at < len(jaxpr.eqns):
        if at in starts:
            group = starts[at]
            part = range(at, group[-1].stop)
            body = jaxprs.stretch(jaxpr, part)
            given = body.jaxpr.invars
            values = [read(v) for v in given]
            own = set(given) - inputs - touched - jaxprs.read_from(jaxpr, part.stop)
            weights = {v for v in given if v in touched or isinstance(env[v], Later)}
            inner = [range(r.start - at, r.stop - at) for r in group]
            outs = _unrolled(body, values, weights, own, policy, inner)
            env.update(zip(body.jaxpr.outvars, outs, strict=True))
            at = part.stop
            continue
        eqn = jaxpr.eqns[at]
        values = [read(a) for a in eqn.invars]
        outs = _equation(eqn, values, touched, policy, in_scan, bucket_bytes)
        env.update(zip(eqn.outvars, outs, strict=True))
        at += 1
    return [read(a) for a in jaxpr.outvars]


def _unrolled(
    body: Any,
    values: list[Any],
    weights: set[Any],
    own: set[Any],
    policy: Policy,
    layers: Sequence[range],
) -> list[Any]:
    """The results of one layer that is not scanned, or of a group of them.

    Args:
      body: its jaxpr.
      values: what it is given.
      weights: variables of those that are parameters.
      own: variables of those that nothing reads after it: its input.
      policy: what it keeps.
      layers: the layers of a group.
    """
    flat, gather = opened(values)
    if policy.kind == "none":
        opens = jaxprs.calls(body.jaxpr, TOUCHES) or any(isinstance(v, Later) for v in values)
        if not opens:
            return _evaluate(body, values, weights, policy)
        it = iter(recompute.tied(flat))
        tied = [
            Later([next(it) for _ in v.shards], v.gather) if isinstance(v, Later) else next(it)
            for v in values
        ]
        return _evaluate(body, tied, weights, policy)
    pairs = list(zip(body.jaxpr.invars, values, strict=True))
    places, at = {}, 0
    for var, value in pairs:
        if var in own and can_move(var.aval):
            places[at] = policy.inputs
        at += len(value.shards) if isinstance(value, Later) else 1
    alone = _replay(body, weights, policy) if len(layers) == 1 else None

    def run(args: Sequence[Any], tap: Any) -> list[Any]:
        given = gather(args)
        if alone is not None:
            return alone(given, tap)
        return [now(x) for x in _evaluate(body, given, weights, _BLOCK, layers=layers)]

    return recompute.layer(run, places, barrier=True)(*flat)


def _equation(
    eqn: Any,
    values: list[Any],
    touched: set[Any],
    policy: Policy,
    in_scan: bool,
    bucket_bytes: float,
) -> list[Any]:
    """The results of one equation; extends `touched` by re-arranged parameters."""
    name, run = eqn.primitive.name, jaxprs.function(eqn)
    later = [v for v in values if isinstance(v, Later)]
    if not eqn.outvars and not eqn.effects:  # jax 0.10 leaves emptied calls behind
        return []
    if eqn.params.get("name") in TOUCHES:
        return [Later(values, lambda *shards: run(*shards)[0])]
    uses_params = any(jaxprs.is_in(a, touched) for a in eqn.invars)
    if name in jaxprs.LAYOUT and len(later) == len(values) == 1:
        return [later[0].then(lambda full: run(full)[0])]
    if name in jaxprs.LAYOUT and uses_params:
        touched.update(eqn.outvars)
    if name == "scan" and uses_params:
        return _scan(eqn, list(map(now, values)), touched, policy, bucket_bytes)
    if not later:
        return run(*values)
    flat, gather = opened(values)
    if not in_scan:
        # Else the gradient is computed, and sent, when layers have run backward: it or what it is
        # made of would wait until then.
        flat = recompute.tied(flat)
    if name in _KEEP:
        return run(*gather(flat))
    # Gathered again in the backward pass, with what uses it.
    again = jax.checkpoint(lambda *flat: run(*gather(flat)), prevent_cse=not in_scan)
    return again(*flat)


def _scan(
    eqn: Any, values: list[Any], touched: set[Any], policy: Policy, bucket_bytes: float
) -> list[Any]:
    """A scan over parameters with its layer, or the touches in it, wrapped."""
    body = jaxprs.written_out(jaxprs.inner(eqn), TOUCHES)
    weights = jaxprs.inside(body, eqn, touched)
    consts, carried = jaxprs.scan_parts(eqn)
    over_layers = jaxprs.slices_its_inputs(eqn, touched)
    if policy.kind == "none" or jaxprs.has_remat(body.jaxpr):
        return jaxprs.function(_gathering(eqn, touched))(*values)
    nested = (
        policy.kind == "block_sqrt" and over_layers and grouped.size_of(eqn.params["length"]) > 1
    )
    run = _replay(body, weights, policy)
    within = recompute.summed_within(body.jaxpr, TOUCHES, bucket_bytes) if over_layers else []
    if nested:
        return grouped.scan(run, eqn, values, policy.inputs, within)
    place = policy.inputs if over_layers else DEVICE
    places = {i: place for i in range(consts, consts + carried)}
    # No barrier is needed: forward and backward of a scan are loops of their own.
    layer = recompute.layer(run, places, barrier=False, within=within)
    new = jax.make_jaxpr(layer)(*(v.aval for v in body.jaxpr.invars))
    return jaxprs.function(eqn.replace(params={**eqn.params, "jaxpr": new}))(*values)


def _gathering(eqn: Any, touched: set[Any]) -> Any:
    """A scan over parameters that gathers them again in its backward pass; or the equation."""
    if eqn.primitive.name != "scan" or not any(jaxprs.is_in(a, touched) for a in eqn.invars):
        return eqn
    body = jaxprs.written_out(jaxprs.inner(eqn), TOUCHES)
    weights = jaxprs.inside(body, eqn, touched)

    def step(*args: Any) -> list[Any]:
        return [now(x) for x in _evaluate(body, args, weights, _NONE, in_scan=True)]

    new = jax.make_jaxpr(step)(*(v.aval for v in body.jaxpr.invars))
    return eqn.replace(params={**eqn.params, "jaxpr": new})


def _replay(body: Any, weights: set[Any], policy: Policy) -> recompute.Run:
    """A layer as a function of its inputs that tells which of its results are kept."""
    jaxpr, pure = body.jaxpr, jaxprs.made_of(body.jaxpr, weights)
    kept = {i: place for i, e in enumerate(jaxpr.eqns) if (place := _place(e, pure, policy))}
    eqns = [_gathering(e, pure) for e in jaxpr.eqns]
    body = jex.ClosedJaxpr(jaxpr.replace(eqns=eqns), body.consts)
    return jaxprs.in_pieces(body, kept)


def _place(eqn: Any, pure: set[Any], policy: Policy) -> Place | None:
    """Where the result of an equation of a layer is kept, or None."""
    name = eqn.primitive.name
    weight = any(v in pure for v in eqn.outvars)
    if policy.kind == "dots":
        return DEVICE if name == "dot_general" and not weight else None
    place = policy.place_of(eqn.params["name"]) if name == "name" else None
    if place is not None and weight:
        raise ValueError(
            f"remat={str(policy)!r} would keep a weight: the value marked {eqn.params['name']!r} "
            "is made of parameters alone. A gathered weight is never kept, it is gathered again; "
            "mark activations instead, or leave that name out"
        )
    return place


def _check_names(jaxpr: Any, policy: Policy) -> None:
    """Raises if a name marks nothing."""
    marked = jaxprs.names_in(jaxpr) if policy.names else set()
    for name, _ in policy.names:
        if name not in marked:
            known = ", ".join(sorted(marked)) or "none"
            raise ValueError(
                f"remat={str(policy)!r}: no value of the loss is marked {name!r}; names that are: "
                f"{known}. Mark values by jax.ad_checkpoint.checkpoint_name(x, {name!r})"
            )
