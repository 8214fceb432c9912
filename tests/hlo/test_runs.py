"""The walk through a compiled program: what runs, how often, inside what, and what it sums to."""

import math

import pytest
from hlo_programs import snippet

from zero_jax.hlo import hlo_text
from zero_jax.hlo.runs import Totals, runs

STATE = "(s32[], f32[4])"


def computation(name, *lines):
    body = "".join(f"  {line}\n" for line in (*lines[:-1], f"ROOT {lines[-1]}"))
    return f"%{name} (p: f32[4]) -> f32[4] {{\n{body}}}\n"


def work(name, of="x"):
    return f'%{name} = f32[4]{{0}} custom-call(%{of}), custom_call_target="f"'


def loop(name, body, trips, init="t"):
    """A loop over `work` called `body`, and the computations it needs."""
    known = f'{{"known_trip_count":{{"n":"{trips}"}}}}' if trips else "{}"
    state = [f"%s = {STATE} parameter(0)", "%i = s32[] get-tuple-element(%s), index=0"]
    array = "%x = f32[4]{0} get-tuple-element(%s), index=1"
    texts = [
        computation(f"body_{name}", *state, array, *body, f"%u = {STATE} tuple(%i, %x)"),
        computation(f"cond_{name}", *state, array, work(f"test_{name}"), "%go = pred[] f(%i)"),
    ]
    line = f"%{name} = {STATE} while(%{init}), condition=%cond_{name}, body=%body_{name}"
    return f"{line}, backend_config={known}", texts


def program(*lines, computations=()):
    given = ["%x = f32[4]{0} parameter(0)", "%k = s32[] parameter(1)"]
    given.append(f"%t = {STATE} tuple(%k, %x)")
    return hlo_text.parse(snippet([*given, *lines], *computations))


def work_of(parsed):
    """(name, times, kinds of the callers) of each piece of work."""
    found = (run for run in runs(parsed) if run.instruction.opcode == "custom-call")
    return [
        (run.instruction.name, run.times, [c.instruction.kind for c in run.callers])
        for run in found
    ]


def total(parsed):
    """Units of work, 1 each, but as many as its number for what is called `costN`."""

    def cost(_, i):
        return (int(i.name[4:] if i.name.startswith("cost") else 1),) if i.target else None

    (units,) = Totals(parsed, cost, (0,)).computation(parsed.entry)
    return units


def test_loops_in_loops_multiply_and_conditions_run_once_more():
    inner, inner_texts = loop("v", [work("a")], 3, init="s")
    outer, outer_texts = loop("w", [inner, work("b")], 5)
    parsed = program(work("before"), outer, work("after"), computations=inner_texts + outer_texts)
    assert work_of(parsed) == [
        ("before", 1, []),
        ("a", 5 * 3, ["while", "while"]),
        ("test_v", 5 * (3 + 1), ["while", "while"]),
        ("b", 5, ["while"]),
        ("test_w", 5 + 1, ["while"]),
        ("after", 1, []),
    ]
    assert total(parsed) == sum(times for _, times, _ in work_of(parsed))


def test_every_branch_is_listed_and_the_dearest_counts():
    given = "%x = f32[4]{0} parameter(0)"
    texts = [computation("one", given, work("cost7")), computation("two", given, work("cost9"))]
    choice = "%c = f32[4]{0} conditional(%k, %x, %x), branch_computations={%one, %two}"
    parsed = program(choice, computations=texts)
    assert work_of(parsed) == [("cost7", 1, ["conditional"]), ("cost9", 1, ["conditional"])]
    assert total(parsed) == 9


def test_an_asynchronous_pair_runs_at_its_start_and_a_call_each_time():
    wrapped = computation("wrapped", "%x = f32[4]{0} parameter(0)", work("a"))
    shape = "((f32[4]{0}), f32[4]{0}, u32[])"
    lines = [
        f"%s = {shape} async-start(%x), calls=%wrapped",
        f"%u = {shape} async-update(%s), calls=%wrapped",
        "%d = f32[4]{0} async-done(%u), calls=%wrapped",
        "%c = f32[4]{0} call(%d), to_apply=%wrapped",
        "%f = f32[4]{0} fusion(%c), kind=kCustom, calls=%wrapped",
    ]
    parsed = program(*lines, computations=[wrapped])
    assert work_of(parsed) == [("a", 1, ["async"]), ("a", 1, ["call"]), ("a", 1, ["fusion"])]
    assert total(parsed) == 3


def test_what_sums_or_sorts_calls_nothing():
    parsed = program("%s = f32[] reduce(%x, %k), dimensions={0}, to_apply=%add")
    assert "sum" not in {run.instruction.name for run in runs(parsed)}


def test_an_unknown_trip_count_is_said_only_where_it_matters():
    line, texts = loop("w", [work("a")], None)
    parsed = program(line, computations=texts)
    assert [times for _, times, _ in work_of(parsed)] == [None, None]
    with pytest.raises(ValueError, match="the loop w has no trip count"):
        total(parsed)
    free = Totals(parsed, lambda _, i: (0,) if i.target else None, (0,))
    assert free.computation(parsed.entry) == (0,)


def test_a_cost_counts_an_instruction_with_all_that_it_calls():
    wrapped = computation("wrapped", "%x = f32[4]{0} parameter(0)", work("a"))
    parsed = program(
        "%f = f32[4]{0} fusion(%x), kind=kLoop, calls=%wrapped", computations=[wrapped]
    )

    def cost(_, i):
        return (math.pi, 1) if i.kind == "fusion" else (1.0, 1) if i.target else None

    assert Totals(parsed, cost, (0.0, 0)).computation(parsed.entry) == (math.pi, 1)
