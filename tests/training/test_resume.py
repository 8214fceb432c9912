"""Runs of `train.py` that end early and go on: as if they had never stopped."""

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from test_train import HERE, TEXT, TINY, finish, folder, metrics, start, start_many

import training.run
import zero_jax
from training.main import main
from training.saving import goes_on
from training.stop import GO_ON_LATER, Stop

__all__ = ["folder"]  # a fixture

# Adam has a state; the rate is small, so that sums in another order stay near.
RUN = [*TINY, "--optimizer", "adamw", "--sample-length", "0", "--eval-every", "0", "--lr", "1e-3"]
OWN = ["--checkpoint-every", "3", "--out", "out"]


def train_here(*args):
    return main([*RUN, *HERE, *args])


def curve(out):
    """The loss of each step, as written last."""
    found = {}
    for line in metrics(out):
        if "loss" in line:
            found[line["step"]] = line["loss"]
    return [found[step] for step in sorted(found)]


def last_loss(out):
    return [line["val_loss"] for line in metrics(out) if "val_loss" in line][-1]


class StopAfterFour(Stop):
    """Asks to end before the fifth step."""

    calls = 0

    def __call__(self):
        self.calls += 1
        return GO_ON_LATER if self.calls == 5 else 0


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_never_stopped(folder, capsys, monkeypatch):
    assert train_here("--steps", "8", "--out", "whole", "--warmup", "2") == 0
    # The rate falls over all steps, so the first half must know of the second.
    args = ["--steps", "8", "--warmup", "2", *OWN]
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "Stop", StopAfterFour)
        assert train_here(*args) == GO_ON_LATER
    assert [line["step"] for line in metrics("out")] == [1, 2, 3, 4]
    capsys.readouterr()
    assert train_here(*args) == 0
    said = capsys.readouterr().out
    assert "Going on from" in said and "restored" in said and "missing: none" in said
    assert curve("out") == curve("whole")
    assert last_loss("out") == last_loss("whole")
    assert sorted(p.name for p in Path("out/checkpoints").glob("[0-9]*")) == ["4", "6", "8"]


@pytest.mark.slow
def test_a_stopped_run_says_which_step_is_saved_and_how_to_go_on(folder, capsys, monkeypatch):
    args = ["--steps", "8", "--warmup", "2", *OWN]
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "Stop", StopAfterFour)
        assert train_here(*args) == GO_ON_LATER
    error = capsys.readouterr().err
    assert f"stopped after step 4, which is saved in {Path('out').resolve()}" in error
    command = error.rpartition("python train.py ")[2].split()
    assert main(command) == 0 and len(curve("out")) == 8


@pytest.mark.slow
def test_a_run_that_has_all_its_steps_says_so_and_more_are_refused(folder, capsys):
    assert train_here("--steps", "4", *OWN) == 0
    capsys.readouterr()
    assert train_here("--steps", "4", *OWN) == 0
    assert "Step 4 is the last of --steps 4: nothing is left to train" in capsys.readouterr().out
    assert train_here("--steps", "3", *OWN) == 2
    assert "is at step 4, beyond --steps 3: ask for more" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_checkpoint_offers_the_one_before(folder, capsys):
    args = ["--steps", "8", "--warmup", "2", *OWN]
    assert train_here(*args) == 0
    chunk = next(p for p in Path("out/checkpoints/8").rglob("c/*") if p.is_file())
    damaged = bytearray(chunk.read_bytes())
    damaged[0] ^= 1
    chunk.write_bytes(damaged)
    capsys.readouterr()
    assert train_here(*args) == 2
    error = capsys.readouterr().err
    assert "That is of step 8; steps 3, 6 are there too: --from-step 6 goes on" in error, error
    assert train_here(*args, "--from-step", "6") == 0
    out = capsys.readouterr().out
    assert "8 are set aside in" in out and "step 6: restored" in out
    assert Path("out/checkpoints/after-6/8").is_dir()
    assert sorted(p.name for p in Path("out/checkpoints").glob("[0-9]*")) == ["3", "6", "8"]
    # The same command once more, as after a kill, does not go back again.
    assert train_here(*args, "--from-step", "6") == 0
    out = capsys.readouterr().out
    assert "--from-step 6 was carried out before" in out and "nothing is left to train" in out
    assert sorted(p.name for p in Path("out/checkpoints").glob("[0-9]*")) == ["3", "6", "8"]
    assert train_here(*args, "--from-step", "7") == 2
    assert "--from-step 7" in capsys.readouterr().err


@pytest.mark.slow
def test_the_last_evaluation_says_how_far_it_is_and_can_be_stopped(folder, capsys, monkeypatch):
    class StopInEvaluation(Stop):
        calls = 0

        def __call__(self):
            self.calls += 1
            return GO_ON_LATER if self.calls == 5 else 0  # after four steps and a batch

    monkeypatch.setattr(training.run, "LONG", 2)
    args = ["--steps", "4", *OWN]
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "Stop", StopInEvaluation)
        assert train_here(*args) == GO_ON_LATER
    said = capsys.readouterr()
    assert "stopped after step 4, which is saved in" in said.err
    assert main([*RUN, *HERE, *args]) == 0
    assert "evaluating: " in capsys.readouterr().out


@pytest.mark.slow
def test_hours_end_a_run(folder):
    assert train_here("--steps", "8", "--max-hours", "0", "--out", "out") == GO_ON_LATER
    assert train_here("--steps", "8", "--out", "out") == 0


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The folder of a run of four steps."""
    home = tmp_path_factory.mktemp("four")
    (home / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert train_here("--steps", "4", *OWN) == 0
    return home / "out"


@pytest.fixture
def done(four, folder):
    """A folder to run in, in which a run has done four steps."""
    shutil.copytree(four, folder / "out")
    return folder


def test_a_finished_run_has_nothing_left_to_do(done, capsys):
    before = last_loss("out")
    capsys.readouterr()
    assert train_here("--steps", "4", *OWN) == 0
    assert "step 4: restored" in capsys.readouterr().out
    assert last_loss("out") == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--fresh"], ["--fresh asks for a new run", "another --out"]),
        (["--seq", "8"], ["--seq 8", "--seq 16", "another --out"]),
        (["--seed", "7"], ["--seed 7", "--seed 0", "another --out"]),
        (["--data", "other.txt"], ["--data", "other.txt", " text.txt", "another --out"]),
        (["--data", "more/text.txt"], ["--data", "train tokens 2214", " 2160", "another --out"]),
        (["--optimizer", "lion"], ["--optimizer lion", "--optimizer adamw", "another --out"]),
        (["--model", "124m"], ["--model 124m", "--model nano", "another --out"]),
    ],
)
def test_what_a_checkpoint_does_not_fit_is_refused(done, capsys, args, words):
    Path("more").mkdir()
    Path("more/text.txt").write_text(TEXT + TEXT[:60])
    Path("other.txt").write_text(TEXT)
    assert train_here("--steps", "8", *OWN, *args) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


@pytest.mark.slow
def test_more_steps_and_edited_data_are_said_with_both_values(done, capsys):
    """Four steps of which none warms up end at a tenth of 1e-3; of eight they are half way."""
    Path("text.txt").write_text(TEXT.replace("Partition", "partition"))
    assert train_here("--steps", "8", *OWN) == 0
    said = capsys.readouterr().out
    data, steps = (line for line in said.splitlines() if line.startswith("warning: "))
    assert "--data was edited since" in data and len(set(re.findall("[0-9a-f]{12}", data))) == 2
    assert "--steps 8" in steps and "--steps 4" in steps and "--lr" in steps
    half_way = 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert f"{half_way:.2g} instead of 0.0001" in steps
    # And at the rate that is named the next step has the former rate.
    (rate,) = re.findall(r"--lr ([\d.e-]+)", steps)
    assert half_way * float(rate) / 1e-3 == pytest.approx(1e-4, rel=0.01)


@pytest.mark.slow
def test_a_text_that_shrinks_while_it_is_read_ends_the_run_with_what_it_has(
    folder, capsys, monkeypatch
):
    class Shrink(Stop):
        calls = 0

        def __call__(self):
            self.calls += 1
            if self.calls == 4:
                Path("text.txt").write_text("short")
            return 0

    monkeypatch.setattr(training.run, "Stop", Shrink)
    args = ["--steps", "200", "--checkpoint-every", "1000", "--out", "out"]
    assert train_here(*args) == 2
    said = capsys.readouterr()
    assert "text.txt changed while the run reads it (size 2,400 bytes, now 5" in said.err
    (saved,) = (int(p.name) for p in Path("out/checkpoints").glob("[0-9]*"))
    assert saved >= 3 and f"Step {saved} is saved in" in said.out
    Path("text.txt").write_text(TEXT)
    args[1] = str(saved + 1)
    assert train_here(*args) == 0 and len(curve("out")) == saved + 1


def test_no_checkpoints_if_none_are_wanted(folder):
    assert train_here("--steps", "4", "--checkpoint-every", "0", "--out", "out") == 0
    assert not Path("out/checkpoints").exists()
    assert not goes_on("out", fresh=True)


def wait_for(condition, run, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)


def trained_until(step):
    path = Path("out/metrics.jsonl")
    return path.exists() and any(line["step"] >= step for line in metrics("out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_ends_a_run(folder, number, code):
    args = [*RUN, "--devices", "1", "--steps", "100000", "--warmup", "2"]
    args += ["--checkpoint-every", "50000"]
    (run,) = running = [start(*args, "--out", "out")]
    wait_for(lambda: trained_until(3), run)
    run.send_signal(number)
    ((got, _, error),) = finish(running, seconds=60)
    assert got == code and "Traceback" not in error
    saved = [int(p.name) for p in Path("out/checkpoints").glob("[0-9]*")]
    assert f"stopped after step {saved[0]}, which is saved in" in error, error
    assert saved == [max(line["step"] for line in metrics("out"))]


@pytest.mark.slow
def test_processes_stop_at_the_same_step_and_go_on_in_another_number(folder):
    args = [*RUN, "--devices", "2", "--steps", "40", "--warmup", "2", "--checkpoint-every", "16"]
    (whole,) = finish([start(*args, "--out", "whole")])
    assert whole[0] == 0, whole
    running = start_many(2, [*args, "--out", "out"])
    wait_for(lambda: trained_until(5), running[0])
    running[1].send_signal(signal.SIGTERM)  # one of them is told
    results = finish(running, seconds=120)
    assert [code for code, _, _ in results] == [75, 75], results
    (again,) = finish([start(*args, "--out", "out")])
    assert again[0] == 0 and "Going on from" in again[1], again
    assert len(curve("out")) == 40
    np.testing.assert_allclose(curve("out"), curve("whole"), rtol=1e-5)


@pytest.mark.slow
def test_a_killed_run_loses_at_most_what_lies_after_its_last_checkpoint(folder):
    args = [*RUN, "--devices", "2", "--steps", "40", "--warmup", "2", "--checkpoint-every", "8"]
    args += ["--out", "out"]
    (whole,) = finish([start(*args[:-1], "whole")])
    assert whole[0] == 0, whole
    (run,) = [start(*args)]
    wait_for(lambda: trained_until(20), run)
    run.kill()
    run.communicate()
    reached = max(line["step"] for line in metrics("out"))
    (again,) = finish([start(*args)])
    assert again[0] == 0, again
    kept = int(again[1].split(", step ")[1].split(":")[0])
    assert reached - 2 * 8 <= kept <= reached
    assert curve("out") == curve("whole")


@pytest.mark.slow
def test_two_runs_in_one_folder_are_refused_in_every_process(folder):
    (first,) = [start(*RUN, "--devices", "1", "--steps", "100000", "--out", "out")]
    wait_for(lambda: trained_until(1), first)
    before = text_of("out/config.json"), os.listdir("out/alive")
    second = [*RUN, "--devices", "2", "--steps", "4", "--out", "out"]
    results = finish(start_many(2, second), seconds=120)
    assert (text_of("out/config.json"), os.listdir("out/alive")) == before, "they are the first's"
    first.kill()
    first.communicate()
    assert [code for code, _, _ in results] == [2, 2], results
    assert "another run writes metrics" in results[0][2]


def test_the_settings_of_the_run_are_in_the_checkpoint(done):
    text = text_of("out/checkpoints/4/state/manifest.json")
    known = json.loads(text)
    assert known["config"]["steps"] == 4 and known["extra"]["sample"] == 32
    assert os.fspath(done) not in text and "/four" not in text, "it can be moved"


@pytest.mark.slow
def test_a_state_goes_from_the_device_to_files(done):
    args = ["--steps", "6", "--offload", "optimizer:nvme=nvme", *OWN]
    assert train_here(*args) == 0
    assert len(curve("out")) == 6
    before = last_loss("out")
    assert train_here(*args) == 0, "files that are there are begun anew"
    assert last_loss("out") == before


@pytest.mark.slow
def test_states_of_few_bits_go_on_as_fp32_and_back_but_not_in_files(done, capsys):
    few = ["--states", "8bit", *OWN]
    assert train_here("--steps", "5", *few) == 0
    assert "States of the optimizer that were fp32 are 8bit from here on" in capsys.readouterr().out
    assert train_here("--steps", "6", *few) == 0
    assert "States of the optimizer" not in capsys.readouterr().out
    assert train_here("--steps", "7", "--offload", "optimizer:nvme=nvme", *OWN) == 2
    assert "saved with --states 8bit, and states in files are fp32" in capsys.readouterr().err
    assert train_here("--steps", "7", *OWN) == 0
    assert "States of the optimizer that were 8bit are fp32 from here on" in capsys.readouterr().out
    assert len(curve("out")) == 7


@pytest.mark.slow
def test_state_files_give_way_to_their_own_run_only(folder, monkeypatch, capsys):
    """Killed before the first checkpoint, it begins anew; another run is refused."""
    step = zero_jax.TrainStep.__call__

    def killed(*args):
        raise RuntimeError("as if by a signal")

    args = ["--steps", "2", "--offload", "optimizer:nvme=nvme", *OWN]
    monkeypatch.setattr(zero_jax.TrainStep, "__call__", killed)
    with pytest.raises(RuntimeError, match="as if"):
        train_here(*args)
    monkeypatch.setattr(zero_jax.TrainStep, "__call__", step)
    assert train_here(*args[:-1], "other") == 2
    assert "nvme/process-00000 holds the state of step 0" in capsys.readouterr().err
    assert train_here(*args) == 0
    assert len(curve("out")) == 2


@pytest.mark.slow
def test_a_run_goes_back_past_the_batches_that_made_gradients_infinite(folder, monkeypatch, capsys):
    seen = []
    step = zero_jax.TrainStep.__call__

    def broken(self, params, opt_state, batch, *extras):
        seen.append(np.asarray(batch[0]).tobytes())
        if len(seen) in (5, 7):
            raise zero_jax.NonFiniteError("8 steps in a row were skipped")
        return step(self, params, opt_state, batch, *extras)

    args = ["--steps", "6", "--warmup", "2", *OWN]
    monkeypatch.setattr(zero_jax.TrainStep, "__call__", broken)
    assert train_here(*args) == 1, "not asked to go back"
    assert "8 steps in a row" in capsys.readouterr().err
    first, _ = seen[:4], seen.clear()
    assert train_here(*args[:-1], "other", "--rollbacks", "2") == 0
    assert "Went back to step 3, 1 more times at most" in capsys.readouterr().out
    assert len(curve("other")) == 6
    assert seen[:4] == first and len(set(seen)) == len(seen) == 10, "no batch comes twice"
    manifest = json.loads(text_of("other/checkpoints/6/state/manifest.json"))
    assert manifest["extra"]["sample"] == 8 * 10


def text_of(path):
    return Path(path).read_text().rstrip().rpartition("\n")[0]
