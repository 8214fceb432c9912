"""Hugging Face's GPT-2: the same logits there, the same bits back, and everything else refused."""

import functools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

# No test may look for anything on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import torch
import transformers
from flax import nnx
from test_checkpoints import assert_bitwise, files_of, whole, zero_on

from models import gpt, hf_gpt2
from zero_jax import arrays, interchange, tensorfiles
from zero_jax.arrays import Damaged
from zero_jax.checkpoint import main
from zero_jax.checkpoints import Checkpoints

pytestmark = pytest.mark.interchange

# Logits of fp32 models, whose sums come in another order.
ATOL = 1e-4

CONFIGS = {
    "odd": gpt.GPTConfig(layers=2, width=12, heads=2, vocab=17, seq=8),
    "even": gpt.GPTConfig(layers=3, width=16, heads=4, vocab=20, seq=6),
    "one head": gpt.GPTConfig(layers=1, width=10, heads=1, vocab=31, seq=5),
    "as many heads as columns": gpt.GPTConfig(layers=4, width=6, heads=6, vocab=9, seq=12),
}


@functools.partial(jax.jit, static_argnums=0)
def make(config):
    """Parameters none of which is zero or one, so that every bias and scale counts."""
    params = nnx.state(gpt.GPT(config, rngs=nnx.Rngs(0)), nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


def tokens_of(config):
    return np.random.default_rng(0).integers(0, config.vocab, (3, config.seq))


def our_logits(config, params):
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    with jax.default_matmul_precision("highest"):
        apply = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
        return np.asarray(apply(params, tokens_of(config)))


def their_logits(model, config):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens_of(config))).logits.float().numpy()


def their_config(config, **others):
    return transformers.GPT2Config(
        vocab_size=config.vocab,
        n_positions=config.seq,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        bos_token_id=None,
        eos_token_id=None,
        **others,
    )


def their_model(config, **others):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(their_config(config, **others))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    return model


def loaded(folder):
    """The model by transformers, which must find every tensor and no other."""
    model, found = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def run(*args):
    return main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By name of the config: a training checkpoint, its parameters, their logits."""
    made = {}
    for name, config in CONFIGS.items():
        folder, zero = tmp_path_factory.mktemp("checkpoint"), zero_on(4)
        params = zero.shard(make(config))
        moments = jax.tree.map(jnp.zeros_like, params)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(3, (params, {"mu": moments}), config={"heads": config.heads})
        made[name] = folder, params, our_logits(config, make(config))
    return made


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    """The same, exported: one folder with several files for each config."""
    made = {}
    for name in CONFIGS:
        made[name] = tmp_path_factory.mktemp("exported") / "out"
        assert run("export", saved[name][0], made[name], "--max-file-bytes", "3e3") == 0
    return made


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
    assert hf_gpt2.shapes(config) == shapes
    theirs = {k: tuple(v.shape) for k, v in their_model(config).named_parameters()}
    assert {p.name: p.shape for p in hf_gpt2.places(config)} == theirs


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
    interchange.export(saved["odd"][0], tmp_path / "out", max_file_bytes=size)
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
    interchange.export(tmp_path / "in", tmp_path / "out")
    assert max(parts) <= limit and sum(parts) == 4 * gpt.num_params(config)
    back = interchange.load(tmp_path / "out", zero_on(1).abstract(functools.partial(make, config)))
    assert_bitwise(back, params)


def test_a_full_disk_is_told_before_anything_is_written(saved, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        interchange.export(saved["odd"][0], tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_go_out_as_they_are(tmp_path, dtype):
    config = CONFIGS["odd"]
    params = jax.tree.map(lambda x: x.astype(dtype), make(config))
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, {"params": params}, config={"model": {"heads": 2}})
    interchange.export(tmp_path / "in", tmp_path / "out")
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
        interchange.export(tmp_path / "in", tmp_path / "out")
    else:
        with pytest.raises(ValueError, match=words):
            interchange.export(tmp_path / "in", tmp_path / "out")
    interchange.export(tmp_path / "in", tmp_path / "given", heads=3)
    assert json.loads((tmp_path / "given" / "config.json").read_text())["n_head"] == 3


def test_a_preset_by_name_has_its_heads(tmp_path):
    config = gpt.preset("nano", seq=4, layers=1)
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, make(config), config={"model": "nano", "seq": 4})
    interchange.export(tmp_path / "in", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_head"] == config.heads


def without(params, path):
    return nnx.State({k: v for k, v in params.items() if k != path})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (lambda p: {"w": jnp.ones((3, 3))}, "no parameters of models/gpt.py"),
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
        interchange.export(tmp_path / "in", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_parameters_elsewhere_are_found_by_prefix(saved, tmp_path):
    params = make(CONFIGS["odd"])
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, {"ema": params, "x": jnp.ones(2)}, config={"heads": 2})
    with pytest.raises(ValueError, match="--prefix ema/"):
        interchange.export(tmp_path / "in", tmp_path / "out")
    assert run("export", tmp_path / "in", tmp_path / "out", "--prefix", "ema/") == 0
    with pytest.raises(ValueError, match="nothing in it begins with 'emma/'"):
        interchange.export(tmp_path / "in", tmp_path / "other", prefix="emma/")


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
        interchange.export(folder, tmp_path / "out")
    chunk.write_bytes(good)
    read = arrays.Array.read
    with monkeypatch.context() as patch:
        patch.setattr(arrays.Array, "read", lambda *a: read(*a) + np.float32(1))
        with pytest.raises(Damaged, match="its checksum differs"):
            interchange.export(folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    interchange.export(folder, tmp_path / "out")


def test_a_tensor_that_was_not_written_whole_is_no_file(tmp_path):
    files = tensorfiles.Writer(tmp_path, {"a": ((2, 3), "float32"), "b": ((4,), "float32")}, 10**6)
    files.write("a", (slice(2), slice(3)), np.ones((2, 3), np.float32))
    files.write("b", slice(3), np.ones(3, np.float32))
    with pytest.raises(AssertionError, match="b"):
        files.finish()


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
    back = interchange.load(exported[name], like)
    assert_bitwise(back, saved[name][1])
    for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(back), strict=True):
        assert (a.sharding, a.shape, a.dtype) == (b.sharding, b.shape, b.dtype)


def test_only_what_devices_hold_is_read(exported, monkeypatch):
    """N devices in one process read everything once; a replicated leaf is not read N times."""
    config, n, sizes, read = CONFIGS["even"], 4, [], tensorfiles.Folder.read

    def reading(*args):
        part = read(*args)
        sizes.append(part.size)
        return part

    monkeypatch.setattr(tensorfiles.Folder, "read", reading)
    like = zero_on(n).abstract(functools.partial(make, config))
    interchange.load(exported["even"], like)
    assert sum(sizes) == gpt.num_params(config)
    assert max(sizes) == max(config.width * 4 * config.width, config.vocab * config.width) // n


@pytest.mark.heavy
def test_each_of_two_processes_reads_what_its_devices_hold(saved, exported, tmp_path):
    config = CONFIGS["even"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [sys.executable, str(pathlib.Path(__file__).parent / "interchange_run.py")]
    runs = [
        subprocess.Popen(
            [
                *script,
                str(exported["even"]),
                str(tmp_path / f"{rank}.npz"),
                str(port),
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
    interchange.export(tmp_path / "in", tmp_path / "out")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "d"))
    other = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=split if x.shape == (1, 8, 24) else other
        ),
        params,
    )
    wide, read = [], tensorfiles.Folder.read

    def reading(self, name, starts, stops):
        if name.endswith("c_attn.weight"):
            wide.append(stops[1] - starts[1])
        return read(self, name, starts, stops)

    monkeypatch.setattr(tensorfiles.Folder, "read", reading)
    assert_bitwise(interchange.load(tmp_path / "out", like), params)
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
    assert interchange.config(tmp_path / "theirs") == config
    zero = zero_on(3)
    params = interchange.load(tmp_path / "theirs", zero.abstract(functools.partial(make, config)))
    got = our_logits(config, zero.full(params))
    np.testing.assert_allclose(got, their_logits(model, config), atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_in_widened(tmp_path, dtype):
    config, model = CONFIGS["odd"], their_model(CONFIGS["odd"]).to(dtype)
    model.save_pretrained(tmp_path)
    params = interchange.load(tmp_path, zero_on(3).abstract(functools.partial(make, config)))
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
    params = interchange.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))
    assert np.array_equal(whole(params)["wte/embedding"], theirs["transformer.wte.weight"])


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
        interchange.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
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
        interchange.config(tmp_path)
    with pytest.raises(ValueError, match=words):
        interchange.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
def test_both_names_of_our_gelu_are_known(tmp_path, name):
    config = CONFIGS["odd"]
    model = their_model(config, activation_function=name, n_inner=48)
    model.save_pretrained(tmp_path)
    params = interchange.load(tmp_path, zero_on(1).abstract(functools.partial(make, config)))
    got = our_logits(config, zero_on(1).full(params))
    np.testing.assert_allclose(got, their_logits(model, config), atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("other", ["even", "one head"])
def test_a_model_of_other_shape_is_refused_with_what_to_build(exported, other):
    like = zero_on(1).abstract(functools.partial(make, CONFIGS[other]))
    with pytest.raises(ValueError, match="wte/embedding is.*zero_jax.interchange.config"):
        interchange.load(exported["odd"], like)
    with pytest.raises(ValueError, match=r"wte/embedding \[17, 12\] is missing"):
        interchange.load(exported["odd"], {"w": jnp.ones(3)})


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
        ("a file is missing", r"model-\d+-of-\d+.safetensors is missing"),
        ("a file is cut", r"model-\d+-of-\d+.safetensors is damaged"),
        ("a header is wrong", r"model-\d+-of-\d+.safetensors is damaged"),
        ("the index is wrong", "index.json is no index"),
        ("the index has no map", "index.json is no index"),
        ("the index names a file elsewhere", "'../x.safetensors'"),
        ("the index names a tensor that is not there", "more"),
        ("a tensor twice", "in two files"),
        ("no config", "config.json"),
        ("the config is wrong", "config.json"),
        ("pickle only", "no safetensors.*pickle"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_file(exported, tmp_path, what, words):
    folder = tmp_path / "in"
    shutil.copytree(exported["odd"], folder)
    damaged(folder, what)
    like = zero_on(1).abstract(functools.partial(make, CONFIGS["odd"]))
    with pytest.raises(ValueError, match=words):
        interchange.load(folder, like)
    assert run("import", folder, tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


def test_without_safetensors_the_error_says_what_to_install(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"pip install safetensors"):
        interchange.load(exported["odd"], zero_on(1).abstract(lambda: make(CONFIGS["odd"])))


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
        step = zero.train_step(lambda p, x: gpt.loss(nnx.merge(graphdef, p), x), tx)
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
