"""Settings that change when a run resumes: refused, with a warning, or freely."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import zero_jax
from training.config import Config, flag
from training.resuming import REFUSE, WARN, base_checksum, check_settings
from training.saving import Saver, _changed_contents, check_resume

LORA = {"lora": 4, "lora_alpha": None, "lora_targets": "all-linear", "base": None, "hf": "A"}
RUN = {
    **{"model": "nano", "optimizer": "adamw", "lr": 1e-3, "warmup": 2, "steps": 8, "clip": 1.0},
    **{"weight_decay": 0.1, "vocab": 256, "capacity": None, "compute": "fp32", "reduce": "fp32"},
    **{"gather": None, "scatter": None, "stage": 3, "hf_config": {"hidden_size": 32}},
}
OTHER = {"optimizer": "lion", "vocab": 512, "capacity": 1.5, "compute": "bf16", "reduce": "bf16"}
OTHER |= {"gather": "int8", "scatter": "int4", "lr": 1e-2, "warmup": 1, "clip": 0.5}
OTHER |= {"weight_decay": 0.0, "lora": 8, "lora_alpha": 400.0, "lora_targets": "q", "base": "nf4"}
DIR = "DIR, step 4"


def settings(name, value):
    lora = LORA if name in LORA else {"lora": None}
    return {**RUN, **lora, name: value}


@pytest.mark.parametrize("name", [*REFUSE, *WARN])
def test_every_setting_of_the_table_is_named_with_both_values(name):
    before, now = settings(name, (RUN | LORA)[name]), settings(name, OTHER[name])
    assert check_settings(before, before, DIR) == []
    assert check_settings(now, {"lora": now["lora"]}, DIR) == []  # of an older release
    former = {"base": "bf16", "lora_alpha": 8.0}.get(name, before[name])
    given = f"no {flag(name)}" if former is None else f"{flag(name)} {former}"
    if name in REFUSE:
        with pytest.raises(ValueError, match=f"{flag(name)} {OTHER[name]} .*{DIR}.*{given}.*--out"):
            check_settings(now, before, DIR)
        return
    (said,) = check_settings(now, before, DIR)
    assert re.search(f"{flag(name)} {OTHER[name]} .*{DIR}.*{given}", said)


# fmt: off
CHANGES = [
    ({**RUN, **LORA}, {**RUN, "lora": None}, "no --lora .*--lora 4"),
    ({**RUN, "lora": None}, {**RUN, **LORA}, "--lora 4 .*no --lora"),
    ({**RUN, **LORA}, {**RUN, **LORA, "hf": None}, "no --hf .*--hf A"),
    (RUN, {**RUN, "clip": 0.0}, "--clip 0.0 .*--clip 1.0"),
    ({**RUN, "clip": 0.0}, RUN, "--clip 1.0 .*--clip 0.0"),
    (RUN, {**RUN, "model": "124m", "hf_config": {"hidden_size": 768}},
     "--model 124m .*--model nano.*hidden_size 768, before 32"),
]
# fmt: on


@pytest.mark.parametrize(("before", "now", "said"), CHANGES)
def test_settings_that_change_the_state_are_refused_by_flag(before, now, said):
    with pytest.raises(ValueError, match=f"{said}.*--out"):
        check_settings(now, before, DIR)


def test_settings_that_change_nothing_are_free():
    before = {**RUN, **LORA, "hf_config": {"sizes": [1, 2]}}
    for change in (
        *({"stage": 1}, {"lora_alpha": 8.0}, {"base": "bf16"}, {"hf": "B"}),
        {"steps": 9, "warmup": 3},
    ):
        now = {**before, **change, "hf_config": {"sizes": (1, 2)}}
        assert check_settings(now, before, DIR) == []


def test_the_weights_of_a_frozen_base_are_compared_not_its_path(tmp_path):
    def checksum(name, value, files=("model.safetensors",)):
        (tmp_path / name).mkdir()
        for file in files:
            save_file({"w": np.full(9, value, np.float32)}, tmp_path / name / file)
        return base_checksum(Config(hf=str(tmp_path / name), lora=4))

    first = checksum("first", 1)
    assert checksum("moved", 1) == first
    two = checksum("two", 1, ["a.safetensors", "b.safetensors"])
    assert two != first and checksum("last", 1, ["a.safetensors", "c.safetensors"]) == two
    with pytest.raises(ValueError, match="--hf .*--adapter"):
        _changed_contents(checksum("other", 2), first, DIR)
    assert base_checksum(Config(hf=str(tmp_path / "first"))) == {}  # all weights are saved


@pytest.mark.parametrize("more", [{}, {"config": {"lr": 1}}, {"extra": {"sample": 0}}])
def test_a_checkpoint_that_train_py_did_not_write_is_named(tmp_path, more):
    with zero_jax.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)}, **more)
    with pytest.raises(ValueError, match="--out.* train.py .*step 1"):
        check_resume(tmp_path, {}, {}, {})
    with pytest.raises(ValueError, match="--from-step 3"):
        Saver(tmp_path, 1, 1, None, {}, {}, {}, from_step=3)
    with Saver(tmp_path / "none", 0, 1, None, {}, {}, {}) as saver:
        saver.save(1, {"w": np.ones(3)}, lambda: 0)
    assert not (tmp_path / "none").exists()
