"""The screen and the command line: progress, tables, numbers, free memory, and every flag once."""

import dataclasses
import io
import itertools
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from training import show
from training.config import Config, flag, parse
from training.room import room_for
from training.show import Speed, human_bytes, human_count, progress
from training.stop import Stopped
from zero_jax.plan.options import Options


def test_progress_in_a_file_is_a_plain_line_every_tenth(capsys, monkeypatch):
    with progress(200, start=100) as show, progress(2, enabled=False) as silent:
        silent(2, loss=1.0, tokens_per_second=1.0)
        for step in range(101, 201):
            show(step, loss=2.5, tokens_per_second=12345)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5
    assert out[0].startswith("step 120/200  loss 2.5000  12.3K tokens/s")
    assert out[-1].endswith("0:00:00 left")
    assert all(line.isprintable() for line in out)
    screen = io.StringIO()  # and a bar on a terminal
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress(4) as show:
        show(4, loss=2.5, tokens_per_second=5e6)
    assert all(x in screen.getvalue() for x in ("step 4/4", "loss 2.5000  5M tokens/s", "\x1b["))


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


def test_numbers_are_decimal_as_in_the_paper_and_round_into_the_next_unit():
    # 7.5e9 parameters at 16 bytes, Figure 1 of the paper: 120 GB, and 1.9 GB on 64 devices.
    numbers = (7.5e9 * 16, 7.5e9 * 16 / 64, 0, 512, 999.9)
    assert [human_bytes(n) for n in numbers] == ["120 GB", "1.88 GB", "0 B", "512 B", "1 kB"]
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


def test_full_parameters_are_gathered_only_where_there_is_room(monkeypatch, capsys):
    assert room_for(10**18, "sample", print), "CPUs do not count their memory"
    limits = ({"bytes_limit": 1000, "bytes_in_use": 400}, {"bytes_limit": 2000, "bytes_in_use": 0})
    devices = [SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in limits]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert room_for(600, "sample", print) and not capsys.readouterr().out
    assert not room_for(601, "sample", print) and "no sample" in capsys.readouterr().out


# The command line.


def test_help_shows_every_setting_once_in_short_groups(capsys):
    def shown(*args):
        with pytest.raises(SystemExit):
            parse(args)
        caught = capsys.readouterr()
        return caught.out + caught.err

    text = shown("--help")
    groups = re.split(r"^\W*(\w+) options\W*$", text, flags=re.MULTILINE)[1:]
    titles = "basic data device optimizer look checkpoint process adapter zero"
    assert groups[::2] == titles.split()
    flags = [re.findall(r"^\W{2,4}(--[a-z][a-z-]+)", group, re.MULTILINE) for group in groups[1::2]]
    every = sorted(flag(field.name) for field in dataclasses.fields(Config))
    assert sorted(itertools.chain(*flags)) == every
    assert max(map(len, flags[:-1])) <= 8
    assert set(flags[-1]) == {flag(field.name) for field in dataclasses.fields(Options)}
    assert "--stepz" in shown("--stepz", "5")
    config = parse(
        ["--steps", "50", "--mesh", "data=2", "--no-debug", "--keep", "5", "--process-id", "1"]
    )
    assert (config.steps, config.mesh, config.keep, config.process_id) == (50, "data=2", 5, 1)


def test_the_command_that_resumes_has_the_flags_that_still_hold():
    for given, on in (
        ("--from-step 6 --lr 0.1 --out a b --fresh", "--lr 0.1 --out a b"),
        ("--from_step=6 --no-fresh --steps 9", "--steps 9 --out runs/001"),
        ("--coordinator h:1 --num-processes 4 --process-id=0", "--out runs/001"),
    ):
        stopped = Stopped(130, Path("runs/001"), 37)
        assert stopped.said(given.split()).endswith(f"\npython train.py {on}")
