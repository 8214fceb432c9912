"""Pipelines: closed forms beside a simulator, and the table of ZeRO 3 beside them on its page."""

import pathlib
import re
from fractions import Fraction
from itertools import product

import pytest
from pipeline_orders import gpipe, interleaved, one_f_one_b, woven, zero_bubble
from pipeline_simulator import APART, WHOLE, peak, run, sent, stashed

from benchmarks.paper import pipelines, tables
from benchmarks.paper.pipelines import schedules
from zero_jax.hlo.targets import target
from zero_jax.models import families
from zero_jax.models.gpt_config import GPTConfig

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
STAGES = range(1, 9)
GRID = [(p, m) for p in STAGES for m in (p, p + 1, 2 * p, 3 * p + 1)]
FEW = [(p, m) for p in STAGES for m in range(1, p)]
MULTIPLES = [(p, k * p, v) for p in STAGES for k in (1, 2, 4) for v in (1, 2, 3, 4)]


def held(orders):
    return max(map(peak, orders))


@pytest.mark.parametrize(("p", "m"), GRID + FEW)
def test_gpipe_waits_for_p_less_one_passes_and_holds_every_micro_batch(p, m):
    claim, orders = schedules(p, m)["GPipe"], gpipe(p, m)
    assert run(orders, WHOLE).idle == claim.idle == 3 * (p - 1)
    assert held(orders) == claim.in_flight == m
    assert claim.idle_share == Fraction(p - 1, m + p - 1)  # GPipe's bubble
    assert claim.idle / (3 * m) == Fraction(p - 1, m)  # the same as Megatron counts it


@pytest.mark.parametrize(("p", "m"), GRID + FEW)
def test_1f1b_waits_as_long_and_holds_p_at_most(p, m):
    claim, orders = schedules(p, m)["1F1B"], one_f_one_b(p, m)
    assert run(orders, WHOLE).idle == claim.idle == schedules(p, m)["GPipe"].idle
    assert held(orders) == claim.in_flight == min(p, m)


@pytest.mark.parametrize(("p", "m"), GRID)
def test_gpipe_and_1f1b_wait_for_p_less_one_passes_however_long_these_are(p, m):
    recomputed = {"F": 1.0, "B": 3.0}
    for orders in (gpipe(p, m), one_f_one_b(p, m)):
        assert run(orders, recomputed).idle == (p - 1) * 4


@pytest.mark.parametrize(("p", "m", "v"), MULTIPLES)
def test_interleaved_waits_a_vth_and_holds_little_more(p, m, v):
    claim, orders = schedules(p, m, v)["interleaved"], interleaved(p, m, v)
    assert run(orders, WHOLE).idle == pytest.approx(float(claim.idle))
    assert claim.idle == Fraction(3 * (p - 1), v)
    assert held(orders) == pytest.approx(float(claim.in_flight))
    if m > p:
        assert claim.in_flight == p * (1 + Fraction(p - 1, p * v))  # arXiv:2205.05198


@pytest.mark.parametrize(("p", "m", "v"), MULTIPLES)
def test_elements_between_stages_are_counted(p, m, v):
    claim, orders = schedules(p, m, v)["interleaved"], interleaved(p, m, v)
    most = max(sent(i, order, p) for i, order in enumerate(orders))
    assert most == claim.hops * m
    if v == 1:
        for other in (gpipe(p, m), one_f_one_b(p, m), zero_bubble(p, m, 1), zero_bubble(p, m, 2)):
            assert most == max(sent(i, order, p) for i, order in enumerate(other))


@pytest.mark.parametrize(("p", "m"), GRID + FEW)
def test_zb_h1_waits_a_third_of_1f1b_and_holds_as_much(p, m):
    claim, orders = schedules(p, m)["ZB-H1"], zero_bubble(p, m, 1)
    counted = run(orders, APART)
    assert counted.idle == counted.idle_between == claim.idle
    assert held(orders) == claim.in_flight == min(p, m)
    if m >= p:
        assert claim.idle == schedules(p, m)["1F1B"].idle / 3


@pytest.mark.parametrize(("p", "m"), [*GRID, *FEW, *((p, 2 * p - 1) for p in STAGES)])
def test_zb_h2_waits_for_nothing_from_2p_less_one_on(p, m):
    claim, orders = schedules(p, m)["ZB-H2"], zero_bubble(p, m, 2)
    assert run(orders, APART).idle_between == claim.idle
    assert held(orders) == claim.in_flight == min(m, 2 * p - 1)
    assert (claim.idle == 0) == (m >= 2 * p - 1)


@pytest.mark.parametrize("p", STAGES)
def test_before_a_global_norm_zb_h2_waits_as_long_as_zb_h1(p):
    for m in (2 * p - 1, 2 * p, 4 * p):
        assert run(zero_bubble(p, m, 2), APART).idle == schedules(p, m)["ZB-H1"].idle


@pytest.mark.parametrize("times", [t for t in product((1, 2, 3), repeat=3) if t[2] == min(t)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_table_2_of_zero_bubble_holds_where_nothing_is_shorter_than_w(p, times):
    f, b, w = times
    taken = {"F": f, "B": b, "W": w}
    for m in (2 * p, 4 * p):
        whole = {"F": f, "B": b + w}
        assert run(one_f_one_b(p, m), whole).idle == (p - 1) * (f + b + w)
        assert run(zero_bubble(p, m, 1), taken).idle_between == (p - 1) * (f + b - w)
        assert run(zero_bubble(p, m, 2), taken).idle_between == (p - 1) * (f + b - 2 * w)


def test_it_does_not_hold_where_w_is_longest():
    # Its size would be nothing or less; the handcrafted order still waits for p-1 forward passes.
    taken = {"F": 1, "B": 1, "W": 2}
    assert run(zero_bubble(4, 16, 1), taken).idle_between == 3 > 3 * (1 + 1 - 2)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("m_w", [0.25, 0.5, 1.0])
def test_activations_of_zero_bubble_are_those_of_its_section_2_3(p, m_w):
    orders = {ahead: zero_bubble(p, 4 * p, ahead) for ahead in (1, 2)}
    for i in range(1, p + 1):  # workers count from 1 there
        assert peak(orders[1][i - 1], m_w) == (p - i + 1) + (i - 1) * m_w
        assert peak(orders[2][i - 1], m_w) == (2 * p - 2 * i + 1) + (2 * i - 2) * m_w


@pytest.mark.parametrize("p", STAGES)
def test_pipedream_never_waits_once_it_runs(p):
    orders = one_f_one_b(p, 6 * p)
    counted = run(orders, WHOLE)
    for i, order in enumerate(orders):
        start = counted.starts[i]["B", 0, p]  # the pipe is full
        end = counted.ends[i]["F", 0, 6 * p - 1]
        inside = [x for x in order if start <= counted.starts[i][x] < end]
        assert sum(WHOLE[kind] for kind, _, _ in inside) == end - start
    assert schedules(p, 6 * p)["PipeDream"].idle == 0


@pytest.mark.parametrize("p", STAGES)
def test_pipedream_keeps_p_less_i_versions_and_is_late_by_one_less(p):
    counted = [stashed(order) for order in one_f_one_b(p, 4 * p)]
    assert counted == [(p - i, p - 1 - i) for i in range(p)]
    claim = schedules(p, 4 * p)["PipeDream"]
    assert (claim.versions, claim.late) == counted[0]
    assert claim.in_flight == held(one_f_one_b(p, 4 * p))


def test_an_order_that_can_not_run_is_caught():
    p, m, v = 4, 8, 2
    good = interleaved(p, m, v)
    short = [woven(*parts(order), p - 1 - i) for i, order in enumerate(good)]  # 1F1B's warm-up
    with pytest.raises(ValueError, match=r"deadlock: device 0 at \('B', 1, 0\)"):
        run(short, WHOLE)
    early = [[("W", 0, 0), ("F", 0, 0), ("B", 0, 0)]]
    with pytest.raises(ValueError, match=r"device 0 at \('W', 0, 0\)"):
        run(early, APART)
    with pytest.raises(ValueError, match="same passes"):
        run([*gpipe(3, 2), gpipe(3, 2)[0][:-1]], WHOLE)


def parts(order):
    return [x for x in order if x[0] == "F"], [x for x in order if x[0] == "B"]


@pytest.mark.parametrize("p", [3, 4, 8])
def test_w_right_behind_b_is_not_zb_h1(p):
    # A mistake that the counts above would catch: it idles longer than the closed form says.
    orders = [
        [x for kind, c, row in order for x in ([(kind, c, row)] + [("W", c, row)] * (kind == "B"))]
        for order in one_f_one_b(p, 4 * p)
    ]
    assert run(orders, APART).idle > schedules(p, 4 * p)["ZB-H1"].idle


@pytest.mark.parametrize("p", range(2, 9))
def test_the_fewest_micro_batches_for_a_tenth(p):
    fewest = pipelines.fewest
    assert fewest("GPipe", p) == fewest("1F1B", p) == 9 * (p - 1)
    assert fewest("ZB-H1", p) == max(3 * (p - 1), p)
    # 9·(2p-1-m) idle for 3m of work: a few less than the 2p-1 of which nothing idles
    assert fewest("ZB-H2", p) == -(-9 * (2 * p - 1) // 12)
    assert fewest("PipeDream", p) == 1
    for v in (1, 2, 4):
        assert fewest("interleaved", p, v) == p * -(-9 * (p - 1) // (v * p))


def test_states_and_elements_are_those_of_zero_on_a_stage():
    psi, p, n = 8e9, 8, 64
    plain, zero, stale = (schedules(p, 32)[x] for x in ("1F1B", "1F1B, ZeRO 1", "PipeDream"))
    assert plain.state_bytes(psi, n) == 16 * psi / p
    assert zero.state_bytes(psi, n) == 4 * psi / p + 12 * psi / n
    assert stale.state_bytes(psi, n) == (16 + 2 * 7) * psi / p
    assert plain.parameter_elements(psi, n) == zero.parameter_elements(psi, n) == 2 * psi / p
    assert stale.parameter_elements(psi, n) == 32 * 2 * psi / p
    assert plain.parameter_elements(psi, p) == 0


def step_seconds(compute, idle, sent, wire):
    return max(compute, sent / wire) + idle


@pytest.mark.parametrize(
    ("zero", "pipe", "idle"), [(300, 100, 1), (300, 100, 0), (300, 250, 4), (300, 290, 0.1)]
)
def test_below_its_bandwidth_a_pipeline_is_shorter_and_above_it_is_not(zero, pipe, idle):
    wire = pipelines.shorter_below(zero, pipe, 2, idle)
    for factor in (0.2, 0.5, 0.9, 0.99):
        assert step_seconds(2, idle, pipe, wire * factor) < step_seconds(2, 0, zero, wire * factor)
    for factor in (1.01, 1.1, 2, 10):
        assert step_seconds(2, idle, pipe, wire * factor) >= step_seconds(2, 0, zero, wire * factor)


def setting(**changes):
    config = GPTConfig(layers=36, width=4096, heads=32)
    run_on = {"seq": 1024, "device": target("h100"), "devices": 64, "stages": 4}
    return pipelines.Setting(**{"config": config, "micro_batches": 16, **run_on, **changes})


def test_all_rows_are_of_one_batch_on_the_same_devices():
    of, psi = setting(rows=2), setting().psi
    made = {row.schedule.name: row for row in pipelines.compare(of)}
    held = {name: of.held_bytes(row.schedule.in_flight) for name, row in made.items()}
    row = tables.activations(36, 4096, 1024, 1)  # of the whole model
    at_once, parts = made["ZeRO 3"], made["ZeRO 3, 4 micro-batches"]
    # 16·2/4 rows a device
    assert (held["ZeRO 3"], held["ZeRO 3, 4 micro-batches"]) == (8 * row, 2 * row)
    assert at_once.states == 16 * psi / 64
    assert (at_once.parameter_bytes, parts.parameter_bytes) == (6 * psi, 4 * 6 * psi)
    assert held["GPipe"] == held["ZeRO 3"] and held["1F1B"] == 2 * row
    assert made["1F1B"].parameter_bytes == 2 * 2 * psi / 4
    assert made["1F1B"].activation_bytes == 16 * 2 * 2 * (2 * 1024 * 4096)
    assert (at_once.least_rows, made["1F1B"].least_rows) == (64 * 2, 27 * 2 * 16)
    flops = families.flops_per_token(of.config, 1024) * 8 * 1024
    assert of.seconds == flops / (0.5 * target("h100").flops)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--pipeline 3", "--pipeline 3 must .*divide --devices 64"),
        ("--pipeline 1", "--pipeline 1 must be at least 2"),
        ("--micro-batches 18", "--micro-batches 18 must be a multiple of --pipeline 8"),
        ("--chunks 10", "--chunks 10: 8 stages have 36 layers"),
        ("--seq 0", "seq=0"),
        ("--target cpu", "cpu comes without figures.*h100"),
        ("--batch-per-device 3", "24 rows of a pipeline .* --micro-batches 32"),
    ],
)
def test_settings_that_make_no_pipeline_are_an_error(args, message, capsys):
    with pytest.raises(SystemExit):
        pipelines.main(args.split())
    assert re.search(message, capsys.readouterr().err)


SHAPES = [("7.5b", 64, 4), ("100b", 1000, 25), ("mixtral-8x7b", 64, 8), ("nano", 8, 2)]


@pytest.mark.parametrize(("model", "devices", "p"), SHAPES)
def test_the_command_prints_every_way(model, devices, p, capsys):
    args = f"--model {model} --devices {devices} --pipeline {p} --micro-batches {4 * p}"
    pipelines.main([*args.split(), "--batch-per-device", "8"])
    printed = capsys.readouterr().out
    names = re.findall(
        r"^(ZeRO 3|GPipe|1F1B|interleaved, v=2|ZB-H1|ZB-H2|PipeDream)", printed, re.M
    )
    assert len(names) == 9
    psi = families.num_params(families.preset(model))
    assert re.search(rf"^GPipe +{16 * psi / p / 1e9:.2f} ", printed, re.M)
    assert f"{4 * p} micro-batches of 2, or 8 a device" in printed


def test_stages_that_are_not_even_are_reported(capsys):
    pipelines.main(["--pipeline", "8"])
    # 36 layers: the longest of 8 stages has 5 where 4.5 are its share
    assert "8 stages of 4 or 5, for which 10% more idle, not counted" in capsys.readouterr().out


def blocks():
    pattern = r"```sh\npython benchmarks/paper/pipelines.py (.*?)\n```\n\n```text\n(.*?)```"
    return re.findall(pattern, PAGE, re.S)


def test_the_page_shows_what_the_command_prints(capsys):
    assert len(blocks()) == 2
    for args, text in blocks():
        pipelines.main(args.split())
        assert capsys.readouterr().out == text


def test_the_page_explains_every_column():
    header = blocks()[0][1].splitlines()[1]
    columns = [name.strip() for name in re.split(r"  +", header.strip())]
    explained = re.findall(r"^- \*\*(.*?)\*\* (?:are|is)", PAGE, re.M)
    assert explained == columns


def shown(block):
    """The figures of a table, by row and column."""
    header, *rows = (line for line in block.splitlines()[1:] if line and line[0] != "-")
    names = re.split(r"  +", header.strip())
    cells = [re.split(r"  +", row.strip()) for row in rows]
    return {name: dict(zip(reversed(names), reversed(row), strict=False)) for name, *row in cells}


def test_what_the_page_says_the_tables_show():
    trillion, llama = (shown(text) for _, text in blocks())
    for table, times in ((trillion, 79), (llama, 12)):
        zero, pipe = table["ZeRO 3"], table["1F1B"]
        sent = float(pipe["weights GB"]) + float(pipe["between GB"])
        assert round(float(zero["weights GB"]) / sent) == times
        assert f"{times} times" in PAGE
        for name in ("1F1B", "ZB-H2"):
            assert table[name]["below GB/s"] in PAGE
    for name in ("ZeRO 3", "1F1B", "ZB-H1", "ZB-H2"):
        assert f"{llama[name]['rows for 10%']} rows" in PAGE
    assert all(llama[name]["idle"] in PAGE for name in ("1F1B", "ZB-H1"))
    for name in ("GPipe", "1F1B", "interleaved, v=2", "ZB-H1", "ZB-H2", "PipeDream"):
        assert float(llama[name]["states GB"]) > 84.943  # none fits without ZeRO
    assert 64 < memory(llama["1F1B, ZeRO 1"]) < 65
    for name in ("1F1B, ZeRO 1", "ZeRO 3", "ZeRO 3, 2 micro-batches"):
        assert memory(trillion[name]) > 84.943
    for table in (trillion, llama):
        limits = {name: row["below GB/s"] for name, row in table.items()}
        assert limits.pop("PipeDream") == "never"
        assert all(limit == "-" or 50 < float(limit) < 400 for limit in limits.values())


def memory(row):
    return float(row["states GB"]) + float(row["held GB"])
