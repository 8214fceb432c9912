"""Refusals of the command line and of documents, and how `train.py` ends with errors."""

import os
import re
import sys
import unittest.mock
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from small_runs import HERE, TINY, folder

import zero_jax
from training import main as program
from training.config import Config
from training.records import check

__all__ = ["folder"]  # a fixture


# fmt: off
COMMANDS = [
    ("--data nowhere.txt", ["nowhere.txt"]), ("--data empty.txt", ["empty.txt"]),
    ("--data ids.npy", ["token 256", "--vocab 300"]),
    ("--seq 500", ["4320", "480", "501", "--seq"]), ("--vocab 100", ["[0, 100)", "--vocab 120"]),
    ("--steps 4 --profile", ["--profile", "--steps 4"]), ("--batch 12", ["--batch 12", "8 or 16"]),
    ("--micro-batches 3", ["--batch 8", "take 24"]), ("--model nanno", ["'nanno'", "'nano'"]),
    ("--model 350m", ["'350m'", "'124m'"]), ("--optimizer adam", ["'adam'", "'adamw'"]),
    ("--remat blok", ["'blok'", "'block'"]), ("--compute bf61", ["'bf61'", "'bf16'"]),
    ("--reduce fp16", ["'fp16'", "bf16"]), ("--stage 4", ["stage=4"]),
    ("--stage auto", ["memory_limit="]),
    pytest.param("--stage auto --memory-limit 1e-6", ["smallest"], marks=pytest.mark.slow),
    ("--steps 0", ["--steps 0"]),
    ("--steps 99999999999999999999", ["--steps 99999999999999999999"]),
    ("--seed 9223372036854775808", ["--seed 9223372036854775808"]),
    ("--vocab 2147483648", ["--vocab 2147483648"]), ("--lr 1e38", ["--lr 1e+38"]),
    ("--lr nan", ["--lr nan"]), ("--sample-length 2147483647", ["--sample-length 2147483647"]),
    ("--join-seconds inf", ["--join-seconds inf"]),
    ("--memory-limit 1e9", ["--memory-limit 1e+09", "--stage auto"]),
    ("--warmup 4", ["--warmup 4", "--steps 4"]), ("--out=", ["--out"]),
    ("--mesh data=²", ["--mesh data=²"]), ("--mesh data=" + "9" * 5000, ["--mesh data=999"]),
    ("--mesh data=999999999", ["data=999999999"]), ("--mesh data=2,modle=4", ["'modle=4'"]),
    ("--mesh data=2,model=2", ["8 devices"]), ("--devices 2147483647", ["--devices 2147483647"]),
    ("--sequence-parallel", ["sequence_parallel"]), ("--config c6", ["'c6'"]),
    ("--config c1 --remat dots", ["--config c1", "--stage", "--remat"]),
    ("--config c4", ["--config c4", "--mesh model=2"]),
    ("--remat partitioned", ["--remat partitioned", "--mesh model=2"]),
    ("--offload activations --remat none", ["remat='none'"]), ("--process-id 0", ["process_id=0"]),
    ("--wandb zero", ["--wandb zero"]),
    ("--num-processes 3 --process-id 0 --coordinator 127.0.0.1:1", ["--devices 9"]),
]
# fmt: on


@pytest.mark.parametrize(
    ("args", "words"), COMMANDS, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_input_of_no_use_is_refused_in_one_line(folder, shared, capsys, monkeypatch, args, words):
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    Path("empty.txt").write_text("")
    np.save("ids.npy", np.tile(np.arange(300, dtype=np.uint16), 10))
    assert program.main([*TINY, *HERE, *args.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    assert all(word in error for word in words), error
    assert not Path("runs").exists()


def chat(**flags):
    roles = (("user", "a"), ("assistant", "b"))
    return {"messages": [{"role": role, "content": text} | flags for role, text in roles]}


def calling(call):
    calls = [{"type": "function", "function": call}]
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}


# fmt: off
FIELDS = [
    (chat(weight=0.5), '"weight" .* 0.5'), (chat(train="no"), '"train" .* "no"'),
    (chat(train=True), '"train" of a user message'), (chat(train_detail=[]), '"train_detail"'),
    (chat(function_call={}), '"function_call" .* "tool_calls"'),
    (chat(tool_calls="f"), '"tool_calls" is "f"'), (chat() | {"tools": "{"}, '"tools"'),
    (chat() | {"tools": {"a": 1}}, '"tools"'),
    (chat() | {"functions": []}, '"functions" .* "tools"'),
    (chat() | {"chat_template_kwargs": 1}, '"chat_template_kwargs"'),
    (chat() | {"chat_template_kwargs": {"tools": 1}}, '"chat_template_kwargs"'),
    (calling({"name": "f", "arguments": "{"}), '"arguments"'),
    (calling({"name": "f", "arguments": "[1]"}), '"arguments"'), (calling("f"), '"function"'),
]
# fmt: on


@pytest.mark.parametrize(("record", "said"), FIELDS)
def test_fields_of_documents_that_can_not_be_heeded_are_refused(record, said):
    with pytest.raises(ValueError, match=said):
        check(record)


# Ends with errors.


@pytest.mark.parametrize("mesh", ["replica=4", "model=8"])
def test_a_mesh_leaves_the_other_devices_to_data(monkeypatch, mesh):
    monkeypatch.setattr(zero_jax, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(program, "launched_processes", lambda: 32)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    program.join(Config(mesh=mesh))
    with pytest.raises(ValueError, match="32 processes"):
        program.join(Config(mesh=f"data=3,{mesh}"))
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("memory is taken"))
    with pytest.raises(ValueError, match="--mesh data=32800"):
        program.join(Config(mesh="data=32800"))


@pytest.mark.parametrize(
    ("raised", "processes", "ended", "said"),
    [
        (JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB\nmore"), 1, 2, "error: RESOURCE_.* 9 GB. Less"),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB"),
            4,
            "left with 2",
            "error: RESOURCE_EXHAUSTED",
        ),
        (JaxRuntimeError("INTERNAL: gone"), 1, 76, "Traceback"),  # another try may help
        (MemoryError("9 TiB"), 1, 2, "error: .* 9 TiB. Less"),
        (FileNotFoundError("nowhere\n.txt"), 1, 2, "error: nowhere .txt"),
        (KeyboardInterrupt(), 1, 130, "stopped"),
    ],
)
def test_errors_have_exit_codes(monkeypatch, capsys, raised, processes, ended, said):
    monkeypatch.setattr(program, "run", unittest.mock.Mock(side_effect=raised))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    leave = unittest.mock.Mock(side_effect=lambda code: sys.exit(f"left with {code}"))
    monkeypatch.setattr(os, "_exit", leave)
    try:
        found = program.main(HERE)
    except SystemExit as left:
        found = left.code
    assert found == ended
    error = capsys.readouterr().err
    assert re.match(said, error) and "more\n" not in error
    if processes == 1 and isinstance(raised, Exception):
        with pytest.raises(type(raised)):
            program.main([*HERE, "--debug"])
