"""Finds in a trace what multiplies with experts, and has it done where these are.

A matrix of experts (E, ...) that stays with its part of the devices is there in parts when the loss
runs, and not as it was traced. So the loss is traced again, of the experts of one group: products
with them, and what lies between those and is said expert by expert, by `at_home.py`, which sends
rows there and back; all else as it was. What comes of it is a trace like any other.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.engine import at_home, tokens_gathered
from zero_jax.engine.weights import Form, follow
from zero_jax.jaxpr import equations
from zero_jax.sharding.cuts import Split

# Places of equations in a jaxpr, and what lies around products where tokens are gathered.
_Wide = tuple[list[int], tokens_gathered.Region | None]
# Traces a function of arrays of these shapes as a device of the mesh runs it.
Stage = Callable[..., jex.ClosedJaxpr]


def at_their_devices(
    closed: jex.ClosedJaxpr,
    cuts: Sequence[Split],
    paths: Sequence[str],
    stage: Stage,
    *,
    parts: bool,
) -> jex.ClosedJaxpr:
    """The same loss, of the experts of one group of devices.

    Args:
      closed: of the loss; its first inputs are the leaves.
      cuts: how each leaf is cut.
      paths: their names.
      stage: traces it.
      parts: whether rows may go in parts. Each multiplies with the same experts, so not where every
        product gathers these for itself.

    Raises:
      ValueError: something else reads experts than products of each with rows of its own.
    """
    if all(cut.experts is None for cut in cuts):
        return closed
    forms, shapes = dict[jex.Var, Form](), []
    for at, var in enumerate(closed.jaxpr.invars):
        shape = list(equations.shape_of(var))
        if at < len(cuts) and (cut := cuts[at]).experts is not None:
            forms[var] = Form(at, len(shape), cut.dim)
            shape[cut.experts] //= cut.expert_shards
        shapes.append(_like(var, shape))
    own = _Retrace(cuts, paths, at_home.MOST_PARTS if parts else 1)
    return stage(lambda *args: own.run(closed, args, forms), *shapes)


class _Retrace:
    def __init__(self, cuts: Sequence[Split], paths: Sequence[str], most: int):
        self._cuts, self._paths, self._most = cuts, paths, most

    def run(
        self, closed: jex.ClosedJaxpr, args: Sequence[Any], forms: Mapping[jex.Var, Form]
    ) -> list[Any]:
        """Runs a jaxpr, of experts on those of a group."""
        jaxpr, known = closed.jaxpr, dict(forms)
        products = [at for at, eqn in enumerate(jaxpr.eqns) if self._is_product(eqn, known)]
        if any(equations.is_in(a, known) for a in jaxpr.outvars):
            raise self._refused("return", jaxpr.outvars, known)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        groups = self._groups(jaxpr, products, known)
        waiting = _steps(jaxpr, [self._widened(jaxpr, group, groups, known) for group in groups])
        while waiting:  # in their order; but what needs a stretch waits until all of that can run
            step = next(s for s in waiting if all(v in env for v in s.needed))
            waiting.remove(step)
            if step.region is not None:
                env[step.region.total] = tokens_gathered.run(step.region, env)
            elif step.results is not None:
                self._stretched(step, env, known)
            else:
                self._alone(step, env, known)
        return [equations.read(env, atom) for atom in jaxpr.outvars]

    def _is_product(self, eqn: jex.JaxprEqn, forms: dict[jex.Var, Form]) -> bool:
        """Whether an equation multiplies with experts; knows of those that it re-arranges."""
        read = [a for a in eqn.invars if equations.is_in(a, forms)]
        if not read or self._is_inside(eqn):
            return False
        if follow(eqn, forms):
            form = next(forms[v] for v in eqn.outvars)
            own = self._cuts[form.leaf].experts
            if form.arranged or own is None or form.rank + own < 0 or _takes(eqn, read, forms, own):
                raise self._refused(eqn.primitive.name, read, forms)
            return False
        if self._stretch([eqn], forms) is None:
            raise self._refused(eqn.primitive.name, read, forms)
        return True

    def _is_inside(self, eqn: jex.JaxprEqn) -> bool:
        """Whether it is a loop or a layer of the model's own, which is looked into."""
        return eqn.primitive.name == "scan" or eqn.primitive.name in equations.REMAT

    def _stretched(self, step: "_Step", env: dict[Any, Any], forms: Mapping[jex.Var, Form]) -> None:
        stretch = self._stretch(step.eqns, forms, step.results or ())
        assert stretch is not None
        body, experts = stretch
        made = at_home.run(body, [env[v] for v in body.invars], experts, self._most)
        env.update(zip(body.outvars, made, strict=True))

    def _alone(self, step: "_Step", env: dict[Any, Any], forms: Mapping[jex.Var, Form]) -> None:
        (eqn,) = step.eqns
        values = [equations.read(env, atom) for atom in eqn.invars]
        if any(equations.is_in(a, forms) for a in eqn.invars):
            eqn, values = self._local(eqn, values, forms)
        env.update(zip(eqn.outvars, equations.function(eqn)(*values), strict=True))

    def _local(
        self, eqn: jex.JaxprEqn, values: list[Any], forms: Mapping[jex.Var, Form]
    ) -> tuple[jex.JaxprEqn, list[Any]]:
        """An equation that only re-arranges experts, or has what multiplies with them inside, as it
        is of those of a group."""
        if eqn.primitive.name == "slice":
            limits = eqn.params["limit_indices"][:1] + values[0].shape[1:]
            return eqn.replace(params={**eqn.params, "limit_indices": limits}), values
        if not self._is_inside(eqn):
            return eqn, values
        first = sum(equations.state_of(eqn)) if eqn.primitive.name == "scan" else len(eqn.invars)
        body, given, shapes = equations.written_out(equations.inner(eqn)), {}, []
        for i, (var, atom) in enumerate(zip(body.jaxpr.invars, eqn.invars, strict=True)):
            shape = list(equations.shape_of(var))
            if equations.is_in(atom, forms):
                given[var] = forms[atom].sliced() if i >= first else forms[atom]
                shape = values[i].shape[1:] if i >= first else values[i].shape
            shapes.append(_like(var, shape))
        made = jax.make_jaxpr(lambda *args: self.run(body, args, given))(*shapes)
        made = equations.written_out(made)
        if not made.consts or isinstance(eqn.params.get("jaxpr"), jex.ClosedJaxpr):
            return equations.with_inner(eqn, made), values
        consts = made.jaxpr.constvars
        jaxpr = made.jaxpr.replace(constvars=[], invars=[*consts, *made.jaxpr.invars])
        atoms = [jex.Var(v.aval) for v in consts]
        opened = eqn.replace(invars=[*atoms, *eqn.invars])
        return equations.with_inner(opened, jex.ClosedJaxpr(jaxpr, ())), [*made.consts, *values]

    def _groups(
        self, jaxpr: jex.Jaxpr, products: list[int], forms: Mapping[jex.Var, Form]
    ) -> list[list[int]]:
        """Products with what lies between them, as many together as can be: those of a layer."""
        groups: list[list[int]] = []
        for at in products:
            together = _between(jaxpr, [*groups[-1], at]) if groups else [at]
            if self._stretch([jaxpr.eqns[n] for n in together], forms) is None:
                groups.append([at])
            else:
                groups[-1:] = [together]
        return groups

    def _widened(
        self,
        jaxpr: jex.Jaxpr,
        group: list[int],
        groups: Sequence[Sequence[int]],
        forms: Mapping[jex.Var, Form],
    ) -> _Wide:
        """Products of a group, with what lies around them where tokens are to be gathered."""
        eqns = [jaxpr.eqns[at] for at in group]
        stretch = self._stretch(eqns, forms)
        assert stretch is not None
        experts = {stretch[0].invars[at]: dim for at, dim in stretch[1].items()}
        size = next(cut.expert_shards for cut in self._cuts if cut.experts is not None)
        others = [jaxpr.eqns[at] for other in groups if other is not group for at in other]
        region = tokens_gathered.around(jaxpr, eqns, experts, size, others)
        own = {id(eqn) for eqn in region.eqns} if region else set()
        return sorted({*group, *(n for n, e in enumerate(jaxpr.eqns) if id(e) in own)}), region

    def _stretch(
        self,
        eqns: Sequence[jex.JaxprEqn],
        forms: Mapping[jex.Var, Form],
        results: Sequence[jex.Var] = (),
    ) -> tuple[jex.Jaxpr, dict[int, int]] | None:
        """Equations as a jaxpr, and which dim of which of its inputs counts experts; None where
        they are not said expert by expert."""
        made = {v for eqn in eqns for v in eqn.outvars}
        given = [v for v in dict.fromkeys(equations.variables(eqns)) if v not in made]
        experts = {}
        for at, var in enumerate(given):
            if var in forms:
                form = forms[var]
                own = self._cuts[form.leaf].experts
                assert own is not None
                if form.arranged or form.rank + own < 0:
                    return None
                experts[at] = form.rank + own
        jaxpr = equations.new_jaxpr(given, results, list(eqns))
        return None if at_home.places(jaxpr, experts) is None else (jaxpr, experts)

    def _refused(
        self, operation: str, atoms: Sequence[Any], forms: Mapping[jex.Var, Form]
    ) -> ValueError:
        leaf = next(forms[a].leaf for a in atoms if equations.is_in(a, forms))
        return ValueError(
            f"{self._paths[leaf]} is an expert parameter, and {operation!r} reads it: only a "
            "product per expert is supported, such as jnp.einsum('ecd,edf->ecf', rows, experts). "
            "Write it in this form, or use a mesh with experts=1, which gathers the experts"
        )


def _like(var: jex.Var, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), getattr(var.aval, "dtype"))  # noqa: B009


def _takes(eqn: jex.JaxprEqn, read: Sequence[Any], forms: Mapping[jex.Var, Form], own: int) -> bool:
    """Whether it takes some of the experts, as if they were layers."""
    return forms[read[0]].rank + own == 0 and eqn.primitive.name in ("slice", "squeeze", "unstack")


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """Equations that run together, and what they need; of a stretch what others read of it, and
    what lies around it where its tokens are gathered."""

    eqns: list[jex.JaxprEqn]
    needed: list[Any]
    results: list[jex.Var] | None = None
    region: tokens_gathered.Region | None = None


def _steps(jaxpr: jex.Jaxpr, stretches: Sequence[_Wide]) -> list[_Step]:
    """Stretches, each where its last equation is, and all other equations alone."""
    last = {group[-1]: (group, region) for group, region in stretches}
    within = {at for group, _ in stretches for at in group}
    steps = []
    for at, eqn in enumerate(jaxpr.eqns):
        if at in last:
            steps.append(_stretch_of(jaxpr, *last[at]))
        elif at not in within:
            steps.append(_Step([eqn], equations.variables([eqn])))
    return steps


def _stretch_of(
    jaxpr: jex.Jaxpr, group: Container[int], region: tokens_gathered.Region | None
) -> _Step:
    mine = [eqn for at, eqn in enumerate(jaxpr.eqns) if at in group]
    others = [eqn for at, eqn in enumerate(jaxpr.eqns) if at not in group]
    made = [v for eqn in mine for v in eqn.outvars]
    read = {*equations.variables(others), *filter(equations.is_var, jaxpr.outvars)}
    needed = [v for v in equations.variables(mine) if v not in set(made)]
    return _Step(mine, needed, [v for v in made if v in read], region)


def _between(jaxpr: jex.Jaxpr, given: Sequence[int]) -> list[int]:
    """Equations with all that lie between them."""
    after, made = set[int](), set[jex.Var]()
    for at, eqn in enumerate(jaxpr.eqns):
        if at in given or any(equations.is_in(a, made) for a in eqn.invars):
            after.add(at)
            made.update(eqn.outvars)
    before, needed = set[int](), set[jex.Var]()
    for at in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[at]
        if at in given or any(v in needed for v in eqn.outvars):
            before.add(at)
            needed.update(filter(equations.is_var, eqn.invars))
    return sorted(after & before)
