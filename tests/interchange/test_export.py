"""Models that go to Hugging Face's GPT-2: the same logits there, or nothing at all."""

import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax import nnx
from gpt2_models import ATOL, CONFIGS, loaded, make, our_logits, run, their_logits, their_model
from test_checkpoint_faults import files_of
from test_checkpoints import assert_bitwise, zero_on

from zero_jax.checkpoint import arrays
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.interchange import hugging_face, safetensor_files
from zero_jax.models import gpt, hf_gpt2

pytestmark = pytest.mark.interchange


# The mapping.


def test_columns_of_qkv_go_from_by_head_to_by_kind():
    heads, head_dim = 3, 2
    ours = np.array(
        [[100 * kind + 10 * n + h for n in range(heads) for kind in range(3) for h in range(2)]]
    )
    theirs = [100 * kind + 10 * n + h for kind in range(3) for n in range(heads) for h in range(2)]
    width = heads * head_dim
    assert np.array(theirs)[hf_gpt2.positions(heads, width)].tolist() == ours[0].tolist()
    assert np.array_equal(hf_gpt2.by_head(np.array([theirs]), heads), ours)
    for start in range(3 * width):
        for stop in range(start + 1, 3 * width + 1):
            columns = hf_gpt2.columns(start, stop, heads, width)
            part = np.concatenate([np.array(theirs)[a:b] for a, b in columns.ranges])
            got = hf_gpt2.by_head(part, columns.heads)[columns.first : columns.last]
            assert np.array_equal(got, ours[0, start:stop])


def test_places_are_the_parameters_of_both_models():
    config = CONFIGS["even"]
    params = jax.eval_shape(lambda: make(config))
    shapes = {"/".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(params)}
    layout = hf_gpt2.layout(config)
    assert layout.shapes == shapes
    theirs = {k: tuple(v.shape) for k, v in their_model(config).named_parameters()}
    assert {p.name: p.shape for p in layout.places} == theirs


# Out.


@pytest.mark.parametrize("name", CONFIGS)
def test_exported_weights_give_the_same_logits_in_pytorch(saved, exported, name):
    assert len(list(exported[name].glob("model-*-of-*.safetensors"))) > 1
    model = loaded(exported[name])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.dtype == torch.float32
    known = model.config
    assert (known.activation_function, known.layer_norm_epsilon) == ("gelu_new", 1e-5)
    got, want = their_logits(model, CONFIGS[name]), saved[name][2]
    assert np.abs(want).max() > 1, "or nothing is compared"
    np.testing.assert_allclose(got, want, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("size", [1, 500, 2000, 10**9])
def test_files_hold_at_most_what_is_allowed_or_one_tensor(saved, tmp_path, size):
    hugging_face.export(saved["odd"][0], tmp_path / "out", max_file_bytes=size)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = tmp_path / "out" / "model.safetensors.index.json"
    held = {path.name: safetensors.numpy.load_file(path) for path in files}
    for tensors in held.values():
        assert tensors and all(x.size for x in tensors.values())
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= size
    total = 4 * gpt.num_params(CONFIGS["odd"])
    if size == 10**9:
        assert [p.name for p in files] == ["model.safetensors"] and not index.exists()
    else:
        last = f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
        assert files[-1].name == last
        known = json.loads(index.read_text())
        assert known["metadata"]["total_size"] == total
        assert known["weight_map"] == {name: file for file in held for name in held[file]}
    assert sum(x.nbytes for tensors in held.values() for x in tensors.values()) == total


@pytest.mark.parametrize("n", [1, 4])
def test_host_memory_holds_a_chunk_at_a_time_and_each_is_read_once(tmp_path, monkeypatch, n):
    config, limit = CONFIGS["even"], 600
    monkeypatch.setattr(arrays, "CHUNK_BYTES", limit)
    params = zero_on(n).shard(make(config))
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, params, config={"heads": config.heads})
        cut = checkpoints.manifest().arrays["blocks/attn/qkv/kernel"].chunk
    assert cut[-1] < 3 * config.width if n == 4 else cut[1] < config.width, "cut in every way"
    parts, read = [], arrays.Array.read

    def reading(*args):
        part = read(*args)
        parts.append(part.nbytes)
        return part

    monkeypatch.setattr(arrays.Array, "read", reading)
    hugging_face.export(tmp_path / "in", tmp_path / "out")
    assert max(parts) <= limit and sum(parts) == 4 * gpt.num_params(config)
    back = hugging_face.load(tmp_path / "out", zero_on(1).abstract(functools.partial(make, config)))
    assert_bitwise(back, params)


def test_a_full_disk_is_told_before_anything_is_written(saved, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        hugging_face.export(saved["odd"][0], tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_go_out_as_they_are(tmp_path, dtype):
    config = CONFIGS["odd"]
    params = jax.tree.map(lambda x: x.astype(dtype), make(config))
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, {"params": params}, config={"model": {"heads": 2}})
    hugging_face.export(tmp_path / "in", tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert str(model.dtype) == f"torch.{dtype}"
    want = our_logits(config, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    np.testing.assert_allclose(their_logits(model.float(), config), want, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"heads": 2}, None),
        ({"model": {"heads": 2}}, None),
        ({"model": "nano"}, "heads"),  # a preset of another width
        ({"heads": 5}, "heads=5 must divide width=12"),
        ({"heads": "2"}, "--heads"),
        (None, "--heads"),
        ([1], "--heads"),
    ],
)
def test_the_number_of_heads_comes_from_the_config_or_is_asked_for(tmp_path, config, words):
    params = make(CONFIGS["odd"])
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, params, config=config)
    if words is None:
        hugging_face.export(tmp_path / "in", tmp_path / "out")
    else:
        with pytest.raises(ValueError, match=words):
            hugging_face.export(tmp_path / "in", tmp_path / "out")
    hugging_face.export(tmp_path / "in", tmp_path / "given", heads=3)
    assert json.loads((tmp_path / "given" / "config.json").read_text())["n_head"] == 3


def test_a_preset_by_name_has_its_heads(tmp_path):
    config = gpt.preset("nano", seq=4, layers=1)
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, make(config), config={"model": "nano", "seq": 4})
    hugging_face.export(tmp_path / "in", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_head"] == config.heads


def without(params, path):
    return nnx.State({k: v for k, v in params.items() if k != path})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (lambda p: {"w": jnp.ones((3, 3))}, "no parameters of models/: wte/embedding"),
        (lambda p: without(p, "ln_f"), r"ln_f/bias \[12\] is missing"),
        (lambda p: {**p, "head": jnp.ones((3, 3))}, r"head \[3, 3\] is not part of it"),
        (lambda p: {**p, "wpe": {"embedding": jnp.ones((8, 13))}}, r"wpe/embedding is \[8, 13\]"),
        (lambda p: {**p, "wpe": {"embedding": jnp.ones((8, 12), int)}}, "int32"),
        (lambda p: {**p, "wpe": {"embedding": jnp.ones((0, 12))}}, "seq=0"),
        (lambda p: {**p, "wte": {"embedding": jnp.ones(12)}}, r"wte/embedding is \[12\]"),
    ],
)
def test_what_is_no_gpt_is_refused_and_leaves_nothing(tmp_path, tree, words):
    params = jax.tree.map(lambda x: x, make(CONFIGS["odd"]))
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, (tree(nnx.to_pure_dict(params)),), config={"heads": 2})
    with pytest.raises(ValueError, match=words):
        hugging_face.export(tmp_path / "in", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_parameters_elsewhere_are_found_by_prefix(saved, tmp_path):
    params = make(CONFIGS["odd"])
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, {"ema": params, "x": jnp.ones(2)}, config={"heads": 2})
    with pytest.raises(ValueError, match="--prefix ema/"):
        hugging_face.export(tmp_path / "in", tmp_path / "out")
    assert run("export", tmp_path / "in", tmp_path / "out", "--prefix", "ema/") == 0
    with pytest.raises(ValueError, match="nothing in it begins with 'emma/'"):
        hugging_face.export(tmp_path / "in", tmp_path / "other", prefix="emma/")


def test_the_command_refuses_and_says_why(saved, tmp_path, capsys):
    folder = saved["odd"][0]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for args, words in (
        ((folder, tmp_path / "full"), "is there already and not empty"),
        ((folder, tmp_path / "full" / "file"), "is there already and not empty"),
        ((folder, tmp_path / "out", "--step", 4), "step 4: there are steps 3"),
        ((tmp_path / "none", tmp_path / "out"), "does not hold a checkpoint"),
        ((folder, tmp_path / "out", "--max-file-bytes", 0), "at least 1"),
        ((folder, tmp_path / "out", "--heads", 0), "heads=0"),
        ((folder, tmp_path / "out", "--max-file-bytes", "nan"), "at least 1"),
        ((folder, tmp_path / "out", "--max-file-bytes", "inf"), "at least 1"),
    ):
        assert run("export", *args) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("export", folder, tmp_path / "out", "--format", "pickle")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    assert run("export", folder, tmp_path / "empty", "--step", 3) == 0
    assert (tmp_path / "empty" / "config.json").exists()


def test_damage_is_noticed_while_exporting_and_leaves_nothing(saved, tmp_path, monkeypatch):
    folder = tmp_path / "in"
    shutil.copytree(saved["odd"][0], folder)
    chunk = next(p for p in files_of(folder / "3" / "state" / "arrays" / "0003") if "c" in p.parts)
    good = chunk.read_bytes()
    chunk.write_bytes(good[:5] + bytes([good[5] ^ 1]) + good[6:])
    with pytest.raises(Damaged, match="0003"):
        hugging_face.export(folder, tmp_path / "out")
    chunk.write_bytes(good)
    read = arrays.Array.read
    with monkeypatch.context() as patch:
        patch.setattr(arrays.Array, "read", lambda *a: read(*a) + np.float32(1))
        with pytest.raises(Damaged, match="its checksum differs"):
            hugging_face.export(folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    hugging_face.export(folder, tmp_path / "out")


def test_a_tensor_that_was_not_written_whole_is_no_file(tmp_path):
    files = safetensor_files.Writer(
        tmp_path, {"a": ((2, 3), "float32"), "b": ((4,), "float32")}, 10**6
    )
    files.write("a", (slice(2), slice(3)), np.ones((2, 3), np.float32))
    files.write("b", slice(3), np.ones(3, np.float32))
    with pytest.raises(AssertionError, match="b"):
        files.finish()
