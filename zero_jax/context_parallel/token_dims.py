"""The check that a traced loss is position-wise along the tokens of a row, and its positions.

A device of `context` traces the loss with its own tokens. Except for `zero_jax.attention`, each
position has to be computed from that position alone. A dataflow analysis follows the tokens through
the trace, with the facts of `token_facts.py`, and raises an error for any other operation. An iota
that is combined with tokens counts the positions of a row: the global positions of the device's
tokens replace it. Random numbers that are combined with tokens differ between the devices; others,
of rows, say, are equal.
"""

from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.context_parallel import chunks, token_facts
from zero_jax.context_parallel.token_facts import (
    CARRY,
    MODEL,
    ONE,
    OTHER,
    RANDOM,
    TOKENS,
    Drawn,
    MixedError,
    Source,
    TokenFact,
)
from zero_jax.context_parallel.token_operations import Operations, check_sums
from zero_jax.sharding.mesh import CONTEXT
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import collective_axes
from zero_jax.tracing.jaxpr import Atom, Rewriter, shape_of
from zero_jax.tracing.sources import line_of

_JOINED = (
    "two values of one variable, of branches or of iterations of a loop, have different positions "
    "of a row, or only one is a sum over tokens. Make them alike, or use a mesh with context=1"
)
_CHOICE = (
    "a branch or the end of a loop depends on a sum over the tokens of one device's part of the "
    "row, or on other positions. Use jax.lax.psum(x, 'context') for the sum over the row"
)


def split_tokens(
    closed: jex.ClosedJaxpr, tokens: Sequence[bool], size: int
) -> tuple[jex.ClosedJaxpr, list[TokenFact]]:
    """Checks that a loss is position-wise along tokens, and makes its positions global.

    Args:
      closed: The loss of one device, traced with its own tokens. The inputs are flat.
      tokens: True for inputs (B, T / C, ...) whose dim 1 has these tokens.
      size: The size C of the `context` axis.

    Returns:
      The loss with global positions, and a fact for each result.

    Raises:
      ValueError: An operation mixes positions, or uses a sum over the tokens of one device. The
        message names the user's line.

    >>> loss = lambda x: jnp.sum(x * jnp.arange(4))
    >>> program, (fact,) = split_tokens(jax.make_jaxpr(loss)(jnp.ones((2, 4))), [True], 2)
    >>> fact.partial, "axis_index" in str(program)
    (True, True)
    >>> split_tokens(jax.make_jaxpr(lambda x: x[:, 1:])(jnp.ones((2, 4))), [True], 2)
    Traceback (most recent call last):
    ValueError: ...slice along the tokens of a row...
    """
    analysis, facts = _analysed(closed, tokens)
    if not analysis.positions:
        return closed, facts
    rewriter = _GlobalPositions(analysis.positions, size)
    new = rewriter(closed)
    assert rewriter.replaced == analysis.positions
    return new, facts


def check_constants(
    closed: jex.ClosedJaxpr, longer: jex.ClosedJaxpr, tokens: Sequence[bool]
) -> None:
    """Checks that no number or size in a loss depends on the number of tokens of a device.

    Divisors of sums may, for a mean, and so may sizes of arrays of tokens.

    Args:
      closed: See `split_tokens`.
      longer: The same loss, traced with more tokens.
      tokens: See `split_tokens`.

    Raises:
      ValueError: One does. The message names the user's line.

    >>> def traced(loss, tokens):
    ...     return jax.make_jaxpr(loss)(jnp.ones((2, tokens)))
    >>> def check(loss):
    ...     check_constants(traced(loss, 4), traced(loss, 8), [True])
    >>> check(lambda x: jnp.mean(jnp.sin(x)))
    >>> check(lambda x: jnp.mean(jnp.sin(x / x.shape[1])))
    Traceback (most recent call last):
    ValueError: ...depends on the length of a row...
    """
    one, two = (_analysed(program, tokens)[0].numbers for program in (closed, longer))
    if len(one) == len(two):
        pairs = zip(one, two, strict=True)
        differ = [(a, around) for (a, around), (b, _) in pairs if a != b]
    else:  # other operations, as with other chunks
        known = {number for number, _ in two}
        differ = [(number, around) for number, around in one if number not in known]
    for number, around in differ[:1]:
        line = next(filter(None, map(line_of, around[::-1])), "")
        raise ValueError(
            f"{line}{token_facts.word(around[-1])}: {number:g} depends on the length of a row, but "
            "each device of the context axis has a part of the row. Divide only sums by it, or "
            "pass it in the batch"
        )


def _analysed(closed: jex.ClosedJaxpr, tokens: Sequence[bool]) -> tuple["_Tokens", list[TokenFact]]:
    """Returns the analysis of a loss that knows its positions, and the facts of the results."""
    shapes = list(map(shape_of, closed.jaxpr.invars))
    (length,) = {shape[1] for shape, has in zip(shapes, tokens, strict=True) if has}
    inputs = []
    for shape, has in zip(shapes, tokens, strict=True):
        others = [d for d, size in enumerate(shape) if size > 1 and not (has and d == 1)]
        inputs.append(TokenFact().plus(others, MODEL).plus([1] * has, TOKENS))
    positions = frozenset[Source]()
    while True:
        analysis = _Tokens(length, positions)
        facts = analysis.facts(closed, inputs)
        if analysis.met <= positions:
            return analysis, facts
        positions |= analysis.met


def averages(facts: Sequence[TokenFact], longer: Sequence[TokenFact], times: int) -> bool:
    """Returns True for a loss (sum, weight) that averages over the tokens of all devices.

    The ratio of both, each added over devices, is then that of one device with all tokens.

    Args:
      facts: The facts of sum and weight.
      longer: Those of the same loss, traced with more tokens.
      times: How many times more.

    >>> def of(loss, tokens):
    ...     traced = jax.make_jaxpr(lambda x: (loss(x), 1.0))(jnp.ones((2, tokens)))
    ...     return split_tokens(traced, [True], 2)[1]
    >>> [averages(of(loss, 4), of(loss, 8), 2) for loss in (jnp.mean, jnp.sum)]
    [True, False]
    """
    (one, of_one), (two, of_two) = facts, longer
    if not (one.partial and two.partial and one.overs and two.overs):
        return False
    if of_one.partial != of_two.partial:
        return False
    numbers = (of_one.over, of_two.over) if of_one.partial else (of_one.number, of_two.number)
    weight, weight_two = numbers
    if not weight or not weight_two:
        return False
    if of_one.partial:
        return _times(one, 1 / weight) == _times(two, 1 / weight_two)
    return _times(one, times * weight) == _times(two, weight_two)


def _times(fact: TokenFact, factor: float) -> list[float]:
    """Returns the divisors times a factor, sorted, to the precision of fp32."""
    return sorted(float(f"{over * factor:.6g}") for over in fact.overs)


class _Tokens(Operations):
    """The facts of loops, branches and functions too."""

    def unknown(self) -> TokenFact:
        raise MixedError("a loop whose carry is not known to compute each position of a row alone")

    def join(self, one: TokenFact, other: TokenFact) -> TokenFact:
        if one == other:
            return one
        if one.running != other.running:
            raise MixedError(CARRY)
        partial = one.partial or other.partial
        if partial and any(not f.partial and f.number != 0 for f in (one, other)):
            raise MixedError(_JOINED)
        both = (one.partial and other.partial) or (one.tokens and other.tokens)
        if both and (one.wide, one.layout) != (other.wide, other.layout):
            raise MixedError(_JOINED)
        first = one if one.tokens else other
        along = one.along | other.along
        if any(d in first.tokens and token_facts.is_table(s) for d, s in along):
            raise MixedError(_JOINED)
        self._meets({s for d, s in along if d in first.tokens and isinstance(s, tuple)})
        along = frozenset((d, s) for d, s in along if s in (TOKENS, ONE) or d not in first.tokens)
        sums = [fact for fact in (one, other) if fact.partial or fact.running]
        return first._replace(
            along=along,
            zeros=one.zeros and other.zeros if first.tail else True,
            partial=partial,
            overs=_joined(sums),
            number=one.number if one.number == other.number else None,
            steps=one.steps or other.steps,
        )

    def sliced(self, fact: TokenFact) -> TokenFact:
        along = {(d - 1 if d > 0 else -self._depth if d == 0 else d, s) for d, s in fact.along}
        return fact._replace(along=frozenset(along))

    def stacked(self, fact: TokenFact) -> TokenFact:
        if fact.running:
            raise MixedError(CARRY)
        along = {(d + 1 if d >= 0 else 0 if d == -self._depth else d, s) for d, s in fact.along}
        return fact._replace(along=frozenset(along))

    def carried(self, state: TokenFact, made: TokenFact) -> TokenFact:
        along = frozenset(pair for pair in state.along if pair[0] != -self._depth)
        if state.running:
            state = state._replace(partial=True, running=())
        return state._replace(along=along).settled()

    def selected(self, choice: TokenFact, fact: TokenFact) -> TokenFact:
        if choice.partial or choice.running or choice.steps:
            raise MixedError(_CHOICE)
        if not choice.along:
            return fact
        if choice.tokens and fact.tokens and choice.tokens != fact.tokens:
            raise MixedError(_CHOICE)
        if not fact.tokens:
            rows, inner, tail = choice.layout
            fact = fact._replace(rows=rows, inner=inner, tail=tail, zeros=not tail)
        return fact._replace(along=fact.along | choice.along, number=None)

    def scan(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        """Loops; over tokens, a carry that changes is a sum over the iterations, or a key."""
        start, count = jaxprs.state_of(eqn)
        self._depth += 1
        starts = values[start : start + count]
        if any(0 in fact.tokens for fact in values[start + count :]):
            state = [self._state(eqn, start, at, fact) for at, fact in enumerate(starts)]
            values = [*values[:start], *state, *values[start + count :]]
        else:
            self.numbers.append((eqn.params["length"], self._around))
        made = list(super().scan(eqn, values))
        self._depth -= 1
        for fact, first in zip(values[start : start + count], starts, strict=True):
            if fact.running and not (first.partial or first.number == 0):
                raise MixedError(CARRY)
        return made

    def _state(self, eqn: jex.JaxprEqn, start: int, at: int, fact: TokenFact) -> TokenFact:
        """Returns the fact in the body of carry `at` of a loop over tokens."""
        body = jaxprs.inner(eqn).jaxpr
        if body.invars[start + at] is body.outvars[at]:
            return fact
        if fact.running:
            raise MixedError(CARRY)
        if jnp.issubdtype(jaxprs.dtype_of(eqn.outvars[at]), jax.dtypes.prng_key):
            return fact.plus([-self._depth], RANDOM)
        overs = fact.overs if fact.partial else frozenset[float]()
        running = (self._depth, at)
        return fact._replace(partial=False, overs=overs, number=None, running=running)

    def custom_derivative(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> Sequence[TokenFact]:
        """Runs the body, except for a function that exchanges tokens itself."""
        name, body = eqn.primitive.name, jaxprs.inner(eqn)
        exchanges = any(
            CONTEXT in collective_axes(e) and e.primitive.name != "axis_index"
            for e in jaxprs.nested(body.jaxpr)
        )
        if name == "custom_vjp_call" and exchanges:
            check_sums(eqn, values)
            return self._exchanged(eqn, values)
        self._custom += 1
        made = self.call(eqn, values)
        self._custom -= 1
        return made

    def _exchanged(self, eqn: jex.JaxprEqn, values: list[TokenFact]) -> list[TokenFact]:
        pairs = list(zip(values, map(shape_of, eqn.invars), strict=True))
        if any(self._is_short(f, shape, dim) for f, shape in pairs for dim in range(1, len(shape))):
            raise token_facts.of_a_table(eqn)
        for f, shape in pairs:
            dim = len(shape) - 3  # of queries, keys and values; vmap adds dims before them
            apart = f.real(shape) == {dim} and f.layout == (1, 1, 0)
            if dim > 0 and not apart and (f.tokens or f.sources(dim)):
                raise token_facts.of_attention(eqn)
        if not any(f.dims for f, _ in pairs):
            raise token_facts.of_attention(eqn)
        fact, shape = next((f, shape) for f, shape in pairs if f.dims)

        def result(var: jex.Var) -> TokenFact:
            rank = len(shape_of(var))
            if shape_of(var) != shape:
                return token_facts.opaque(rank)
            kept = fact.mapped(lambda d, s: (d, s) if d in fact.dims else None)
            others = [d for d in range(rank) if d not in fact.dims]
            return kept.plus(others, OTHER)._replace(zeros=not fact.tail)

        return list(map(result, eqn.outvars))


def _joined(sums: Sequence[TokenFact]) -> frozenset[float]:
    """Returns the divisors of a value that is one of several sums over tokens."""
    known = [fact for fact in sums if fact.overs]
    if not sums:
        return TokenFact().overs
    return token_facts.divisors(known) if len(known) == len(sums) else known[0].overs


class _GlobalPositions(Rewriter):
    """Puts the global positions of the device's tokens in place of these iotas.

    Keys of random numbers along tokens are folded with the index of the device.
    """

    def __init__(self, positions: frozenset[Source], size: int):
        self._positions, self._size = positions, size
        drawn = [source for source in positions if isinstance(source, Drawn)]
        self._drawn = {path: {s for s in drawn if s.path == path} for path, _ in drawn}
        self._path: tuple[int, ...] = ()
        self.replaced: set[Source] = set()

    def equation(self, eqn: jex.JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        before, self._path = self._path, (*self._path, id(eqn))
        if self._path in self._positions:
            self.replaced.add(self._path)
            made: Sequence[Atom] = self.run(_positions(eqn, self._size), [])
        elif self._path in self._drawn:
            self.replaced |= self._drawn[self._path]
            made = self.run(_drawn_apart(eqn, self._size), values)
        else:
            made = super().equation(eqn, values)
        self._path = before
        return made


def _positions(eqn: jex.JaxprEqn, size: int) -> jex.ClosedJaxpr:
    """Returns the global positions of the device's tokens in place of an iota."""
    shape, dim, dtype = (eqn.params[name] for name in ("shape", "dimension", "dtype"))

    def positions() -> jax.Array:
        along = chunks.positions(shape[dim]).astype(dtype)
        return jax.lax.broadcast_in_dim(along, shape, (dim,))

    closed = jax.make_jaxpr(positions, axis_env=[(CONTEXT, size)])()
    return jaxprs.as_if_from(jaxprs.written_out(closed), eqn)


def _drawn_apart(eqn: jex.JaxprEqn, size: int) -> jex.ClosedJaxpr:
    """Returns the same operation on keys that are folded with the index of the device."""

    def drawn(keys: jax.Array) -> jax.Array:
        fold = jax.random.fold_in
        for _ in range(keys.ndim):
            fold = jax.vmap(fold, (0, None))
        made: jax.Array = eqn.primitive.bind(fold(keys, jax.lax.axis_index(CONTEXT)), **eqn.params)
        return made

    closed = jax.make_jaxpr(drawn, axis_env=[(CONTEXT, size)])(eqn.invars[0].aval)
    return jaxprs.as_if_from(jaxprs.written_out(closed), eqn)
