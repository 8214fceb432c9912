"""The words that a step of the fuzz must send, by the rules of docs/guide.md, and those it does.

Told from the traced loss and from what JAX itself keeps for a backward pass; counted in the
compiled program. XLA's own savings are switched off there: on CPUs it drops barriers and then
merges the two gathers of a leaf.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

import zero_jax
from zero_jax.engine import grads, repeats
from zero_jax.engine.reading import is_own_remat
from zero_jax.engine.trace import Traced
from zero_jax.engine.weights import Form, follow
from zero_jax.hlo import traffic
from zero_jax.jaxpr import equations, reads
from zero_jax.remat import layer_groups
from zero_jax.sharding.cuts import Split

OPTIONS = {
    "xla_disable_hlo_passes": "cse,while-loop-invariant-code-motion,algsimp",
    "xla_backend_optimization_level": 0,  # nobody runs it
}
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
# The sum of loss and weight, and of the aux of a case.
SCALARS = 16
NOTHING = jax.checkpoint_policies.nothing_saveable
Policy = Callable[..., Any] | None  # of JAX's; None keeps everything


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == "dot_general"


POLICIES: dict[str, Policy] = {
    "none": None,
    "dots": _is_product,
    "block": NOTHING,
    "block@host": NOTHING,
    "block_sqrt": NOTHING,
}


def fault(zero: zero_jax.Zero, loss: Any, grad_fn: Any, params: Any, rows: Any) -> str | None:
    """How the words that a loss and its gradients send differ from those they must, or None.

    Args:
      zero: of the run.
      loss: which returns (loss, aux).
      grad_fn: what `zero.value_and_grad` made of it.
      params, rows: its arguments.
    """
    mesh = dict(zero.mesh.shape)
    traced = grads.GlobalLoss(zero.settings, loss, True).read(params, rows, ())
    own = wanted(zero, traced)
    found = sent(grad_fn.lower(params, rows), mesh)
    over = {kind: found[kind] - own[kind] for kind in KINDS}
    over["all-reduce"] -= min(over["all-reduce"], SCALARS)
    near = all(abs(over[kind]) <= 0.01 * own[kind] for kind in KINDS)
    return None if near else f"words {found} for {own}"


def sent(lowered: Any, mesh: Mapping[str, int]) -> dict[str, int]:
    """Words that a program sends for ZeRO, by kind."""
    compiled = lowered.compile(compiler_options=OPTIONS)
    own = [c for c in traffic.collectives(compiled, mesh) if c.axis != "model"]
    return {kind: sum(c.words for c in own if c.kind == kind) for kind in KINDS}


def wanted(zero: zero_jax.Zero, traced: Traced) -> dict[str, int]:
    """The words that it must send, but for some `SCALARS`."""
    cuts, still = [x.cut for x in traced.leaves], [x.frozen for x in traced.leaves]
    trained = [c for c, s in zip(cuts, still, strict=True) if not s]
    # A leaf whose values nobody reads is not gathered.
    read = [c for c, r in zip(cuts, reads.read_inputs(traced.closed.jaxpr), strict=False) if r]
    gathered, scattered = sum(map(_parted, read)), sum(map(_parted, trained))
    summed = 2 * sum(_size(c) for c in trained if c.dim is None)
    if zero.stage == 2:
        scattered *= zero.micro_batches
    elif zero.stage == 3:
        touches = Touches(cuts, still, zero.remat)
        touches.walk_loss(traced.closed)
        gathered = touches.gathered * zero.micro_batches
        scattered = touches.scattered * zero.micro_batches
    if zero.mesh.shape["data"] == 1:
        gathered = scattered = summed = 0
    if zero.mesh.shape.get("replica", 1) > 1:
        joined = [c.dim is not None and c.parts > 1 for c in trained]
        gathered += sum(_shard(c) for c in read if c.dim is not None and c.parts > 1)
        scattered += sum(_shard(c) for c, j in zip(trained, joined, strict=True) if j)
        summed += 2 * sum(_shard(c) for c, j in zip(trained, joined, strict=True) if not j)
    return dict(zip(KINDS, (gathered, scattered, summed), strict=True))


def _parted(cut: Split) -> int:
    """Words that a gather of the leaf sends, or a reduce-scatter."""
    return 0 if cut.dim is None else _size(cut)


def _size(cut: Split) -> int:
    """Words of a leaf with its padding, on one device of `model`."""
    return math.prod(cut.rest_shape) // (1 if cut.model is None else cut.model_shards)


def _shard(cut: Split) -> int:
    """Words of what the devices of one replica hold each."""
    return _size(cut) // (1 if cut.dim is None else cut.shards)


@dataclasses.dataclass
class Touches:
    """Adds up what the touches of stage 3 send in one micro-batch.

    An operation that reads a leaf is a touch, but for those that only re-arrange it. So are a layer
    as a whole and a loop with what it reads in every turn. A touch gathers the leaf, once more if
    the backward pass reads it, and scatters its gradient if it has one.

    Attributes:
      cuts: how leaves are cut.
      still: which are frozen.
      remat: the policy of layers.
    """

    cuts: Sequence[Split]
    still: Sequence[bool]
    remat: Any
    gathered: int = 0
    scattered: int = 0

    @property
    def policy(self) -> Policy:
        return self.remat if callable(self.remat) else POLICIES[self.remat]

    def walk_loss(self, closed: jex.ClosedJaxpr) -> None:
        jaxpr = closed.jaxpr
        pairs = enumerate(zip(jaxpr.invars, self.cuts, strict=False))
        forms = {v: Form(i, len(c.shape), c.dim) for i, (v, c) in pairs}
        runs = [] if self.policy is None else repeats.runs_of(jaxpr, forms)
        self.walk(jaxpr, forms, 1, jaxpr.outvars[:1], runs)

    def walk(
        self,
        jaxpr: jex.Jaxpr,
        forms: dict[jex.Var, Form],
        turns: int,
        results: Sequence[Any],
        runs: Sequence[Sequence[Sequence[int]]] = (),
    ) -> None:
        """Follows a program of which these results have gradients."""
        forms, live = dict(forms), _differentiated(jaxpr, results)
        fixed = equations.without_derivative(jaxpr)
        stretch = equations.Stretches(jaxpr)
        layers = {layer[0]: (layer, len(run)) for run in runs for layer in run}
        inside = {at for layer, _ in layers.values() for at in layer}
        for at, eqn in enumerate(jaxpr.eqns):
            if at in layers:
                layer, count = layers[at]
                again = 1 + (self.remat == "block_sqrt" and count > 3)
                body = stretch(layer)
                mine = {v: forms[v] for v in body.jaxpr.invars if v in forms}
                moved = {v for v in body.jaxpr.invars if v not in fixed}
                self.touch(body, mine, moved, live, self.policy, turns, again)
            if at in inside or not any(equations.is_in(a, forms) for a in eqn.invars):
                continue
            if not follow(eqn, forms):
                self.operation(eqn, forms, fixed, live, turns)
        for form in {forms[a] for a in jaxpr.outvars if equations.is_in(a, forms)}:
            self._send(form, turns, 0, self._trains(form))

    def operation(
        self,
        eqn: jex.JaxprEqn,
        forms: Mapping[jex.Var, Form],
        fixed: set[jex.Var],
        live: set[jex.Var],
        turns: int,
    ) -> None:
        whole = {a: forms[a] for a in eqn.invars if equations.is_in(a, forms)}
        policy: Policy = None if eqn.primitive.name in ("scan", "custom_vjp_call") else NOTHING
        if eqn.primitive.name == "scan":
            first = sum(equations.state_of(eqn))
            sliced = {a for a in eqn.invars[first:] if equations.is_in(a, whole)}
            slices = {a for a in sliced if whole[a].may_slice}
            self.layers(eqn, whole, slices, fixed, live, turns)
            whole = {a: form for a, form in whole.items() if a not in slices}
            eqn = eqn if self.policy is None else _with_policy(eqn, self.policy)
        elif is_own_remat(eqn):
            policy = eqn.params["policy"] or NOTHING
        moved = {a for a in eqn.invars if equations.is_var(a) and a not in fixed}
        self.touch(_alone(eqn), whole, moved, live, policy, turns)

    def layers(
        self,
        eqn: jex.JaxprEqn,
        forms: Mapping[Any, Form],
        slices: set[Any],
        fixed: set[jex.Var],
        live: set[jex.Var],
        turns: int,
    ) -> None:
        """A loop over slices: its turns are layers; under "none" each operation is for itself."""
        if not slices:
            return
        body, length = equations.written_out(equations.inner(eqn)), eqn.params["length"]
        pairs = list(zip(body.jaxpr.invars, eqn.invars, strict=True))
        own = {v: forms[a].sliced() for v, a in pairs if equations.is_in(a, slices)}
        # Of a loop in which nothing is trained no result has a gradient.
        alive = bool(live & set(eqn.outvars))
        if self.policy is None:
            self.walk(body.jaxpr, own, turns * length, body.jaxpr.outvars if alive else ())
            return
        first, carried = equations.state_of(eqn)
        moved = {v for v, a in pairs if equations.is_var(a) and a not in fixed}
        moved |= set(body.jaxpr.invars[first : first + carried])
        sqrt = self.remat == "block_sqrt" and carried and layer_groups.size_of(length) > 1
        outs = set(filter(equations.is_var, body.jaxpr.outvars)) if alive else set()
        self.touch(body, own, moved, outs, self.policy, turns * length, 2 if sqrt else 1)

    def touch(
        self,
        body: jex.ClosedJaxpr,
        forms: Mapping[jex.Var, Form],
        moved: set[jex.Var],
        live: set[jex.Var],
        policy: Policy,
        turns: int,
        again: int = 1,
    ) -> None:
        """What runs as a whole, whose backward pass needs its weights so often again."""
        if not any(map(self._words, forms.values())):
            return
        used = [equations.is_in(v, live) and equations.is_float(v) for v in body.jaxpr.outvars]
        trained = {v for v in moved if equations.is_float(v)}
        trained -= {v for v, form in forms.items() if not self._trains(form)}
        made = {v: {v} for v in forms}
        if policy not in (None, NOTHING):  # which never keeps what is made of weights alone
            body, made = _without_pure(body, forms)
        moving = [bool(made.get(v, {v}) & trained) for v in body.jaxpr.invars]
        needed = _kept(body, moving, used, policy) if any(used) else set()
        for leaf in {form.leaf for form in forms.values()}:
            own = {v for v, form in forms.items() if form.leaf == leaf}
            back = again * any(made[v] & own for v in needed if v in made)
            self._send(forms[min(own, key=id)], turns, back, any(used) and bool(own & trained))

    def _trains(self, form: Form) -> bool:
        return not form.stopped and not self.still[form.leaf]

    def _send(self, form: Form, turns: int, back: int, gradient: bool) -> None:
        self.gathered += self._words(form) * turns * (1 + back)
        self.scattered += self._words(form) * turns * gradient

    def _words(self, form: Form) -> int:
        cut = self.cuts[form.leaf]
        left = cut.rest_shape[len(cut.shape) - form.rank :]
        if form.parted and form.rank == len(cut.shape):
            left = (1, *left[1:])
        part = 1 if cut.model is None else cut.model_shards
        return 0 if cut.dim is None else math.prod(left) // part


def _differentiated(jaxpr: jex.Jaxpr, results: Sequence[Any]) -> set[jex.Var]:
    """The variables through which these results have gradients."""
    live: set[jex.Var] = set(filter(equations.is_var, results))
    for eqn in reversed(jaxpr.eqns):
        made = any(v in live and equations.is_float(v) for v in eqn.outvars)
        if made and eqn.primitive.name != "stop_gradient":
            live.update(equations.variables([eqn]))
    return live


def _alone(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """One equation as a program, with its own literals."""
    given = list(dict.fromkeys(equations.variables([eqn])))
    return jex.ClosedJaxpr(jex.Jaxpr((), given, eqn.outvars, [eqn], eqn.effects), ())


def _with_policy(eqn: jex.JaxprEqn, policy: Policy) -> jex.JaxprEqn:
    """A scan whose turns keep what the policy says."""
    body = equations.inner(eqn)
    again = _under(policy, jex.jaxpr_as_fun(body))
    return equations.with_inner(eqn, jax.make_jaxpr(again)(*map(_like, body.jaxpr.invars)))


def _under(policy: Policy, fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a backward pass that finds what the policy keeps."""
    everything = policy in (None, jax.checkpoint_policies.everything_saveable)
    return fun if everything else jax.checkpoint(fun, policy=policy)


def _like(var: jex.Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _without_pure(
    body: jex.ClosedJaxpr, forms: Mapping[jex.Var, Form]
) -> tuple[jex.ClosedJaxpr, dict[jex.Var, set[jex.Var]]]:
    """A program that is given what it makes of weights alone; of all that, of which weights."""
    jaxpr, made, rest = body.jaxpr, {v: {v} for v in forms}, []
    pure = reads.made_of(jaxpr, set(forms))
    for eqn in jaxpr.eqns:
        if not eqn.outvars or eqn.outvars[0] not in pure:
            rest.append(eqn)
            continue
        weights = (made.get(a, set()) for a in equations.variables([eqn]))
        made.update(dict.fromkeys(eqn.outvars, set().union(*weights)))
    used = {*equations.variables(rest), *filter(equations.is_var, jaxpr.outvars)}
    given = [v for v in jaxpr.invars if v not in forms] + [v for v in made if v in used]
    new = jex.Jaxpr(jaxpr.constvars, given, jaxpr.outvars, rest, jaxpr.effects)
    return jex.ClosedJaxpr(new, body.consts), made


def _kept(
    body: jex.ClosedJaxpr, moving: Sequence[bool], used: Sequence[bool], policy: Policy
) -> set[jex.Var]:
    """Which inputs JAX itself keeps for the backward pass of a program under a policy.

    Args:
      body: the program.
      moving: which inputs have gradients.
      used: through which results.
      policy: see `Policy`.
    """

    def residuals(*args: Any) -> list[Any]:
        def some(*own: Any) -> list[Any]:
            it = iter(own)
            full = [next(it) if m else x for m, x in zip(moving, args, strict=True)]
            outs = zip(jex.jaxpr_as_fun(body)(*full), used, strict=True)
            return [x for x, own in outs if own]

        moved = [x for m, x in zip(moving, args, strict=True) if m]
        return jax.tree.leaves(jax.vjp(_under(policy, some), *moved)[1])

    if not any(moving):
        return set()
    jaxpr = jax.make_jaxpr(residuals)(*map(_like, body.jaxpr.invars)).jaxpr
    pairs = zip(body.jaxpr.invars, jaxpr.invars, strict=True)
    return {own for own, var in pairs if var in jaxpr.outvars}
