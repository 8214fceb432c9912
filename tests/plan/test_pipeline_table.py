"""The table of ZeRO beside pipelines: one batch, one wire, and the page that shows it."""

import pathlib
import re

import pytest

from zero_jax.hlo.targets import target
from zero_jax.models import families
from zero_jax.plan import command, paper, pipeline_table

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "pipelines.md"


def step_seconds(compute, idle, sent, wire):
    return max(compute, sent / wire) + idle


@pytest.mark.parametrize(
    ("zero", "pipe", "idle"), [(300, 100, 1), (300, 100, 0), (300, 250, 4), (300, 290, 0.1)]
)
def test_below_its_wire_a_pipeline_is_shorter_and_above_it_is_not(zero, pipe, idle):
    wire = pipeline_table.shorter_below(zero, pipe, 2, idle)
    for factor in (0.2, 0.5, 0.9, 0.99):
        assert step_seconds(2, idle, pipe, wire * factor) < step_seconds(2, 0, zero, wire * factor)
    for factor in (1.01, 1.1, 2, 10):
        assert step_seconds(2, idle, pipe, wire * factor) >= step_seconds(2, 0, zero, wire * factor)


def setting(**changes):
    shape = {"psi": 8 * 10**9, "layers": 36, "width": 4096, "seq": 1024, "flops_per_token": 48e9}
    run_on = {"device": target("h100"), "devices": 64, "stages": 4, "micro_batches": 16}
    return pipeline_table.Setting(**{**shape, **run_on, **changes})


def test_all_rows_are_of_one_batch_on_the_same_devices():
    made = {row.name: row for row in pipeline_table.compare(setting(rows=2))}
    row = paper.activations(36, 4096, 1024, 1)  # of the whole model
    at_once, parts = made["ZeRO 3"], made["ZeRO 3, 4 micro-batches"]
    assert at_once.held == 8 * row and parts.held == 2 * row  # 16·2/4 rows a device
    assert at_once.states == 16 * 8e9 / 64
    assert (at_once.parameter_bytes, parts.parameter_bytes) == (6 * 8e9, 4 * 6 * 8e9)
    assert made["GPipe"].held == at_once.held and made["1F1B"].held == parts.held
    assert made["1F1B"].parameter_bytes == 2 * 2 * 8e9 / 4
    assert made["1F1B"].activation_bytes == 16 * 2 * 2 * (2 * 1024 * 4096)
    assert (at_once.least_rows, made["1F1B"].least_rows) == (64 * 2, 27 * 2 * 16)
    assert setting(rows=2).seconds == 48e9 * 8 * 1024 / (0.5 * target("h100").flops)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 3}, "stages=3 on devices=64.*divide"),
        ({"stages": 1}, "stages=1.*2 or more"),
        ({"micro_batches": 18}, "micro_batches=18 on stages=4.*20 say"),
        ({"chunks": 10}, "stages=4 of chunks=10 are more than the 36 layers"),
        ({"rows": 0}, "rows=0.*at least 1"),
        ({"device": target("cpu")}, "'cpu' comes without.*h100"),
    ],
)
def test_settings_that_make_no_pipeline_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        setting(**changes)


SHAPES = [("7.5b", 64, 4), ("100b", 1000, 25), ("1t", 1024, 64), ("llama-3.1-70b", 64, 8)]
SHAPES += [("mixtral-8x7b", 64, 8), ("nano", 8, 2)]


@pytest.mark.parametrize(("model", "devices", "p"), SHAPES)
def test_the_command_prints_every_way(model, devices, p, capsys):
    args = f"pipelines --model {model} --devices {devices} --pipeline {p} --micro-batches {4 * p}"
    assert command.main(args.split()) == 0
    printed = capsys.readouterr().out
    names = re.findall(
        r"^(ZeRO 3|GPipe|1F1B|interleaved, v=2|ZB-H1|ZB-H2|PipeDream)", printed, re.M
    )
    assert len(names) == 9
    psi = families.num_params(families.preset(model))
    assert re.search(rf"^GPipe +{16 * psi / p / 1e9:.2f} ", printed, re.M)


def test_the_batch_is_given_as_for_the_other_commands(capsys):
    args = "pipelines --model 7.5b --devices 64 --pipeline 4 --micro-batches 16"
    assert command.main([*args.split(), "--batch-per-device", "8"]) == 0
    assert "batch: 512 rows of 1024; 16 pipelines of 4 with 16 micro-batches of 2" in (
        capsys.readouterr().out
    )
    assert command.main([*args.split(), "--batch-per-device", "3"]) == 2
    assert "multiple of --micro-batches 16" in capsys.readouterr().err


def test_stages_that_are_not_even_are_told_of(capsys):
    assert command.main(["pipelines", "--pipeline", "8"]) == 0
    # 36 layers: the longest of 8 stages has 5 where 4.5 are its share
    assert "8 stages of 4 or 5, for which 10% more idle, not counted" in capsys.readouterr().out


def blocks():
    shown = re.findall(
        r"```sh\npython -m zero_jax.plan (.*?)\n```\n\n```text\n(.*?)```", page(), re.S
    )
    return [(" ".join(args.replace("\\\n", " ").split()), text) for args, text in shown]


def page():
    return PAGE.read_text()


def test_the_page_shows_what_the_command_prints(capsys):
    assert len(blocks()) == 2
    for args, text in blocks():
        assert command.main(args.split()) == 0
        assert capsys.readouterr().out == text


def test_the_page_explains_every_column():
    header = blocks()[0][1].splitlines()[1]
    columns = [name.strip() for name in re.split(r"  +", header.strip())]
    explained = re.findall(r"^- \*\*(.*?)\*\* (?:are|is)", page(), re.M)
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
        assert f"{times} times" in page()
        for name in ("1F1B", "ZB-H2"):
            assert table[name]["below GB/s"] in page()
    for name in ("ZeRO 3", "1F1B", "ZB-H1", "ZB-H2"):
        assert f"{llama[name]['rows for 10%']} rows" in page()
    assert all(llama[name]["idle"] in page() for name in ("1F1B", "ZB-H1"))
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
