"""The roofline: seconds of literal programs for 64 H100 against formulas written here."""

import dataclasses
import subprocess
import types

import pytest
from hlo_lines import computation, gather, loop, program
from test_flops import HALF, QKV, B, D, N, T, attention

from zero_jax.hlo import aot, collectives, hlo_text, kernel_table, latencies, roofline
from zero_jax.hlo.targets import target, topology

H100 = target("h100")
PEAK, MEMORY, FAST, SLOW = H100.flops, H100.memory_bandwidth, H100.fast_wire, H100.slow_wire
WIRE = 8 * SLOW  # of a ring over all hosts

# A product of two square matrices in bf16.
WIDTH = 4096
SQUARE = f"bf16[{WIDTH},{WIDTH}]{{1,0}}"
XW = {"x": SQUARE, "w": SQUARE}
FLOPS, SIZE, COPIED = 2 * WIDTH**3, 3 * 2 * WIDTH**2, 2 * 2 * WIDTH**2
PRODUCT = FLOPS / PEAK  # seconds
COPY = f"%c = bf16[{WIDTH},{WIDTH}]{{0,1}} copy(%dot)"


def dot(name="dot", of="x"):
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%{name} = {SQUARE} dot(%{of}, %w), {dims}"


def module(shapes, *lines, computations=()):
    text = program(shapes, *lines, computations=computations, header="num_partitions=64")
    parsed = hlo_text.parse(text)
    return parsed, collectives.of_program(parsed, None)


def estimate(shapes, *lines, computations=(), aim=H100, model_flops=None):
    return roofline.step_time(*module(shapes, *lines, computations=computations), aim, model_flops)


def test_each_kernel_takes_the_longer_of_its_two_times():
    assert FLOPS / PEAK > SIZE / MEMORY, "not bound by compute: the test shows nothing"
    t = estimate(XW, dot(), model_flops=FLOPS / 2)
    assert (t.flops, t.traffic_bytes) == (FLOPS, SIZE)
    assert t.seconds == t.kernel_seconds == t.compute_seconds == pytest.approx(PRODUCT)
    assert t.memory_seconds == pytest.approx(SIZE / MEMORY)
    assert t.model_flops_fraction == pytest.approx(0.5)
    assert "50.0%" in roofline.format_step_time(t)

    t = estimate(XW, dot(), COPY)
    assert t.kernel_seconds == pytest.approx(PRODUCT + COPIED / MEMORY)
    assert t.kernel_seconds > max(t.compute_seconds, t.memory_seconds)
    assert t.memory_seconds == pytest.approx((SIZE + COPIED) / MEMORY)
    assert t.model_flops_fraction is None


ROWS, WIDE_ROW = "f32[36,64]{1,0}", "bf16[1,64]{1,0}"
TABLE, IDS, TOKENS = "bf16[50304,4096]{1,0}", "s32[32,1]{1,0}", "bf16[32,1,4096]{2,1,0}"
STACK, LAYER = "f32[36,64,4096]{2,1,0}", "bf16[1,64,4096]{2,1,0}"
UPDATE = [*("%c = f32[1,64]{1,0} convert(%row)", "%zero = s32[] constant(0)"),
          f"%u = {ROWS} dynamic-update-slice(%p, %c, %at, %zero)"]  # fmt: skip
ALL = {"p": ROWS, "row": WIDE_ROW, "at": "s32[]"}
BOTH = f"({ROWS}, f32[36]{{0}})"
SCATTERED = {"p": TABLE, "ids": IDS, "rows": TOKENS}
SLICED = {"p": STACK, "at": "s32[]"}
# fmt: off
CALLED = [computation(*given) for given in [
    ("layer", SLICED, "%zero = s32[] constant(0)",
     "%ds = f32[1,64,4096]{2,1,0} dynamic-slice(%p, %at, %zero, %zero)",
     f"%c = {LAYER} convert(%ds)"),
    ("updated", ALL, *UPDATE),
    ("also_summed", ALL, *UPDATE, "%init = f32[] constant(0)",
     "%r = f32[36]{0} reduce(%u, %init), dimensions={1}, to_apply=%add",
     f"%t = {BOTH} tuple(%u, %r)"),
    ("embedded", SCATTERED, f"%s = {TABLE} scatter(%p, %ids, %rows), to_apply=%add")]]
READ, WRITTEN = 2 * 64 + 4, 4 * 36 * 64  # a row in bf16 with its number; all rows in fp32


def fused(called, shape=ROWS, operands="%p, %row, %at"):
    return f"%f = {shape} fusion({operands}), kind=kLoop, calls=%{called}"


TRAFFIC = {
    "a byte a pred": ({"p": "f32[512]"}, ["%c = pred[512] compare(%p, %p), direction=LT"],
                      (4 + 1) * 512),
    "to the side": (
        {"p": "f32[1000]"}, ["%s = (f32[1000], f32[1000], u32[]) copy-start(%p)",
                             "%d = f32[1000] copy-done(%s)"], 2 * 4 * 1000),
    "an update in place": (ALL, [fused("updated")], READ + 4 * 64),
    "an update summed": (ALL, [fused("also_summed", BOTH)], WRITTEN + READ + WRITTEN + 4 * 36),
    # The gradient of an embedding reads and writes the rows it changes, a lookup those it gathers.
    "a slice of a stack": (SLICED, [fused("layer", LAYER, "%p, %at")], 4 + 64 * 4096 * (4 + 2)),
    "a scatter": (SCATTERED, [fused("embedded", TABLE, "%p, %ids, %rows")],
                  4 * 32 + 3 * 2 * 32 * 4096),
    "a gather": (SCATTERED, ["%g = bf16[32,4096]{1,0} gather(%p, %ids), slice_sizes={1,4096}"],
                 4 * 32 + 2 * 2 * 32 * 4096)}
# fmt: on


@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_that_kernels_read_and_write(name):
    shapes, lines, want = TRAFFIC[name]
    t = estimate(shapes, *lines, computations=CALLED)
    assert (t.flops, t.traffic_bytes) == (0, want)
    assert t.seconds == t.memory_seconds == pytest.approx(want / MEMORY)


SENT = 64 * 1000  # bf16 numbers of the full side of a collective that the device waits for
SUMS = "replica_groups={}, dimensions={0}, to_apply=%add"


def sent(kind, n, how, aim=H100):
    given = SENT // n if kind == "all-gather" else SENT
    result = SENT // n if kind == "reduce-scatter" else SENT
    line = f"%c = bf16[{result}] {kind}(%p), {how}, dimensions={{0}}, to_apply=%add"
    return estimate({"p": f"bf16[{given}]"}, line, aim=aim)


RINGS = [
    *((kind, 8, "[8,8]<=[64]", FAST) for kind in ("all-gather", "reduce-scatter", "all-reduce")),
    ("all-gather", 64, "{}", WIRE),
    # Each device of a group on a host brings its own slow wire.
    ("all-gather", 8, "mesh['replica'=8,'data'=8] {'replica'}", SLOW),
    ("all-gather", 16, "mesh['replica'=16,'data'=4] {'replica'}", 2 * SLOW),
    ("all-gather", 8, "mesh['a'=8,'b'=8], device_ids=([8,8]T(1,0)) {'a'}", FAST),
    ("all-gather", 16, "mesh['a'=8,'b'=8] {'a':(1)2,'b'}", 8 * SLOW),
    ("all-gather", 8, "[8,8]<=[8,8]T(1,0)", SLOW),
    ("all-gather", 4, "{{0,1,8,9},{2,3,10,11}}", 2 * SLOW),
    ("all-gather", 1, "[64,1]<=[64]", FAST),
]


@pytest.mark.parametrize(("kind", "n", "groups", "wire"), RINGS)
def test_a_ring_takes_its_bytes_over_the_wire(kind, n, groups, wire):
    t = sent(kind, n, f"replica_groups={groups}")
    sent_bytes = (1 + (kind == "all-reduce")) * 2 * SENT * (n - 1) / n
    assert t.communication_bytes == pytest.approx(sent_bytes)
    assert t.seconds == t.communication_seconds == t.exposed_seconds
    assert t.seconds == pytest.approx(sent_bytes / wire)
    assert t.kernel_seconds == t.overlapped_seconds == 0
    # Of a ring over hosts the fast wire is the limit.
    t = sent("all-gather", 64, "replica_groups={}", dataclasses.replace(H100, slow_wire=FAST))
    assert t.communication_seconds == pytest.approx(2 * SENT * 63 / 64 / FAST)


PAIRS = [
    ("collective-permute", "source_target_pairs={{0,1},{1,0}}", 1, 0),
    ("collective-permute", "source_target_pairs={{0,1},{7,8}}", 0, 1),
    # Parts for devices of the same host stay in it.
    ("all-to-all", "replica_groups=[8,8]<=[64]", 7 / 8, 0),
    ("all-to-all", "replica_groups=[1,64]<=[64]", 7 / 64, 56 / 64),
]


@pytest.mark.parametrize(("kind", "how", "fast", "slow"), PAIRS)
def test_pairs_use_one_wire_each(kind, how, fast, slow):
    seconds = sent(kind, 64, how).communication_seconds
    assert seconds == pytest.approx(2 * SENT * (fast / FAST + slow / SLOW))


# Overlap: collectives share one wire, products cover them.


def numbers_for(seconds):
    """Returns a multiple of 64 bf16 numbers whose collective takes about so long, and its time."""
    numbers = round(seconds * WIRE / 2 / 64) * 64
    return numbers, 2 * numbers * 63 / 64 / WIRE


def given(numbers, name="g"):
    return {name: f"bf16[{numbers // 64}]"}


@pytest.mark.parametrize("share", [0.1, 3])
def test_a_gather_is_exposed_by_what_the_product_does_not_cover(share):
    numbers, wire = numbers_for(share * PRODUCT)
    start, done = gather("a", numbers, 64, "g")
    t = estimate(XW | given(numbers), start, dot(), done)
    assert t.communication_seconds == pytest.approx(wire)
    assert t.overlapped_seconds == pytest.approx(min(wire, PRODUCT))
    assert t.exposed_seconds == pytest.approx(max(0, wire - PRODUCT))
    assert t.seconds == pytest.approx(max(PRODUCT, wire))
    lines = roofline.format_step_time(t).splitlines()
    shown = [t.seconds, t.kernel_seconds, t.communication_seconds]
    assert [float(line.split()[1]) for line in lines] == pytest.approx(shown, abs=5e-5)
    assert len({line.index(" s ") for line in lines}) == 1


def test_collectives_wait_for_each_other():
    numbers, once = numbers_for(0.8 * PRODUCT)
    (a, a_done), (b, b_done) = (gather(name, numbers, 64, "g") for name in "ab")
    t = estimate(XW | given(numbers), a, b, dot(), a_done, b_done)
    assert once < PRODUCT < 2 * once, "one or both fit: the test shows nothing"
    assert t.communication_seconds == pytest.approx(2 * once)
    assert t.exposed_seconds == pytest.approx(2 * once - PRODUCT)
    assert t.overlapped == pytest.approx(PRODUCT / (2 * once))
    summed = f"%s = bf16[{numbers // 64}] all-reduce(%g), {SUMS}"
    t = estimate(XW | given(numbers), a, dot(), summed, a_done)
    assert t.exposed_seconds == pytest.approx(t.communication_seconds - once), "a sum that blocks"


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_every_turn_of_a_loop_waits_alike_and_the_first_for_a_gather_around_it(share):
    numbers, small = numbers_for(share * PRODUCT)
    start, done = gather("a", numbers, 64, "g")
    body = [f"%g = bf16[{numbers // 64}] constant(0)", start, dot(), done]
    lines, texts = loop("l", XW, XW, body, trips=100)
    t = estimate(XW, *lines, computations=texts)
    assert t.kernel_seconds == pytest.approx(100 * PRODUCT)
    assert t.communication_seconds == pytest.approx(100 * small)
    assert t.exposed_seconds == pytest.approx(100 * max(0, small - PRODUCT), abs=1e-12)
    if share < 1:
        numbers, large = numbers_for(10 * PRODUCT)
        start, done = gather("b", numbers, 64, "big")
        t = estimate(XW | given(numbers, "big"), start, *lines, done, computations=texts)
        assert t.communication_seconds == pytest.approx(large + 100 * small)
        assert t.exposed_seconds == pytest.approx(large + small - PRODUCT)


def test_of_a_conditional_the_branch_that_takes_longest_runs():
    numbers, wire = numbers_for(PRODUCT)
    line = f"%a = bf16[{numbers}] all-gather(%g), replica_groups={{}}, dimensions={{0}}"
    calls = [computation("one", given(numbers), line), computation("none", given(numbers))]
    choice = "conditional(%which, %g, %g), branch_computations={%none, %one}"
    shapes = given(numbers) | {"which": "pred[]"}
    library = '%y = bf16[9] custom-call(%g), custom_call_target="__cudnn$norm"'
    t = estimate(shapes, library, f"%c = bf16[{numbers}] {choice}", computations=calls)
    assert t.exposed_seconds == pytest.approx(wire)
    said = " ".join(t.assumptions)
    peaks = ("989.4 TFLOP/s", "3352 GB/s", "450 GB/s", "50 GB/s", "400 GB/s")
    for part in ("expensive branch", "__cudnn$norm", "h100", *peaks):
        assert part in said
    said = " ".join(sent("all-gather", 64, "replica_groups={}").assumptions)
    assert not any(part in said for part in ("conditional", "library", "packed"))


def test_attention_takes_the_time_of_its_products_and_packed_rows_are_assumed_short():
    t = estimate(QKV, attention(documents=64))
    assert t.compute_seconds == pytest.approx(4 * B * N * HALF * D / PEAK)
    assert t.traffic_bytes == 2 * (B * T * (N + 2) * D + 9)
    assert "64 documents" in " ".join(t.assumptions)


def test_a_wrapped_collective_is_under_way_until_its_done():
    numbers, wire = numbers_for(0.5 * PRODUCT)
    part, full = f"bf16[{numbers // 64}]", f"bf16[{numbers}]"
    called = computation("wrapped", {"p": full}, f"%r = {part} reduce-scatter(%p), {SUMS}")
    start = f"%s = (({full}), {part}) async-start(%g), calls=%wrapped"
    done = f"%d = {part} async-done(%s), calls=%wrapped"
    t = estimate(XW | {"g": full}, start, dot(), done, computations=[called])
    assert t.communication_seconds == pytest.approx(wire)
    assert (t.exposed_seconds, t.overlapped) == (0, 1)


# Latencies for XLA's scheduler.

AT_ONCE = 3


def told(shapes, *lines, computations=()):
    return latencies.modelled(*module(shapes, *lines, computations=computations), H100, AT_ONCE)


def test_kernels_take_the_longer_of_their_two_times_in_loops_too():
    found = told(XW, dot(), COPY)
    assert found == {"dot": pytest.approx(PRODUCT), "c": pytest.approx(COPIED / MEMORY)}
    first, second = latencies.text_of({"dot.1": 2e-3, "all-gather-start": 4.5e-7}).splitlines()
    assert first == 'costs { name: "dot.1" cost_us: 2000.000 }'
    assert second == 'costs { name: "all-gather-start" cost_us: 0.450 }'
    line = f"%f = {LAYER} fusion(%w, %i), kind=kLoop, calls=%layer"
    lines, texts = loop("l", {"w": STACK}, ["w"], [line])
    assert set(told({"w": STACK}, *lines, computations=[*CALLED, *texts])) == {"f", "go"}


def scattered(name, numbers, of):
    part, full = f"bf16[{numbers // 64}]", f"bf16[{numbers}]"
    start = f"%{name} = (({full}), {part}) reduce-scatter-start(%{of}), {SUMS}"
    return start, f"%{name}.done = {part} reduce-scatter-done(%{name})"


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_sum_takes_longer_by_what_it_could_have_begun_earlier(share):
    """At most twice as long, and only if no product waits for it; a gather never."""
    numbers, wire = numbers_for(share * PRODUCT)
    shapes = XW | {"given": f"f32[{numbers}]"}
    of = f"%g = bf16[{numbers}] convert(%given)"
    start, done = scattered("s", numbers, "g")
    longer = min(PRODUCT, AT_ONCE * wire)
    late = told(shapes, dot(), of, start, done)
    assert late["s"] == pytest.approx(AT_ONCE * wire + longer)
    after = f"%y = {SQUARE} fusion(%s.done, %dot), kind=kLoop, calls=%add"
    for lines in ([of, start, dot(), done], [dot(), of, start, done, after, dot("dot2", "y")]):
        assert told(shapes, *lines)["s"] == pytest.approx(AT_ONCE * wire)
    start, done = gather("s", numbers, 64, "g")
    gathered = told(XW | given(numbers), dot(), start, done)
    assert gathered["s-start"] == pytest.approx(AT_ONCE * wire)


def test_without_peaks_or_trip_counts_there_is_no_step_time():
    for aim, trips, words in (target("cpu"), 8, "'cpu'"), (H100, None, "loop l .*trip count"):
        lines, texts = loop("l", XW, XW, [dot()], trips=trips)
        with pytest.raises(ValueError, match=words):
            estimate(XW, *lines, computations=texts, aim=aim)


ENDS = [  # exit code, what is printed, runs, error
    # Products are compiled as a library's.
    (1, "No supported config found for HLO: %x", 2, None, ""),
    (1, "x", 1, RuntimeError, "h100 (.|\n)*x"),
    (-6, "x", 1, ValueError, "h100 .*-6(.|\n)*pip install"),
    (1, "no ptxas here", 1, ValueError, "ptxas(.|\n)*pip install"),
    (None, "", 1, RuntimeError, "h100 .* 1 s"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "said", "runs", "error", "words"), ENDS)
def test_how_a_compiler_ends(code, said, runs, error, words, monkeypatch, tmp_path):
    tried = []

    def run(command, env, timeout, **_):
        tried.append(env["XLA_FLAGS"])
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return types.SimpleNamespace(returncode=0 if len(tried) == 2 else code, stderr=said)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(aot, "TIMEOUT", 1.0)
    with pytest.raises(error, match=words) if error else pytest.warns(UserWarning, match="h100"):
        aot._run_child(tmp_path, H100, 8)
    assert len(tried) == runs
    assert ("triton_gemm=false" in tried[-1]) == (runs == 2)


def test_devices_fill_hosts_or_a_box():
    cases = [("h100", 64, "8x1x8"), ("h100", 4, "1x1x4"), ("v5p", 64, "4x4x4"), ("v5p", 8, "2x2x2")]
    for name, devices, want in cases:
        assert topology(target(name), devices) == want
        assert topology(target(name), devices, f"1X1X{devices}") == f"1x1x{devices}"
    assert aot.check(target("cpu"), 64) == ""


def test_kernels_are_grouped_by_operation_and_line_and_sum_to_the_kernels_of_the_step():
    meta = 'metadata={{op_name="{}" stack_frame_id=0}}'
    copy = f"%copy.{{}} = bf16[{WIDTH},{WIDTH}]{{{{0,1}}}} copy(%{{}})"
    body = [dot(), copy.format(1, "dot") + ", " + meta.format("jit(f)/transpose(jvp(g))/copy")]
    lines, computations = loop("layers", XW, ["x", "w"], body, ["copy.1", "w"], trips=5)
    last = copy.format(2, "layers_x")
    program, _ = module(XW, *lines, last, computations=computations)
    groups = kernel_table.kernel_groups(program, H100)
    found = [(g.operation, g.is_backward, g.runs, g.bytes) for g in groups]
    assert found == [
        *(("copy", True, 5, 5 * COPIED), ("copy", False, 1, COPIED)),
        *(("go", False, 6, 6 * 5), ("dot", False, 5, 5 * SIZE)),  # "go" is the loop's condition
    ]
    excess = [g.excess for g in groups]
    assert excess == pytest.approx([5 * COPIED / MEMORY, COPIED / MEMORY, 30 / MEMORY, 0])
    times = estimate(XW, *lines, last, computations=computations)
    assert sum(g.seconds for g in groups) == pytest.approx(times.kernel_seconds)
    text = kernel_table.format_kernels(groups)
    assert f"{1e3 * sum(excess):.2f} of {1e3 * times.kernel_seconds:.2f} ms" in text
