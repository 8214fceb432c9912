"""Each error of interchange has its type, and names the key, the file or the tensor."""

import json
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exchange import GPTS, abstract, loaded, noisy, save
from test_defaults import FULL, GPT2, KINDS
from test_folders import CONFIG, EMBEDDING, HEAD, INDEX, ONE, PARTS, TIED, tensors, written

from zero_jax import interchange
from zero_jax.interchange import peft
from zero_jax.models import hf

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NAN, INF = float("nan"), float("inf")
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7}

# Settings of a config.json.
# fmt: off
SETTINGS = [
    ("rms_norm_eps", "llama", {"rms_norm_eps": NAN}),
    ("rms_norm_eps", "llama", {"rms_norm_eps": "1e-5"}),
    ("rope_theta", "llama", {"rope_theta": INF}),
    ("rope_theta", "llama", {"rope_theta": -1.0}),
    ("rope_scaling", "llama", {"rope_scaling": [1]}),
    ("factor", "llama", {"rope_scaling": {"rope_type": "linear"}}),
    ("'yarn'", "llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("partial_rotary_factor", "llama", {"rope_scaling": {"partial_rotary_factor": 0.5}}),
    ("rope_parameters", "llama", {"rope_scaling": {"full_attention": {}}}),
    ("rope_parameters", "gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}),
    ("rope_parameters", "gemma3_text", {"rope_scaling": None, "rope_parameters": {
        "full_attention": [1], "sliding_attention": {}}}),
    ("tie_word_embeddings", "llama", {"tie_word_embeddings": "false"}),
    ("hidden_act is 'relu'", "llama", {"hidden_act": "relu"}),
    ("layer_types", "llama", {"layer_types": KINDS}),
    ("layer_types", "mistral", {"layer_types": KINDS}),
    ("layer_types", "qwen2", {"layer_types": KINDS[:3]}),
    ("layer_types", "qwen3", {"layer_types": ["chunked_attention"] * 7}),
    ("layer_types", "qwen3", {"use_sliding_window": False}),
    ("max_window_layers", "qwen2", {"layer_types": None, "max_window_layers": "3"}),
    ("sliding_window", "gemma3_text", {"sliding_window": None}),
    ("final_logit_softcapping", "gemma3_text", {"final_logit_softcapping": 30.0}),
    ("num_experts", "qwen3_moe", {"num_local_experts": 7}),
    ("mlp_only_layers", "qwen3_moe", {"mlp_only_layers": [1]}),
    ("num_hidden_layers is 7 .*1073741824", "qwen3_moe", {"num_experts": 2**30}),
    ("num_hidden_layers", "llama", {"num_hidden_layers": 2**30}),
    ("hidden_size", "llama", {"hidden_size": 2**31}),
    ("hidden_size is '128'", "llama", {"hidden_size": "128"}),
    ("kv_heads=3", "llama", {"num_key_value_heads": 3}),
    ("'qwen4'.*qwen3 ", "qwen3", {"model_type": "qwen4"}),
    ("tie_word_embeddings", "llama", {
        "model_type": "gemma3", "tie_word_embeddings": False, "text_config": TEXT}),
    ("text_config", "llama", {"model_type": "gemma3"}),
    ("num_hidden_layers", "gpt2", {"model_type": "llama"}),
    *((next(iter(change)), "gpt2", change) for change in (
        {"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-6}, {"n_inner": 13},
        {"tie_word_embeddings": False}, {"scale_attn_weights": False}, {"n_layer": "2"},
        {"scale_attn_by_inverse_layer_idx": True}, {"add_cross_attention": True},
        {"n_head": None})),
    ("heads=5", "gpt2", {"n_head": 5}),
]
# fmt: on


@pytest.mark.parametrize(("named", "family", "change"), SETTINGS)
def test_a_setting_without_meaning_is_named(named, family, change):
    with pytest.raises(ValueError, match=named):
        hf.config_of((GPT2 if family == "gpt2" else FULL[family]) | change)


def with_config(**others):
    return lambda folder: written(folder, CONFIG | others, tensors(1.0))


def llama(change, known=CONFIG):
    def put(folder):
        held = tensors(2.0, known)
        change(held)
        written(folder, known, held)

    return put


def holding(name, shape, dtype=np.float32, known=CONFIG):
    return llama(lambda held: held.update({name: np.ones(shape, dtype)}), known)


def lost(name):
    return lambda folder: (written(folder, parts=tensors(1.0)) / name).unlink()


def indexed(more):
    """All tensors in the first part, the head in the second too, and more names in the index."""

    def put(folder):
        written(folder, index={name: PARTS[0] for name in tensors(1.0)} | more)
        safetensors.numpy.save_file(tensors(1.0), folder / PARTS[0])
        safetensors.numpy.save_file({HEAD: tensors(1.0)[HEAD]}, folder / PARTS[1])

    return put


def only(name):
    return lambda folder: safetensors.numpy.save_file(tensors(1.0), written(folder) / name)


def special(name, kind):
    """A pipe, a folder, a link to nothing, or a file of 1 TiB that takes no room."""

    def put(folder):
        written(folder, index={EMBEDDING: PARTS[0]} if name == PARTS[0] else None)
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(folder / "gone")
        else:
            with open(path, "wb") as out:
                out.truncate(1 << 40)

    return put


def content(name, data):
    return lambda folder: (written(folder) / name).write_bytes(data)


def header(known, data=b"", length=None):
    text = known if isinstance(known, bytes) else json.dumps(known).encode()
    text = (len(text) if length is None else length).to_bytes(8, "little") + text + data
    return content(ONE, text)


TENSOR, EIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"\0" * 8
# fmt: off
FOLDERS = [
    (PARTS[0], lost(INDEX)),
    (f"{INDEX}.*{PARTS[1]}", lost(PARTS[1])),
    (f"{HEAD}.*{PARTS[0]} and {PARTS[1]}", indexed({HEAD: PARTS[1]})),
    (f"{INDEX}.*extra", indexed({"extra": PARTS[0]})),
    (INDEX, lambda f: written(f, index={})),
    (r"'\.\./x'", lambda f: written(f, index={EMBEDDING: "../x"})),
    (f"{ONE}.*gone", special(ONE, "link")),
    ("consolidated.safetensors", only("consolidated.safetensors")),
    (".bin", only("pytorch_model.bin")),
    (f"no {ONE} and no {INDEX}", written),
    ("`adapter_config.json`.*`adapter`", lambda f: (
        written(f, one=tensors(1.0)) / "adapter_config.json").write_text("{}")),
    ("`adapter`", lambda f: (f / "adapter_config.json").write_text("{}")),
    ("`adapter`", only("adapter_model.safetensors")),
    ("`quantization_config`.*'fp8'", with_config(quantization_config=FP8)),
    ("`compression_config`", with_config(compression_config={"a": 1})),
    ("`quantization_config`", with_config(model_type="gemma3", text_config={
        "quantization_config": FP8})),
    ("`transformers_weights`", with_config(transformers_weights="x.safetensors")),
    ("config.json", lambda folder: None),
    (f"{HEAD}.*{EMBEDDING}", holding(HEAD, (32, 16), known=TIED)),
    (f"{HEAD}.*{EMBEDDING}", holding(HEAD, (1, 16), known=TIED)),
    (EMBEDDING, llama(lambda t: t.pop(EMBEDDING), TIED)),
    ("norm.weight", holding("norm.weight", 16)),
    (r"layers.2.*missing", lambda f: written(f, CONFIG | {"num_hidden_layers": 3}, tensors(1.0))),
    (r"model.norm.weight \[16\]", llama(lambda t: t.pop("model.norm.weight"))),
    (r"more \[3\]", holding("more", 3)),
    (rf"{EMBEDDING} is \[31, 16\].*\[32, 16\]", holding(EMBEDDING, (31, 16))),
    (rf"{EMBEDDING} is \[0, 16\].*\[32, 16\]", holding(EMBEDDING, (0, 16))),
    (f"{EMBEDDING} is int32", holding(EMBEDDING, (32, 16), np.int32)),
    (f"{EMBEDDING} is float64", holding(EMBEDDING, (32, 16), np.float64)),
    *((ONE, special(ONE, kind)) for kind in ("pipe", "folder")),
    *((PARTS[0], special(PARTS[0], kind)) for kind in ("pipe", "folder")),
    # Files of safetensors: empty, cut, overlapping, beyond the file or 64 bits, unknown, hostile.
    *((ONE, put) for put in (
        content(ONE, b""), content(ONE, EIGHT[:2]), header({"a": TENSOR}, EIGHT, 2**63),
        header({"a": TENSOR}, EIGHT, 10**6), header({"a": TENSOR}, EIGHT + EIGHT),
        header({"a": TENSOR, "b": TENSOR | {"data_offsets": [4, 12]}}, EIGHT + EIGHT[:4]),
        header({"a": TENSOR, "b": TENSOR | {"data_offsets": [16, 24]}}, 4 * EIGHT),
        header({"a": TENSOR | {"data_offsets": [8, 0]}}, EIGHT),
        header({"a": TENSOR | {"data_offsets": [0, 2**60]}}, EIGHT),
        header({"a": TENSOR | {"shape": [3]}}, EIGHT),
        header({"a": TENSOR | {"shape": [2**62, 2**62]}}, EIGHT),
        header({"a": TENSOR | {"dtype": "F99"}}, EIGHT), header(b"[" * 100_000), header([]),
        header(b'{"\xff": 1}'), header({"\x1b[2J": TENSOR}, EIGHT))),
    ("model", header({EMBEDDING: TENSOR | {"dtype": "F8_E4M3", "shape": [8]}}, EIGHT)),
    ("model", header({})),
    ("model", header({EMBEDDING: TENSOR | {"shape": [0, 2**62], "data_offsets": [0, 0]}})),
]
BAD_JSON = [
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"[" * 100_000, b"[1]", b'{"model_type": "lla',
    b"\xff\xfe\x00", b'{"vocab_size": ' + b"9" * 5000 + b"}", b""]
JSON = [(name, put(name)) for name in ("config.json", INDEX, "adapter_config.json") for put in (
    *(lambda name, data=data: content(name, data) for data in BAD_JSON),
    *(lambda name, kind=kind: special(name, kind) for kind in ("pipe", "folder", "1 TiB")))]
# fmt: on


@pytest.mark.parametrize(("named", "put"), [*FOLDERS, *JSON])
def test_a_folder_that_can_not_be_read_is_named(named, put, tmp_path):
    put(tmp_path)
    with pytest.raises(ValueError, match=named) as caught:
        peft.adapter_config(tmp_path) if named == "adapter_config.json" else loaded(tmp_path)
    assert str(caught.value).isprintable()


NAMES = ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "head_dim"]


@pytest.mark.parametrize("size", [2**30, 50_000, 10**30])
@pytest.mark.parametrize("name", [*NAMES, "num_attention_heads", "num_key_value_heads"])
def test_sizes_that_the_files_do_not_have_raise_before_memory_is_taken(tmp_path, name, size):
    written(tmp_path, CONFIG | {name: size}, tensors(1.0))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"config\.json"):
            interchange.check(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


# Parameters in a checkpoint that are no GPT of its config.
# fmt: off
TREES = [
    ("wte/embedding", lambda p: {"w": jnp.ones((3, 3))}),
    ("--prefix 0/ema/", lambda p: {"ema": p}),
    (r"ln_f/bias \[12\]", lambda p: {name: x for name, x in p.items() if name != "ln_f"}),
    (r"head \[3, 3\]", lambda p: {**p, "head": jnp.ones((3, 3))}),
    (r"wpe/embedding is \[8, 13\]", lambda p: {**p, "wpe": {"embedding": jnp.ones((8, 13))}}),
    ("int32", lambda p: {**p, "wpe": {"embedding": jnp.ones((8, 12), int)}}),
    ("seq=0", lambda p: {**p, "wpe": {"embedding": jnp.ones((0, 12))}}),
    (r"wte/embedding is \[12\]", lambda p: {**p, "wte": {"embedding": jnp.ones(12)}}),
    ("wpe/embedding is missing", lambda p: {name: x for name, x in p.items() if name != "wpe"}),
    ("--like", lambda p: {"embed": p["wte"]}),
]
# fmt: on


@pytest.mark.parametrize(("named", "tree"), TREES)
def test_a_checkpoint_that_is_no_model_leaves_no_folder(named, tree, tmp_path):
    params = tree(noisy(GPTS["odd"]).to_pure_dict())
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
