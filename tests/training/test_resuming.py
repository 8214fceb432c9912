"""Settings that change when a run resumes: refused, with a warning, or freely."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_train import folder

import zero_jax
from training.config import Config
from training.main import main
from training.resuming import REFUSE, WARN, base_checksum, check_settings
from training.saving import _changed_contents

__all__ = ["folder"]  # a fixture

LORA = {"lora": 4, "lora_alpha": None, "lora_targets": "all-linear", "base": None, "hf": "A"}
RUN = {
    **{"model": "nano", "optimizer": "adamw", "lr": 1e-3, "warmup": 2, "steps": 8, "clip": 1.0},
    **{"weight_decay": 0.1, "vocab": 256, "capacity": None, "compute": "fp32", "reduce": "fp32"},
    **{"gather": None, "scatter": None, "stage": 3, "hf_config": {"hidden_size": 32}},
}
OTHER = {"optimizer": "lion", "vocab": 512, "capacity": 1.5, "compute": "bf16", "reduce": "bf16"}
OTHER |= {"gather": "int8", "scatter": "int4", "lr": 1e-2, "warmup": 1, "clip": 0.5}
OTHER |= {"weight_decay": 0.0, "lora": 8, "lora_alpha": 400.0, "lora_targets": "q", "base": "nf4"}


def flag(name):
    return "--" + name.replace("_", "-")


def settings(name=None, value=None):
    lora = LORA if name in LORA else {"lora": None}
    return {**RUN, **lora, **({} if name is None else {name: value})}


@pytest.mark.parametrize("name", [*REFUSE, *WARN])
def test_every_setting_of_the_table_is_named_with_both_values(name):
    before = settings(name, (RUN | LORA)[name])
    now = settings(name, OTHER[name])
    assert check_settings(before, before, "DIR, step 4") == []
    assert check_settings(now, {"lora": now["lora"]}, "DIR") == []  # an older release
    if name in REFUSE:
        with pytest.raises(ValueError, match=f"{flag(name)} {OTHER[name]}.*--out"):
            check_settings(now, before, "DIR, step 4")
        return
    (said,) = check_settings(now, before, "DIR, step 4")
    former = {"base": "bf16"}.get(name, before[name])
    assert f"{flag(name)} {OTHER[name]} is given" in said and "DIR, step 4" in said
    assert (f"no {flag(name)}" if former is None else f"{flag(name)} {former}") in said


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({**RUN, **LORA}, {**RUN, "lora": None}, "no --lora is given.*--lora 4"),
        ({**RUN, "lora": None}, {**RUN, **LORA}, "--lora 4 is given.*no --lora"),
        ({**RUN, **LORA}, {**RUN, **LORA, "hf": None}, "no --hf is given.*--hf A"),
        (RUN, {**RUN, "clip": 0.0}, "--clip 0.0 is given.*--clip 1.0"),
        ({**RUN, "clip": 0.0}, RUN, "--clip 1.0 is given.*--clip 0.0"),
        (
            RUN,
            {**RUN, "model": "124m", "hf_config": {"hidden_size": 768}},
            "--model 124m is given.*--model nano.*hidden_size 768, before 32",
        ),
    ],
)
def test_settings_that_change_the_state_are_refused_by_flag(before, now, said):
    with pytest.raises(ValueError, match=f"{said}.*--out"):
        check_settings(now, before, "DIR, step 4")


@pytest.mark.parametrize(
    "change",
    [{"stage": 1}, {"lora_alpha": 8.0}, {"base": "bf16"}, {"steps": 9, "warmup": 3}, {"hf": "B"}],
)
def test_settings_that_change_nothing_are_free(change):
    before = {**RUN, **LORA, "hf_config": {"sizes": [1, 2]}}
    now = {**before, **change, "hf_config": {"sizes": (1, 2)}}
    assert check_settings(now, before, "DIR, step 4") == []


def test_the_weights_of_a_frozen_base_are_compared_not_its_path(tmp_path):
    def of(name, value, files=("model.safetensors",)):
        (tmp_path / name).mkdir()
        for file in files:
            save_file({"w": np.full(9, value, np.float32)}, tmp_path / name / file)
        return base_checksum(Config(hf=str(tmp_path / name), lora=4))

    first = of("first", 1)
    assert of("moved", 1) == first
    two = of("two", 1, ["a.safetensors", "b.safetensors"])
    assert two != first and of("last", 1, ["a.safetensors", "c.safetensors"]) == two
    with pytest.raises(ValueError, match="--hf holds other weights.*--adapter"):
        _changed_contents(of("other", 2), first, "DIR, step 4")
    assert base_checksum(Config(hf=str(tmp_path / "first"))) == {}  # all weights are saved


SMALL = ["--seq", "16", "--batch", "8", "--devices", "8", "--steps", "2", "--sample-length", "0"]
SMALL += ["--eval-every", "0", "--eval-batches", "1", "--data", "text.txt", "--out", "out"]
LORA_FLAGS = ["--lora", "2", "--optimizer", "sgd"]


def test_a_refused_run_leaves_its_folder_as_it_was(folder, capsys):
    assert main([*SMALL, *LORA_FLAGS]) == 0
    files = ("config.json", "adapter/adapter_config.json", "events.jsonl")
    before = [(folder / "out" / name).read_bytes() for name in files]
    capsys.readouterr()
    assert main([*SMALL, *LORA_FLAGS, "--lora-alpha", "400"]) == 2
    assert "--lora-alpha 400.0 is given" in (error := capsys.readouterr().err)
    assert "--lora-alpha 4.0" in error
    assert main([*SMALL, "--lora", "2", "--optimizer", "lion"]) == 2
    assert "--optimizer lion is given" in (error := capsys.readouterr().err)
    assert "--optimizer sgd" in error
    assert [(folder / "out" / name).read_bytes() for name in files] == before
    assert main([*SMALL, *LORA_FLAGS, "--lora-alpha", "4", "--base", "fp32", "--lr", "1e-4"]) == 0
    said = capsys.readouterr().out
    assert "warning: --base fp32 is given" in said and "warning: --lr 0.0001 is given" in said
    assert json.loads(before[1])["lora_alpha"] == 4


@pytest.mark.parametrize("more", [{}, {"config": {"lr": 1}}, {"extra": {"sample": 0}}])
def test_a_checkpoint_of_the_library_in_out_is_named(folder, capsys, more):
    with zero_jax.Checkpoints(folder / "out" / "checkpoints") as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)}, **more)
    assert main(SMALL) == 2
    error = capsys.readouterr().err
    assert "--out" in error and "train.py did not write" in error and "step 1" in error
    assert not (folder / "out" / "config.json").exists()
