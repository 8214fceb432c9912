"""Runs of `train.py` that end early and resume: damaged checkpoints, changed texts, killed runs."""

import itertools
import re
from pathlib import Path

import pytest
from small_runs import HERE, RUN, curve, folder, last_loss, saved_steps, trained_until, wait_for

import training.run
from training.main import main
from training.preemption import Stop

pytestmark = pytest.mark.slow
__all__ = ["RUN", "curve", "folder", "last_loss", "trained_until", "wait_for"]  # also for others
OWN = ["--save-steps", "3", "--output-dir", "out"]
EIGHT = ["--max-steps", "8", "--warmup-steps", "2", *OWN]


def train_here(*args):
    return main([*RUN, *HERE, *args])


def test_a_damaged_checkpoint_offers_the_one_before(folder, shared, capsys):
    assert train_here(*EIGHT) == 0
    chunk = next(p for p in Path("out/checkpoints/8").rglob("c/*") if p.is_file())
    damaged = bytearray(chunk.read_bytes())
    damaged[0] ^= 1
    chunk.write_bytes(damaged)
    assert train_here(*EIGHT) == 2
    assert re.search(r"step 8; .*steps are 3, 6: .*--resume-step 6", capsys.readouterr().err)
    assert train_here(*EIGHT, "--resume-step", "6") == 0
    assert "step 6: restored" in capsys.readouterr().out
    assert Path("out/checkpoints/after-6/8").is_dir() and saved_steps("out") == [3, 6, 8]
    # The same command once more, as after a kill, does not go back again.
    assert train_here(*EIGHT, "--resume-step", "6") == 0
    out = capsys.readouterr().out
    assert "--resume-step 6 was applied" in out and "nothing is left to train" in out
    assert train_here(*EIGHT, "--resume-step", "7") == 2
    assert "--resume-step 7" in capsys.readouterr().err
    assert train_here("--max-steps", "9", "--warmup-steps", "2", *OWN) == 0
    assert "warning: --max-steps 9 is given" in capsys.readouterr().out
    assert train_here(*EIGHT) == 2
    assert "step 9, past --max-steps 8" in capsys.readouterr().err


def test_a_text_that_shrinks_ends_the_run_with_its_steps_saved(folder, capsys, monkeypatch):
    calls = itertools.count(1)
    edit = {4: lambda: Path("text.txt").write_text("short")}
    ask = {"__call__": lambda self: edit.get(next(calls), int)() and 0}
    monkeypatch.setattr(training.run, "Stop", type("Shrink", (Stop,), ask))
    assert train_here("--max-steps", "200", "--save-steps", "1000", "--output-dir", "out") == 2
    said = capsys.readouterr()
    assert re.search("text.txt .*4,800 bytes, now 5", said.err)
    (saved,) = saved_steps("out")
    assert 3 <= saved == len(curve("out")) and f"Step {saved} is saved in" in said.out


def test_states_become_8bit_which_can_not_be_in_files(folder, capsys):
    for steps, states in (("2", "fp32"), ("3", "8bit")):
        assert train_here("--max-steps", steps, "--optimizer-state-dtype", states, *OWN) == 0
    assert "optimizer state from fp32 to 8bit" in capsys.readouterr().out
    assert train_here("--max-steps", "4", "--offload", "optimizer:nvme=nvme", *OWN) == 2
    assert "--optimizer-state-dtype 8bit" in capsys.readouterr().err
