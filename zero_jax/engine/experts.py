"""Expert parallelism: products with experts run on the devices that store these.

A matrix of experts (E, ...) is sharded over groups of devices and never gathered over them. So the
loss is traced again for the experts of one group. Products with them, and per-expert operations
between these, are replaced by those of `expert_exchange.py`, which communicate rows or tokens; all
other operations are unchanged. The result is a trace like any other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.extend.core as jex

from zero_jax.engine.expert_exchange import (
    MOST_PARTS,
    ExpertProducts,
    TokenRegion,
    Weights,
    around,
    per_expert,
)
from zero_jax.sharding.layout import Partition
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.evaluator import Evaluator
from zero_jax.tracing.forms import Form, follow
from zero_jax.tracing.graph import Graph
from zero_jax.tracing.jaxpr import Atom, dtype_of, is_in, shape_of

# Traces a function of arrays of these shapes as a device of the mesh runs it.
Stage = Callable[..., jex.ClosedJaxpr]


def at_their_devices(
    closed: jex.ClosedJaxpr,
    cuts: Sequence[Partition],
    paths: Sequence[str],
    stage: Stage,
    *,
    parts: bool,
) -> jex.ClosedJaxpr:
    """Returns the loss, whose first inputs are the leaves, for the experts of one group of devices.

    With `parts`, an all-to-all may be in parts of the rows. Each part multiplies with the same
    experts, so it is False where every product gathers these separately.

    Raises:
      ValueError: An operation other than a product per expert reads experts.
    """
    dims = {at: cut.experts for at, cut in enumerate(cuts) if cut.experts is not None}
    shapes = [list(shape_of(var)) for var in closed.jaxpr.invars]
    for at, dim in dims.items():
        shapes[at][dim] //= cuts[at].expert_shards
    evaluator = _OfOneGroup(dims, cuts, paths, MOST_PARTS if parts else 1)

    def loss(*args: jax.Array) -> list[_Value]:
        values = [_LocalExperts(x, at) if at in dims else x for at, x in enumerate(args)]
        return evaluator.run(closed, values)

    pairs = zip(shapes, map(dtype_of, closed.jaxpr.invars), strict=True)
    return stage(loss, *(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in pairs))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _LocalExperts:
    """The experts of this device's group, all or a slice of leaf number `leaf`."""

    array: jax.Array
    leaf: int = dataclasses.field(metadata={"static": True})


_Value = jax.Array | _LocalExperts
_Forms = dict[jex.Var, Form]  # of the variables that are experts


class _OfOneGroup(Evaluator[_Value]):
    """Evaluates a loss on the experts of one group of devices.

    `dims` has for each leaf of experts the dim that counts them, from the end.
    """

    def __init__(
        self, dims: Mapping[int, int], cuts: Sequence[Partition], paths: Sequence[str], most: int
    ):
        super().__init__()
        self._dims, self._cuts, self._paths, self._most = dims, cuts, paths, most

    def is_replaced(self, value: _Value) -> bool:
        return isinstance(value, _LocalExperts)

    def run(self, closed: jex.ClosedJaxpr, values: Sequence[_Value]) -> list[_Value]:
        jaxpr, graph = closed.jaxpr, Graph(closed.jaxpr)
        env: dict[jex.Var, _Value] = dict(zip(jaxpr.invars, values, strict=True))
        forms = {
            var: Form(x.leaf, x.array.ndim, self._cuts[x.leaf].dim)
            for var, x in env.items()
            if isinstance(x, _LocalExperts)
        }
        groups = {max(group.at): group for group in self._groups(graph, forms)}
        if any(is_in(a, forms) for a in jaxpr.outvars):
            raise self._unsupported("return", jaxpr.outvars, forms)
        env.update(zip(jaxpr.constvars, closed.consts, strict=True))
        grouped = {at for group in groups.values() for at in group.at}
        waiting = [at for at in graph.positions if at in groups or at not in grouped]
        reads = {at: jaxprs.variables(graph.part([at])) for at in waiting}
        reads |= {at: group.closed.jaxpr.invars for at, group in groups.items()}
        while waiting:  # in order, but readers of a group's equations wait until all of it can run
            at = next(at for at in waiting if all(v in env for v in reads[at]))
            waiting.remove(at)
            if group := groups.get(at):
                operands = (env[v] for v in reads[at])
                made = group.run([x.array if isinstance(x, _LocalExperts) else x for x in operands])
                env.update(zip(group.closed.jaxpr.outvars, made, strict=True))
            else:
                eqn = graph.eqns[at]
                results = self.equation(eqn, [jaxprs.read(env, atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, results, strict=True))
        return [jaxprs.read(env, atom) for atom in jaxpr.outvars]

    def default(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        (experts,) = values
        assert isinstance(experts, _LocalExperts)  # the equation rearranges experts
        if eqn.primitive.name == "slice":
            limits = eqn.params["limit_indices"][:1] + experts.array.shape[1:]
            eqn = eqn.replace(params={**eqn.params, "limit_indices": limits})
        return [_LocalExperts(x, experts.leaf) for x in jaxprs.function(eqn)(experts.array)]

    def _groups(self, graph: Graph, forms: _Forms) -> list[ExpertProducts | TokenRegion]:
        """Returns groups of products, and of equations around them if tokens are gathered.

        Adds to `forms` the experts that are rearranged.
        """
        products = [x for at in graph.positions if (x := self._product(graph, at, forms))]
        weights, groups = self._weights(forms), list[ExpertProducts]()
        for product in products:  # as many as possible are grouped: those of a layer
            together = graph.between([*groups[-1].at, *product.at]) if groups else ()
            joined = per_expert(graph, together, weights) if groups else None
            groups = [*groups[:-1], joined] if joined else [*groups, product]
        every = {at for group in groups for at in group.at}
        shards = next(self._cuts[leaf].expert_shards for leaf in self._dims)
        return [
            around(graph, group.at, weights, shards, every - {*group.at})
            or dataclasses.replace(group, most=self._most)
            for group in groups
        ]

    def _product(self, graph: Graph, at: int, forms: _Forms) -> ExpertProducts | None:
        """Returns a product with experts, or None; adds to `forms` those that it rearranges."""
        eqn = graph.eqns[at]
        name, experts = eqn.primitive.name, [a for a in eqn.invars if is_in(a, forms)]
        # The bodies of scans and of rematerialised functions are evaluated like this one.
        if not experts or name == "scan" or name in jaxprs.REMAT:
            return None
        is_rearranged = follow(eqn, forms)
        weights = self._weights(forms)
        takes_experts = name == "slice" and weights.get(experts[0]) == 0
        if is_rearranged and eqn.outvars[0] in weights and not takes_experts:
            return None
        product = None if is_rearranged else per_expert(graph, [at], weights)
        if product is None:
            raise self._unsupported(name, experts, forms)
        return product

    def _weights(self, forms: _Forms) -> Weights:
        """Returns experts with the dim that counts them, where it is known."""
        kept = {v: form for v, form in forms.items() if not form.arranged}
        dims = {v: form.rank + self._dims[form.leaf] for v, form in kept.items()}
        return {v: dim for v, dim in dims.items() if dim >= 0}

    def _unsupported(self, operation: str, atoms: Sequence[Atom], forms: _Forms) -> ValueError:
        leaf = next(forms[a].leaf for a in atoms if is_in(a, forms))
        return ValueError(
            f"{self._paths[leaf]} is an expert parameter, and {operation!r} reads it: only a "
            "product per expert is supported, such as jnp.einsum('ecd,edf->ecf', rows, experts). "
            "Write it in this form, or use a mesh with experts=1, which gathers the experts"
        )
