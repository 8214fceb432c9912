"""Folders in the format of Hugging Face that are refused, and why."""

import functools
import json
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from gpt2_models import (
    ATOL,
    CONFIGS,
    make,
    our_logits,
    run,
    their_logits,
    their_model,
)
from test_checkpoints import zero_on
from test_import import their_tensors, written

from zero_jax.interchange import hugging_face

pytestmark = pytest.mark.interchange


def changed(change):
    def apply(tensors):
        change(tensors)
        return tensors

    return apply


WTE = "transformer.wte.weight"
BAD_TENSORS = {
    "missing": (lambda t: t.pop("transformer.ln_f.bias"), r"transformer.ln_f.bias \[12\] is miss"),
    "extra": (lambda t: t.update(more=np.ones(3, np.float32)), r"more \[3\] is not part of it"),
    "misshapen": (
        lambda t: t.update({WTE: np.ones((16, 12), np.float32)}),
        r"wte.weight is \[16, 12\], not \[17, 12\]",
    ),
    "empty": (
        lambda t: t.update({WTE: np.ones((0, 12), np.float32)}),
        r"wte.weight is \[0, 12\], not \[17, 12\]",
    ),
    "of integers": (
        lambda t: t.update({WTE: np.ones((17, 12), np.int32)}),
        "wte.weight is int32",
    ),
    "too wide": (
        lambda t: t.update({WTE: np.ones((17, 12), np.float64)}),
        "wte.weight is float64",
    ),
    "a head of its own": (
        lambda t: t.update({"lm_head.weight": np.ones((17, 12), np.float32)}),
        "lm_head.weight differs",
    ),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path, what):
    config, (change, words) = CONFIGS["odd"], BAD_TENSORS[what]
    tensors = their_tensors(config)
    change(tensors)
    written(tmp_path, tensors, config)
    with pytest.raises(ValueError, match=words):
        hugging_face.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"model_type": "gpt3"}, "model_type 'gpt3' is none of gpt2, .* gpt2 is the nearest"),
        ({"model_type": "llama"}, "num_hidden_layers is None"),
        ({"activation_function": "gelu"}, "activation_function 'gelu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"n_inner": 13}, "n_inner 13"),
        ({"scale_attn_weights": False}, "scale_attn_weights False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
        ({"n_head": 5}, "heads=5 must divide"),
        ({"n_head": None}, "n_head"),
        ({"n_layer": "2"}, "n_layer"),
    ],
)
def test_a_config_that_cannot_be_expressed_is_refused(tmp_path, others, words):
    config = CONFIGS["odd"]
    written(tmp_path, their_tensors(config), config, **others)
    with pytest.raises(ValueError, match=words):
        hugging_face.config(tmp_path)
    with pytest.raises(ValueError, match=words):
        hugging_face.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
def test_both_names_of_our_gelu_are_known(tmp_path, name):
    config = CONFIGS["odd"]
    model = their_model(config, activation_function=name, n_inner=48)
    model.save_pretrained(tmp_path)
    params = hugging_face.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))
    got = our_logits(config, zero_on(1).full(params))
    np.testing.assert_allclose(got, their_logits(model, config), atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("other", ["even", "one head"])
def test_a_model_of_other_shape_is_refused_with_what_to_build(exported, other):
    like = zero_on(1).abstract(functools.partial(make, CONFIGS[other]))
    with pytest.raises(ValueError, match="wte/embedding is.*zero_jax.interchange.config"):
        hugging_face.load(exported["odd"], like)
    with pytest.raises(ValueError, match=r"wte/embedding \[17, 12\] is missing"):
        hugging_face.load(exported["odd"], {"w": jnp.ones(3)})


def damaged(folder, what):
    one = sorted(folder.glob("*.safetensors"))[-1]
    index = folder / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    if what == "a file is missing":
        one.unlink()
    elif what == "a file is cut":
        one.write_bytes(one.read_bytes()[:-1])
    elif what == "a header is wrong":
        one.write_bytes(b"\xff" * 100)
    elif what == "the index is wrong":
        index.write_text("{")
    elif what == "the index has no map":
        index.write_text("{}")
    elif what == "the index names a file elsewhere":
        known["weight_map"] = {k: "../x.safetensors" for k in known["weight_map"]}
        index.write_text(json.dumps(known))
    elif what == "the index names a tensor that is not there":
        known["weight_map"]["more"] = one.name
        index.write_text(json.dumps(known))
    elif what == "a tensor twice":
        (folder / "again.safetensors").write_bytes(one.read_bytes())
        known["weight_map"]["again"] = "again.safetensors"
        index.write_text(json.dumps(known))
    elif what == "no config":
        (folder / "config.json").unlink()
    elif what == "the config is wrong":
        (folder / "config.json").write_text("[]")
    elif what == "pickle only":
        for path in folder.glob("*.safetensors"):
            path.rename(path.with_suffix(".bin"))
        index.unlink()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a file is missing", r"names files that are missing, model-\d+-of-\d+.safetensors"),
        ("a file is cut", r"model-\d+-of-\d+.safetensors is damaged"),
        ("a header is wrong", r"model-\d+-of-\d+.safetensors is damaged"),
        ("the index is wrong", "index.json is no JSON"),
        ("the index has no map", "index.json is no index"),
        ("the index names a file elsewhere", "'../x.safetensors'"),
        ("the index names a tensor that is not there", "more"),
        ("a tensor twice", "in two files"),
        ("no config", "config.json"),
        ("the config is wrong", "config.json"),
        ("pickle only", "no model.safetensors.*pickle"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_file(exported, tmp_path, what, words):
    folder = tmp_path / "in"
    shutil.copytree(exported["odd"], folder)
    damaged(folder, what)
    like = zero_on(1).abstract(functools.partial(make, CONFIGS["odd"]))
    with pytest.raises(ValueError, match=words):
        hugging_face.load(folder, like)
    assert run("import", folder, tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


def test_without_safetensors_the_error_says_what_to_install(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"pip install safetensors"):
        hugging_face.load(exported["odd"], zero_on(1).abstract(lambda: make(CONFIGS["odd"])))
