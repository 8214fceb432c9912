"""The screen shows how far a run is, tables, and numbers that one can read."""

import io
import math
import sys

from training import show
from training.show import Speed, human_bytes, human_count, print_table, progress


def test_progress_in_a_file_is_a_plain_line_every_tenth(capsys):
    with progress(200) as show:
        for step in range(1, 201):
            show(step, loss=2.5, tokens_per_second=12345)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 10
    assert out[0].startswith("step 20/200  loss 2.5000  12.3K tokens/s")
    assert out[-1].endswith("0:00:00 left")
    assert all(line.isprintable() for line in out)


def test_progress_of_a_resumed_run_and_of_other_processes(capsys):
    with progress(100, start=50) as show, progress(2, enabled=False) as silent:
        silent(2, loss=1.0, tokens_per_second=1.0)
        for step in range(51, 101):
            show(step, loss=1.0, tokens_per_second=1.0)
    assert capsys.readouterr().out.splitlines()[0].startswith("step 60/100")


def test_progress_shows_a_bar_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress(4) as show:
        show(4, loss=2.5, tokens_per_second=5e6)
    for said in ("step 4/4", "loss 2.5000  5M tokens/s", "\x1b["):
        assert said in screen.getvalue()


def test_speed_is_that_of_the_last_steps_without_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    speed = Speed(tokens_per_step=100, window=2)

    def after(seconds):
        now[0] += seconds
        return speed.tick()

    assert [after(10), after(10), after(1), after(1)] == [10, 10, 200 / 11, 100]
    now[0] += 1000
    speed.restart()
    assert after(2) == 50


def test_table_is_not_cut_off_or_read_as_markup_in_a_file(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "['params']['blocks'][0]['attention']['query']['kernel']"
    print_table("memory [GB]", ["leaf", "bytes"], [[path, "1.5 GB"], ["[red]x", 2]])
    out = capsys.readouterr().out
    assert "memory [GB]" in out and "[red]x" in out
    assert any(path in line and "1.5 GB" in line for line in out.splitlines())


def test_numbers_are_decimal_as_in_the_paper_and_round_into_the_next_unit():
    # 7.5e9 parameters at 16 bytes: 120 GB without partitioning, Figure 1 of the paper
    assert human_bytes(7.5e9 * 16) == "120 GB"
    assert human_bytes(7.5e9 * 16 / 64) == "1.88 GB"  # the paper rounds to 1.9
    assert [human_bytes(n) for n in (0, 512, 999.9, 1000)] == ["0 B", "512 B", "1 kB", "1 kB"]
    counts = {
        999_499: "999K",
        999_600: "1M",
        -1500: "-1.5K",
        1e18: "1000000T",
        0: "0",
        0.25: "0.25",
    }
    assert {n: human_count(n) for n in counts} == counts
    assert [human_count(n) for n in (math.nan, math.inf)] == ["nan", "inf"]
