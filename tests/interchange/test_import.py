"""Models that come from Hugging Face's GPT-2: the same bits back, and everything else refused."""

import functools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import torch
from flax import nnx
from gpt2_models import (
    ATOL,
    CONFIGS,
    loaded,
    make,
    our_logits,
    run,
    their_config,
    their_logits,
    their_model,
    tokens_of,
)
from test_checkpoints import assert_bitwise, whole, zero_on

import zero_jax
from training.supervise import free_address
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.interchange import hugging_face, safetensor_files
from zero_jax.models import gpt

pytestmark = pytest.mark.interchange


# Back.


@pytest.mark.parametrize(
    ("name", "n", "stage", "model"),
    [
        *((name, n, stage, 1) for name in ("odd", "even") for n in (1, 3, 4) for stage in (0, 3)),
        *(("even", n, stage, 2) for n in (1, 2, 4) for stage in (0, 3)),
        ("even", 2, 3, 4),
        ("one head", 3, 3, 1),
        ("as many heads as columns", 4, 3, 1),
    ],
)
def test_imported_back_it_is_bitwise_what_was_exported(saved, exported, name, n, stage, model):
    zero = zero_on(n, stage, model)
    like = zero.abstract(functools.partial(make, CONFIGS[name]))
    back = hugging_face.load(exported[name], like)
    assert_bitwise(back, saved[name][1])
    for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(back), strict=True):
        assert (a.sharding, a.shape, a.dtype) == (b.sharding, b.shape, b.dtype)


def test_only_what_devices_hold_is_read(exported, monkeypatch):
    """N devices in one process read everything once; a replicated leaf is not read N times."""
    config, n, sizes, read = CONFIGS["even"], 4, [], safetensor_files.Folder.read

    def reading(*args):
        part = read(*args)
        sizes.append(part.size)
        return part

    monkeypatch.setattr(safetensor_files.Folder, "read", reading)
    like = zero_on(n).abstract(functools.partial(make, config))
    hugging_face.load(exported["even"], like)
    assert sum(sizes) == gpt.num_params(config)
    assert max(sizes) == max(config.width * 4 * config.width, config.vocab * config.width) // n


@pytest.mark.slow
def test_each_of_two_processes_reads_what_its_devices_hold(saved, exported, tmp_path):
    config = CONFIGS["even"]
    address = free_address()
    script = [sys.executable, str(pathlib.Path(__file__).parents[1] / "interchange_run.py")]
    runs = [
        subprocess.Popen(
            [
                *script,
                str(exported["even"]),
                str(tmp_path / f"{rank}.npz"),
                address,
                "2",
                str(rank),
            ]
        )
        for rank in range(2)
    ]
    try:
        assert [run.wait(timeout=300) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    want = whole(saved["even"][1])
    got = {name: np.zeros_like(value) for name, value in want.items()}
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as found:
            pieces = dict(found)
        assert pieces.pop("read") == gpt.num_params(config) // 2
        for key, piece in pieces.items():
            name, _, starts = key.partition("@")
            corner = map(int, starts.split(","))
            box = tuple(slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True))
            assert not got[name][box].any(), "no piece twice"
            got[name][box] = piece
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_part_of_columns_of_qkv_reads_whole_heads_only(tmp_path, monkeypatch, heads):
    """Columns split over devices in the midst of heads: what is read is rounded up to heads."""
    config = gpt.GPTConfig(layers=1, width=8, heads=heads, vocab=5, seq=3)
    params = make(config)
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, params, config={"heads": heads})
    hugging_face.export(tmp_path / "in", tmp_path / "out")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "d"))
    other = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=split if x.shape == (1, 8, 24) else other
        ),
        params,
    )
    wide, read = [], safetensor_files.Folder.read

    def reading(self, name, starts, stops):
        if name.endswith("c_attn.weight"):
            wide.append(stops[1] - starts[1])
        return read(self, name, starts, stops)

    monkeypatch.setattr(safetensor_files.Folder, "read", reading)
    assert_bitwise(hugging_face.load(tmp_path / "out", like), params)
    head = 8 // heads
    touched = [-(-(3 * d + 3) // (3 * head)) - 3 * d // (3 * head) for d in range(8)]
    assert sorted(wide) == sorted(3 * [n * head for n in touched])


SAVED = {
    "one file": {},
    "shards": {"max_shard_size": "3KB"},
}


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("base", [False, True])
def test_a_model_by_transformers_comes_in_with_its_logits(tmp_path, name, how, base):
    config, model = CONFIGS[name], their_model(CONFIGS[name])
    (model.transformer if base else model).save_pretrained(tmp_path / "theirs", **SAVED[how])
    assert hugging_face.config(tmp_path / "theirs") == config
    zero = zero_on(3)
    params = hugging_face.load(tmp_path / "theirs", zero.abstract(functools.partial(make, config)))
    got = our_logits(config, zero.full(params))
    np.testing.assert_allclose(got, their_logits(model, config), atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_in_widened(tmp_path, dtype):
    config, model = CONFIGS["odd"], their_model(CONFIGS["odd"]).to(dtype)
    model.save_pretrained(tmp_path)
    params = hugging_face.load(tmp_path, zero_on(3).abstract(functools.partial(make, config)))
    got = whole(params)["wte/embedding"]
    assert got.dtype == np.float32
    assert np.array_equal(got, model.transformer.wte.weight.detach().float().numpy())


def their_tensors(config):
    return {k: v.detach().numpy().copy() for k, v in their_model(config).named_parameters()}


def written(folder, tensors, config, **others):
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(their_config(config).to_dict() | others))
    return folder


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_old_buffers_and_the_tied_head_are_left_out(tmp_path, prefix):
    config = CONFIGS["odd"]
    theirs = their_tensors(config)
    tensors = {k.replace("transformer.", prefix): v for k, v in theirs.items()}
    tensors["lm_head.weight"] = theirs["transformer.wte.weight"].copy()
    for layer in range(config.layers):
        mask = np.tril(np.ones((1, 1, config.seq, config.seq), np.uint8))
        tensors[f"{prefix}h.{layer}.attn.bias"] = mask
        tensors[f"{prefix}h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    written(tmp_path, tensors, config)
    params = hugging_face.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))
    assert np.array_equal(whole(params)["wte/embedding"], theirs["transformer.wte.weight"])


# A checkpoint from it.


def test_training_starts_from_an_imported_checkpoint(tmp_path):
    config, model = CONFIGS["even"], their_model(CONFIGS["even"])
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    assert run("import", tmp_path / "theirs", tmp_path / "mine") == 0
    assert run("verify", tmp_path / "mine") == 0
    zero = zero_on(2, 3, 2)
    with Checkpoints(tmp_path / "mine") as checkpoints:
        assert checkpoints.steps == [0]
        back = checkpoints.restore(
            (zero.abstract(functools.partial(make, config)),), say=lambda _: None
        )
        params = back.tree[0]
        assert back.config["model"]["heads"] == config.heads
        got = our_logits(config, zero.full(params))
        np.testing.assert_allclose(got, their_logits(model, config), atol=ATOL, rtol=ATOL)
        tx = zero.optimizer(optax.adamw(1e-3))
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
        step = zero.train_step(
            lambda p, x: zero_jax.Weighted(*gpt.loss(nnx.merge(graphdef, p), x)), tx
        )
        rows = jnp.asarray(np.tile(tokens_of(config), (4, 1)))
        params, state, _ = step(params, tx.init(params), rows)
        # A run that saves (params, opt_state) goes on in the same folder.
        checkpoints.save(1, (params, state), config=back.config)
    assert run("export", tmp_path / "mine", tmp_path / "again") == 0
    got = their_logits(loaded(tmp_path / "again"), config)
    np.testing.assert_allclose(got, our_logits(config, zero.full(params)), atol=ATOL, rtol=ATOL)


def test_import_does_not_touch_a_folder_with_checkpoints(saved, exported, tmp_path, capsys):
    folder = saved["odd"][0]
    assert run("import", exported["odd"], folder) == 2
    assert "holds checkpoints already" in capsys.readouterr().err
    assert Checkpoints(folder, read_only=True).steps == [3]
    assert run("import", exported["odd"], tmp_path / "new", "--step", -1) == 2
    assert "step=-1" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
