"""The uses of the variables of a jaxpr as a graph of its equations."""

from collections.abc import Callable, Iterable, Sequence

import jax.extend.core as jex

from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.jaxpr import is_in, is_var


class Graph:
    """The uses of a jaxpr's variables. Equations are given by their positions.

    Attributes:
      eqns: The equations.
      made_by: The equation that makes each variable.
    """

    def __init__(self, jaxpr: jex.Jaxpr):
        self.eqns: Sequence[jex.JaxprEqn] = jaxpr.eqns
        self.made_by = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._readers: dict[jex.Var, list[int]] = {}
        for at, eqn in enumerate(jaxpr.eqns):
            for v in dict.fromkeys(jaxprs.variables([eqn])):
                self._readers.setdefault(v, []).append(at)
        for v in dict.fromkeys(filter(is_var, jaxpr.outvars)):
            self._readers.setdefault(v, []).append(len(jaxpr.eqns))

    def readers(self, var: jex.Var) -> list[int]:
        """Returns the equations that read a variable; the number of equations if it is returned."""
        return self._readers.get(var, [])

    def only_reader(self, var: jex.Var) -> int | None:
        """Returns the equation that alone reads a variable, None if it is returned."""
        readers = self.readers(var)
        return readers[0] if len(readers) == 1 and readers[0] < len(self.eqns) else None

    def where(self, condition: Callable[[jex.JaxprEqn], bool]) -> list[int]:
        """Returns the equations that meet a condition."""
        return [at for at, eqn in enumerate(self.eqns) if condition(eqn)]

    @property
    def positions(self) -> range:
        """All equations."""
        return range(len(self.eqns))

    def part(self, at: Iterable[int]) -> list[jex.JaxprEqn]:
        """Returns equations in the order of the jaxpr."""
        return [self.eqns[i] for i in sorted(at)]

    def after(self, start: Iterable[int]) -> list[int]:
        """Returns these equations and all that depend on them."""
        reached, made = set(start), set[jex.Var]()
        for at, eqn in enumerate(self.eqns):
            if at in reached or any(is_in(a, made) for a in eqn.invars):
                reached.add(at)
                made.update(eqn.outvars)
        return sorted(reached)

    def between(self, start: Iterable[int]) -> list[int]:
        """Returns these equations and all that lie between two of them."""
        start, used = set(start), set[jex.Var]()
        reached = []
        for at in reversed(self.after(start)):
            if at in start or not used.isdisjoint(self.eqns[at].outvars):
                reached.append(at)
                used.update(jaxprs.variables([self.eqns[at]]))
        return reached[::-1]

    def connected(self, at: Iterable[int]) -> list[set[int]]:
        """Groups these equations: those of two groups read nothing of each other."""
        groups: list[set[int]] = []
        for i in sorted(at):
            makers = {self.made_by.get(v) for v in jaxprs.variables([self.eqns[i]])}
            joined = [group for group in groups if not group.isdisjoint(makers)]
            groups = [*(group for group in groups if group not in joined), {i}.union(*joined)]
        return groups

    def made(self, at: Iterable[int]) -> list[jex.Var]:
        """Returns the results of equations."""
        return [v for i in at for v in self.eqns[i].outvars]

    def results(self, at: Iterable[int]) -> list[jex.Var]:
        """Returns the results of equations that others read, or that are returned."""
        part = set(at)
        return [v for v in self.made(sorted(part)) if not part.issuperset(self.readers(v))]
