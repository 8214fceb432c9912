"""The roofline's wires, and what is said of a step's time."""

import dataclasses

import pytest
from test_roofline import (
    FAST,
    H100,
    LAYERS,
    PEAK,
    SLOW,
    STACKED,
    computation,
    estimate,
    loop,
    square,
)

from zero_jax.hlo import roofline
from zero_jax.hlo.targets import target


def gather(n, groups, size=64 * 1000, kind="all-gather", more=""):
    """A collective of `size` bf16 numbers, counted on its full side, that the device waits for."""
    given, result = (size // n, size) if kind == "all-gather" else (size, size // n)
    result = result if kind in ("all-gather", "reduce-scatter") else size
    return [
        f"%p = bf16[{given}]{{0}} parameter(0)",
        f"%c = bf16[{result}]{{0}} {kind}(%p), replica_groups={groups}, dimensions={{0}}{more}",
    ]


@pytest.mark.parametrize(
    ("kind", "rounds"), [("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)]
)
@pytest.mark.parametrize(
    ("n", "groups", "wire"),
    [
        (8, "[8,8]<=[64]", FAST),
        (4, "[16,4]<=[64]", FAST),
        (64, "{}", min(FAST, 8 * SLOW)),
        (16, "[4,16]<=[64]", min(FAST, 8 * SLOW)),
    ],
)
def test_a_ring_takes_its_bytes_over_the_wire(kind, rounds, n, groups, wire):
    t = estimate(gather(n, groups, kind=kind, more=", to_apply=%sum"))
    sent_bytes = rounds * 2 * 64 * 1000 * (n - 1) / n
    assert t.wire_bytes == pytest.approx(sent_bytes)
    assert t.seconds == t.wire_seconds == t.exposed_seconds == pytest.approx(sent_bytes / wire)
    assert t.kernel_seconds == t.covered_seconds == 0


@pytest.mark.parametrize(
    ("groups", "n", "wire"),
    [
        ("mesh['replica'=8,'data'=8] {'data'}", 8, FAST),
        ("mesh['replica'=8,'data'=8] {'replica'}", 8, SLOW),
        ("mesh['replica'=8,'data'=8] {'replica','data'}", 64, 8 * SLOW),
        ("mesh['replica'=16,'data'=4] {'replica'}", 16, 2 * SLOW),
        ("mesh['a'=8,'b'=8], device_ids=([8,8]T(1,0)) {'a'}", 8, FAST),
        ("mesh['a'=8,'b'=8] {'a':(1)2,'b'}", 16, 8 * SLOW),
        ("[8,8]<=[8,8]T(1,0)", 8, SLOW),
        ("[4,16]<=[16,4]T(1,0)", 16, 2 * SLOW),
        ("{{0,8},{1,9}}", 2, SLOW),
        ("{{0,1,8,9},{2,3,10,11}}", 4, 2 * SLOW),
    ],
)
def test_each_device_of_a_group_on_a_host_brings_its_own_slow_wire(groups, n, wire):
    t = estimate(gather(n, groups))
    assert t.wire_seconds == pytest.approx(2 * 64 * 1000 * (n - 1) / n / wire)


def test_the_fast_wire_is_the_limit_of_a_ring_over_hosts():
    aim = dataclasses.replace(H100, slow_wire=FAST)
    t = estimate(gather(64, "{}"), aim=aim)
    assert t.wire_seconds == pytest.approx(2 * 64 * 1000 * 63 / 64 / FAST)


@pytest.mark.parametrize(
    ("kind", "more", "fast", "slow"),
    [
        ("collective-permute", "{{0,1},{1,0}}", 1, 0),
        ("collective-permute", "{{0,1},{7,8}}", 0, 1),
        ("all-to-all", "[8,8]<=[64]", 7 / 8, 0),
        ("all-to-all", "[1,64]<=[64]", 7 / 64, 56 / 64),
        ("all-to-all", "[8,8]<=[8,8]T(1,0)", 0, 7 / 8),
    ],
)
def test_pairs_use_one_wire_each(kind, more, fast, slow):
    """Of an all-to-all over hosts the parts for devices of the same host stay in it."""
    key = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    t = estimate(
        ["%p = f32[6400]{0} parameter(0)", f"%c = f32[6400]{{0}} {kind}(%p), {key}={more}"]
    )
    assert t.wire_seconds == pytest.approx(4 * 6400 * (fast / FAST + slow / SLOW))


def test_a_group_of_one_takes_no_time():
    assert estimate(gather(1, "[64,1]<=[64]")).seconds == 0


def test_collectives_in_a_loop_run_in_every_trip():
    entry, body, condition = loop("%f = bf16[1,64,4096]{2,1,0} fusion")
    line = "%ag = bf16[64,64,4096]{2,1,0} all-gather(%f), replica_groups={}, dimensions={0}\n  %one"
    t = estimate(entry, STACKED, body.replace("%one", line, 1), condition)
    once = 2 * 64 * 64 * 4096 * 63 / 64 / (8 * SLOW)
    assert t.wire_seconds == t.exposed_seconds == pytest.approx(LAYERS * once)


def hidden_gather(width, numbers):
    """A gather of so many bf16 numbers over 64 devices, while a square product runs."""
    lines, flops, _ = square(width)
    full, part = f"bf16[{numbers}]{{0}}", f"bf16[{numbers // 64}]{{0}}"
    start = (
        f"%s = ({part}, {full}) all-gather-start(%g), replica_groups=[1,64]<=[64], dimensions={{0}}"
    )
    done = f"%d = {full} all-gather-done(%s)"
    body = [f"%g = {part} parameter(2)", *lines[:2], start, lines[2], done]
    return estimate(body), flops / PEAK, 2 * numbers * 63 / 64 / (8 * SLOW)


def test_a_short_gather_is_hidden_by_a_long_product():
    t, product, wire = hidden_gather(4096, 64 * 1000)
    assert product > wire, "not covered: the test shows nothing"
    assert t.wire_seconds == t.covered_seconds == pytest.approx(wire)
    assert t.exposed_seconds == 0
    assert t.seconds == pytest.approx(product)


def test_of_a_long_gather_the_device_waits_for_the_rest():
    t, product, wire = hidden_gather(4096, 64 * 1000 * 1000)
    assert wire > product, "covered: the test shows nothing"
    assert t.covered_seconds == pytest.approx(product)
    assert t.exposed_seconds == pytest.approx(wire - product)
    assert t.seconds == pytest.approx(wire)


# What is said of it.


def test_model_flops_are_a_fraction_of_the_peak():
    lines, flops, _ = square(4096)
    t = estimate(lines, model_flops=flops / 2)
    assert t.model_flops_fraction == pytest.approx(0.5)
    assert "50.0%" in roofline.format_step_time(t)


def test_the_summary_shows_the_seconds_in_aligned_lines():
    t = hidden_gather(4096, 64 * 1000 * 1000)[0]
    lines = roofline.format_step_time(t).splitlines()
    shown = [t.seconds, t.kernel_seconds, t.wire_seconds]
    assert [float(line.split()[1]) for line in lines] == pytest.approx(shown, abs=5e-5)
    assert len({line.index(" s ") for line in lines}) == 1


def test_assumptions_hold_the_figures_of_the_target():
    said = " ".join(estimate(gather(8, "[8,8]<=[64]")).assumptions)
    for figure in ("h100", "989.4 TFLOP/s", "3352 GB/s", "450 GB/s", "50 GB/s", "400 GB/s"):
        assert figure in said
    assert "conditional" not in said and "library" not in said


def test_library_calls_without_flops_and_conditional_collectives_are_named():
    branch = computation("branch", *gather(8, "[8,8]<=[64]"))
    lines = [
        "%p = bf16[8000]{0} parameter(0)",
        "%which = pred[] parameter(1)",
        "%c = bf16[64000]{0} conditional(%which, %p, %p), branch_computations={%branch, %branch}",
        '%a = bf16[8000]{0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"',
    ]
    said = " ".join(estimate(lines, branch).assumptions)
    assert "dearer branch" in said and "__cudnn$fmhaSoftmax" in said


def test_a_target_without_peaks_is_an_error():
    with pytest.raises(ValueError, match=r"'cpu' comes without .*take an accelerator"):
        estimate(square(8)[0], aim=target("cpu"))


def test_a_loop_of_unknown_length_is_an_error():
    entry, body, condition = loop("%f = bf16[1,64,4096]{2,1,0} fusion", config="{}")
    unknown = condition.replace("%n = s32[] constant(36)", "%n = s32[] remainder(%i, %i)")
    with pytest.raises(ValueError, match=r"the loop l has no trip count .*jax\.lax\.scan"):
        estimate(entry, STACKED, body, unknown)
    known = estimate(entry, STACKED, body, condition)  # derived from the condition
    assert known.seconds > 0
