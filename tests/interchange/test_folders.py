"""Folders of transformers: which files are read, tied heads, and finite weights."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exchange import loaded
from problems import whole

from zero_jax import interchange
from zero_jax.models import hf

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
# fmt: off
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
# fmt: on
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
            safetensors.numpy.save_file({n: parts[n] for n in names[at::2]}, folder / file)
        index = {name: PARTS[at % 2] for at, name in enumerate(names)} if index is None else index
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def values(folder, report=lambda _: None):
    """The smallest and the largest number of each parameter."""
    found = whole(loaded(folder, 8, report=report)[1])
    return {float(f(x)) for x in found.values() for f in (np.min, np.max)}


@pytest.mark.parametrize("parts_left", [True, False])
def test_one_file_is_read_and_not_an_index_beside_it(tmp_path, parts_left):
    written(tmp_path, one=tensors(2.0), parts=tensors(1.0))
    for file in PARTS * (not parts_left):
        (tmp_path / file).unlink()
    said = []
    assert values(tmp_path, said.append) == {2.0}
    assert len(said) == 1 and ONE in said[0] and INDEX in said[0]


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "pytorch_model.bin", PARTS[0]])
def test_weights_in_other_files_beside_it_are_not_read(tmp_path, beside):
    written(tmp_path, one=tensors(2.0))
    safetensors.numpy.save_file(tensors(1.0), tmp_path / beside)
    assert values(tmp_path) == {2.0}


def test_parts_are_read_by_their_index(tmp_path):
    interchange.check(written(tmp_path))  # without weights
    interchange.check(written(tmp_path, parts=tensors(3.0)))
    assert values(tmp_path) == {3.0}


@pytest.mark.parametrize("saved", ["both", "embedding", "head"])
def test_a_tied_model_may_be_saved_with_its_embedding_its_head_or_both(tmp_path, saved):
    own = tensors(2.0, TIED) | {EMBEDDING: np.arange(512, dtype=np.float32).reshape(32, 16)}
    if saved != "embedding":
        own[HEAD] = own[EMBEDDING].copy()
    if saved == "head":
        del own[EMBEDDING]
    found = whole(loaded(written(tmp_path, TIED, own))[1])
    assert np.array_equal(found["embed/embedding"], np.arange(512).reshape(32, 16))
    assert "head/kernel" not in found


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
