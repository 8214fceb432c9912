"""The audit of compiled programs: real ones for CPU devices, and GPU spellings as literal text."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest
from hlo_lines import ARGUMENTS, FLOPS, GATHERED, computation, gather, loop, product, program

from zero_jax.hlo import auditor, replica_groups

# Programs of eight CPU devices: kinds, axes, loops and branches.

WHOLE = jax.sharding.PartitionSpec()
CUBE = {"replica": 2, "data": 2, "model": 2}
OUTER, MIDDLE, INNER, S = 5, 3, 2, 12


def compile_on(axes, f, *arrays, in_specs=WHOLE, out_specs=WHOLE):
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile()


@functools.cache
def on_a_cube():
    """Collectives of every kind, some in up to three loops."""

    def innermost(c, _):
        return jnp.tanh(c + jax.lax.psum(c, "model")), None

    def between(c, _):
        c, _ = jax.lax.scan(innermost, c, None, length=INNER)
        return c + jax.lax.all_gather(c, "data")[0], None

    def outermost(c, _):
        c, _ = jax.lax.scan(between, c, None, length=MIDDLE)
        piece = jax.lax.psum_scatter(c, ("replica", "model"), tiled=True)
        return jnp.tile(jnp.sin(piece), 4), None

    def f(x):
        x, _ = jax.lax.scan(outermost, x, None, length=OUTER)
        swapped = jax.lax.all_to_all(x, "model", 0, 0, tiled=True)
        ring = jax.lax.ppermute(jnp.sin(x[:7]), "data", [(0, 1), (1, 0)])
        loss = jax.lax.psum(x[0], ("replica", "data", "model"))
        return jax.lax.psum(jnp.cos(x), ("replica", "data")), swapped, ring, loss

    return compile_on(CUBE, f, jnp.ones(S))


def test_collectives_in_nested_loops_along_every_axis_send_their_closed_form():
    found = auditor.collectives(on_a_cube(), CUBE)
    sizes = lambda c: (c.group_size, c.elements, c.runs, c.sent_elements)  # noqa: E731
    assert {(c.kind, c.axis): sizes(c) for c in found} == {
        ("all-reduce", "model"): (2, S, OUTER * MIDDLE * INNER, OUTER * MIDDLE * INNER * 2 * S),
        ("all-gather", "data"): (2, 2 * S, OUTER * MIDDLE, OUTER * MIDDLE * 2 * S),
        ("reduce-scatter", "replica+model"): (4, S, OUTER, OUTER * S),
        ("all-to-all", "model"): (2, S, 1, S), ("collective-permute", "?"): (2, 7, 1, 7),
        ("all-reduce", "replica+data+model"): (8, 1, 1, 2),
        ("all-reduce", "replica+data"): (4, S, 1, 2 * S)}  # fmt: skip
    for c in found:
        assert (c.dtype, c.bytes, c.scalar) == ("f32", 4 * c.elements, c.elements == 1)
        assert (c.conditional, c.asynchronous, c.in_loop) == (False, False, c.runs > 1)
    assert {c.op_name.rpartition("/")[2] for c in found if c.kind == "all-reduce"} == {"psum"}
    # Trip counts are derived where XLA wrote none; the table lists most words first.
    text = on_a_cube().as_text()
    bare = re.sub(r", backend_config=\{.*", "", text)
    assert "known_trip_count" in text and "known_trip_count" not in bare
    assert [c.runs for c in auditor.collectives(bare)] == [c.runs for c in found]
    table = auditor.format_table(auditor.audit(on_a_cube(), CUBE)).splitlines()
    words = [int(line.split()[5]) for line in table[1:]]
    assert words == sorted(words, reverse=True) and words[0] == OUTER * MIDDLE * INNER * 2 * S


def test_each_branch_counts_as_taken_and_words_of_an_unknown_trip_count_are_an_error():
    def send(x):
        return jnp.sin(x) + jax.lax.psum(x, "data")

    def f(x):
        either = jax.lax.cond(x[0] > 0, send, lambda x: jax.lax.pmax(x, "data") * 2, x)
        maybe = lambda _, x: jax.lax.cond(x[0] > 0, send, jnp.negative, x)  # noqa: E731
        until = lambda x: jax.lax.while_loop(lambda s: jnp.sum(s) < 10, send, x)  # noqa: E731
        unknown = jax.lax.scan(lambda x, _: (until(x), None), x, None, length=4)[0]
        return either, jax.lax.fori_loop(0, 7, maybe, x), unknown

    report = auditor.audit(compile_on({"data": 8}, f, jnp.ones(4)))
    known = [c for c in report.collectives if c.runs]
    assert sorted((c.runs, c.conditional, c.sent_elements) for c in known) == [
        *[(1, True, 2 * 4)] * 2, (7, True, 7 * 2 * 4)]  # fmt: skip
    (c,) = set(report.collectives) - set(known)
    assert (c.runs, c.conditional) == (None, False)
    for ask in (lambda: report.sent_elements, lambda: c.sent_elements):
        with pytest.raises(ValueError, match="trip count"):
            ask()
    with pytest.raises(AssertionError, match="trip count"):
        auditor.assert_communication(report, 2, num_params=4)
    assert "<=1" in auditor.format_table(report) and "?" in auditor.format_table(report)


KNOWN = '{"known_trip_count":{"n":"36"}}'
TRIPS = {
    "{}": None, KNOWN: 36, '{"dynamic_variables":[],"known_trip_count":{"n":"36"}}': 36,
    r'"{\"known_trip_count\":{\"n\":\"36\"}}"': 36, "{known_trip_count={n=36}}": 36}  # fmt: skip


def test_trip_count_spellings():
    """The condition, which sends too, runs once more than the body."""
    send = "%r = f32[6] all-reduce(%x), to_apply=%add"
    lines, texts = loop("w", {"x": "f32[6]"}, "p", [send], "r", trips=36, condition=[send])
    text = program({"p": "f32[6]"}, *lines, computations=texts)
    for config, runs in TRIPS.items():
        found = auditor.collectives(text.replace(KNOWN, config))
        assert [c.runs for c in found] == [runs, runs and runs + 1]


GROUPS = [  # text, devices in each group, axis
    ("{{0,4},{1,5},{2,6},{3,7}}", 2, "replica"), ("{{0,1,4,5},{2,3,6,7}}", 4, "replica+model"),
    ("{{0,1,2,3,4,5,6,7}}", 8, "replica+data+model"), ("{}", 8, "replica+data+model"),
    ("{{0,3},{1,2},{4,7},{5,6}}", 2, "?"), ("{{0,1,2},{3,4,5,6,7}}", None, "?"),
    ("{{0},{1},{2},{3},{4},{5},{6},{7}}", 1, None), ("[4,2]<=[8]", 2, "model"),
    ("[4,2]<=[4,2]T(1,0)", 2, "data"), ("[4,2]<=[2,2,2]T(0,2,1)", 2, "data"),
    ("[2,4]<=[2,2,2]T(1,0,2)", 4, "replica+model"),
    ("mesh['replica'=2,'data'=2,'model'=2] {'model','replica'}", 4, "replica+model"),
    ("mesh['axis_0'=4,'axis_1'=2] device_ids=([2,2,2]T(0,2,1)) {'axis_1'}", 2, "data"),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2,'axis_1'}", 4, "replica+model"),
    ("mesh['node'=16,'gpu'=8] {'node','gpu'}", 128, None),
    ("mesh['data'=8,'model'=1] {'model'}", 1, None),
    ("mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}", 2, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "size", "axis"), GROUPS)
def test_sizes_and_axes_are_found_in_every_spelling_of_groups(text, size, axis):
    groups = replica_groups.parse(text, 8)
    assert size is None or groups.size == size
    assert axis is None or groups.axis(CUBE) == axis
    # Without a mesh only the text can say.
    assert replica_groups.parse("{{0,1},{2,3}}", 4).axis(None) == "?"
    assert replica_groups.parse("mesh['gpu'=2] {'gpu'}", 2).axis(None) == "gpu"


# What is sent, in the spellings of the GPU compiler.

SYNC = ', backend_config={"collective_backend_config":{"is_sync":true,"is_pipelined":false}}'
SIZES = (2, 3, 5, 7, 11)
BF16S = ", ".join(f"bf16[{8 * n},4]{{1,0:T(8,128)(2,1)}}" for n in SIZES)
OPERANDS = ", ".join(f"%p{n}" for n in SIZES) + ", /*index=5*/%q"
EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
NAME = "jit(f)/w['a, b']/all_gather"
LETTERS = {f"p{n}": f"bf16[{n},4]{{1,0}}" for n in SIZES} | {"q": "f32[13,4]{1,0}", "r": "f32[5]"}
HOST = '_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"'
SEND = "%s = (f32[5], u32[], token[]) send(%r, %p2)"
SPELLINGS = {
    "start": (
        f"%s = (bf16[2,4], bf16[16,4]) all-gather-start(%p2), {EIGHT}, "
        f'metadata={{op_name="{NAME}" stack_frame_id=37}}',
        dict(kind="all-gather", dtype="bf16", elements=64, bytes=128, sent_bytes=128,
             sent_elements=64,
             group_size=8, asynchronous=True, op_name=NAME)),
    "a start that blocks": (
        "%s = f32[5] all-reduce-start(%r), replica_groups={{0,4},{1,5},{2,6},{3,7}}, "
        f"to_apply=%add{SYNC}",
        dict(group_size=2, asynchronous=False, sent_elements=2 * 5, sent_bytes=4 * 2 * 5)),
    "combined": (
        f"%s = ({BF16S}, /*index=5*/f32[104,4]{{1,0}}) all-gather({OPERANDS}), {EIGHT}",
        dict(dtype="bf16,f32", elements=8 * 4 * (sum(SIZES) + 13), scalar=False,
             sent_bytes=8 * 4 * (2 * sum(SIZES) + 4 * 13))),
    "to itself": ("%s = f32[5] collective-permute(%r), source_target_pairs={{0,0}}",
                  dict(group_size=1, sent_elements=0)),
    "send": (f"{SEND}, frontend_attributes={{{HOST}}}",
             dict(kind="send", elements=5, sent_elements=5)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_the_gpu_compiler(name):
    line, want = SPELLINGS[name]
    to_host = SEND.replace("%s", "%h") + ", channel_id=2, is_host_transfer=true"
    (c,) = auditor.collectives(program(LETTERS, line, to_host))
    assert {key: getattr(c, key) for key in want} == want


# What runs while a collective is under way.

ASYNC = "((f32[32]), f32[4], u32[])"
FULL, SCATTER = {"q": "f32[32]"}, "reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}"
START, DONE = gather("g")
SYNC_START, SYNC_DONE = gather("g", more=SYNC)
FUSED = "%x = f32[4,16] fusion(%shard, %a, %b), kind=kCustom, calls=%gemm"
WIDE = "%full = f32[32] broadcast(%a), dimensions={}"
CALLED = [
    computation("gemm", ARGUMENTS, product("y")),
    computation("wrapped", FULL, f"%rs = f32[4] {SCATTER}, to_apply=%add"),
    computation("middle", FULL, "%x = f32[4] fusion(%q), kind=kCustom, calls=%wrapped"),
    computation("outer", FULL, "%x = f32[4] call(%q), to_apply=%middle"),
    computation("called", ARGUMENTS, f"%g = bf16[48] all-gather(%shard), {EIGHT}")]  # fmt: skip


WRAPPED = [WIDE, f"%s = {ASYNC} async-start(%full), calls=%outer", product("x"),
           f"%u = {ASYNC} async-update(%s), calls=%outer", product("y"),
           f"%v = {ASYNC} async-update(%u), calls=%outer",
           "%d = f32[4] async-done(%v), calls=%outer", product("z")]  # fmt: skip
OVERLAPS = {"products": ([START, FUSED, product("y"), DONE], True, 2 * FLOPS),
            "blocking": ([SYNC_START, product("y"), SYNC_DONE], False, 0),
            "wrappers in wrappers": (WRAPPED, True, 2 * FLOPS)}  # fmt: skip


def audited(lines, computations=()):
    """The audit of literal text; its sizes are 0."""
    kinds = ("argument", "output", "alias", "temp", "host")
    sizes = dict.fromkeys([f"{kind}_bytes" for kind in kinds], 0)
    text = program(ARGUMENTS, *lines, computations=[*CALLED, *computations])
    return auditor.of_text(text, sizes, None)


@pytest.mark.parametrize("name", OVERLAPS)
def test_products_between_start_and_done_hide_a_collective(name):
    lines, asynchronous, flops = OVERLAPS[name]
    report = audited(lines)
    (c,) = report.collectives
    assert (c.asynchronous, c.overlapped_flops, c.concurrent) == (asynchronous, flops, flops > 0)
    kind, elements, size = ("reduce-scatter", 32, 4) if lines[0] == WIDE else ("all-gather", 48, 2)
    assert (c.kind, c.elements, c.sent_elements) == (kind, elements, elements)
    sent = size * elements
    assert report.overlap() == auditor.Overlap(*((sent, 0) if flops else (0, sent)))
    assert report.overlap().fraction == (flops > 0)


def test_collectives_under_way_at_once_and_computations_that_are_called_twice():
    (one, one_done), (two, two_done) = gather("one"), gather("two")
    lines = [one, product("x"), two, product("y"), one_done, product("z"), two_done]
    assert [c.overlapped_flops for c in audited(lines).collectives] == [2 * FLOPS] * 2
    calls = [f"%{n} = bf16[48]{{0}} call(%shard, %a, %b), to_apply=%called" for n in "xy"]
    assert [c.sent_elements for c in audited(calls).collectives] == [GATHERED] * 2
    assert audited([product("y")]).overlap() == auditor.Overlap(0, 0)
    assert audited([product("y")]).overlap().fraction == 1


def test_collectives_of_loops_with_products_are_those_of_layers():
    layers, texts = loop("w", ARGUMENTS, ARGUMENTS, [START, product("y"), DONE], trips=5)
    report = audited([*layers, *gather("h")], texts)
    found = [(c.runs, c.in_loop, c.in_layers, c.overlapped_flops) for c in report.collectives]
    assert found == [(5, True, True, FLOPS), (1, False, False, 0)]
    assert report.overlap() == auditor.Overlap(concurrent=5 * 2 * GATHERED, exposed=2 * GATHERED)
    assert report.overlap().fraction == pytest.approx(5 / 6)
    whole = auditor.Overlap(concurrent=5 * 2 * GATHERED, exposed=0)
    assert report.overlap(layers_only=True) == whole

    rows, row_texts = loop("rows", ARGUMENTS, ARGUMENTS, gather("g"), trips=5)
    report = audited(rows, row_texts)
    assert [(c.runs, c.in_layers) for c in report.collectives] == [(5, False)]
    assert report.overlap(layers_only=True) == auditor.Overlap(0, 0)
    assert report.overlap().exposed == 5 * 2 * GATHERED
    layers, texts = loop("w", ARGUMENTS, ARGUMENTS, [*rows, product("y")], trips=3)
    (c,) = audited(layers, [*texts, *row_texts]).collectives
    assert (c.runs, c.in_layers) == (3 * 5, True)
    layers, texts = loop("w", ARGUMENTS, ARGUMENTS, [product("y")], trips=5)
    (c,) = audited([START, *layers, DONE], texts).collectives
    assert (c.asynchronous, c.overlapped_flops) == (True, 0), "around a loop of products"
    layers, texts = loop("w", ARGUMENTS, ARGUMENTS, [product("y")], trips=None)
    assert audited(layers, texts).flops is None


# The summary of a step, and the assertion of what it sends.


def test_communication_is_asserted_in_all_and_by_kind():
    step, psi = on_a_cube(), 30
    sent = {kind: words / psi for kind, words in auditor.audit(step).sent_elements.items()}
    assert auditor.audit(step).elements_per_param(psi) == pytest.approx(sum(sent.values()))
    for expected in (sum(sent.values()), sent):
        auditor.assert_communication(step, expected, num_params=psi)
    more = sent | {"all-gather": sent["all-gather"] + 1}
    others = more | {"all-reduce": sent["all-reduce"] - 1}
    without = {k: v for k, v in sent.items() if k != "reduce-scatter"}
    for expected in (sum(more.values()), more, others, without):
        with pytest.raises(AssertionError, match=r"kind .*\n.*all-reduce(.|\n)*reduce-scatter"):
            auditor.assert_communication(step, expected, num_params=psi, rel=1e-3)


LOWERED = jax.jit(jnp.sin).lower(1.0)
ERRORS = [
    (lambda: auditor.audit(LOWERED), "Lowered"),
    (lambda: auditor.assert_communication(LOWERED, 3.0), "Lowered"),
    (lambda: auditor.assert_communication(audited([product("y")]), 3.0), "num_params"),
    (lambda: auditor.audit(types.SimpleNamespace(memory_analysis=lambda: None)), "memory"),
    (lambda: auditor.collectives(""), "ENTRY"),
    (lambda: auditor.collectives(program({}, "something new")), "something new"),
    (lambda: audited(["%r = f32[4,8] all-reduce(%a), replica_groups=x"]), r"\br\b.*\bx\b"),
]


@pytest.mark.parametrize(("call", "words"), ERRORS)
def test_what_cannot_be_audited_is_an_error(call, words):
    with pytest.raises(ValueError, match=words):
        call()
