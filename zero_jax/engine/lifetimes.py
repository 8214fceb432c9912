"""How long gathered copies and full gradients live: of each stage, and of each leaf of a trace.

The stage is asked here and nowhere else. What the trace says of a leaf (is it read layer by layer,
how often is it opened, of how many dims is what is opened) is found here once; gradients, the
planner and the compiler's options read it.
Source: ZeRO (arXiv:1910.02054), sections 5 and 7.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.collectives import gather_scatter
from zero_jax.collectives.gather_scatter import Wire
from zero_jax.engine import repeats
from zero_jax.engine.weights import Form, follow
from zero_jax.jaxpr import equations
from zero_jax.remat import policies
from zero_jax.remat.policies import Policy, of_jax
from zero_jax.sharding.cuts import Split

_NONE = policies.parse("none")
STEP, MICRO_BATCH, TOUCH = "step", "micro-batch", "touch"


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """What a stage is.

    Attributes:
      copy: how long a gathered copy lives: STEP or TOUCH; None where nothing is cut.
      gradient: when the full local gradient of a leaf is summed over devices: after the STEP, or
        as it appears, at its TOUCH. See `lifetime`.
      others: the same of a leaf that is not read by layers alone.
    """

    copy: str | None
    gradient: str
    others: str


LIFETIMES = {
    0: Lifetime(None, STEP, STEP),
    1: Lifetime(STEP, STEP, STEP),
    # A leaf that is used twice, as a tied embedding, is sent once: when its gradient is complete.
    2: Lifetime(STEP, TOUCH, MICRO_BATCH),
    3: Lifetime(TOUCH, TOUCH, TOUCH),
}


def lifetime(stage: int, micro_batches: int) -> Lifetime:
    """What a stage is with so many micro-batches. Where there is one, no gradient waits for others:
    it is summed as it appears, behind the backward pass of other layers.

    >>> lifetime(1, 4).gradient, lifetime(1, 1) == LIFETIMES[2]
    ('step', True)
    """
    known = LIFETIMES[stage]
    if micro_batches > 1 or known.gradient != STEP:
        return known
    return dataclasses.replace(LIFETIMES[2], copy=known.copy)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is known of one leaf of the parameters during a step.

    Attributes:
      path: its name.
      cut: how it is cut; `stacked` if a loop takes it slice by slice.
      frozen: whether it has no gradient.
      opens: whether the loss is given its shard, and opens it where it is read; else it is given a
        copy that lives as long as the step.
      summed: when its gradient is summed over devices: STEP, MICRO_BATCH or TOUCH.
      in_layer: whether layers alone read it.
      waits_in: the dtype in which its gradient waits for the update, where that is not the
        shard's: what its gradient is taken with respect to has it.
    """

    path: str
    cut: Split
    frozen: bool
    opens: bool
    summed: str
    in_layer: bool
    waits_in: Any = None


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers that are alike.

    Attributes:
      count: how many.
      words: elements that one of them gathers on a device.
      scanned: whether a loop runs them.
      policy: what they keep, as written; a `jax.checkpoint` of the model's own has its own.
    """

    count: int
    words: int
    scanned: bool
    policy: str


@dataclasses.dataclass(frozen=True)
class _Read:
    """One place where a leaf is opened.

    Attributes:
      form: what it is there.
      stacked: whether a loop takes it slice by slice.
      loops: how many loops did so with its shards.
      layer: which of all layers it is in, or None.
      opening: reads of one leaf with the same opening share it.
      by: the operation.
    """

    form: Form
    stacked: bool
    loops: int
    layer: int | None
    opening: Any
    by: str


class Reading:
    """Reads a trace: where each leaf is opened, and which layers there are.

    Args:
      jaxpr: of the loss, with calls written out; its first inputs are the leaves.
      cuts: how each leaf is cut.
      policy: what layers keep.
    """

    def __init__(self, jaxpr: jex.Jaxpr, cuts: Sequence[Split], policy: Policy):
        self._policy, self._cuts = policy, cuts
        self._reads: list[_Read] = []
        # Of each layer the number of those that are alike, whether scanned, and its policy.
        self._found: list[tuple[int, bool, str]] = []
        forms = {
            var: Form(at, len(cut.shape), cut.dim)
            for at, (var, cut) in enumerate(zip(jaxpr.invars, cuts, strict=False))
        }
        places: dict[int, tuple[int, Any]] = {}
        for run in repeats.runs_of(jaxpr, forms):
            for layer in run:
                inside = self._layer(len(run), False, policy), self._opening(policy)
                places.update((at, inside) for at in layer)
        self._walk(jaxpr, forms, 0, None, None, places)

    @property
    def layers(self) -> list[Layers]:
        """What layers there are, alike ones together."""
        known = [
            Layers(count, self._words(at), scanned, policy)
            for at, (count, scanned, policy) in enumerate(self._found)
        ]
        return list(dict.fromkeys(known))

    def read_by(self, operation: str) -> set[int]:
        """Which leaves are read by such operations."""
        return {r.form.leaf for r in self._reads if r.by == operation}

    def leaf(self, at: int, path: str, frozen: bool, life: Lifetime, wire: Wire) -> Leaf:
        """What is known of a leaf at a stage."""
        reads = [r for r in self._reads if r.form.leaf == at]
        stacked = bool(reads) and all(r.stacked for r in reads)
        cut = dataclasses.replace(self._cuts[at], stacked=stacked)
        inside = len({r.layer for r in reads}) == 1 and reads[0].layer is not None
        due = life.gradient if inside else life.others
        opens = due == TOUCH
        # Of what every device holds, vectors and what the stage would cut are summed all at once.
        at_once = cut.dim is None and (life.copy is not None or cut.layer_rank < 2 or not opens)
        once = len({id(r.opening) for r in reads}) == 1 and reads[0].loops == 1
        small = opens and not at_once and not frozen and once and not reads[0].form.parted
        waits = wire.reduce if small and gather_scatter.takes_slot(cut, wire) else None
        if waits is None and cut.dim is not None and cut.parts > 1 and not frozen:
            waits = jnp.dtype("float32")  # a shard that was joined is in the compute dtype
        in_layer = bool(reads) and all(r.layer is not None for r in reads)
        return Leaf(path, cut, frozen, opens, STEP if at_once else due, in_layer, waits)

    def _layer(self, count: int, scanned: bool, policy: Policy) -> int:
        self._found.append((count, scanned, str(policy)))
        return len(self._found) - 1

    @staticmethod
    def _opening(policy: Policy) -> Any:
        """What the reads of one layer share; under "none" each operation opens for itself."""
        return None if policy.kind == "none" else object()

    def _walk(
        self,
        jaxpr: jex.Jaxpr,
        forms: dict[jex.Var, Form],
        loops: int,
        layer: int | None,
        opening: Any,
        places: Mapping[int, tuple[int, Any]],
    ) -> None:
        forms = dict(forms)
        for at, eqn in enumerate(jaxpr.eqns):
            mine = [forms[a] for a in eqn.invars if equations.is_in(a, forms)]
            if not mine or follow(eqn, forms):
                continue
            own, shared = places.get(at, (layer, opening))
            if eqn.primitive.name == "scan":
                self._scan(eqn, forms, loops, own, shared)
            elif shared is None and is_own_remat(eqn):
                policy = of_jax(eqn.params["policy"])
                body = equations.written_out(equations.inner(eqn)).jaxpr
                inside = own if own is not None else self._layer(1, False, policy)
                self._walk(body, _inside(body, eqn, forms), loops, inside, object(), {})
            else:
                for form in dict.fromkeys(mine):
                    self._read(form, loops, own, shared, eqn.primitive.name)
        for form in dict.fromkeys(forms[a] for a in jaxpr.outvars if equations.is_in(a, forms)):
            self._read(form, loops, layer, opening, "return")

    def _scan(
        self,
        eqn: jex.JaxprEqn,
        forms: dict[jex.Var, Form],
        loops: int,
        layer: int | None,
        opening: Any,
    ) -> None:
        first = sum(equations.state_of(eqn))
        sliced = {}
        body = equations.written_out(equations.inner(eqn)).jaxpr
        for i, (var, atom) in enumerate(zip(body.invars, eqn.invars, strict=True)):
            if equations.is_in(atom, forms) and i >= first and forms[atom].may_slice:
                sliced[var] = forms[atom].sliced()
            elif equations.is_in(atom, forms):
                self._read(forms[atom], loops, layer, opening, "scan", stacked=i >= first)
        if sliced:
            policy = _NONE if opening is not None else self._policy
            if layer is None:
                layer = self._layer(eqn.params["length"], True, policy)
            self._walk(body, sliced, loops + 1, layer, self._opening(policy), {})

    def _read(
        self,
        form: Form,
        loops: int,
        layer: int | None,
        opening: Any,
        by: str,
        stacked: bool = False,
    ) -> None:
        own = object() if opening is None else opening
        self._reads.append(_Read(form, stacked or loops > 0, loops, layer, own, by))

    def _words(self, layer: int) -> int:
        """Of the leaves that a layer reads, each counted once."""
        forms = {r.form.leaf: r.form for r in self._reads if r.layer == layer}
        return sum(_elements(self._cuts[leaf], form) for leaf, form in forms.items())


def is_own_remat(eqn: jex.JaxprEqn) -> bool:
    """Whether it is a `jax.checkpoint` of the model's own, not of a gradient within the loss."""
    return eqn.primitive.name in equations.REMAT and not eqn.params.get("differentiated")


def _inside(
    body: jex.Jaxpr, eqn: jex.JaxprEqn, forms: Mapping[jex.Var, Form]
) -> dict[jex.Var, Form]:
    pairs = zip(body.invars, eqn.invars, strict=True)
    return {var: forms[a] for var, a in pairs if equations.is_in(a, forms)}


def _elements(cut: Split, form: Form) -> int:
    """Of what is left of a leaf, on one device."""
    left = cut.shape[len(cut.shape) - form.rank :]
    if form.parted and form.rank == len(cut.shape):
        left = (1, *left[1:])
    return math.prod(left) // (cut.model_shards if cut.model is not None else 1)
