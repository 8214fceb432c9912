"""Folders of transformers as they are found: other files beside the weights, and damaged ones."""

import functools
import json
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import zero_jax
from zero_jax import interchange
from zero_jax.interchange import peft
from zero_jax.models import families, hf

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 32}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
CONFIG |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
TIED = CONFIG | {"tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensors(value, known=CONFIG, dtype=np.float32):
    return {p.name: np.full(p.shape, value, dtype) for p in hf.layout(hf.config_of(known)).places}


def written(folder, known=CONFIG, one=None, parts=None, index=None):
    """A folder with one file of tensors, or with parts and their index."""
    (folder / "config.json").write_text(json.dumps(known))
    if one is not None:
        safetensors.numpy.save_file(one, folder / ONE, metadata={"format": "pt"})
    if parts is not None:
        names = list(parts)
        for at, file in enumerate(PARTS):
            own = {name: parts[name] for name in names[at::2]}
            safetensors.numpy.save_file(own, folder / file)
        index = {name: PARTS[at % 2] for at, name in enumerate(names)} if index is None else index
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def make(config):
    return nnx.state(families.build(config, nnx.Rngs(0)), nnx.Param)


def loaded(folder, report=lambda _: None):
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    like = zero.abstract(functools.partial(make, interchange.config(folder)))
    params = zero.full(interchange.load(folder, like, report))
    return {"/".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(params)}


# Which files are read: as transformers' `_get_resolved_checkpoint_files` has it.


@pytest.mark.parametrize("parts_left", [True, False])
def test_one_file_is_read_and_not_an_index_beside_it(tmp_path, parts_left):
    written(tmp_path, one=tensors(2.0), parts=tensors(1.0))
    for file in PARTS * (not parts_left):
        (tmp_path / file).unlink()
    said = []
    found = loaded(tmp_path, said.append)
    assert (
        {float(x.max()) for x in found.values()}
        == {2.0}
        == {float(x.min()) for x in found.values()}
    )
    assert len(said) == 1 and f"{ONE} is read" in said[0] and INDEX in said[0]


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "pytorch_model.bin", PARTS[0]])
def test_weights_in_other_files_beside_it_are_not_read(tmp_path, beside):
    written(tmp_path, one=tensors(2.0))
    safetensors.numpy.save_file(tensors(1.0), tmp_path / beside)
    assert {float(x.max()) for x in loaded(tmp_path).values()} == {2.0}


@pytest.mark.parametrize("saved", ["both", "embedding", "head"])
def test_a_tied_model_may_be_saved_with_its_embedding_its_head_or_both(tmp_path, saved):
    own = tensors(2.0, TIED) | {EMBEDDING: np.arange(512, dtype=np.float32).reshape(32, 16)}
    if saved != "embedding":
        own[HEAD] = own[EMBEDDING].copy()
    if saved == "head":
        del own[EMBEDDING]
    found = loaded(written(tmp_path, TIED, own))
    assert np.array_equal(found["embed/embedding"], np.arange(512).reshape(32, 16))
    assert "head/kernel" not in found


def test_a_tied_head_that_differs_is_an_error_and_so_is_neither(tmp_path):
    own = tensors(2.0, TIED)
    written(tmp_path, TIED, own | {HEAD: own[EMBEDDING] + 1})
    with pytest.raises(ValueError, match=f"{HEAD} differs from {EMBEDDING}"):
        loaded(tmp_path)
    written(tmp_path, TIED, {name: own[name] for name in own if name != EMBEDDING})
    with pytest.raises(ValueError, match=f"{EMBEDDING}.*is missing"):
        loaded(tmp_path)


def without_index(folder):
    written(folder, parts=tensors(1.0))
    (folder / INDEX).unlink()


def one_part_gone(folder):
    written(folder, parts=tensors(1.0))
    (folder / PARTS[1]).unlink()


def twice(folder):
    index = {name: PARTS[0] for name in tensors(1.0)} | {HEAD: PARTS[1]}
    written(folder, index=index)
    safetensors.numpy.save_file(tensors(1.0), folder / PARTS[0])
    safetensors.numpy.save_file({HEAD: tensors(1.0)[HEAD]}, folder / PARTS[1])


def only(name, known=CONFIG):
    def put(folder):
        written(folder, known)
        safetensors.numpy.save_file(tensors(1.0), folder / name)

    return put


def with_config(**others):
    return lambda folder: written(folder, CONFIG | others, tensors(1.0))


def adapters_beside(folder):
    written(folder, one=tensors(1.0))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def adapters_alone(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    safetensors.numpy.save_file({"a": np.ones(1)}, folder / "adapter_model.safetensors")


def dangling(folder):
    written(folder)
    (folder / ONE).symlink_to(folder / "gone")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FOLDERS = {
    "parts without an index": (without_index, f"{PARTS[0]}.*copy it"),
    "an index of a part that is missing": (one_part_gone, f"{INDEX}.*missing, {PARTS[1]}"),
    "a tensor in two parts": (twice, f"{HEAD} is in two files of .*{PARTS[0]} and {PARTS[1]}"),
    "an index of nothing": (lambda f: written(f, index={}), f"{INDEX} is no index"),
    "a link to nothing": (dangling, f"{ONE}, which links to .*gone, is missing"),
    "Mistral's own format": (only("consolidated.safetensors"), "consolidated.safetensors"),
    "pickle": (only("pytorch_model.bin"), r"pickle \(.bin\)"),
    "nothing": (written, f"no {ONE} and no {INDEX}"),
    "adapters beside the model": (adapters_beside, "`adapter_config.json`.*`adapter`"),
    "adapters alone": (adapters_alone, "adapters.*`adapter`"),
    "adapters with a config": (only("adapter_model.safetensors"), "adapters.*`adapter`"),
    "quantised": (with_config(quantization_config=FP8), "`quantization_config`.*'fp8'"),
    "quantised before": (with_config(compression_config={"a": 1}), "`compression_config`"),
    "weights elsewhere": (
        with_config(transformers_weights="x.safetensors"),
        "`transformers_weights`",
    ),
    "no config": (lambda folder: None, "config.json is missing"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_that_can_not_be_read_says_what_it_has_and_what_to_do(tmp_path, what):
    put, match = FOLDERS[what]
    put(tmp_path)
    with pytest.raises(ValueError, match=match):
        loaded(tmp_path)


def test_text_inside_a_model_of_images_may_be_quantised_too():
    known = {"model_type": "gemma3", "text_config": {"quantization_config": FP8}}
    with pytest.raises(ValueError, match="`quantization_config`"):
        interchange.folder_config._check_not_quantised(known)


# Weights that are not finite.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path, dtype, value):
    own = tensors(1.0, dtype=dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    own[name][3, 5] = value
    with pytest.raises(ValueError, match=f"{ONE}: {name} has NaN or infinite"):
        loaded(written(tmp_path, one=own))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_the_largest_and_smallest_numbers_are_finite(tmp_path, dtype):
    own = tensors(1.0, dtype=dtype)
    kind = jnp.finfo(dtype)
    own[EMBEDDING][0, :4] = [kind.max, kind.min, kind.tiny, -0.0]
    found = loaded(written(tmp_path, one=own))["embed/embedding"]
    assert np.array_equal(found[0, :4], own[EMBEDDING][0, :4].astype(np.float32))


def test_an_adapter_that_is_not_finite_is_named(tmp_path):
    a = {"a": np.full((2, 16, 1), np.nan), "b": np.ones((2, 1, 16))}
    config, lora = hf.config_of(CONFIG), zero_jax.Lora(1)
    a = {"blocks/attn/q/kernel": {k: x.astype(np.float32) for k, x in a.items()}}
    folder = peft.save_adapter(a, lora, config, tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter_model.safetensors: .*q_proj.*NaN"):
        peft.load_adapter(folder, config)


# Damaged and hostile files.

SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"]
SIZES += ["num_attention_heads", "num_key_value_heads", "head_dim"]


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


def test_a_folder_that_fits_or_has_no_weights_passes_the_check(tmp_path):
    interchange.check(written(tmp_path))
    interchange.check(written(tmp_path, one=tensors(1.0)))


def nested(depth):
    return ('{"a":' * depth + "1" + "}" * depth).encode()


BAD_JSON = {
    "nested": nested(100_000),
    "nested lists": b"[" * 100_000,
    "no object": b"[1]",
    "cut": b'{"model_type": "lla',
    "no text": b"\xff\xfe\x00",
    "a number of many digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "nothing": b"",
}


@pytest.mark.parametrize("file", ["config.json", INDEX, "adapter_config.json"])
@pytest.mark.parametrize("what", [*BAD_JSON, "a pipe", "a folder", "too long"])
def test_json_that_is_damaged_is_named(tmp_path, file, what):
    written(tmp_path)
    path = tmp_path / file
    path.unlink(missing_ok=True)
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    elif what == "too long":
        with open(path, "wb") as out:
            out.truncate(1 << 40)  # it takes no room on the disk
    else:
        path.write_bytes(BAD_JSON[what])
    read = peft.adapter_config if file == "adapter_config.json" else loaded
    with pytest.raises(ValueError, match=file):
        read(tmp_path)


@pytest.mark.parametrize("file", [ONE, PARTS[0]])
@pytest.mark.parametrize("what", ["a pipe", "a folder"])
def test_weights_that_are_no_file_are_named(tmp_path, file, what):
    written(tmp_path, index={EMBEDDING: PARTS[0]} if file == PARTS[0] else None)
    path = tmp_path / file
    os.mkfifo(path) if what == "a pipe" else path.mkdir()
    with pytest.raises(ValueError, match=f"{file} is not a regular file"):
        loaded(tmp_path)


def header(known, data=b"", length=None):
    text = known if isinstance(known, bytes) else json.dumps(known).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWO = b"\0" * 16
HEADERS = {
    "nothing": b"",
    "cut in its length": b"\0\0",
    "a giant length": header({"a": TENSOR}, TWO[:8], 2**63),
    "longer than the file": header({"a": TENSOR}, TWO[:8], 10**6),
    "overlap": header({"a": TENSOR, "b": TENSOR | {"data_offsets": [4, 12]}}, TWO[:12]),
    "a hole": header({"a": TENSOR, "b": TENSOR | {"data_offsets": [16, 24]}}, TWO + TWO),
    "more than it names": header({"a": TENSOR}, TWO),
    "backwards": header({"a": TENSOR | {"data_offsets": [8, 0]}}, TWO),
    "before the file": header({"a": TENSOR | {"data_offsets": [-8, 0]}}, TWO),
    "beyond the file": header({"a": TENSOR | {"data_offsets": [0, 2**60]}}, TWO),
    "another shape": header({"a": TENSOR | {"shape": [3]}}, TWO[:8]),
    "a shape beyond 64 bits": header({"a": TENSOR | {"shape": [2**62, 2**62]}}, TWO[:8]),
    "an unknown dtype": header({"a": TENSOR | {"dtype": "F99"}}, TWO[:8]),
    "nested": header(b"[" * 100_000),
    "a list": header([]),
    "no text": header(b'{"\xff": 1}'),
    "letters for the terminal": header({"\x1b[2J": TENSOR}, TWO[:8]),
    "fp8": header({EMBEDDING: TENSOR | {"dtype": "F8_E4M3", "shape": [8]}}, TWO[:8]),
    "nothing in it": header({}),
    "empty and huge": header({EMBEDDING: TENSOR | {"shape": [0, 2**62], "data_offsets": [0, 0]}}),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_damaged_file_of_safetensors_is_named(tmp_path, what):
    written(tmp_path)
    (tmp_path / ONE).write_bytes(HEADERS[what])
    with pytest.raises(ValueError, match=str(tmp_path)) as caught:
        loaded(tmp_path)
    assert str(caught.value).isprintable()
