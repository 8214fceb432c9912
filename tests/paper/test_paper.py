"""Figures of the ZeRO paper, and closed forms of pipeline schedules beside a simulation."""

import re
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from benchmarks.paper import pipelines, scaling, tables
from zero_jax.hlo.targets import target
from zero_jax.models import gpt_config

# Cells of table 1 that the paper truncates where it rounds the others: model and N.
TRUNCATED = {(128e9, 1024), (1e12, 64), (1e12, 256), (1e12, 1024)}


def state_bytes(psi, n, stage, k=12):
    states = [k * psi, 2 * psi, 2 * psi]  # sharded in this order
    return sum(states[:stage]) / n + sum(states[stage:])


def printed(value, cell, rounding=ROUND_HALF_UP):
    return str(Decimal(value).quantize(Decimal(cell), rounding=rounding))


def test_table_1_digit_for_digit():
    for (psi, n), cells in tables.TABLE_1.items():
        for stage, cell in enumerate(cells, 1):
            exact = state_bytes(psi, n, stage) / 1e9
            assert tables.model_states(psi, n, stage) / 1e9 == pytest.approx(exact, rel=1e-12)
            truncated = (psi, n) in TRUNCATED and stage < 3
            assert (printed(exact, cell) != cell) == truncated
            assert not truncated or printed(exact, cell, ROUND_DOWN) == cell
            assert f"[{cell}]" in tables.table_1()


@pytest.mark.parametrize("stage", range(4))
def test_table_2_is_the_first_row_times_mp(stage):
    exact = 32e9 / state_bytes(1, 64, stage) / 1e9
    base = printed(exact, tables.TABLE_2[1][0][stage].rstrip("B"))
    for mp, (cells, measured) in tables.TABLE_2.items():
        largest = tables.largest_model(32e9, 64, stage, mp=mp)
        assert largest == pytest.approx(1e9 * exact * mp, rel=1e-12)
        billions, cell = Decimal(base) * mp, cells[stage]
        trillions = printed(billions / 1000, cell.rstrip("T")) if "T" in cell else ""
        assert cell in (f"{billions}B", f"{trillions}T") and f"[{cell}]" in tables.table_2()
        if stage < 2:
            assert 0.6 * largest < 1e9 * float(measured[stage].rstrip("B")) < largest


def test_checkpointing_reduces_60_gb_of_activations_to_less_than_8():
    shape = {"layers": 48, "width": 1600, "seq": 1024, "batch": 32}  # GPT-2 of 1.5B
    assert round(tables.activations(**shape) / 1e9) == 60
    assert 5e9 < tables.checkpoints(**shape) + tables.activations(**shape | {"layers": 1}) < 8e9
    assert tables.block_elements(6144, 1024, 8) == 12 * 6144 * 1024 * 8
    assert tables.block_elements(6144, 1024, 8, True) == 13 * 6144 * 1024 * 8


def test_60b_scales_superlinearly_from_64_to_400_devices():
    def predict(devices, **options):
        setting = scaling.Setting(gpt_config.preset("60b"), target("v100-32gb"), **options)
        return scaling.predict(setting, devices)

    points = predict([64, 128, 256, 400])
    speeds = [point.flops_per_device for point in points]
    assert speeds == sorted(speeds) and points[1].total_flops > 2 * points[0].total_flops
    assert points[3].total_flops == pytest.approx(15e15, rel=0.2)  # section 10.2
    layers, width = scaling.FIGURE_3[:2]
    psi = (50304 + 1024 + 2) * width + layers * (12 * width**2 + 13 * width)
    for point, n in zip(points, (4, 8, 16, 25), strict=True):
        assert point.states_bytes == pytest.approx(state_bytes(psi, n, 2) / 16)
        assert point.saved_bytes == pytest.approx(point.batch * layers * width * 1024 * 2 / 16)
    # A ring of 4 sends 3/4 of its elements, one of 8 sends 7/8: 7/6 of the batch hides both.
    (few,), (many,) = predict([64], max_batch=12), predict([128], max_batch=14)
    assert many.flops_per_device == pytest.approx(few.flops_per_device, rel=1e-12)


def simulate(orders, times):
    """Runs passes (kind, micro-batch) as early as possible: idle time and most rows in flight. F
    needs the previous stage, B its F and the next stage, W its B."""
    ends, left = [{} for _ in orders], [[*order] for order in orders]
    for _ in range(sum(map(len, left))):
        for device, order in enumerate(left):
            needed = needs(device, order[0], len(ends)) if order else [(device, None)]
            before = [ends[i].get(x) for i, x in needed]
            if None not in before:
                now, start = order.pop(0), max([0, *before, *ends[device].values()])
                ends[device][now] = start + times[now[0]]
    changes = [[{"F": 1, "B": -1}.get(kind, 0) for kind, _ in order] for order in orders]
    held = max(sum(change[:i]) for change in changes for i in range(len(change) + 1))
    return max(max(x.values()) for x in ends) - sum(times[kind] for kind, _ in orders[0]), held


def needs(device, now, devices):
    if now[0] == "F":
        return [(device - 1, now)] if device else []
    own = [(device, ("F" if now[0] == "B" else "B", now[1]))]
    return own + [(device + 1, now)] * (now[0] == "B" and device + 1 < devices)


def zb_h1(p, m, device, kinds):
    """Returns a device's order of ZB-H1 (arXiv:2401.10241, figure 3), without W that of 1F1B."""
    lags = {"F": 0, "B": p - 1 - device, "W": p - 1}
    order = [(kind, turn - lags[kind]) for turn in range(m + p - 1) for kind in kinds]
    return [(kind, row) for kind, row in order if 0 <= row < m]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 3), (4, 9), (5, 16), (8, 17)])
def test_closed_forms_of_schedules_equal_a_simulation(p, m):
    closed, times = pipelines.schedules(p, m), {"F": 1, "B": 2}
    gpipe = [[*(("F", x) for x in range(m)), *(("B", x) for x in reversed(range(m)))]] * p
    one_f_one_b, split = ([zb_h1(p, m, i, kinds) for i in range(p)] for kinds in ("FB", "FBW"))
    assert simulate(gpipe, times) == (closed["GPipe"].idle, closed["GPipe"].in_flight)
    assert simulate(one_f_one_b, times) == (closed["1F1B"].idle, closed["1F1B"].in_flight)
    assert simulate(split, dict.fromkeys("FBW", 1)) == (closed["ZB-H1"].idle, min(p, m))
    assert closed["GPipe"].idle == closed["1F1B"].idle == 3 * (p - 1)


def test_the_page_shows_the_output_of_the_command(capsys):
    pattern = r"```sh\npython benchmarks/paper/pipelines.py (.*?)\n```\n\n```text\n(.*?)```"
    page = Path(__file__).parents[2] / "docs" / "pipelines.md"
    blocks = re.findall(pattern, page.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for args, text in blocks:
        pipelines.main(args.split())
        assert capsys.readouterr().out == text
