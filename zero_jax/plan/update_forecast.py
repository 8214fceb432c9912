"""What a partitioned update holds and sends beside its states, foretold from its trace.

An elementwise transformation computes on shards and sends nothing. A product of matrices that are
cut (Muon's, Shampoo's) is another matter: as the partitioner of XLA has it, rows of the result stay
where rows of the left operand are, and the right operand is gathered whole, in its own dtype; where
both are cut along what is summed over, the whole result is summed over devices. XLA starts the
gathers of all leaves together, so a copy of each of a leaf's matrices is held at once.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import optax

from zero_jax.engine.settings import Settings
from zero_jax.engine.transformations import without_frozen
from zero_jax.jaxpr import equations
from zero_jax.plan.model_spread import Dim, spread
from zero_jax.sharding.cuts import Split, state_splits

PyTree = Any


@dataclass(frozen=True)
class Update:
    """Of one device and step.

    Attributes:
      words: that are sent, of whatever dtype, for products of matrices that are cut.
      gathered: bytes of the copies that these need, held at once.
      shards: bytes of what the products work on beside states and parameters: the gradients' fp32
        shards, and one of each leaf that is multiplied.
    """

    words: float = 0.0
    gathered: int = 0
    shards: int = 0

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term, as of `forecast.Forecast`."""
        return {"gradients": self.shards, "update": self.gathered}


def forecast(settings: Settings, tx: optax.GradientTransformation, full: PyTree) -> Update:
    """Foretells the update of a transformation.

    Args:
      settings: of the run.
      tx: any optax transformation, not wrapped.
      full: the logical parameters.
    """
    if settings.shards == 1 or settings.offload.states:
        return Update()  # nothing is cut; or it streams, and is elementwise
    plain = without_frozen(tx, settings.frozen)
    state = jax.eval_shape(plain.init, full)
    cuts = settings.splitter(full)
    given = [*cuts, *state_splits(state, full, cuts), *cuts]
    loss = jax.ShapeDtypeStruct((), "float32")
    traced = jax.make_jaxpr(lambda g, s, p, loss: plain.update(g, s, p, value=loss))(
        *(full, state, full, loss)
    )
    found = _Products()
    values = [_Value(_dim(cut), at if at < len(cuts) else None) for at, cut in enumerate(given)]
    found.run(traced, [*values, _Value(None, None)], 1)
    multiplied = sum(_shard_bytes(cuts[at]) for at in found.held)
    return Update(
        words=sum(words / _model_shards(cuts, at) for at, words in found.words),
        gathered=sum(
            sum(sizes.values()) // _model_shards(cuts, at) for at, sizes in found.held.items()
        ),
        shards=multiplied + sum(map(_shard_bytes, cuts)) if found.held else 0,
    )


class _Value(NamedTuple):
    """Along which dim it is cut, and of which leaf's gradient it is made."""

    dim: Dim
    leaf: int | None


class _Products:
    """Collects what products need; see the fields."""

    def __init__(self) -> None:
        self.words: list[tuple[int | None, int]] = []  # and of which leaf
        self.held: dict[int, dict[tuple[int, ...], int]] = {}  # bytes by leaf and shape

    def run(self, closed: jex.ClosedJaxpr, given: Sequence[_Value], times: int) -> list[_Value]:
        """Walks a jaxpr that runs so many times; returns what its results are."""
        jaxpr = equations.written_out(closed, equations.CALLS).jaxpr
        known: dict[jex.Var, _Value] = dict(zip(jaxpr.invars, given, strict=True))

        def of(atom: Any) -> _Value:
            there = equations.is_var(atom) and atom in known
            return known[atom] if there else _Value(None, None)

        for eqn in jaxpr.eqns:
            known.update(
                zip(eqn.outvars, self._one(eqn, [of(a) for a in eqn.invars], times), strict=True)
            )
        return [of(atom) for atom in jaxpr.outvars]

    def _one(self, eqn: jex.JaxprEqn, given: list[_Value], times: int) -> Iterable[_Value]:
        pairs = zip(eqn.invars, given, strict=True)
        made_of = [
            (math.prod(equations.shape_of(a)), v.leaf) for a, v in pairs if v.leaf is not None
        ]
        leaf = max(made_of, default=(0, None), key=lambda pair: pair[0])[1]
        if eqn.primitive.name == "scan":
            return self._scan(eqn, given, times)
        if eqn.primitive.name == "dot_general":
            self._product(eqn, given, leaf, times)
        return [_Value(dim, leaf) for dim in spread(eqn, [v.dim for v in given])]

    def _scan(self, eqn: jex.JaxprEqn, given: list[_Value], times: int) -> list[_Value]:
        """Values keep their cut from turn to turn; slices lose their first dim."""
        first, carried = equations.state_of(eqn)
        inside = [v if i < first + carried else _sliced(v) for i, v in enumerate(given)]
        outs = self.run(equations.inner(eqn), inside, times * eqn.params["length"])
        return [v if i < carried else _stacked(v) for i, v in enumerate(outs)]

    def _product(
        self, eqn: jex.JaxprEqn, given: list[_Value], leaf: int | None, times: int
    ) -> None:
        (lhs_sum, rhs_sum), (lhs_batch, _) = eqn.params["dimension_numbers"]
        lhs, rhs = (v.dim for v in given)
        if lhs in lhs_batch and lhs is not None:
            return  # each device multiplies its own
        summed = lhs in lhs_sum, rhs in rhs_sum
        if summed == (True, True) or (True in summed and None in (lhs, rhs)):
            self._note(leaf, eqn.outvars[0], 2 * times)
        elif lhs is not None and rhs is not None:
            self._note(leaf, eqn.invars[0] if summed[0] else eqn.invars[1], times)

    def _note(self, leaf: int | None, whole: Any, times: int) -> None:
        shape = equations.shape_of(whole)
        self.words.append((leaf, times * math.prod(shape)))
        if leaf is not None:
            self.held.setdefault(leaf, {})[tuple(sorted(shape))] = equations.bytes_of(whole)


def _sliced(value: _Value) -> _Value:
    return value._replace(dim=value.dim - 1 if value.dim else None)


def _stacked(value: _Value) -> _Value:
    return value._replace(dim=None if value.dim is None else value.dim + 1)


def _dim(cut: Split) -> Dim:
    return None if cut.dim is None else cut.dim % len(cut.shape)


def _model_shards(cuts: Sequence[Split], leaf: int | None) -> int:
    return 1 if leaf is None or cuts[leaf].model is None else cuts[leaf].model_shards


def _shard_bytes(cut: Split) -> int:
    return 4 * math.prod(cut.device_shape)
