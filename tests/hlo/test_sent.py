"""What is sent and under which products, known by construction."""

import types

import pytest
from hlo_programs import snippet

from zero_jax.hlo import auditor

M, K, N = 4, 8, 16
FLOPS = 2 * M * K * N  # of `product`
GATHERED = 8 * 6  # elements of what `gather` makes


def product(name):
    return (
        f"%{name} = f32[{M},{N}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={0}"
    )


def gather(name, more=""):
    """A start and its done."""
    return [
        (
            f"%{name}-start = ((bf16[6]{{0}}), bf16[48]{{0}}) all-gather-start(%shard), "
            f"replica_groups={{}}, dimensions={{0}}{more}"
        ),
        f"%{name}-done = bf16[48]{{0}} all-gather-done(%{name}-start){more}",
    ]


def schedule(lines, *computations):
    """A program that runs these lines in this order; %shard, %a and %b are its arguments."""
    arguments = [
        "%shard = bf16[6]{0} parameter(0)",
        f"%a = f32[{M},{K}]{{1,0}} parameter(1)",
        f"%b = f32[{K},{N}]{{1,0}} parameter(2)",
    ]
    return snippet([*arguments, *lines[:-1], f"ROOT {lines[-1]}"], *computations)


def audited(text):
    """The audit of literal text; its sizes are of no interest here."""
    sizes = {
        f"{host}{kind}_size_in_bytes": 0
        for host in ("", "host_")
        for kind in ("argument", "output", "alias", "temp")
    }
    return auditor.of_text(text, types.SimpleNamespace(**sizes), None)


def computation(name, lines, root):
    """A computation of the arguments %a and %b."""
    head = (
        f"%{name} (a: f32[{M},{K}], b: f32[{K},{N}]) -> f32[] {{\n"
        f"  %a = f32[{M},{K}]{{1,0}} parameter(0)\n  %b = f32[{K},{N}]{{1,0}} parameter(1)\n"
    )
    return head + "".join(f"  {line}\n" for line in lines) + f"  ROOT {root}\n}}\n"


# What runs while a collective is under way.


def test_a_product_between_start_and_done_hides_a_gather():
    start, done = gather("g")
    report = audited(schedule([start, product("y"), done]))
    (c,) = report.collectives
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (True, FLOPS, True)
    assert report.hidden() == auditor.Hidden(hidden=2 * GATHERED, exposed=0)
    assert report.hidden().fraction == 1


def test_products_before_the_start_and_after_the_done_hide_nothing():
    start, done = gather("g")
    report = audited(schedule([product("x"), start, done, product("y")]))
    (c,) = report.collectives
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (True, 0, False)
    assert report.hidden() == auditor.Hidden(hidden=0, exposed=2 * GATHERED)
    assert report.hidden().fraction == 0


def test_elementwise_work_hides_nothing():
    start, done = gather("g")
    work = computation("double", [], "%s = f32[4,8]{1,0} add(%a, %a)")
    fusion = "%y = f32[4,8]{1,0} fusion(%a, %b), kind=kLoop, calls=%double"
    (c,) = auditor.collectives(schedule([start, fusion, done], work))
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (True, 0, False)


def test_a_product_inside_a_fusion_hides():
    start, done = gather("g")
    fused = computation("gemm", [], product("y"))
    fusion = f"%y = f32[{M},{N}]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm"
    (c,) = auditor.collectives(schedule([start, fusion, fusion.replace("%y", "%z"), done], fused))
    assert c.overlapped_flops == 2 * FLOPS


def test_each_of_two_collectives_under_way_sees_what_runs_in_its_own_time():
    (one, one_done), (two, two_done) = gather("one"), gather("two")
    lines = [one, product("x"), two, product("y"), one_done, product("z"), two_done]
    found = auditor.collectives(schedule(lines))
    assert [c.name for c in found] == ["one-start", "two-start"]
    assert [c.overlapped_flops for c in found] == [2 * FLOPS, 2 * FLOPS]


def test_a_start_that_blocks_is_exposed_whatever_stands_between():
    start, done = gather("g", ', backend_config={"collective_backend_config":{"is_sync":true}}')
    (c,) = auditor.collectives(schedule([start, product("y"), done]))
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (False, 0, False)


WRAPPED = (
    "%wrapped (q: f32[32]) -> f32[4] {\n  %q = f32[32]{0} parameter(0)\n"
    "  ROOT %rs = f32[4]{0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, "
    'to_apply=%add\n}, execution_thread="main"\n'
)
ASYNC = "((f32[32]{0}), f32[4]{0}, u32[])"


@pytest.mark.parametrize("calls", [", calls=%wrapped", ""], ids=["0.10", "0.12"])
def test_an_update_between_start_and_done_ends_nothing(calls):
    lines = [
        "%full = f32[32]{0} broadcast(%a), dimensions={}",
        f"%s = {ASYNC} async-start(%full), calls=%wrapped",
        product("x"),
        f"%u = {ASYNC} async-update(%s){calls}",
        product("y"),
        f"%v = {ASYNC} async-update(%u){calls}",
        f"%d = f32[4]{{0}} async-done(%v){calls}",
        product("z"),
    ]
    (c,) = auditor.collectives(schedule(lines, WRAPPED))
    assert (c.kind, c.words, c.overlapped_flops) == ("reduce-scatter", 32, 2 * FLOPS)


def test_wrappers_around_wrappers_are_followed():
    """An asynchronous computation that calls one that fuses one that scatters."""
    outer = WRAPPED.replace("%wrapped", "%outer").replace(
        "reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add",
        "call(%q), to_apply=%middle",
    )
    middle = WRAPPED.replace("%wrapped", "%middle").replace(
        "reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add",
        "fusion(%q), kind=kCustom, calls=%wrapped",
    )
    lines = [
        "%full = f32[32]{0} broadcast(%a), dimensions={}",
        f"%s = {ASYNC} async-start(%full), calls=%outer",
        product("x"),
        "%d = f32[4]{0} async-done(%s), calls=%outer",
    ]
    (c,) = auditor.collectives(schedule(lines, outer, middle, WRAPPED))
    assert (c.kind, c.name, c.elements, c.words) == ("reduce-scatter", "rs", 32, 32)
    assert (c.asynchronous, c.overlapped_flops) == (True, FLOPS)


def test_an_asynchronous_product_hides_once_not_at_its_start_update_and_done():
    gemm = computation("gemm", [], product("y"))
    result = f"((f32[{M},{K}]{{1,0}}, f32[{K},{N}]{{1,0}}), f32[{M},{N}]{{1,0}}, u32[])"
    start, done = gather("g")
    lines = [
        start,
        f"%s = {result} async-start(%a, %b), calls=%gemm",
        f"%u = {result} async-update(%s), calls=%gemm",
        f"%d = f32[{M},{N}]{{1,0}} async-done(%u), calls=%gemm",
        done,
    ]
    (c,) = auditor.collectives(schedule(lines, gemm))
    assert c.overlapped_flops == FLOPS


def loop_of(body_lines, trips, name="w"):
    """A while loop over (counter, shard, a, b), and the computations that it needs."""
    state = f"(s32[], bf16[6]{{0}}, f32[{M},{K}]{{1,0}}, f32[{K},{N}]{{1,0}})"
    body = [
        f"%s = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%s), index=0",
        "%shard = bf16[6]{0} get-tuple-element(%s), index=1",
        f"%a = f32[{M},{K}]{{1,0}} get-tuple-element(%s), index=2",
        f"%b = f32[{K},{N}]{{1,0}} get-tuple-element(%s), index=3",
        *body_lines,
        f"ROOT %t = {state} tuple(%i, %shard, %a, %b)",
    ]
    condition = [f"%s = {state} parameter(0)", "ROOT %go = pred[] constant(true)"]
    texts = [
        f"%{role}_{name} (s: {state}) -> {state} {{\n" + "".join(f"  {x}\n" for x in lines) + "}\n"
        for role, lines in (("body", body), ("condition", condition))
    ]
    loop = [
        "%zero = s32[] constant(0)",
        f"%init = {state} tuple(%zero, %shard, %a, %b)",
        f"%{name} = {state} while(%init), condition=%condition_{name}, body=%body_{name}, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
    ]
    return loop, texts


def test_loops_are_told_from_the_rest_of_the_step():
    """Hidden in a loop of 5, exposed outside it: 5 to 1 in bytes."""
    start, done = gather("g")
    loop, texts = loop_of([start, product("y"), done], trips=5)
    report = audited(schedule([*loop, *gather("h")], *texts))
    assert [(c.runs, c.in_loop, c.hidden) for c in report.collectives] == [
        (5, True, True),
        (1, False, False),
    ]
    assert report.collectives[0].overlapped_flops == FLOPS, "of each run"
    assert report.hidden() == auditor.Hidden(hidden=5 * 2 * GATHERED, exposed=2 * GATHERED)
    assert report.hidden().fraction == pytest.approx(5 / 6)
    assert report.hidden(layers_only=True) == auditor.Hidden(hidden=5 * 2 * GATHERED, exposed=0)


def test_a_loop_without_products_is_none_over_layers():
    """Gathering a stack row by row is no layer's work, but in a loop with products it is."""
    gathering, texts = loop_of(gather("g"), trips=5)
    report = audited(schedule(gathering, *texts))
    assert [(c.runs, c.in_layers) for c in report.collectives] == [(5, False)]
    assert report.hidden(layers_only=True) == auditor.Hidden(0, 0)
    assert report.hidden().exposed == 5 * 2 * GATHERED

    rows, row_texts = loop_of(gather("g"), trips=5, name="rows")
    layers, layer_texts = loop_of([*rows, product("y")], trips=3)
    (c,) = auditor.collectives(schedule(layers, *row_texts, *layer_texts))
    assert (c.runs, c.in_layers) == (3 * 5, True)


def test_the_products_of_a_loop_are_left_to_its_own_collectives():
    start, done = gather("h")
    loop, texts = loop_of([product("y")], trips=5)
    (c,) = auditor.collectives(schedule([start, *loop, done], *texts))
    assert (c.asynchronous, c.overlapped_flops) == (True, 0)


def test_a_step_that_sends_nothing_waits_for_nothing():
    report = audited(schedule([product("y")]))
    assert report.hidden() == auditor.Hidden(0, 0)
    assert report.hidden().fraction == 1


def test_sent_bytes_are_words_in_bytes():
    """An all-reduce sends twice what it holds; mixed dtypes count each at their own width."""
    lines = [
        "%h = f32[5]{0} broadcast(%a), dimensions={}",
        "%sum = f32[5]{0} all-reduce(%h), replica_groups={}, to_apply=%add",
        (
            "%both = (bf16[48]{0}, f32[40]{0}) all-gather(%shard, %h), replica_groups={}, "
            "dimensions={0}"
        ),
        "%alone = f32[5]{0} all-reduce(%h), replica_groups={{0},{1},{2},{3}}, to_apply=%add",
    ]
    total, both, alone = auditor.collectives(schedule(lines))
    assert (total.words, total.sent_bytes) == (2 * 5, 2 * 5 * 4)
    assert (both.dtype, both.words, both.sent_bytes) == ("bf16,f32", 88, 48 * 2 + 40 * 4)
    assert (alone.words, alone.sent_bytes) == (0, 0)
