"""Expert parallelism: products with experts run on the devices that store these.

A matrix of experts (E, ...) is sharded over groups of devices and never gathered over them. So the
loss is traced again for the experts of one group. Products with them, and per-expert operations
between these, are replaced by `expert_all_to_all.py` or `expert_all_gather.py`, which communicate
tokens; all other operations are unchanged. The result is a trace like any other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.engine import expert_all_gather, expert_all_to_all
from zero_jax.engine.weights import Form, follow
from zero_jax.sharding.partition import Partition
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Graph
from zero_jax.tracing.interpreter import Evaluator
from zero_jax.tracing.jaxpr import is_in, shape_of

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
    """Returns the loss for the experts of one group of devices.

    Args:
      closed: The loss; its first inputs are the leaves.
      cuts: Partition of each leaf.
      paths: Names of the leaves.
      stage: Traces the loss.
      parts: True to allow an all-to-all in parts of the rows. Each part multiplies with the same
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
        aval: Any = var.aval
        shapes.append(jax.ShapeDtypeStruct(tuple(shape), aval.dtype))
    evaluator = _OfOneGroup(cuts, paths, expert_all_to_all.MOST_PARTS if parts else 1)

    def loss(*args: Any) -> list[Any]:
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

    array: Any
    leaf: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """Equations that run together.

    Attributes:
      at: Their positions; the step runs where the last of them is.
      reads: Variables that they read.
      products: Equations that are computed per expert, as a jaxpr, with the inputs that are
        experts and their dims; None for any other equation.
      region: Set where tokens are gathered.
    """

    at: list[int]
    reads: list[jex.Var]
    products: tuple[jex.ClosedJaxpr, dict[int, int]] | None = None
    region: expert_all_gather.TokenRegion | None = None


class _OfOneGroup(Evaluator):
    """Evaluates a loss on the experts of one group of devices."""

    def __init__(self, cuts: Sequence[Partition], paths: Sequence[str], most: int):
        super().__init__()
        self._cuts, self._paths, self._most = cuts, paths, most
        self._groups = next(cut.expert_shards for cut in cuts if cut.experts is not None)

    def is_replaced(self, value: Any) -> bool:
        return isinstance(value, _LocalExperts)

    def run(self, closed: jex.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        jaxpr, graph = closed.jaxpr, Graph(closed.jaxpr)
        pairs = list(zip(jaxpr.invars, values, strict=True))
        forms = {var: self._form(x) for var, x in pairs if isinstance(x, _LocalExperts)}
        products = graph.where(lambda eqn: self._is_product(eqn, forms))
        if any(is_in(a, forms) for a in jaxpr.outvars):
            raise self._unsupported("return", jaxpr.outvars, forms)
        env: dict[Any, Any] = {
            **dict(zip(jaxpr.constvars, closed.consts, strict=True)),
            **dict(pairs),
        }
        waiting = self._steps(graph, products, forms)
        while waiting:  # in order, but readers of a step's equations wait until all of it can run
            step = next(s for s in waiting if all(v in env for v in s.reads))
            waiting.remove(step)
            self._run_step(step, graph, env)
        return [jaxprs.read(env, atom) for atom in jaxpr.outvars]

    def _form(self, experts: _LocalExperts) -> Form:
        return Form(experts.leaf, experts.array.ndim, self._cuts[experts.leaf].dim)

    def _run_step(self, step: _Step, graph: Graph, env: dict[Any, Any]) -> None:
        if step.products is None:
            (eqn,) = graph.part(step.at)
            made = self.equation(eqn, [jaxprs.read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, made, strict=True))
            return
        arrays = {v: x.array if isinstance(x, _LocalExperts) else x for v, x in env.items()}
        if step.region is not None:
            env[step.region.total] = expert_all_gather.run(step.region, arrays)
            return
        closed, experts = step.products
        inputs = [arrays[v] for v in closed.jaxpr.invars]
        made = expert_all_to_all.run(closed, inputs, experts, self._most)
        env.update(zip(closed.jaxpr.outvars, made, strict=True))

    def default(self, eqn: jex.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        (experts,) = values  # it rearranges experts
        if eqn.primitive.name == "slice":
            limits = eqn.params["limit_indices"][:1] + experts.array.shape[1:]
            eqn = eqn.replace(params={**eqn.params, "limit_indices": limits})
        return [_LocalExperts(x, experts.leaf) for x in jaxprs.function(eqn)(experts.array)]

    def _is_product(self, eqn: jex.JaxprEqn, forms: dict[jex.Var, Form]) -> bool:
        """Returns True for a product with experts; adds to `forms` those that it rearranges."""
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
        if self._per_expert([eqn], forms) is None:
            raise self._unsupported(name, experts, forms)
        return True

    def _dim(self, form: Form) -> int | None:
        """Returns the dim that counts experts, or None if it is not known."""
        experts = self._cuts[form.leaf].experts
        if form.arranged or experts is None or form.rank + experts < 0:
            return None
        return form.rank + experts

    def _per_expert(
        self,
        eqns: Sequence[jex.JaxprEqn],
        forms: Mapping[jex.Var, Form],
        results: Sequence[jex.Var] = (),
    ) -> tuple[jex.ClosedJaxpr, dict[int, int]] | None:
        """Returns equations as a jaxpr, and the inputs that are experts with their dims.

        None where an equation is not computed per expert.
        """
        inputs = jaxprs.inputs_of(eqns)
        dims = {at: self._dim(forms[v]) for at, v in enumerate(inputs) if v in forms}
        experts = {at: dim for at, dim in dims.items() if dim is not None}
        closed = jaxprs.stretch(eqns, results)
        if len(experts) < len(dims) or expert_all_to_all.expert_dims(closed, experts) is None:
            return None
        return closed, experts

    def _steps(
        self, graph: Graph, products: Sequence[int], forms: Mapping[jex.Var, Form]
    ) -> list[_Step]:
        """Returns groups of products, each at its last equation, and all other equations."""
        groups: list[list[int]] = []
        for at in products:  # as many as possible are grouped: those of a layer
            together = graph.between([*groups[-1], at]) if groups else [at]
            if self._per_expert(graph.part(together), forms) is None:
                groups.append([at])
            else:
                groups[-1:] = [together]
        steps = {}
        for group in groups:
            others = {at for other in groups if other is not group for at in other}
            step = self._group(graph, group, others, forms)
            steps[step.at[-1]] = step
        within = {at for step in steps.values() for at in step.at}
        for at in graph.positions:
            if at not in within:
                steps[at] = _Step([at], jaxprs.variables(graph.part([at])))
        return [steps[at] for at in sorted(steps)]

    def _group(
        self,
        graph: Graph,
        group: Sequence[int],
        others: set[int],
        forms: Mapping[jex.Var, Form],
    ) -> _Step:
        """Returns products that run together, with the region around them if that is cheaper."""
        products = self._per_expert(graph.part(group), forms, graph.results(group))
        assert products is not None
        experts = {products[0].jaxpr.invars[at]: dim for at, dim in products[1].items()}
        region = expert_all_gather.around(graph, group, experts, self._groups, others)
        at = sorted({*group, *(region.at if region else ())})
        return _Step(at, jaxprs.inputs_of(graph.part(at)), products, region)

    def _unsupported(
        self, operation: str, atoms: Sequence[Any], forms: Mapping[jex.Var, Form]
    ) -> ValueError:
        leaf = next(forms[a].leaf for a in atoms if is_in(a, forms))
        return ValueError(
            f"{self._paths[leaf]} is an expert parameter, and {operation!r} reads it: only a "
            "product per expert is supported, such as jnp.einsum('ecd,edf->ecf', rows, experts). "
            "Write it in this form, or use a mesh with experts=1, which gathers the experts"
        )
