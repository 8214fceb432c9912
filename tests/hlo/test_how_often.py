"""How often a collective runs: loops, branches and trip counts, known by construction."""

import re

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import (
    compile_on,
    compile_on_8,
    make_mesh,
    nested_scans,
    snippet,
    the_only,
)
from test_sent import GATHERED, schedule

from zero_jax.hlo import auditor

# Loops and branches.


def test_nested_scans_multiply():
    found = {c.kind: c for c in auditor.collectives(nested_scans(outer=5, inner=3))}
    assert found["all-reduce"].runs == 5 * 3
    assert found["all-reduce"].words == 5 * 3 * 2 * 4
    assert found["all-gather"].runs == 5
    assert found["all-gather"].words == 5 * 8 * 4


def test_trip_counts_are_derived_where_xla_wrote_none():
    text = nested_scans(outer=5, inner=3).as_text()
    bare = re.sub(r", backend_config=\{.*", "", text)
    assert "known_trip_count" in text and "known_trip_count" not in bare
    assert [c.runs for c in auditor.collectives(bare)] == [
        c.runs for c in auditor.collectives(text)
    ]


def data_dependent_loop():
    def loop(x):
        return jax.lax.while_loop(
            lambda s: jnp.sum(s) < 10, lambda s: s + jax.lax.psum(s, "data"), x
        )

    return compile_on_8(loop, jnp.ones(4))


def test_an_unknown_trip_count_does_not_pass_silently():
    program = data_dependent_loop()
    c = the_only(program)
    assert c.runs is None
    with pytest.raises(ValueError, match="trip count"):
        _ = c.words
    with pytest.raises(ValueError, match="trip count"):
        _ = auditor.audit(program).words
    with pytest.raises(AssertionError, match="trip count"):
        auditor.assert_communication(program, 2, num_params=4)
    assert "?" in auditor.format_table(auditor.audit(program))


def test_a_loop_condition_runs_once_more_than_its_body():
    def loop(x):
        def unfinished(state):
            return (state[0] < 6) & (jax.lax.psum(jnp.sum(state[1]), "data") > -1.0)

        return jax.lax.while_loop(unfinished, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))

    text = compile_on_8(loop, jnp.ones(4)).as_text()
    assert the_only(text).runs is None, "a condition on data"
    known = re.sub(
        r"( while\(.*)", r'\1, backend_config={"known_trip_count":{"n":"6"}}', text, count=1
    )
    assert the_only(known).runs == 6 + 1


def test_every_branch_counts_and_is_marked():
    def choose(x):
        return jax.lax.cond(
            x[0] > 0, lambda: jax.lax.psum(x, "data"), lambda: jax.lax.pmax(x, "data") * 2
        )

    program = compile_on_8(choose, jnp.ones(4))
    assert [(c.runs, c.conditional) for c in auditor.collectives(program)] == [(1, True)] * 2
    assert auditor.audit(program).words == {"all-reduce": 2 * 2 * 4}
    assert "<=1" in auditor.format_table(auditor.audit(program))


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        (', backend_config={"dynamic_variables":[],"known_trip_count":{"n":"36"}}', 36),
        (r', backend_config="{\"known_trip_count\":{\"n\":\"36\"}}"', 36),
        (", backend_config={known_trip_count={n=36}}", 36),
        ("", 4),  # from 9 down to 1 in steps of 2
    ],
)
def test_trip_count_spellings(config, runs):
    body = (
        "%body (s: (s32[], f32[6])) -> (s32[], f32[6]) {\n"
        "  %s = (s32[], f32[6]{0}) parameter(0)\n  %two = s32[] constant(2)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        "  %x = f32[6]{0} get-tuple-element(%s), index=1\n"
        "  %less = s32[] subtract(%i, %two)\n"
        "  %r = f32[6]{0} all-reduce(%x), replica_groups={}, to_apply=%add\n"
        "  ROOT %t = (s32[], f32[6]{0}) tuple(%less, %r)\n}\n"
    )
    condition = (
        "%cond (s: (s32[], f32[6])) -> pred[] {\n"
        "  %s = (s32[], f32[6]{0}) parameter(0)\n  %one = s32[] constant(1)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        "  ROOT %go = pred[] compare(%one, %i), direction=LT\n}\n"
    )
    lines = [
        "%p = f32[6]{0} parameter(0)",
        "%nine = s32[] constant(9)",
        "%init = (s32[], f32[6]{0}) tuple(%nine, %p)",
        "ROOT %w = (s32[], f32[6]{0}) while(%init), condition=%cond, body=%body" + config,
    ]
    assert the_only(snippet(lines, body, condition)).runs == runs


# How often: real programs of eight CPU devices.


def cube():
    return make_mesh((2, 2, 2), ("replica", "data", "model"))


def loops_on_a_cube(outer, middle, inner):
    """Each axis in a loop of its own, three deep."""

    def innermost(c, _):
        return jnp.tanh(c + jax.lax.psum(c, "model")), None

    def between(c, _):
        c, _ = jax.lax.scan(innermost, c, None, length=inner)
        return c + jax.lax.all_gather(c, "data")[0], None

    def outermost(c, _):
        c, _ = jax.lax.scan(between, c, None, length=middle)
        piece = jax.lax.psum_scatter(c, ("replica", "model"), tiled=True)
        return jnp.tile(jnp.sin(piece), 4), None

    def f(x):
        return jax.lax.psum(jax.lax.scan(outermost, x, None, length=outer)[0], ("replica", "data"))

    return compile_on(cube(), f, jnp.ones(12))


def test_three_nested_loops_along_several_axes():
    found = {c.axis: c for c in auditor.collectives(loops_on_a_cube(5, 3, 2), dict(cube().shape))}
    assert {axis: (c.kind, c.runs, c.group_size) for axis, c in found.items()} == {
        "model": ("all-reduce", 5 * 3 * 2, 2),
        "data": ("all-gather", 5 * 3, 2),
        "replica+model": ("reduce-scatter", 5, 4),
        "replica+data": ("all-reduce", 1, 4),
    }
    assert found["model"].words == 5 * 3 * 2 * 2 * 12
    assert found["data"].words == 5 * 3 * 2 * 12
    assert found["replica+model"].words == 5 * 12


def test_a_branch_in_a_loop_counts_as_taken_each_time():
    def body(_, x):
        return jax.lax.cond(x[0] > 0, lambda: jnp.sin(jax.lax.psum(x, "data")), lambda: -x)

    (c,) = auditor.collectives(
        compile_on_8(lambda x: jax.lax.fori_loop(0, 7, body, x), jnp.ones(4))
    )
    assert (c.runs, c.conditional) == (7, True)


@pytest.mark.parametrize("known", ["outer", "inner"])
def test_one_unknown_loop_makes_the_count_unknown(known):
    def unknown(f, x):
        return jax.lax.while_loop(lambda s: jnp.sum(s) < 10, f, x)

    def four_times(f, x):
        return jax.lax.scan(lambda s, _: (f(s), None), x, None, length=4)[0]

    def send(s):
        return jnp.sin(s) + jax.lax.psum(s, "data")

    outer, inner = (four_times, unknown) if known == "outer" else (unknown, four_times)
    program = compile_on_8(lambda x: outer(lambda s: inner(send, s), x), jnp.ones(4))
    (c,) = auditor.collectives(program)
    assert c.runs is None


def test_a_computation_that_is_called_twice_sends_twice():
    called = (
        "%called (s: bf16[6]) -> bf16[48] {\n  %shard = bf16[6]{0} parameter(0)\n"
        "  ROOT %g = bf16[48]{0} all-gather(%shard), replica_groups={}, dimensions={0}\n}\n"
    )
    calls = [f"%{n} = bf16[48]{{0}} call(%shard), to_apply=%called" for n in "xy"]
    found = auditor.collectives(schedule(calls, called))
    assert [(c.kind, c.words) for c in found] == [("all-gather", GATHERED)] * 2


def test_collectives_that_xla_combines_in_a_loop_are_one_with_all_their_words():
    """Nine leaves a layer, in one all-reduce: more than the five after which XLA numbers them."""
    sizes = (2, 3, 5, 7, 11, 13, 17, 19, 23)

    def layer(xs, _):
        return jax.tree.map(lambda x, s: jnp.tanh(x + s), xs, jax.lax.psum(xs, "data")), None

    def f(*xs):
        return jax.lax.scan(layer, xs, None, length=6)[0]

    found = auditor.collectives(compile_on_8(f, *(jnp.ones(n) for n in sizes)))
    assert len(found) < len(sizes), "nothing was combined: the test shows nothing"
    assert {c.runs for c in found} == {6}
    assert sum(c.words for c in found) == 6 * 2 * sum(sizes)
