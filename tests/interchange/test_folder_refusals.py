"""Folders of transformers: which files are read, and errors that name a key, a file or a tensor."""

import json
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exchange import GPTS, abstract, loaded, noisy, save
from problems import whole
from test_defaults import FULL, KINDS

from zero_jax import interchange
from zero_jax.interchange import hugging_face, peft
from zero_jax.models import hf

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
TIED = CONFIG | {"tie_word_embeddings": True}
SIZES = ["head_dim", *[*CONFIG][1:7]]  # keys of config.json


def tensors(value, known=CONFIG, dtype=np.float32):
    return {p.name: np.full(p.shape, value, dtype) for p in hf.layout(hf.config_of(known)).places}


def written(folder, known=CONFIG, one=None, parts=None, index=None):
    """A folder with one file of tensors, or with parts and their index."""
    (folder / "config.json").write_text(json.dumps(known))
    if one is not None:
        safetensors.numpy.save_file(one, folder / ONE, metadata={"format": "pt"})
    if parts is not None:
        for at, file in enumerate(PARTS):
            safetensors.numpy.save_file({n: parts[n] for n in [*parts][at::2]}, folder / file)
        index = {name: PARTS[at % 2] for at, name in enumerate(parts)}
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def values(folder, report=lambda _: None):
    found = whole(loaded(folder, 8, report=report)[1])
    return {float(value) for x in found.values() for value in np.unique(x)}


def test_one_file_is_read_and_none_beside_it_or_parts_by_their_index(tmp_path):
    said = []
    interchange.check(written(tmp_path))  # without weights
    interchange.check(written(tmp_path, parts=tensors(1.0)))
    assert values(tmp_path) == {1.0}
    written(tmp_path, one=tensors(2.0))
    assert values(tmp_path, said.append) == {2.0}
    assert len(said) == 1 and ONE in said[0] and INDEX in said[0]
    for file in PARTS:
        (tmp_path / file).unlink()
    assert values(tmp_path) == {2.0}, "beside an index without its files"
    (tmp_path / INDEX).unlink()
    for beside in ("consolidated.safetensors", "pytorch_model.bin", PARTS[0]):
        safetensors.numpy.save_file(tensors(1.0), tmp_path / beside)
    assert values(tmp_path) == {2.0}


@pytest.mark.parametrize("saved", ["both", "embedding", "head"])
def test_a_tied_model_may_be_saved_with_its_embedding_its_head_or_both(tmp_path, saved):
    rows = np.arange(512, dtype=np.float32).reshape(32, 16)
    own = tensors(2.0, TIED) | {EMBEDDING: rows, HEAD: rows.copy()}
    if saved != "both":
        del own[HEAD if saved == "embedding" else EMBEDDING]
    found = whole(loaded(written(tmp_path, TIED, own))[1])
    assert np.array_equal(found["embed/embedding"], rows) and "head/kernel" not in found


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_weights_that_are_not_finite_are_named_and_the_largest_are_read(tmp_path, dtype):
    own, kind = tensors(1.0, dtype=dtype), jnp.finfo(dtype)
    own[EMBEDDING][0, :4] = [kind.max, kind.min, kind.tiny, -0.0]
    found = whole(loaded(written(tmp_path, one=own))[1])["embed/embedding"]
    assert np.array_equal(found[0, :4], own[EMBEDDING][0, :4].astype(np.float32))
    name = "model.layers.1.mlp.down_proj.weight"
    for value in (np.nan, np.inf, -np.inf):
        own[name][3, 5] = value
        with pytest.raises(ValueError, match=f"{ONE}: {name}"):
            loaded(written(tmp_path, one=own))


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NAN, INF = float("nan"), float("inf")
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7}
CHANGES = {  # by family: settings whose first is named by the error, or (error, settings)
    "llama": [
        {"rms_norm_eps": NAN}, {"rms_norm_eps": "1e-5"}, {"rope_theta": INF}, {"rope_theta": -1.0},
        {"rope_scaling": [1]}, ("factor", {"rope_scaling": {"rope_type": "linear"}}),
        ("'yarn'", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("partial_rotary_factor", {"rope_scaling": {"partial_rotary_factor": 0.5}}),
        ("rope_parameters", {"rope_scaling": {"full_attention": {}}}),
        {"tie_word_embeddings": "false"}, ("hidden_act is 'relu'", {"hidden_act": "relu"}),
        {"layer_types": KINDS}, {"num_hidden_layers": 2**30}, {"hidden_size": 2**31},
        ("kv_heads`=3", {"num_key_value_heads": 3}), ("size is '128'", {"hidden_size": "128"}),
        {"tie_word_embeddings": False, "model_type": "gemma3", "text_config": TEXT},
        ("text_config", {"model_type": "gemma3"})],
    "mistral": [{"layer_types": KINDS}],
    "qwen2": [{"layer_types": KINDS[:3]}, {"max_window_layers": "3", "layer_types": None}],
    "qwen3": [
        {"layer_types": ["chunked_attention"] * 7}, ("layer_types", {"use_sliding_window": False}),
        ("'qwen4'.*qwen3 ", {"model_type": "qwen4"})],
    "gemma3_text": [
        {"rope_parameters": {"rope_theta": 5.0}}, {"sliding_window": None},
        {"rope_parameters": {"full_attention": [1], "sliding_attention": {}}, "rope_scaling": None},
        {"final_logit_softcapping": 30.0}],
    "qwen3_moe": [
        ("num_experts", {"num_local_experts": 7}), {"mlp_only_layers": [1]},
        ("num_hidden_layers is 7 .*1073741824", {"num_experts": 2**30})],
    "gpt2": [
        ("num_hidden_layers", {"model_type": "llama"}), ("heads`=5", {"n_head": 5}),
        {"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-6}, {"n_inner": 13},
        {"tie_word_embeddings": False}, {"scale_attn_weights": False}, {"n_layer": "2"},
        {"scale_attn_by_inverse_layer_idx": True}, {"add_cross_attention": True}, {"n_head": None}],
}  # fmt: skip


@pytest.mark.parametrize(("family", "change"), [(f, own) for f in CHANGES for own in CHANGES[f]])
def test_a_setting_without_meaning_is_named(family, change):
    named, change = change if isinstance(change, tuple) else (next(iter(change)), change)
    with pytest.raises(ValueError, match=named):
        hf.config_of(FULL[family] | change)


def one(more, known=CONFIG):
    """A file with these tensors too, or without those that are None."""
    own = {n: x for n, x in (tensors(2.0, known) | more).items() if x is not None}
    return lambda folder: written(folder, known, own)


def indexed(more):
    """All tensors in the first part, the head in the second too, and more names in the index."""

    def put(folder):
        written(folder, index={name: PARTS[0] for name in tensors(1.0)} | more)
        safetensors.numpy.save_file(tensors(1.0), folder / PARTS[0])
        safetensors.numpy.save_file({HEAD: tensors(1.0)[HEAD]}, folder / PARTS[1])

    return put


SPECIAL = {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to("gone")}
SPECIAL["loop"] = lambda path: path.symlink_to(path)
SPECIAL["1 TiB"] = lambda path: (path.touch(), os.truncate(path, 1 << 40))  # takes no space


def special(name, kind):
    def put(folder):
        path = written(folder, index={EMBEDDING: PARTS[0]} if name == PARTS[0] else None) / name
        path.unlink(missing_ok=True)
        SPECIAL[kind](path)

    return put


def content(name, data):
    return lambda folder: (written(folder) / name).write_bytes(data)


def header(known, data=b"", length=None):
    text = known if isinstance(known, bytes) else json.dumps(known).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    return content(ONE, size + text + data)


TENSOR, EIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"\0" * 8
BIG = {"shape": [0, 2**62], "data_offsets": [0, 0]}
# fmt: off
FOLDERS = [
    (PARTS[0], lambda f: (written(f, parts=tensors(1.0)) / INDEX).unlink()),
    (f"{PARTS[1]}.*copy all", lambda f: (written(f, parts=tensors(1.0)) / PARTS[1]).unlink()),
    (f"{HEAD}.*{PARTS[0]} and .*{PARTS[1]}", indexed({HEAD: PARTS[1]})),
    (INDEX, lambda f: written(f, index={})),
    (r"'\.\./x'", lambda f: written(f, index={EMBEDDING: "../x"})),
    (f"{ONE}.*gone", special(ONE, "link")), (f"no {ONE} and no {INDEX}", written),
    ("consolidated.safetensors", content("consolidated.safetensors", b"")),
    (r"\.bin\)", content("pytorch_model.bin", b"")),
    ("`adapter_config.json`.*`adapter`", lambda f: (
        written(f, one=tensors(1.0)) / "adapter_config.json").write_text("{}")),
    ("`adapter`", lambda f: (f / "adapter_config.json").write_text("{}")),
    ("`adapter`", content("adapter_model.safetensors", b"")),
    ("`quantization_config`.*'fp8'", one({}, CONFIG | {"quantization_config": FP8})),
    ("`compression_config`", one({}, CONFIG | {"compression_config": {"a": 1}})),
    ("`quantization_config`", lambda f: written(f, CONFIG | {
        "model_type": "gemma3", "text_config": {"quantization_config": FP8}})),
    ("`transformers_weights`", one({}, CONFIG | {"transformers_weights": "x.safetensors"})),
    ("config.json", lambda folder: None),
    *((f"{HEAD}.*{EMBEDDING}", one({HEAD: np.ones((n, 16), np.float32)}, TIED)) for n in (32, 1)),
    (EMBEDDING, one({EMBEDDING: None}, TIED)), ("norm.weight", one({"norm.weight": np.ones(16)})),
    (r"layers.2.*missing", lambda f: written(f, CONFIG | {"num_hidden_layers": 3}, tensors(1.0))),
    (rf"{NORM} \[16\]", one({NORM: None})), (r"more \[3\]", one({"more": np.ones(3, np.float32)})),
    *((rf"{EMBEDDING} is \[{n}, 16\].*\[32, 16\]", one({EMBEDDING: np.ones((n, 16), np.float32)}))
      for n in (31, 0)),
    *((f"{EMBEDDING} is {name}", one({EMBEDDING: np.ones((32, 16), dtype)}))
      for dtype, name in (("int32", "I32"), ("float64", "F64"))),
    *((name, special(name, kind)) for name in (ONE, PARTS[0]) for kind in ("pipe", "folder")),
    # Files of safetensors: empty, cut, overlapping, beyond the file or 64 bits, unknown, hostile.
    *((ONE, put) for put in (
        content(ONE, b""), content(ONE, EIGHT[:2]), header({"a": TENSOR}, EIGHT, 2**63),
        header({"a": TENSOR}, EIGHT, 10**6), header({"a": TENSOR}, EIGHT + EIGHT),
        header({"a": TENSOR, "b": TENSOR | {"data_offsets": [4, 12]}}, EIGHT + EIGHT[:4]),
        header({"a": TENSOR, "b": TENSOR | {"data_offsets": [16, 24]}}, 4 * EIGHT),
        *(header({"a": TENSOR | change}, EIGHT) for change in (
            {"data_offsets": [8, 0]}, {"data_offsets": [0, 2**60]}, {"shape": [3]},
            {"shape": [2**62, 2**62]}, {"dtype": "F99"})),
        header(b"[" * 100_000), header([]), header(b'{"\xff": 1}'),
        header({"\x1b[2J": TENSOR}, EIGHT))),
    ("model", header({EMBEDDING: TENSOR | {"dtype": "F8_E4M3", "shape": [8]}}, EIGHT)),
    ("model", header({})), ("model", header({EMBEDDING: TENSOR | BIG}))]
BAD_JSON = [
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"[" * 100_000, b"[1]", b'{"model_type": "lla',
    b"\xff\xfe\x00", b'{"vocab_size": ' + b"9" * 5000 + b"}", b""]
for name in ("config.json", INDEX, "adapter_config.json"):
    FOLDERS += [(name, content(name, data)) for data in BAD_JSON]
    FOLDERS += [(name, special(name, kind)) for kind in ("pipe", "folder", "loop", "1 TiB")]
TREES = [  # parameters in a checkpoint that are no GPT of its config
    ("wte/embedding", lambda p: {"w": jnp.ones((3, 3))}),
    ("--prefix.*0/ema/", lambda p: {"ema": p}), ("--like", lambda p: {"embed": p["wte"]}),
    (r"ln_f/bias \[12\]", lambda p: {name: x for name, x in p.items() if name != "ln_f"}),
    ("wpe/embedding is missing", lambda p: {name: x for name, x in p.items() if name != "wpe"}),
    (r"head \[3, 3\]", lambda p: p | {"head": jnp.ones((3, 3))}),
    (r"wpe/embedding is \[8, 13\]", lambda p: p | {"wpe": {"embedding": jnp.ones((8, 13))}}),
    ("int32", lambda p: p | {"wpe": {"embedding": jnp.ones((8, 12), int)}}),
    ("seq`=0", lambda p: p | {"wpe": {"embedding": jnp.ones((0, 12))}}),
    (r"wte/embedding is \[12\]", lambda p: p | {"wte": {"embedding": jnp.ones(12)}})]
# fmt: on


@pytest.mark.parametrize(("named", "put"), FOLDERS)
def test_a_folder_that_can_not_be_read_is_named(named, put, tmp_path):
    put(tmp_path)
    with pytest.raises(ValueError, match=named) as caught:
        peft.adapter_config(tmp_path) if named == "adapter_config.json" else loaded(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("size", [2**30, 50_000, 10**30])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_the_files_do_not_have_raise_before_memory_is_taken(tmp_path, name, size):
    written(tmp_path, CONFIG | {name: size}, tensors(1.0))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"config\.json"):
            interchange.check(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_an_embedding_is_read_without_a_copy(tmp_path):
    known = CONFIG | {"vocab_size": 2**18}
    held = hugging_face.opened(written(tmp_path, known, tensors(1.0, known)))
    read = held.reader("embed/embedding", np.dtype("float32"), rounded=False)
    tracemalloc.start()
    size = read((0, 0), (2**18, 16)).nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 2**24 and peak < 1.2 * size


@pytest.mark.parametrize(("named", "tree"), TREES)
def test_a_checkpoint_that_is_no_model_leaves_no_folder(named, tree, tmp_path):
    params = tree(dict(noisy(GPTS["odd"]).to_pure_dict()))
    save(tmp_path / "in", (params,), {"heads": 2})
    with pytest.raises(ValueError, match=named):
        interchange.export(tmp_path / "in", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_like_of_another_model_and_an_export_that_was_killed_are_refused(tmp_path):
    odd = save(tmp_path / "in", noisy(GPTS["odd"]), {"heads": 2})
    (tmp_path / ".out.partial").mkdir()
    with pytest.raises(ValueError, match=".out.partial"):
        interchange.export(odd, tmp_path / "out")
    (tmp_path / ".out.partial").rmdir()
    with pytest.raises(ValueError, match="missing"):
        interchange.export(odd, tmp_path / "out", like=written(tmp_path))
    interchange.export(odd, tmp_path / "out")
    for like in (abstract(GPTS["even"]), {"w": jnp.ones(3)}):
        with pytest.raises(ValueError, match="`like`.*wte/embedding"):
            interchange.load(tmp_path / "out", like)
