"""The roofline: seconds of literal programs against formulas written here."""

import pytest

from zero_jax.hlo import hlo_text, roofline, traffic
from zero_jax.hlo.targets import target

H100 = target("h100")
PEAK, MEMORY, FAST, SLOW = H100.flops, H100.memory_bandwidth, H100.fast_wire, H100.slow_wire
LAYERS = 36


def module(body, *computations, devices=64):
    """A program whose entry computation holds `body`, and its collectives."""
    reduction = (
        "%sum (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n}\n"
    )
    entry = "ENTRY %main (p: f32[]) -> f32[] {\n  " + "\n  ".join(body) + "\n}\n"
    header = f"HloModule m, is_scheduled=true, num_partitions={devices}\n\n"
    program = hlo_text.parse(header + "\n".join([reduction, *computations, entry]))
    return program, traffic.of_program(program, None)


def estimate(body, *computations, devices=64, aim=H100, model_flops=None):
    """Its step time."""
    return roofline.step_time(*module(body, *computations, devices=devices), aim, model_flops)


def computation(name, *lines):
    return f"%{name} (p: f32[]) -> f32[] {{\n  " + "\n  ".join(lines) + "\n}\n"


def square(n):
    """A product of two bf16 matrices, with its FLOPs and bytes."""
    shape = f"bf16[{n},{n}]{{1,0}}"
    lines = [
        f"%x = {shape} parameter(0)",
        f"%dot = {shape} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
    ]
    return [lines[0], f"%w = {shape} parameter(1)", lines[1]], 2 * n**3, 3 * 2 * n * n


# Kernels.


def test_a_large_product_takes_what_its_flops_take():
    lines, flops, size = square(4096)
    assert flops / PEAK > size / MEMORY, "not bound by compute: the test shows nothing"
    t = estimate(lines)
    assert (t.flops, t.traffic_bytes) == (flops, size)
    assert t.seconds == t.kernel_seconds == t.compute_seconds == pytest.approx(flops / PEAK)
    assert t.memory_seconds == pytest.approx(size / MEMORY)


def test_a_copy_takes_what_its_bytes_take():
    t = estimate(["%p = f32[1000,1000]{1,0} parameter(0)", "%c = f32[1000,1000]{0,1} copy(%p)"])
    assert (t.flops, t.traffic_bytes) == (0, 2 * 4 * 1000**2)
    assert t.seconds == t.memory_seconds == pytest.approx(2 * 4 * 1000**2 / MEMORY)


def test_each_kernel_takes_the_longer_of_its_two_times():
    lines, flops, size = square(4096)
    copied = 2 * 2 * 4096**2
    t = estimate([*lines, "%c = bf16[4096,4096]{0,1} copy(%dot)"])
    assert t.kernel_seconds == pytest.approx(flops / PEAK + copied / MEMORY)
    assert t.kernel_seconds > max(t.compute_seconds, t.memory_seconds)
    assert t.memory_seconds == pytest.approx((size + copied) / MEMORY)


def test_views_take_no_time():
    t = estimate(
        [
            "%p = f32[64,8]{1,0} parameter(0)",
            "%b = f32[512]{0} bitcast(%p)",
            "%t = (f32[512]{0}, f32[64,8]{1,0}) tuple(%b, %p)",
            "%o = (f32[512]{0}, f32[64,8]{1,0}) opt-barrier(%t)",
            "%g = f32[512]{0} get-tuple-element(%o), index=0",
        ]
    )
    assert t.seconds == t.traffic_bytes == 0
    assert t.model_flops_fraction is None


def test_copies_to_the_side_count_once():
    shape = "f32[1000]{0}"
    t = estimate(
        [
            f"%p = {shape} parameter(0)",
            f"%s = ({shape}, {shape}, u32[]) copy-start(%p)",
            f"%d = {shape} copy-done(%s)",
        ]
    )
    assert t.traffic_bytes == 2 * 4 * 1000


STACKED = computation(
    "layer",
    "%p0 = f32[36,64,4096]{2,1,0} parameter(0)",
    "%p1 = s32[] parameter(1)",
    "%zero = s32[] constant(0)",
    "%ds = f32[1,64,4096]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), "
    "dynamic_slice_sizes={1,64,4096}",
    "ROOT %c = bf16[1,64,4096]{2,1,0} convert(%ds)",
)


def loop(fused, config='{"known_trip_count":{"n":"36"}}'):
    """A loop over layers that calls a fusion of a stacked operand and the layer's number."""
    state = "(s32[], f32[36,64,4096]{2,1,0})"
    body = computation(
        "body",
        f"%s = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%s), index=0",
        "%w = f32[36,64,4096]{2,1,0} get-tuple-element(%s), index=1",
        f"{fused}(%w, %i), kind=kLoop, calls=%layer",
        "%one = s32[] constant(1)",
        "%next = s32[] add(%i, %one)",
        f"ROOT %t = {state} tuple(%next, %w)",
    )
    condition = computation(
        "condition",
        f"%s = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%s), index=0",
        "%n = s32[] constant(36)",
        "ROOT %go = pred[] compare(%i, %n), direction=LT",
    )
    entry = [
        "%zero = s32[] constant(0)",
        "%w = f32[36,64,4096]{2,1,0} parameter(0)",
        f"%t = {state} tuple(%zero, %w)",
        f"ROOT %l = {state} while(%t), condition=%condition, body=%body, backend_config={config}",
    ]
    return entry, body, condition


COUNTER = LAYERS * 3 * 4 + (LAYERS + 1) * (2 * 4 + 1)  # adding to it and comparing it


def test_a_slice_of_a_stacked_operand_counts_in_every_trip_of_a_loop():
    entry, body, condition = loop("%f = bf16[1,64,4096]{2,1,0} fusion")
    t = estimate(entry, STACKED, body, condition)
    layer = 4 + 64 * 4096 * (4 + 2)  # the number, the slice in f32, the result in bf16
    assert t.traffic_bytes == LAYERS * layer + COUNTER
    assert t.seconds == pytest.approx(t.traffic_bytes / MEMORY)


def test_an_asynchronous_fusion_counts_as_any():
    state = "((f32[36,64,4096]{2,1,0}, s32[]), bf16[1,64,4096]{2,1,0}, u32[])"
    entry, body, condition = loop(f"%f = {state} fusion-start")
    done = "%d = bf16[1,64,4096]{2,1,0} fusion-done(%f)\n  %one"
    t = estimate(entry, STACKED, body.replace("%one", done, 1), condition)
    assert t.traffic_bytes == LAYERS * (4 + 64 * 4096 * (4 + 2)) + COUNTER


def test_an_operand_that_is_also_read_whole_counts_whole():
    fused = computation(
        "fused",
        "%p0 = f32[36,64]{1,0} parameter(0)",
        "%s = f32[1,64]{1,0} slice(%p0), slice={[0:1], [0:64]}",
        "%b = f32[36,64]{1,0} broadcast(%s), dimensions={0,1}",
        "ROOT %a = f32[36,64]{1,0} add(%p0, %b)",
    )
    lines = [
        "%p = f32[36,64]{1,0} parameter(0)",
        "%f = f32[36,64]{1,0} fusion(%p), kind=kLoop, calls=%fused",
    ]
    assert estimate(lines, fused).traffic_bytes == 2 * 4 * 36 * 64


def test_a_fusion_that_only_converts_reads_and_writes_all():
    fused = computation(
        "fused", "%p0 = f32[36,64]{1,0} parameter(0)", "ROOT %c = bf16[36,64]{1,0} convert(%p0)"
    )
    lines = [
        "%p = f32[36,64]{1,0} parameter(0)",
        "%f = bf16[36,64]{1,0} fusion(%p), kind=kLoop, calls=%fused",
    ]
    assert estimate(lines, fused).traffic_bytes == (4 + 2) * 36 * 64


UPDATE = (
    "%p0 = f32[36,64]{1,0} parameter(0)",
    "%p1 = bf16[1,64]{1,0} parameter(1)",
    "%p2 = s32[] parameter(2)",
    "%c = f32[1,64]{1,0} convert(%p1)",
    "%zero = s32[] constant(0)",
    "%u = f32[36,64]{1,0} dynamic-update-slice(%p0, %c, %p2, %zero)",
)
UPDATED = [
    "%p = f32[36,64]{1,0} parameter(0)",
    "%row = bf16[1,64]{1,0} parameter(1)",
    "%at = s32[] parameter(2)",
    "%f = f32[36,64]{1,0} fusion(%p, %row, %at), kind=kLoop, calls=%fused",
]


def test_an_update_in_place_counts_the_update():
    fused = computation("fused", *UPDATE[:-1], f"ROOT {UPDATE[-1]}")
    read, written = 2 * 64 + 4, 4 * 64
    assert estimate(UPDATED, fused).traffic_bytes == read + written


def test_an_update_that_is_read_again_counts_the_whole():
    again = "ROOT %n = f32[36,64]{1,0} negate(%u)"
    read, written = 4 * 36 * 64 + 2 * 64 + 4, 4 * 36 * 64
    assert estimate(UPDATED, computation("fused", *UPDATE, again)).traffic_bytes == read + written


def test_an_update_whose_result_is_also_summed_counts_the_whole():
    fused = computation(
        "fused",
        *UPDATE,
        "%init = f32[] constant(0)",
        "%r = f32[36]{0} reduce(%u, %init), dimensions={1}, to_apply=%sum",
        "ROOT %t = (f32[36,64]{1,0}, f32[36]{0}) tuple(%u, %r)",
    )
    shape = "(f32[36,64]{1,0}, f32[36]{0})"
    lines = [*UPDATED[:3], UPDATED[3].replace("%f = f32[36,64]{1,0}", f"%f = {shape}")]
    read, written = 4 * 36 * 64 + 2 * 64 + 4, 4 * 36 * 64 + 4 * 36
    assert estimate(lines, fused).traffic_bytes == read + written


def test_an_update_of_what_the_fusion_makes_writes_the_whole():
    fused = computation(
        "fused",
        "%p0 = f32[1,64]{1,0} parameter(0)",
        "%nought = f32[] constant(0)",
        "%b = f32[36,64]{1,0} broadcast(%nought), dimensions={}",
        "%zero = s32[] constant(0)",
        "ROOT %u = f32[36,64]{1,0} dynamic-update-slice(%b, %p0, %zero, %zero)",
    )
    lines = [
        "%row = f32[1,64]{1,0} parameter(0)",
        "%f = f32[36,64]{1,0} fusion(%row), kind=kLoop, calls=%fused",
    ]
    assert estimate(lines, fused).traffic_bytes == 4 * 64 + 4 * 36 * 64


def test_a_slice_of_a_view_counts_as_a_slice():
    fused = computation(
        "fused",
        "%p0 = bf16[36,64]{1,0} parameter(0)",
        "%b = bf16[36,8,8]{2,1,0} bitcast(%p0)",
        "%c = f32[36,8,8]{2,1,0} convert(%b)",
        "ROOT %s = f32[1,8,8]{2,1,0} slice(%c), slice={[0:1], [0:8], [0:8]}",
    )
    lines = [
        "%p = bf16[36,64]{1,0} parameter(0)",
        "%f = f32[1,8,8]{2,1,0} fusion(%p), kind=kLoop, calls=%fused",
    ]
    assert estimate(lines, fused).traffic_bytes == (2 + 4) * 64


def test_a_bare_update_counts_the_update_twice():
    lines = [
        *UPDATED[:1],
        "%row = f32[1,64]{1,0} parameter(1)",
        "%at = s32[] parameter(2)",
        "%u = f32[36,64]{1,0} dynamic-update-slice(%p, %row, %at, %at)",
    ]
    assert estimate(lines).traffic_bytes == 2 * 4 * 64 + 4


def test_the_gradient_of_an_embedding_reads_and_writes_the_rows_it_changes():
    table, rows, ids = "bf16[50304,4096]{1,0}", "bf16[32,1,4096]{2,1,0}", "s32[32,1]{1,0}"
    fused = computation(
        "fused",
        f"%p0 = {table} parameter(0)",
        f"%p1 = {ids} parameter(1)",
        f"%p2 = {rows} parameter(2)",
        f"ROOT %s = {table} scatter(%p0, %p1, %p2), to_apply=%sum",
    )
    lines = [
        f"%p = {table} parameter(0)",
        f"%ids = {ids} parameter(1)",
        f"%rows = {rows} parameter(2)",
        f"%f = {table} fusion(%p, %ids, %rows), kind=kInput, calls=%fused",
    ]
    assert estimate(lines, fused).traffic_bytes == 4 * 32 + 3 * 2 * 32 * 4096


def test_a_lookup_reads_the_rows_it_gathers():
    lines = [
        "%p = bf16[50304,4096]{1,0} parameter(0)",
        "%ids = s32[32,1]{1,0} parameter(1)",
        "%g = bf16[32,4096]{1,0} gather(%p, %ids), slice_sizes={1,4096}",
    ]
    assert estimate(lines).traffic_bytes == 4 * 32 + 2 * 2 * 32 * 4096


def test_of_a_conditional_the_dearer_branch_runs():
    branches = [
        computation(
            f"branch{n}", f"%p = f32[{n}]{{0}} parameter(0)", f"ROOT %c = f32[{n}]{{0}} copy(%p)"
        )
        for n in (100, 1000)
    ]
    lines = [
        "%which = s32[] parameter(0)",
        "%x = f32[100]{0} parameter(1)",
        "%y = f32[1000]{0} parameter(2)",
        "%c = f32[] conditional(%which, %x, %y), branch_computations={%branch100, %branch1000}",
    ]
    assert estimate(lines, *branches).traffic_bytes == 2 * 4 * 1000
