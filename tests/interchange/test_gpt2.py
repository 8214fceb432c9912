"""GPT-2 in the format of Hugging Face and back, without PyTorch: bits, files, bytes read."""

import json
import os
import shutil
import sys
import unittest.mock

import jax
import numpy as np
import pytest
import safetensors.numpy
from exchange import GPTS, abstract, exported_in_files, loaded, noisy, save, zero_on
from problems import assert_bitwise

from zero_jax import interchange
from zero_jax.checkpoint import arrays
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.commands.checkpoint import main
from zero_jax.interchange import safetensor_files
from zero_jax.models import gpt, hf

ODD, EVEN = GPTS["odd"], GPTS["even"]


def run(*args):
    return main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp
    return {name: exported_in_files(folder("gpt2"), own) for name, own in GPTS.items()}


@pytest.fixture
def reads(monkeypatch):
    """Shapes of the parts that are read from a checkpoint or safetensors, the latter with names."""
    found = []
    for of in (arrays.StoredArray, safetensor_files.Files):

        def reading(*args, read=of.read):
            part = read(*args)
            found.append((str(args[1]), part.shape))
            return part

        monkeypatch.setattr(of, "read", reading)
    return found


MESHES = [
    ("odd", 1, 0, 1), ("odd", 3, 3, 1), ("even", 4, 3, 1), ("even", 2, 3, 2), ("even", 2, 0, 4),
    ("one head", 3, 1, 1), ("as many heads as columns", 4, 3, 1),
    ("as many heads as columns", 8, 3, 1)]  # fmt: skip
HEADS = [
    (ODD, {"heads": 2}, 2), (ODD, {"hf_config": hf.json_of(ODD, "float32")}, 2),
    (ODD, {"model": {"heads": 2}}, 2), (ODD, {"model": "nano"}, None),
    (gpt.preset("nano", seq=4, layers=1, vocab=9), {"model": "nano"}, 4),
    (ODD, {"heads": "2"}, None), (ODD, None, None), (ODD, [1], None)]  # fmt: skip


@pytest.mark.parametrize(("name", "n", "stage", "model"), MESHES)
def test_imported_back_it_has_the_bits_that_were_exported(exported, reads, name, n, stage, model):
    (params, _, folder), config = exported[name], GPTS[name]
    like = abstract(config, n, stage, model)
    reads.clear()
    assert interchange.config(folder) == config
    back = interchange.load(folder, like)
    assert_bitwise(back, params)
    for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(back), strict=True):
        assert (a.sharding, a.shape, a.dtype) == (b.sharding, b.shape, b.dtype)
    if (name, model) == ("even", 1):  # each part once, of one device at a time
        sizes = [int(np.prod(shape)) for _, shape in reads]
        assert sum(sizes) == gpt.num_params(config)
        assert max(sizes) == max(4 * config.width**2, config.vocab * config.width) // n


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_part_of_columns_of_qkv_reads_whole_heads_only(tmp_path, reads, heads):
    """Columns split over devices in the midst of heads: the parts are rounded up to heads."""
    params = noisy(gpt.GPTConfig(layers=1, width=8, heads=heads, vocab=5, seq=3))
    interchange.export(save(tmp_path / "in", params, {"heads": heads}), tmp_path / "out")
    reads.clear()
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split, other = (jax.NamedSharding(mesh, jax.P(*dims)) for dims in ((None, None, "d"), ()))

    def like(x):
        sharding = split if x.shape == (1, 8, 24) else other
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    assert_bitwise(interchange.load(tmp_path / "out", jax.tree.map(like, params)), params)
    wide = [shape[1] for name, shape in reads if name.endswith("c_attn.weight")]
    head = 8 // heads
    parts = [-(-(3 * d + 3) // (3 * head)) - 3 * d // (3 * head) for d in range(8)]
    assert sorted(wide) == sorted(3 * [n * head for n in parts])


@pytest.mark.parametrize("size", [1, 2000, 10**9])
def test_files_hold_at_most_what_is_allowed_or_one_tensor(exported, tmp_path, size):
    interchange.export(exported["odd"][1], tmp_path / "out", max_file_bytes=size)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    held = {path.name: safetensors.numpy.load_file(path) for path in files}
    sizes = [[x.nbytes for x in tensors.values()] for tensors in held.values()]
    assert all(min(own) and (len(own) == 1 or sum(own) <= size) for own in sizes)
    total, index = 4 * gpt.num_params(ODD), tmp_path / "out" / "model.safetensors.index.json"
    assert sum(map(sum, sizes)) == total
    if size == 10**9:
        assert [*held] == ["model.safetensors"] and not index.exists()
    else:
        assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
        known = json.loads(index.read_text())
        assert known["metadata"]["total_size"] == total
        assert known["weight_map"] == {name: file for file in held for name in held[file]}


@pytest.mark.parametrize("n", [1, 4])
def test_host_memory_holds_a_chunk_at_a_time_and_each_is_read_once(tmp_path, monkeypatch, reads, n):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 600)
    params = zero_on(n).shard(noisy(EVEN))
    save(tmp_path / "in", params, {"heads": EVEN.heads})
    with Checkpoints(tmp_path / "in", read_only=True) as checkpoints:
        cut = checkpoints.manifest().arrays["blocks/attn/qkv/kernel"].chunk
    assert cut[-1] < 3 * EVEN.width if n == 4 else cut[1] < EVEN.width, "chunks of every dim"
    reads.clear()
    interchange.export(tmp_path / "in", tmp_path / "out")
    sizes = [4 * int(np.prod(shape)) for _, shape in reads]
    assert max(sizes) <= 600 and sum(sizes) == 4 * gpt.num_params(EVEN)
    reads.clear()
    assert run("verify", tmp_path / "in") == 0
    assert sorted(4 * int(np.prod(shape)) for _, shape in reads) == sorted(sizes)
    assert_bitwise(loaded(tmp_path / "out")[1], params)


@pytest.mark.parametrize(("config", "noted", "heads"), HEADS)
def test_the_number_of_heads_is_noted_or_given(tmp_path, config, noted, heads):
    folder, out = save(tmp_path / "in", noisy(config), noted), tmp_path / "out"
    if heads is None:
        with pytest.raises(ValueError, match="--heads"):
            interchange.export(folder, out)
    interchange.export(folder, out, heads=None if heads else 3)
    assert json.loads((out / "config.json").read_text())["n_head"] == (heads or 3)


def test_the_commands_say_what_is_wrong_and_leave_no_folder(exported, tmp_path, capsys):
    params, folder, out = exported["odd"]
    full, new = tmp_path / "full", tmp_path / "new"
    full.mkdir()
    (full / "file").write_text("mine")
    # fmt: off
    for words, *args in (
        ("not empty", "export", folder, full), ("not empty", "export", folder, full / "file"),
        ("step 4", "export", folder, new, "--step", 4), ("checkpoint", "export", new, out / "x"),
        ("'emma/'", "export", folder, new, "--prefix", "emma/"),
        *((f"max_file_bytes`={n}", "export", folder, new, "--max-file-bytes", n)
          for n in (0, "nan", "inf")),
        *((f"`heads`={n}", "export", folder, new, "--heads", n) for n in (0, 5)),
        (str(folder), "import", out, folder), ("step`=-1", "import", out, new, "--step", -1),
        ("config.json", "import", full, new),
    ):
        # fmt: on
        assert run(*args) == 2
        assert words in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    assert run("export", folder, tmp_path / "empty", "--step", 3, "--prefix", "0/") == 0
    assert run("import", tmp_path / "empty", new) == 0
    with Checkpoints(new, read_only=True) as checkpoints:
        assert checkpoints.steps == [0]
        back = checkpoints.restore((abstract(ODD),), say=lambda _: None)
    assert back.config["hf_config"]["n_head"] == 2
    assert_bitwise(back.tree[0], params)


def test_damage_and_a_full_disk_leave_no_folder(exported, tmp_path, monkeypatch):
    folder, out = shutil.copytree(exported["odd"][1], tmp_path / "in"), tmp_path / "out"
    array = folder / "3" / "state" / "arrays" / "0003"
    chunk = next(p for p in sorted(array.rglob("*")) if p.is_file() and "c" in p.parts)
    good = chunk.read_bytes()
    chunk.write_bytes(good[:5] + bytes([good[5] ^ 1]) + good[6:])
    with pytest.raises(Damaged, match="0003"):
        interchange.export(folder, out)
    chunk.write_bytes(good)
    read, full = arrays.StoredArray.read, OSError(28, "No space left on device")
    for owner, name, broken, error in (
        (arrays.StoredArray, "read", lambda *a: read(*a) + np.float32(1), Damaged),
        (os, "posix_fallocate", unittest.mock.Mock(side_effect=full), OSError),
    ):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(owner, name, broken)
            interchange.export(folder, out)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    interchange.export(folder, out)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="pip install safetensors"):
        interchange.load(out, abstract(ODD))
