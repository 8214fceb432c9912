"""The screen and the command line: progress, numbers, flags, refusals, signals, exit codes."""

import dataclasses
import io
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh
from problems import out_of_memory
from small_runs import HERE, TINY, finish, folder, metrics, start

from training import main as program
from training import show
from training.config import Config, as_yaml, parse
from training.memory import lack_of_room
from training.preemption import Stop, Stopped
from training.run import _left_together
from training.show import Meter, human_bytes, human_count
from zero_jax.commands import plan
from zero_jax.commands.command_line import flag

__all__ = ["folder"]  # a fixture
# Flags that a command of the plan lacks.
LACKING = {"memory": "--latencies", "compile": "", "auto": "--latencies --stage --paper-config"}
LACKING |= {"meshes": "--latencies --json --plot --context-parallel"}


def test_progress_in_a_file_is_a_plain_line_every_tenth(capsys, monkeypatch):
    monkeypatch.setattr(show.time, "monotonic", itertools.count().__next__)
    with Meter(200, 24_600, start=100) as meter, Meter(2, 10, enabled=False) as silent:
        for step in range(101, 201):
            silent.step(2, 1.0)  # in the second between
            meter.step(step, 2.5)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5 and all(line.isprintable() for line in out)
    assert out[0].startswith("step 120/200  loss 2.5000  12K tokens/s")
    assert out[-1].endswith("0:00:00 left")
    screen = io.StringIO()  # and a bar on a terminal
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Meter(4, 5_000_000) as meter:
        meter.step(4, 2.5)
    assert all(x in screen.getvalue() for x in ("step 4/4", "loss 2.5000  5M tokens/s", "\x1b["))


def test_speed_and_numbers_are_rounded_and_full_parameters_need_room(monkeypatch):
    now = iter([0, 10, 20, 21, 22, 1022, 1024])
    monkeypatch.setattr(show.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(show, "WINDOW", 2)
    meter = Meter(5, 100)
    assert [meter.step(n, 1.0) for n in (1, 2, 3, 4)] == [10, 10, 200 / 11, 100]
    meter.restart()  # after a pause
    assert meter.step(5, 1.0) == 50
    # 7.5e9 parameters at 16 bytes, Figure 1 of the paper: 120 GB, and 1.9 GB on 64 devices.
    numbers = (7.5e9 * 16, 7.5e9 * 16 / 64, 0, 512, 999.9)
    assert [human_bytes(n) for n in numbers] == ["120 GB", "1.88 GB", "0 B", "512 B", "1 kB"]
    counts = (999_499, 999_600, -1500, 1e18, 0, 0.25, math.nan, math.inf)
    assert " ".join(map(human_count, counts)) == "999K 1M -1.5K 1000000T 0 0.25 nan inf"
    assert not lack_of_room(10**18, "sample"), "CPUs do not count their memory"
    limits = ({"bytes_limit": 1000, "bytes_in_use": 400}, {"bytes_limit": 2000, "bytes_in_use": 0})
    devices = [SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in limits]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert not lack_of_room(600, "sample") and "no sample" in lack_of_room(601, "sample")


@pytest.mark.parametrize("command", ["train.py", *LACKING])
def test_help_shows_each_setting_once_with_its_default(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"]) if command == "train.py" else plan.parse(command, ["--help"])
    text = capsys.readouterr().out
    lines, settings = text.splitlines(), Config if command == "train.py" else plan.PlanSettings
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    shown = re.findall(r"^  (--[\w-]+)(.*(?:\n {9}.*)*)", text, re.MULTILINE)
    found = {name: re.findall(r"\(default: ([^)]+)\)", " ".join(x.split())) for name, x in shown}
    known = {flag(f.name): f.default for f in dataclasses.fields(settings)} | {"--config": None}
    for name in LACKING.get(command, "").split():
        del known[name]
    if settings is Config:
        known["--no-resume"] = not known.pop("--resume")
        groups = [group.count("\n  --") for group in re.split(r"^\S.*:$", text, flags=re.MULTILINE)]
        assert max(sorted(groups)[:-1]) <= 8 and len(groups) == 12, "short groups, but ZeRO"
    assert sorted(known) == sorted(name for name, _ in shown)
    for name, default in known.items():
        said = "off" if default is False else str(default)
        assert found[name] == [said] or (default is None and len(found[name]) == 1), name


def test_an_unknown_flag_is_an_error_with_the_nearest(capsys):
    near = {"--steps": "--max-steps", "--batch": "--global-batch-size", "--seq=8": "--seq-len"}
    near |= {"--ouput-dir": "--output-dir", "--output_dir": "--output-dir"}
    names = [flag(field.name) for field in dataclasses.fields(Config)]
    for word, name in (near | {f"{name}z": name for name in names}).items():
        with pytest.raises(SystemExit, match="2"):
            parse([word, "5"])
        said = capsys.readouterr().err
        assert f" {word.partition('=')[0]} " in said and f" {name}. " in said


FILE = "{max_steps: 50, lr: 1e-3, mesh: 'data=2,model=2', stage: auto, memory_limit: 80e9, "
FILE += "grad-accum-steps: 2, profile: true, debug: no, resume: false, data: null}"
FLAGS = "--max-steps 50 --lr 1e-3 --mesh data=2,model=2 --stage auto --memory-limit 80e9 "
FLAGS += "--grad-accum-steps 2 --profile --no-resume"
WRONG = {  # in a file, and what the error names
    "max_step: 5": "max_step |max_steps", "[seed]": "mapping", "max_steps: many": "steps|'many'",
    "max_steps: true": "max-steps", "seed: [1]": "seed", "resume: 1": "resume", "a: b: c": "line 1",
    "stage: 7": "--stage|'7'", "config: a.yaml": "config ", "no_resume: true": "no_resume |resume.",
    "profile: an": "profile", "at: 2024-13-40": "at ", "seed: 1.5": "--seed|'1.5'",
    "\x00": "unacceptable", "{seed: 1, seed: 2}": "seed |twice",
}  # fmt: skip


def test_a_file_of_settings_is_as_the_flags_which_override_it(folder, capsys):
    Path("run.yaml").write_text(FILE)
    known = parse(FLAGS.split())
    assert parse(["--config", "run.yaml"]) == known != Config()
    other = dataclasses.replace(known, max_steps=9, stage=2, resume=True, profile=False)
    words = ["--max-steps", "9", "--config=run.yaml", "--stage", "2", "--resume", "--no-profile"]
    assert parse(words) == other
    Path("run.yaml").write_text("")
    assert parse(["--config", "run.yaml"]) == Config()
    for text, names in {**WRONG, None: "No such file"}.items():
        Path("run.yaml").write_text(text) if text else Path("run.yaml").unlink()
        with pytest.raises(SystemExit, match="2"):
            parse(["--config", "run.yaml"])
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert all(x in said for x in ("run.yaml: ", *names.split("|"))), said
    for text in ("", "{paper_config: c1, stage: 2}", "stage: 2", "paper_config: c1"):
        Path("run.yaml").write_text(text)
        own = ["--stage", "2"] * ("stage" not in text)
        own += ["--paper-config", "c1"] * ("c1" not in text)
        assert program.main(["--config", "run.yaml", *own]) == 2
        assert re.match("error: .*--paper-config c1.*--stage", capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_is_repeated_from_its_config_yaml(folder, shared):
    own = "--max-steps 3 --seed 5 --paper-config c1 --no-resume --output-dir one"
    assert program.main([*TINY, *HERE, *own.split()]) == 0
    assert program.main(["--config", "one/config.yaml", "--output-dir", "two"]) == 0
    one, two = (metrics(out, "loss", "val_loss") for out in ("one", "two"))
    assert one == two and len(one) == 5
    start = {"supervise": 2, "num_processes": 2, "process_id": 1, "resume": False, "resume_step": 1}
    assert as_yaml(Config(**start, export_dir="DIR", output_dir="DIR")) == as_yaml(Config())


COMMANDS = [  # and what is said
    ("--data nowhere.txt", "nowhere.txt"), ("--global-batch-size 12", "batch-size 12|8 or 16"),
    ("--data empty.txt", "empty.txt"), ("--paper-config c1 --remat dots", "c1|--stage|--remat"),
    ("--data ids.npy", "token 256|--vocab-size 300"), ("--max-steps 4 --profile", "file|steps 4"),
    ("--seq-len 500", "4320|480|501|--seq-len"), ("--model nanno", "'nanno'|'nano'"),
    ("--vocab-size 100", "[0, 100)|--vocab-size 120"), ("--offload activations", "remat`='none'"),
    ("--optimizer adam", "'adam'|'adamw'"), ("--warmup-steps 4", "--warmup-steps 4|--max-steps 4"),
    ("--compute-dtype bf61", "'bf61'|'bf16'"), ("--stage auto", "memory_limit"),
    ("--reduce-dtype fp16", "'fp16'|bf16"), ("--paper-config c5", "c5|--mesh model=2"),
    ("--stage 4", "--stage|'4'"), ("--paper-config c6", "'c6'"), ("--output-dir=", "--output-dir"),
    pytest.param("--stage auto --memory-limit 1000", "smallest", marks=pytest.mark.slow),
    ("--memory-limit 1e9", "--memory-limit 1e9|--stage auto"), ("--process-id 0", "process_id=0"),
    ("--mesh data=" + "9" * 5000, "--mesh data=999"), ("--sequence-parallel", "sequence_parallel"),
    ("--mesh data=2,modle=4", "'modle=4'"), ("--mesh data=2,model=2", "8 devices"),
    ("--num-processes 3 --process-id 0 --coordinator-address 127.0.0.1:1", "--devices 9"),
    ("--context-parallel 4 --seq-len 20", "--seq-len 20|axis of 4|16 or 24"),
    ("--context-parallel 2 --mesh context=2", "--context-parallel 2|--mesh context=2|leave one"),
    ("--context-parallel 2 --model nano-experts", "axis of 2|experts|--mesh experts=2"),
    ("--context-parallel 2 --mesh model=2", "`context`=2|`model`=2"),
    ("--mesh context=8 --seq-len 8", "--seq-len 8|axis of 8|use 16"),
    ("--context-parallel 8 --global-batch-size 3 --grad-accum-steps 2", "size 3|1 devices|2 or 4"),
    ("--long-documents wrap", "'wrap'"), ("--lora-base-dtype nf5", "'nf5'"), ("--loss-on u", "'u'"),
    *((own, own) for own in (
        "--max-steps 0", "--max-steps 99999999999999999999", "--learning-rate nan",
        "--join-timeout-seconds inf", "--mesh data=²", "--devices 2147483647",
        "--wandb-project zero")),
]  # fmt: skip
ERRORS = [
    (out_of_memory, 1, 2, r"error: RESOURCE_.* 4(0){14} bytes\. To use less"),
    (out_of_memory, 4, "left with 2", "error: RESOURCE"), (KeyboardInterrupt(), 1, 130, "stopped"),
    (JaxRuntimeError("INTERNAL: gone\nmore"), 1, 76, "Traceback"),  # another try may help
    (MemoryError("9 TiB"), 1, 2, "error: .* 9 TiB. To use less"),
    (FileNotFoundError("nowhere\n.txt"), 1, 2, "error: nowhere .txt"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "words"), COMMANDS, ids=lambda x: x[:40])
def test_input_of_no_use_is_refused_in_one_line(folder, shared, capsys, monkeypatch, args, words):
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    Path("empty.txt").write_text("")
    np.save("ids.npy", np.tile(np.arange(300, dtype=np.uint16), 10))
    with pytest.raises(SystemExit, match="2"):
        sys.exit(program.main([*TINY, *HERE, *args.split()]))
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    assert all(word in error for word in words.split("|")), error
    assert not Path("runs").exists()


@pytest.mark.parametrize(("raised", "processes", "ended", "said"), ERRORS)
def test_errors_have_exit_codes(monkeypatch, capsys, raised, processes, ended, said):
    monkeypatch.setattr(program, "run", unittest.mock.Mock(side_effect=raised))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(os, "_exit", lambda code: sys.exit(f"left with {code}"))
    try:
        found = program.main(HERE)
    except SystemExit as left:
        found = left.code
    assert found == ended
    error = capsys.readouterr().err
    assert re.match(said, error) and error.splitlines()[-1] != "more"
    kind = JaxRuntimeError if raised is out_of_memory else type(raised)
    if processes == 1 and issubclass(kind, Exception):
        with pytest.raises(kind):
            program.main([*HERE, "--debug"])


ROOT = Path(__file__).parents[2]
HANGS = """
import concurrent.futures, time, jax, training.preemption
saved = lambda: time.sleep(600 * HANGS) or "step 3"
training.preemption.PATIENCE = 1.0
with training.preemption.Stop(jax.sharding.Mesh(jax.devices(), ("data",)), None, saved) as stop:
    # As documents.py reads: a thread, which the end of its block waits for.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        reading = thread.submit(time.sleep, 600)
        print("hangs", flush=True)
        reading.result()
"""
WRITE = """
import runpy, sys
runpy.run_path("zero_jax/streams.py")["lasting_streams"]()
for _ in range(3):
    print("3\\u03a8 elements", flush=True)
    print("x" * 100_000)
sys.stderr.write("done")
"""
STDOUT = [
    ('"$1" -c "$2" >&-', ""), ('set -o pipefail; "$1" -c "$2" | head -1', ""),
    ('PYTHONIOENCODING=ascii "$1" -c "$2"', "3\\u03a8 elements"),
    ('LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 "$1" -c "$2"', "3"),
]  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def test_the_first_signal_ends_a_run_between_steps(capfd):
    mesh, kept = Mesh(jax.devices(), ("data",)), signal.getsignal(signal.SIGTERM)
    for name, code in (("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75), ("SIGUSR1", 75)):
        with Stop(mesh) as stop:
            assert stop() == 0
            os.kill(os.getpid(), getattr(signal, name))
            assert stop() == code
        assert ("again" in capfd.readouterr().err) == (name == "SIGINT")
    assert Stop(mesh, hours=0)() == 75 and signal.getsignal(signal.SIGTERM) == kept


EARLY = """
import os, runpy, sys
sys.addaudithook(lambda event, own: own[:1] == ("training.main",) and os.kill(os.getpid(), 2))
runpy.run_path("train.py", run_name="__main__")
"""


def test_an_interrupt_before_and_in_a_run_says_what_is_left():
    run = start("-c", EARLY, script=(), environment=ENVIRONMENT, cwd=ROOT)
    assert finish([run]) == [(130, "", "stopped before the run began\n")]
    with pytest.raises(Stopped, match="step 3"), _left_together(lambda: "step 3"):
        raise KeyboardInterrupt  # as in an export


@pytest.mark.parametrize("storage_hangs", [False, True])
def test_a_second_interrupt_ends_a_run_whose_reader_hangs(storage_hangs):
    code = HANGS.replace("HANGS", str(storage_hangs))
    run = start("-c", code, script=(), environment=ENVIRONMENT)
    assert run.stdout.readline()
    run.send_signal(signal.SIGINT)
    assert "again to stop at once" in run.stderr.readline()
    run.send_signal(signal.SIGINT)
    said = "second Ctrl-C: " + "step 3\n" * (not storage_hangs)
    assert finish([run], 60) == [(130, "", said)]


@pytest.mark.parametrize(("how", "words"), STDOUT)
def test_a_command_ends_with_its_own_exit_code_whatever_stdout_is(how, words):
    command = ["bash", "-c", how, "bash", sys.executable, WRITE]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "done")
    assert done.stdout.startswith(words)
