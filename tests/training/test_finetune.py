"""`train.py` fine-tunes: a folder in, documents, adapters and a folder out; and what it refuses."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_train import finish, start

from training import ask, byte_tokenizer, room
from training.main import main
from zero_jax.commands import checkpoint as checkpoint_command

ROOT = Path(__file__).parents[2]
TEXT = "Partition what each device holds, and gather what it needs.\n" * 40
SMALL = [
    "--seq",
    "32",
    "--batch",
    "8",
    "--devices",
    "8",
    "--eval-every",
    "0",
    "--eval-batches",
    "1",
]
SMALL += ["--eval-batches", "1", "--optimizer", "sgd"]
LORA = ["--lora", "2", "--base", "nf4"]


def chat(number):
    words = [f"what is {number}", f"it is {number}{'.' * (number % 9)}"]
    roles = ("user", "assistant")
    return {"messages": [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a small model of bytes and a file of conversations."""
    here = tmp_path_factory.mktemp("made")
    (here / "text.txt").write_text(TEXT)
    (here / "chat.jsonl").write_text("".join(json.dumps(chat(n)) + "\n" for n in range(80)))
    begin = ["--data", str(here / "text.txt"), "--steps", "2", "--sample-length", "0"]
    out = ["--out", str(here / "run"), "--export", str(here / "small")]
    assert main([*SMALL, *begin, *out]) == 0
    return here


@pytest.fixture
def tune(made, tmp_path, monkeypatch):
    """Runs in an empty folder on that model and those conversations."""
    monkeypatch.chdir(tmp_path)

    def run(*more):
        known = ["--hf", str(made / "small"), "--data", str(made / "chat.jsonl"), "--steps", "4"]
        return main([*SMALL, *known, "--sample-length", "8", *more])

    return run


def losses(out="out"):
    lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_model_of_bytes_goes_out_with_its_tokenizer(made):
    names = {path.name for path in (made / "small").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    known = json.loads((made / "small" / "config.json").read_text())
    assert (known["vocab_size"], known["eos_token_id"]) == (256, byte_tokenizer.END[0])


def job(page):
    """The commands of the job for a laptop, as a page prints them."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(block for block in blocks if "training.pairs" in block).splitlines()


@pytest.mark.slow
def test_the_job_for_a_laptop_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    assert job("README.md") == job("docs/finetuning.md")
    environment, small, pairs, *tunes = job("README.md")
    assert environment.startswith("python3 -m venv")
    monkeypatch.chdir(tmp_path)
    subprocess.run(shlex.split(pairs), env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    for command in (small, *tunes):
        words = shlex.split(command)
        assert words[:2] == ["python", "train.py"]
        fewer = ["--steps", "2", "--devices", "8", "--eval-batches", "1", "--sample-length", "8"]
        assert main([*words[2:], *fewer]) == 0
    assert len(re.findall("<.assistant.>", capsys.readouterr().out)) == 2 * len(tunes) == 4
    *_, asks = re.findall(
        r"```sh\n([^`]*training.ask[^`]*)```", (ROOT / "docs/finetuning.md").read_text()
    )
    for command in asks.splitlines():
        _, _, module, *words = shlex.split(command)
        run = {"training.ask": ask.main, "zero_jax.checkpoint": checkpoint_command.main}[module]
        assert run([*words, *["--length", "8"] * (run is ask.main)]) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_adapters_are_trained_and_leave_files(tune, made, capsys):
    assert tune(*LORA, "--out", "out", "--export", "tuned") == 0
    said = capsys.readouterr().out
    assert said.index("before training: validation loss") < said.index("Writing to out") + 10_000
    assert "<|user|>what is 72<|end|><|assistant|>" in said, "the first held out, asked again"
    assert "documents of all rows:" in said and "8 documents held out" in said
    assert said.index("all 72 documents in rows of 32 tokens:") < said.index("before training")
    adapter = load_file("out/adapter/adapter_model.safetensors")
    assert len(adapter) == 2 * 4 * 4
    assert any(x.any() for name, x in adapter.items() if "lora_B" in name)
    before, after = (load_file(p / "model.safetensors") for p in (made / "small", Path("tuned")))
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {
        name
        for name in before
        if "_attn.weight" in name or "c_proj.w" in name or "c_fc.weight" in name
    }
    names = [p.name for p in Path("out/checkpoints/4").rglob("*") if "base" in p.name]
    assert not names, "checkpoints have no base"


@pytest.mark.slow
def test_a_tuned_model_answers_a_question_as_the_run_showed_it(tune, made, capsys):
    """The first held out, asked of the run, of adapters beside the model, of what was exported."""
    lora = ["--lora", "2", "--base", "fp32", "--lr", "0.5"]
    assert tune(*lora, "--out", "out", "--export", "tuned") == 0
    said = capsys.readouterr().out
    assert re.search(r"python -m training.ask \S*/out '...'", said)
    shown = said.rpartition("<|user|>what is 72<|end|><|assistant|>")[2]
    asked = (["out"], ["tuned"], [str(made / "small"), "--adapter", "out/adapter"])
    answers = []
    for folder, *more in asked:
        assert ask.main([folder, "what is 72", "--length", "8", *more]) == 0
        answers.append(capsys.readouterr().out[:-1])
    assert answers[0] and shown.startswith(answers[0]) and len(set(answers)) == 1
    assert ask.main([str(made / "small"), "what is 72", "--length", "8"]) == 0
    assert capsys.readouterr().out[:-1] != answers[0], "the model before it was tuned"


@pytest.mark.slow
def test_a_model_that_is_too_large_for_the_device_is_not_asked(made, monkeypatch, capsys):
    full = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10**6, "bytes_in_use": 0})
    monkeypatch.setattr(room.jax, "local_devices", lambda: [full])
    assert ask.main([str(made / "small"), "x"]) == 2
    assert "no answer: it takes 0.0 GB of a device, which has less" in capsys.readouterr().err


@pytest.mark.slow
def test_a_question_that_can_not_be_asked_is_refused(made, tmp_path, capsys):
    for words, message in (
        ([str(made / "run"), "x"], r"export .*run/checkpoints DIR, and ask DIR"),
        ([str(made / "small"), ""], "ask something"),
        ([str(made / "small"), "x", "--length", "0"], "length=0"),
        ([str(tmp_path), "x"], "config.json is missing"),
        ([str(made / "small"), "x", "--adapter", str(tmp_path)], "adapter_config.json"),
    ):
        assert ask.main(words) == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_goes_on_from_its_adapters_on_another_number_of_devices(tune):
    assert tune(*LORA, "--out", "whole") == 0
    assert tune(*LORA, "--out", "parts", "--steps", "4", "--checkpoint-every", "2") == 0
    shutil.rmtree("parts/checkpoints/4")
    Path("parts/metrics.jsonl").unlink()
    assert tune(*LORA, "--out", "parts", "--mesh", "data=4,replica=2") == 0
    assert losses("parts").keys() == {3, 4}
    for step, loss in losses("parts").items():
        assert loss == pytest.approx(losses("whole")[step], rel=1e-5)
    one, other = (load_file(f"{o}/adapter/adapter_model.safetensors") for o in ("whole", "parts"))
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_run_that_is_killed_sees_the_same_documents_on_another_number_of_devices(made, tune):
    """Each loss is that of its batch, so equal losses are of equal documents."""
    many = ["--steps", "40", "--checkpoint-every", "2", "--sample-length", "0"]
    assert tune(*many, "--out", "whole") == 0
    known = [*SMALL, "--hf", str(made / "small"), "--data", str(made / "chat.jsonl"), *many]
    process = start(*known, "--out", "out")
    end = time.monotonic() + 240
    saved = Path("out/checkpoints")
    while not (saved.is_dir() and any(p.name.isdigit() for p in saved.iterdir())):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert 2 <= max(losses("out")) < 40, "killed on its way"
    ((code, said, error),) = finish([start(*known, "--out", "out", "--devices", "4")])
    assert code == 0 and "Going on from" in said, error
    found = losses("out")
    assert found.keys() == losses("whole").keys()
    for step, loss in losses("whole").items():
        assert found[step] == pytest.approx(loss, rel=1e-4), step
    assert len({round(loss, 4) for loss in found.values()}) > 30, "batches differ"


@pytest.mark.slow
def test_a_run_begins_with_adapters_of_another(tune, capsys):
    assert tune(*LORA, "--out", "first") == 0
    assert tune(*LORA, "--out", "second", "--adapter", "first/adapter") == 0
    said = capsys.readouterr().out.split("before training: validation loss ")
    end = said[1].partition("\nvalidation loss ")[2].split()[0]
    assert float(said[2].split()[0]) == pytest.approx(float(end), abs=2e-4)


@pytest.mark.slow
def test_the_whole_model_is_trained_without_adapters(tune, made):
    assert tune("--out", "out", "--export", "tuned") == 0
    before, after = (load_file(p / "model.safetensors") for p in (made / "small", Path("tuned")))
    assert all((before[name] != after[name]).any() for name in before if "wpe" not in name)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--base", "nf4"], "--base nf4: only a model that is not trained rests so"),
        (["--lora-targets", "q"], "--lora-targets q: only a model that is not trained"),
        (["--lora", "0"], "--lora 0: it must be at least 1"),
        (["--lora", "2", "--base", "nf5"], "no base is called 'nf5'"),
        (["--lora", "2", "--lora-targets", "attn/qq"], "attn/qq"),
        (["--vocab", "300"], "--vocab 300: the model in"),
        (["--seq", "64"], "--seq 64: the model takes rows of at most 32 tokens"),
        (["--loss-on", "user"], "'user'"),
        (["--long", "wrap"], "'wrap'"),
        (
            ["--long", "refuse", "--seq", "16"],
            "line 1: .* tokens, of which --seq 16 has room for 17",
        ),
        (["--adapter", "x"], "--adapter x: adapters are trained with --lora"),
        (["--lora", "2", "--adapter", "x"], "x/adapter_config.json is no config of an adapter"),
        (["--export", "."], "already and not empty"),
        (["--checkpoint-every", "0", "--export", "new"], "--export writes the last checkpoint"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(tune, capsys, more, message):
    Path("something").write_text("")
    assert tune(*more) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error:") and "\n" not in error
    assert re.search(message, error), error


def edited(made, path, **files):
    shutil.copytree(made / "small", path)
    for name, text in files.items():
        name = name.replace("__", ".")
        (path / name).unlink(missing_ok=True)
        if text is not None:
            (path / name).write_text(text)
    return str(path)


def test_folders_that_do_not_fit_are_refused(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = ["--data", str(made / "chat.jsonl"), "--steps", "2"]

    def refused(folder, *more):
        assert main([*SMALL, *data, "--hf", folder, *more]) == 2
        return capsys.readouterr().err

    assert "config.json" in refused(edited(made, tmp_path / "a", config__json=None))
    unknown = json.dumps({"model_type": "lama"})
    assert "'lama' is none of" in refused(edited(made, tmp_path / "b", config__json=unknown))
    bare = edited(made, tmp_path / "c", tokenizer__json=None, tokenizer_config__json=None)
    assert "has documents, which a tokenizer takes apart" in refused(bare)
    big = json.loads((made / "small" / "tokenizer.json").read_text())
    big["model"]["vocab"] |= {f"token{n}": 253 + n for n in range(100)}
    other = edited(made, tmp_path / "d", tokenizer__json=json.dumps(big))
    assert "and the model's embedding 256 rows" in refused(other)
    plain = edited(made, tmp_path / "e", chat_template__jinja=None)
    assert "has no chat template, and the data has conversations" in refused(plain)


def test_a_broken_line_is_refused_with_its_file_and_number(made, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(chat(1)) + '\n{"messages": [{"role": "bot", "content": ""}]}\n')
    assert main([*SMALL, "--hf", str(made / "small"), "--data", str(broken)]) == 2
    assert f"{broken}, line 2: role 'bot' is none of" in capsys.readouterr().err


@pytest.mark.parametrize("lora", [[], ["--lora", "2"]])
def test_an_exported_model_stops_where_the_run_learned_to_end(made, tune, capsys, lora):
    """Base models end texts with one token, and their tokenizer ends turns with another."""
    shutil.copytree(made / "small", "base")
    for name in ("config.json", "generation_config.json"):
        known = (
            json.loads((made / "small" / "config.json").read_text()) if "gen" not in name else {}
        )
        Path("base", name).write_text(json.dumps(known | {"eos_token_id": 0, "bos_token_id": 1}))
    capsys.readouterr()
    assert tune("--hf", "base", "--steps", "1", "--out", "out", "--export", "tuned", *lora) == 0
    end = byte_tokenizer.END[0]
    assert json.loads(Path("tuned/config.json").read_text())["eos_token_id"] == end
    generation = json.loads(Path("tuned/generation_config.json").read_text())
    assert generation == {"eos_token_id": [end, 0], "bos_token_id": 1}
    said = f"generate with eos_token_id=[{end}, 0]" in capsys.readouterr().out
    assert said == bool(lora)
