"""`train.py` fine-tunes: a folder in, documents, adapters and a folder out."""

import json
import os
import re
import shlex
import shutil
import subprocess
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_runs import curve, folder, saved_steps
from test_documents import chat
from test_train import stop_before

import training.run
from training import ask, byte_tokenizer, leaving, room
from training.config import Config
from training.main import main
from training.plan import load
from training.stop import FAILED, GO_ON_LATER
from training.trainer import Trainer
from zero_jax.commands import checkpoint as checkpoint_command

__all__ = ["folder"]  # a fixture

TUNE = "--hf small --data chat.jsonl --steps 2 --seq 32 --batch 8 --devices 8 --optimizer sgd"
TUNE = [*TUNE.split(), "--eval-every", "0", "--eval-batches", "1", "--sample-length", "0"]
LORA = ["--lora", "2", "--base", "nf4"]
ENDS = {"eos_token_id": 0, "bos_token_id": 1}


@pytest.fixture
def tune(first_run, folder, shared):
    """Runs beside a model of bytes whose texts end with token 0, and 80 conversations."""
    shutil.copytree(first_run[0] / "small", "small")
    known = json.loads(Path("small/config.json").read_text())
    assert (known["vocab_size"], known["eos_token_id"]) == (256, byte_tokenizer.END[0])
    Path("small/config.json").write_text(json.dumps(known | ENDS))
    Path("small/generation_config.json").write_text(json.dumps(ENDS))
    chats = [chat(f"what is {n}", f"it is {n}{'.' * (n % 9)}") for n in range(80)]
    Path("chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats))
    return lambda *more: main([*TUNE, *more])


def tensors_of(folder):
    return load_file(Path(folder, "model.safetensors"))


def change(name, value, place=(2, 3)):
    """Sets values of a tensor of the model."""
    tensors = {name: array.copy() for name, array in tensors_of("small").items()}
    tensors[name][place] = value
    save_file(tensors, "small/model.safetensors", metadata={"format": "pt"})


def check_exported(out, said, lora):
    """Base models end texts with one token, and their tokenizer ends turns with another."""
    end = byte_tokenizer.END[0]
    assert json.loads(Path(out, "config.json").read_text())["eos_token_id"] == end
    generation = json.loads(Path(out, "generation_config.json").read_text())
    assert generation == {"eos_token_id": [end, 0], "bos_token_id": 1}
    assert (f"eos_token_id=[{end}, 0]" in said) == lora
    after = tensors_of(out)
    for name, before in tensors_of("small").items():
        trained = not lora or re.search(r"_attn.weight|c_proj.w|c_fc.weight", name)
        assert (before != after[name]).any() == bool(trained) or "wpe" in name, name


def test_adapters_leave_files_and_resume_with_the_same_documents(tune, capsys, monkeypatch):
    assert tune(*LORA, "--out", "whole", "--export", "tuned") == 0
    said = capsys.readouterr().out
    assert said.index("all 72 documents in rows of 32 tokens:") < said.index("before training")
    assert "documents of all rows:" in said and "8 documents held out" in said
    check_exported("tuned", said, lora=True)
    adapter = load_file("whole/adapter/adapter_model.safetensors")
    assert len(adapter) == 2 * 4 * 4
    assert any(x.any() for name, x in adapter.items() if "lora_B" in name)
    assert not [p for p in Path("whole/checkpoints/2").rglob("*") if "base" in p.name]
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "Stop", stop_before(2))
        assert tune(*LORA, "--out", "out") == GO_ON_LATER
    assert tune(*LORA, "--out", "out") == 0
    assert curve("out") == curve("whole") and saved_steps("out") == [1, 2]
    for name, array in load_file("out/adapter/adapter_model.safetensors").items():
        np.testing.assert_array_equal(array, adapter[name])
    change("transformer.h.1.mlp.c_fc.weight", np.nan)
    assert tune(*LORA, "--export", "new", "--out", "nan") == 2
    assert "model.safetensors: transformer.h.1.mlp.c_fc.weight" in capsys.readouterr().err
    assert not Path("new").exists()


def test_all_weights_are_trained_unless_their_loss_is_not_finite(tune, capsys):
    assert tune("--out", "out", "--export", "tuned") == 0
    check_exported("tuned", capsys.readouterr().out, lora=False)
    for name in ("transformer.ln_f.weight", "transformer.wte.weight"):
        change(name, 3e38, place=...)
    assert tune("--checkpoint-every", "0", "--out", "inf") == FAILED
    error = capsys.readouterr().err
    assert "before training is" in error and "--compute fp32" in error
    assert '"loss"' not in Path("inf/metrics.jsonl").read_text()
    assert not Path("inf/checkpoints").exists()


def test_adapters_may_stand_beside_a_model_that_begins_anew(folder):
    trainer = Trainer(load(Config(data="text.txt", lora=2, seq=16, batch=8, devices=8)))
    states = trainer.init()
    (said,) = leaving.leave(trainer, leaving.adapters(trainer, states[0]))
    assert "adapter" in said and Path("adapter/adapter_config.json").exists()
    params, _ = trainer.joined(trainer.kept(states), print)
    for one, other in zip(*map(jax.tree.leaves, (states[0]["base"], params["base"])), strict=True):
        np.testing.assert_array_equal(one, other)  # every start makes the same


# fmt: off
EDITED = {  # folders by name: which files are edited, or left out
    "none": {"config.json": None},
    "broken": {"tokenizer.json": lambda known: {}, "tokenizer_config.json": None},
    "lama": {"config.json": lambda known: {"model_type": "lama"}},
    "bare": {"tokenizer.json": None, "tokenizer_config.json": None},
    "big": {"tokenizer.json": lambda known: known | {"model": known["model"] | {
        "vocab": known["model"]["vocab"] | {f"token{n}": 253 + n for n in range(100)}}}},
    "plain": {"chat_template.jinja": None},
    "layers": {"config.json": lambda known: known | {"n_layer": 50_000}},
}
REFUSED = [
    ("--base nf4", "--base nf4"), ("--lora-targets q", "--lora-targets q"),
    ("--lora 0", "--lora 0"), ("--lora 2 --base nf5", "'nf5'"),
    ("--lora 2 --lora-targets attn/qq", "attn/qq"), ("--vocab 300", "--vocab 300"),
    ("--seq 64", "--seq 64.* 32 tokens"), ("--loss-on user", "'user'"), ("--long wrap", "'wrap'"),
    ("--long refuse --seq 16", "chat.jsonl, line 1: .*--seq 16 "),
    ("--adapter x", "--adapter x.*--lora"), ("--lora 2 --adapter x", "x/adapter_config.json"),
    ("--export small", "small"),
    ("--checkpoint-every 0 --export new", "--export.*--checkpoint-every 0"),
    ("--data broken.jsonl", "broken.jsonl, line 2: role 'bot'"),
    ("--data chat.jsonl=1,text.txt=1", r"--data .*text\.txt"),
    ("--data text.txt=1,text.txt=2", "--data text.txt=1"), ("--hf none", "config.json"),
    ("--hf lama", "'lama'"), ("--hf bare", "chat.jsonl .*--tokenizer"), ("--hf big", "256 rows"),
    ("--hf plain", "plain has no chat template"), ("--tokenizer nowhere", "nowhere"),
    ("--tokenizer broken", "broken"), ("--hf layers", "config.json"),
]
# fmt: on


@pytest.mark.parametrize(("more", "said"), REFUSED)
def test_settings_folders_and_data_that_do_not_fit_are_refused(tune, capsys, more, said):
    if (name := more.split()[1]) in EDITED:
        shutil.copytree("small", name)
        for file, edit in EDITED[name].items():
            known = json.loads(Path("small", file).read_text()) if edit else None
            Path(name, file).unlink()
            if edit:
                Path(name, file).write_text(json.dumps(edit(known)))
    bad = {"messages": [{"role": "bot", "content": ""}]}
    Path("broken.jsonl").write_text(json.dumps(chat("a", "b")) + "\n" + json.dumps(bad) + "\n")
    assert tune(*more.split()) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error:") and "\n" not in error
    assert re.search(said, error), error


@pytest.mark.slow
def test_the_job_for_a_laptop_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    root = Path(__file__).parents[2]
    pages = [(root / name).read_text() for name in ("README.md", "docs/finetuning.md")]
    blocks = (re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for page in pages)
    job, same = (next(x for x in own if "training.pairs" in x).splitlines() for own in blocks)
    assert job == same, "as both pages print it"
    environment, small, pairs, *tunes = job
    assert environment.startswith("python3 -m venv")
    monkeypatch.chdir(tmp_path)
    subprocess.run(shlex.split(pairs), env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    for command in (small, *tunes):
        words = shlex.split(command)
        assert words[:2] == ["python", "train.py"]
        fewer = ["--steps", "2", "--devices", "8", "--eval-batches", "1", "--sample-length", "8"]
        assert main([*words[2:], *fewer]) == 0
    assert len(re.findall("<.assistant.>", capsys.readouterr().out)) == 2 * len(tunes) == 4
    *_, asks = re.findall(r"```sh\n([^`]*training.ask[^`]*)```", pages[1])
    for command in asks.splitlines():
        _, _, module, *words = shlex.split(command)
        run = {"training.ask": ask.main, "zero_jax.checkpoint": checkpoint_command.main}[module]
        assert run([*words, *["--length", "8"] * (run is ask.main)]) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_tuned_model_answers_as_the_run_showed_it_and_trains_on(tune, capsys, monkeypatch):
    lora = ["--lora", "2", "--base", "fp32", "--lr", "0.5", "--sample-length", "8"]
    assert tune(*lora, "--out", "out", "--export", "tuned") == 0
    first = capsys.readouterr().out
    shown = first.rpartition("<|user|>what is 72<|end|><|assistant|>")[2]
    answers = []
    for path, *more in (["out"], ["tuned"], ["small", "--adapter", "out/adapter"], ["small"]):
        assert ask.main([path, "what is 72", "--length", "8", *more]) == 0
        answers.append(capsys.readouterr().out[:-1])
    assert answers[0] and shown.startswith(answers[0]) and len(set(answers[:3])) == 1
    assert answers[3] != answers[0], "the model before it was tuned"
    # Another run begins with the adapters of this one.
    assert tune(*lora, "--out", "second", "--adapter", "out/adapter") == 0
    said = capsys.readouterr().out.partition("before training: validation loss ")[2]
    end = re.search(r"\nvalidation loss ([\d.]+)", first)[1]
    assert float(said.split()[0]) == pytest.approx(float(end), abs=2e-4)
    # Questions that can't be asked.
    for words, message in (
        (["small", ""], "question=''"), (["small", "x", "--length", "0"], "length=0"),
        (["whole", "x"], "config.json"), (["small", "x", "--adapter", "."], "adapter_config.json"),
    ):  # fmt: skip
        assert ask.main(words) == 2
        assert message in capsys.readouterr().err
    shutil.rmtree("out/adapter")
    assert ask.main(["out", "x"]) == 2
    assert re.search("export .*out/checkpoints DIR", capsys.readouterr().err)
    full = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10**6, "bytes_in_use": 0})
    monkeypatch.setattr(room.jax, "local_devices", lambda: [full])
    assert ask.main(["small", "x"]) == 2
    assert "no answer: " in capsys.readouterr().err
