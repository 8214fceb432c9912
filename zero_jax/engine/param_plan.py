"""The plan of every parameter: where it is gathered, how often, in which layer; the layers."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.collectives import gather_scatter
from zero_jax.collectives.gather_scatter import Wire
from zero_jax.engine.lifetimes import STEP, TOUCH, Layers, Leaf, Lifetime, Positions
from zero_jax.engine.scans import fallback, unrolls
from zero_jax.engine.unrolled import NOT_PREFETCHED
from zero_jax.remat import policies
from zero_jax.remat.policies import Remat, of_jax
from zero_jax.sharding.layout import Partition
from zero_jax.tracing import jaxpr as equations
from zero_jax.tracing import layer_detection
from zero_jax.tracing.forms import Form, uses

_NONE = policies.parse("none")


@dataclasses.dataclass(frozen=True)
class _Read:
    """One use of a parameter.

    Attributes:
      form: The parameter's form there.
      stacked: True if a loop takes it slice by slice.
      loops: The number of loops that slice its shards.
      layer: The index of the layer, or None.
      opening: Reads of one parameter with the same opening share one gather.
      by: The name of the operation.
      at: The equation of the loss that reads it, or that contains the read.
      rows: The number of rows, for an operation that only takes rows.
    """

    form: Form
    stacked: bool
    loops: int
    layer: int | None
    opening: Any
    by: str
    at: int
    rows: int


class Reading:
    """Uses of every parameter in a trace, and its layers.

    Args:
      jaxpr: The loss, with inlined calls; its first inputs are the parameters.
      cuts: The partition of each parameter.
      policy: The remat policy.
      bucket_bytes: The maximum bytes per collective.
      stand_ins: The parameters, by position, whose codes are read in their place. These follow the
        other parameters.
    """

    def __init__(
        self,
        jaxpr: jex.Jaxpr,
        cuts: Sequence[Partition],
        policy: Remat,
        bucket_bytes: float,
        stand_ins: Sequence[int] = (),
    ):
        self._policy, self._cuts, self._bucket_bytes = policy, cuts, bucket_bytes
        self._stand_ins = stand_ins
        self._reads: list[_Read] = []
        self._found: list[Layers] = []  # without the number of elements
        self._scans: set[int] = set()  # those that are unrolled
        # The current equation of the loss, those at which layers begin, and at which prefetched
        # layers with matmuls end.
        self._jaxpr, self._at, self._starts, self._loops = jaxpr, 0, [-1], list[int]()
        forms = {
            var: Form(at, len(cut.shape), cut.dim)
            for at, (var, cut) in enumerate(zip(jaxpr.invars, cuts, strict=False))
        }
        places: dict[int, tuple[int, Any]] = {}
        runs = layer_detection.runs_of(jaxpr, forms)
        # Where all is saved each operation gathers for itself.
        self._unrolled = [] if policy.kind == "none" else runs
        for run in runs:
            self._starts.append(run[0][0])
            reason = NOT_PREFETCHED.get(policy.kind, "")
            if not reason:
                self._loops.append(run[-1][-1])
            for layer in run:
                shared = None if policy.kind == "none" else object()
                own = self._layer(len(run), False, policy, reason), shared
                places.update((at, own) for at in layer)
        self._walk(jaxpr, forms, 0, None, None, places)

    @property
    def layers(self) -> list[Layers]:
        """The layers of the loss; equal ones are one entry."""
        known = [
            dataclasses.replace(
                layers, elements=self._elements(at), fp8_elements=self._elements(at, fp8=True)
            )
            for at, layers in enumerate(self._found)
        ]
        return list(dict.fromkeys(known))

    def read_by(self, operation: str) -> set[int]:
        """Returns the parameters that such operations read."""
        return {r.form.leaf for r in self._reads if r.by == operation}

    def leaves(
        self, names: Sequence[str], frozen: Sequence[bool], life: Lifetime, wire: Wire
    ) -> list[Leaf]:
        """Returns the plan of every parameter at a stage."""
        pairs = zip(names, frozen, strict=True)
        made = [self._leaf(at, *own, life, wire) for at, own in enumerate(pairs)]
        for at in self._stand_ins:
            made[at] = dataclasses.replace(made[at], is_stand_in=True)
        return made

    def positions(self, leaves: Sequence[Leaf], life: Lifetime) -> Positions:
        """Returns where the layers are, and which parameters are gathered during the last of them.

        Heads of the same layers are gathered together: at most a bucket of them, in order of use.
        """
        heads: dict[int, list[int]] = {}
        left: dict[int, float] = {}
        for use, at in sorted((self._use(at), at) for at in range(len(leaves))):
            # A tied head is read before its layers too.
            layers = max((end for end in self._loops if end < use), default=None)
            leaf, size = leaves[at], equations.bytes_of(self._jaxpr.invars[at])
            able = leaf.cut.dim is not None and leaf.cut.layer_rank > 1 and life.copy == TOUCH
            parted = any(r.form.parted for r in self._reads if r.form.leaf == at)
            other = parted or leaf.frozen or leaf.by_rows or leaf.is_stand_in
            if layers is None or not able or other:
                continue
            if size <= left.setdefault(layers, self._bucket_bytes):
                left[layers] -= size
                heads.setdefault(layers, []).append(at)
        return Positions(self._unrolled, max(self._starts), heads, self._scans)

    def _leaf(self, at: int, path: str, frozen: bool, life: Lifetime, wire: Wire) -> Leaf:
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
        leaf = Leaf(path, cut, frozen, opens, STEP if at_once else due, in_layer, waits)
        if life.copy != TOUCH or cut.dim is None or not reads:
            return leaf
        return dataclasses.replace(leaf, by_rows=_by_rows(reads, cut, wire))

    def _use(self, leaf: int) -> int:
        """Returns the last equation outside of layers that reads a leaf, or -1."""
        reads = (r.at for r in self._reads if r.form.leaf == leaf and r.layer is None)
        return max(reads, default=-1)

    def _layer(
        self,
        count: int,
        scanned: bool,
        policy: Remat,
        fallback: str = "",
        unrolled: bool = False,
    ) -> int:
        self._found.append(Layers(count, 0, scanned, str(policy), fallback, unrolled))
        return len(self._found) - 1

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
        for at, eqn, mine in uses(jaxpr, forms):
            self._at = at if jaxpr is self._jaxpr else self._at
            own, shared = places.get(at, (layer, opening))
            if eqn.primitive.name == "scan":
                self._scan(eqn, forms, loops, own, shared)
            elif shared is None and is_own_remat(eqn):
                policy = of_jax(eqn.params["policy"])
                body = equations.written_out(equations.inner(eqn)).jaxpr
                inside = own if own is not None else self._layer(1, False, policy)
                self._walk(body, _inside(body, eqn, forms), loops, inside, object(), {})
            else:
                rows = self._rows(eqn, forms) if len(mine) == 1 else 0
                for form in dict.fromkeys(mine):
                    self._read(form, loops, own, shared, eqn.primitive.name, rows=rows)
        self._at = len(jaxpr.eqns) if jaxpr is self._jaxpr else self._at
        for form in dict.fromkeys(forms[a] for a in jaxpr.outvars if equations.is_in(a, forms)):
            self._read(form, loops, layer, opening, "return")

    def _rows(self, eqn: jex.JaxprEqn, forms: Mapping[jex.Var, Form]) -> int:
        """Returns how many rows an equation takes, if a cast before it can come after it."""
        table, read = eqn.invars[0], equations.rows_taken(eqn)
        if not read or not equations.is_in(table, forms):
            return 0
        leaf, fill = self._jaxpr.invars[forms[table].leaf], eqn.params["fill_value"]
        # The value of a missing row: NaN survives a cast to another float.
        alike = equations.is_float(leaf) and equations.is_float(table)
        survives = table is leaf or (alike and (fill is None or fill != fill))
        fills = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        return read if survives or not fills else 0

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
            policy, reason = _NONE if opening is not None else self._policy, ""
            nested = layer is not None
            if loops == 0 and not nested:
                self._starts.append(self._at)
            if layer is None:
                reason = fallback(body, sliced, policy, self._bucket_bytes)
                length = eqn.params["length"]
                unrolled = loops == 0 and not reason and unrolls(body, length, policy)
                if unrolled:
                    self._scans.add(self._at)
                layer = self._layer(length, True, policy, reason, unrolled)
                some = eqn.params["length"] and any(equations.products(body))
                if loops == 0 and not reason and some:
                    self._loops.append(self._at)
            self._walk(body, sliced, loops + 1, layer, object(), {})

    def _read(
        self,
        form: Form,
        loops: int,
        layer: int | None,
        opening: Any,
        by: str,
        stacked: bool = False,
        rows: int = 0,
    ) -> None:
        own = object() if opening is None else opening
        place = loops, layer, own
        self._reads.append(_Read(form, stacked or loops > 0, *place, by, self._at, rows))

    def _elements(self, layer: int, *, fp8: bool = False) -> int:
        """Returns the elements of the parameters, or codes in fp8, that a layer gathers."""
        reads = (r for r in self._reads if r.layer == layer)
        forms = {r.form.leaf: r.form for r in reads if r.form.leaf not in self._stand_ins}
        first = len(self._cuts) - len(self._stand_ins) if fp8 else 0
        pairs = ((leaf, form) for leaf, form in forms.items() if leaf >= first)
        return sum(_elements_of(self._cuts[leaf], form) for leaf, form in pairs)


def _by_rows(reads: Sequence[_Read], cut: Partition, wire: Wire) -> bool:
    """Returns whether a parameter is looked up by rows: it is read once, outside of layers."""
    read = reads[0]
    plain = len(reads) == 1 and read.layer is None and not (read.form.arranged or read.form.parted)
    return plain and gather_scatter.looked_up(cut, read.rows, wire)


def is_own_remat(eqn: jex.JaxprEqn) -> bool:
    """Returns whether it is a `jax.checkpoint` of the model, not of a gradient within the loss."""
    return eqn.primitive.name in equations.REMAT and not eqn.params.get("differentiated")


def _inside(
    body: jex.Jaxpr, eqn: jex.JaxprEqn, forms: Mapping[jex.Var, Form]
) -> dict[jex.Var, Form]:
    pairs = zip(body.invars, eqn.invars, strict=True)
    return {var: forms[a] for var, a in pairs if equations.is_in(a, forms)}


def _elements_of(cut: Partition, form: Form) -> int:
    """Returns the elements of a form of a parameter, on one device."""
    left = cut.shape[len(cut.shape) - form.rank :]
    if form.parted and form.rank == len(cut.shape):
        left = (1, *left[1:])
    return math.prod(left) // shared(cut)


def shared(cut: Partition) -> int:
    """Returns the number of parts over `model` and `experts` of a gathered parameter."""
    return (1 if cut.model is None else cut.model_shards) * cut.expert_shards
