"""Expert parallelism: products with experts run on the devices that store these.

A matrix of experts (E, ...) is sharded over groups of devices and never gathered over them. So the
loss is traced again for the experts of one group. Products with them, and per-expert operations
between these, are replaced by `expert_all_to_all.py` or `expert_all_gather.py`, which communicate
tokens; all other operations are unchanged. The result is a trace like any other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.extend.core as jex

from zero_jax.engine.expert_all_gather import TokenRegion, around
from zero_jax.engine.expert_all_to_all import MOST_PARTS, ExpertProducts, Weights, per_expert
from zero_jax.sharding.layout import Partition
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Graph
from zero_jax.tracing.forms import Form, follow
from zero_jax.tracing.interpreter import Evaluator
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
    if all(cut.experts is None for cut in cuts):
        return closed
    shapes, leaves = [], set[int]()
    for at, var in enumerate(closed.jaxpr.invars):
        shape = list(shape_of(var))
        if at < len(cuts) and (cut := cuts[at]).experts is not None:
            leaves.add(at)
            shape[cut.experts] //= cut.expert_shards
        shapes.append(jax.ShapeDtypeStruct(tuple(shape), dtype_of(var)))
    evaluator = _OfOneGroup(cuts, paths, MOST_PARTS if parts else 1)

    def loss(*args: jax.Array) -> list[_Value]:
        values = [_LocalExperts(x, at) if at in leaves else x for at, x in enumerate(args)]
        return evaluator.run(closed, values)

    return stage(loss, *shapes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _LocalExperts:
    """The experts of this device's group, in place of those of all groups.

    Attributes:
      array: The experts.
      leaf: The leaf that they are, or are a slice of.
    """

    array: jax.Array
    leaf: int = dataclasses.field(metadata={"static": True})


_Value = jax.Array | _LocalExperts


def _array(value: _Value) -> jax.Array:
    return value.array if isinstance(value, _LocalExperts) else value


class _OfOneGroup(Evaluator[_Value]):
    """Evaluates a loss on the experts of one group of devices."""

    def __init__(self, cuts: Sequence[Partition], paths: Sequence[str], most: int):
        super().__init__()
        self._cuts, self._paths, self._most = cuts, paths, most
        self._shards = next(cut.expert_shards for cut in cuts if cut.experts is not None)

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
        products = [at for at in graph.positions if self._is_product(graph, at, forms)]
        if any(is_in(a, forms) for a in jaxpr.outvars):
            raise self._unsupported("return", jaxpr.outvars, forms)
        env.update(zip(jaxpr.constvars, closed.consts, strict=True))
        groups = {max(x.at): x for x in self._groups(graph, products, self._weights(forms))}
        grouped = {at for group in groups.values() for at in group.at}
        reads = {at: jaxprs.variables(graph.part([at])) for at in graph.positions}
        reads |= {at: group.closed.jaxpr.invars for at, group in groups.items()}
        waiting = [at for at in graph.positions if at in groups or at not in grouped]
        while waiting:  # in order, but readers of a group's equations wait until all of it can run
            at = next(at for at in waiting if all(v in env for v in reads[at]))
            waiting.remove(at)
            eqn, group = graph.eqns[at], groups.get(at)
            if group is None:
                made = self.equation(eqn, [jaxprs.read(env, atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, made, strict=True))
            else:
                most = [self._most] if isinstance(group, ExpertProducts) else []
                results = group.run([_array(env[v]) for v in reads[at]], *most)
                env.update(zip(group.closed.jaxpr.outvars, results, strict=True))
        return [jaxprs.read(env, atom) for atom in jaxpr.outvars]

    def default(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        (experts,) = values
        assert isinstance(experts, _LocalExperts)  # the equation rearranges experts
        if eqn.primitive.name == "slice":
            limits = eqn.params["limit_indices"][:1] + experts.array.shape[1:]
            eqn = eqn.replace(params={**eqn.params, "limit_indices": limits})
        return [_LocalExperts(x, experts.leaf) for x in jaxprs.function(eqn)(experts.array)]

    def _is_product(self, graph: Graph, at: int, forms: dict[jex.Var, Form]) -> bool:
        """Returns True for a product with experts; adds to `forms` those that it rearranges."""
        eqn = graph.eqns[at]
        name, experts = eqn.primitive.name, [a for a in eqn.invars if is_in(a, forms)]
        # The bodies of scans and of rematerialised functions are evaluated like this one.
        if not experts or name == "scan" or name in jaxprs.REMAT:
            return False
        if follow(eqn, forms):
            form = forms[eqn.outvars[0]]
            dim = self._dim(form)
            first = forms[experts[0]].rank == -(self._cuts[form.leaf].experts or 0)
            takes_some = first and name in ("slice", "squeeze", "unstack")
            if dim is None or takes_some:
                raise self._unsupported(name, experts, forms)
            return False
        if per_expert(graph, [at], self._weights({a: forms[a] for a in experts})) is None:
            raise self._unsupported(name, experts, forms)
        return True

    def _dim(self, form: Form) -> int | None:
        """Returns the dim that counts experts, or None if it is not known."""
        experts = self._cuts[form.leaf].experts
        if form.arranged or experts is None or form.rank + experts < 0:
            return None
        return form.rank + experts

    def _weights(self, forms: Mapping[jex.Var, Form]) -> Weights:
        dims = {v: self._dim(form) for v, form in forms.items()}
        return {v: dim for v, dim in dims.items() if dim is not None}

    def _groups(
        self, graph: Graph, products: Sequence[int], weights: Weights
    ) -> list[ExpertProducts | TokenRegion]:
        """Returns groups of products, and of equations around them if tokens are gathered."""
        groups: list[ExpertProducts] = []
        for at in products:  # as many as possible are grouped: those of a layer
            together = graph.between([*groups[-1].at, at]) if groups else [at]
            joined = per_expert(graph, together, weights)
            if joined is None:
                joined = per_expert(graph, [at], weights)
            elif groups:
                groups.pop()
            assert joined is not None  # a product alone is one per expert
            groups.append(joined)
        every = {at for group in groups for at in group.at}
        return [
            around(graph, group.at, weights, self._shards, every - {*group.at}) or group
            for group in groups
        ]

    def _unsupported(
        self, operation: str, atoms: Sequence[Atom], forms: Mapping[jex.Var, Form]
    ) -> ValueError:
        leaf = next(forms[a].leaf for a in atoms if is_in(a, forms))
        return ValueError(
            f"{self._paths[leaf]} is an expert parameter, and {operation!r} reads it: only a "
            "product per expert is supported, such as jnp.einsum('ecd,edf->ecf', rows, experts). "
            "Write it in this form, or use a mesh with experts=1, which gathers the experts"
        )
