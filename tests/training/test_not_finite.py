"""`train.py` with NaN or infinite weights, losses or gradients never ends with exit code 0."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_finetune import LORA, SMALL, edited, made
from test_train import HERE, TINY, finish, folder, start_many

import zero_jax
from training.main import main
from zero_jax.plan.text_model import TextModel

__all__ = ["folder", "made"]  # fixtures
NAME = "model.safetensors"


@pytest.fixture
def tune(made, tmp_path, monkeypatch, capsys):
    """Trains a copy of a small folder whose tensors or config are changed; code and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(change, *more, **config):
        out = tmp_path / "changed"
        edited(made, out)
        tensors = {name: array.copy() for name, array in load_file(out / NAME).items()}
        change(tensors)
        (out / NAME).unlink()
        save_file(tensors, out / NAME, metadata={"format": "pt"})
        known = json.loads((out / "config.json").read_text()) | config
        (out / "config.json").write_text(json.dumps(known))
        data = ["--hf", str(out), "--data", str(made / "chat.jsonl"), "--steps", "2"]
        code = main([*SMALL, *data, "--sample-length", "0", "--out", "out", *more])
        return code, capsys.readouterr().err

    return run


def test_weights_that_are_not_finite_end_the_run_by_name(tune, tmp_path):
    name = "transformer.h.1.mlp.c_fc.weight"

    def change(tensors):
        tensors[name][2, 3] = np.nan

    code, error = tune(change, *LORA, "--export", "exported")
    assert code == 2
    assert f"{NAME}: {name} has NaN or infinite values" in error
    assert not (tmp_path / "exported").exists()


def test_finite_weights_whose_loss_is_not_end_the_run_before_it_trains(tune, tmp_path):
    def change(tensors):
        for name in ("transformer.ln_f.weight", "transformer.wte.weight"):
            tensors[name][:] = 3e38

    code, error = tune(change, "--export", "exported")
    assert code == 1
    assert "validation loss before training is" in error and "--compute fp32" in error
    assert "loss" not in (tmp_path / "out" / "metrics.jsonl").read_text().replace("val_loss", "")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("name", ["vocab_size", "n_layer", "n_embd", "n_positions"])
def test_sizes_that_the_files_do_not_have_end_the_run_by_name(tune, name):
    code, error = tune(lambda tensors: None, **{name: 50_000})
    assert code == 2
    assert "is not the model that its config.json describes" in error


def test_a_run_that_diverges_in_its_last_steps_does_not_end_well(folder, capsys):
    args = [
        "--lr",
        "1e4",
        "--clip",
        "0",
        "--steps",
        "12",
        "--eval-every",
        "0",
        "--export",
        "exported",
    ]
    assert main([*TINY, *HERE, *args, "--out", "out"]) == 1
    assert "validation loss after training is nan" in capsys.readouterr().err
    assert not (folder / "exported").exists()


def test_a_run_whose_every_step_is_skipped_does_not_end_well(folder, capsys, monkeypatch):
    loss = TextModel.trained_loss

    def broken(self, params, batch):
        total, weight = loss(self, params, batch)
        return zero_jax.Weighted(total * np.nan, weight)

    monkeypatch.setattr(TextModel, "trained_loss", broken)
    for _ in range(2):  # and so does the same command again, which finds nothing to train
        assert main([*TINY, *HERE, "--checkpoint-every", "2", "--out", "out"]) == 1
        assert "all of --steps 4 were skipped" in capsys.readouterr().err


@pytest.mark.slow
def test_a_weight_that_one_process_reads_ends_all_of_them(made, tmp_path):
    edited(made, tmp_path / "changed")
    tensors = {k: x.copy() for k, x in load_file(tmp_path / "changed" / NAME).items()}
    tensors["transformer.wte.weight"][-1, 3] = np.nan  # a row of the last device
    save_file(tensors, tmp_path / "changed" / NAME, metadata={"format": "pt"})
    data = ["--hf", str(tmp_path / "changed"), "--data", str(made / "chat.jsonl"), "--steps", "2"]
    args = [*SMALL, *data, "--devices", "2", "--out", str(tmp_path / "out")]
    for code, _, error in finish(start_many(2, args)):
        assert code == 2, "or a launcher would start it again"
        assert "transformer.wte.weight has NaN" in error
