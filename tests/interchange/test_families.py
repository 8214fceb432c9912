"""Llama, Mistral, Qwen and Gemma from their own files: the same numbers, and back to the bit."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from families import FAMILIES, make, our_logits, ours, their_gradients, their_logits, theirs, tokens
from flax import nnx
from test_checkpoints import assert_bitwise, zero_on

from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.interchange import hugging_face
from zero_jax.models import decoder, decoder_presets, generate, hf

pytestmark = pytest.mark.interchange


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in FAMILIES:
        made[name] = tmp_path_factory.mktemp("theirs")
        theirs(name).save_pretrained(made[name], max_shard_size="30KB")
    return made


def loaded(folder, n=1, stage=3):
    config = hugging_face.config(folder)
    return config, hugging_face.load(
        folder, zero_on(n, stage).abstract(functools.partial(make, config))
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_theirs_gives_their_logits(folders, name):
    assert len(list(folders[name].glob("*.safetensors"))) > 1
    config, params = loaded(folders[name], n=3)
    want = their_logits(theirs(name))
    assert np.abs(want).max() > 1, "or nothing is compared"
    got = our_logits(config, zero_on(3).full(params))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "gpt2"])
def test_gradients_are_theirs(folders, name):
    config, params = loaded(folders[name])
    model, rows = theirs(name), tokens()
    model.zero_grad()
    model(torch.from_numpy(rows), labels=torch.from_numpy(rows)).loss.backward()
    known = their_gradients(model)

    def loss(params):
        total, weight = decoder.loss(ours(config, params), jnp.asarray(rows))
        return total / weight

    with jax.default_matmul_precision("highest"):
        grads = jax.jit(jax.grad(loss))(params)
    flat = {"/".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(grads)}
    for place in hf.layout(config).places:
        want = known[place.name]
        found = np.asarray(flat[place.path])[place.at]
        box, found = place.turn.put((0,) * found.ndim, found)
        scale = np.abs(want).max()
        assert scale > 0
        np.testing.assert_allclose(found, want[box], atol=1e-4 * scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_theirs_token_by_token(folders, name):
    config, params = loaded(folders[name])
    prompt = tokens(1, 5)
    want = theirs(name).generate(
        torch.from_numpy(prompt), max_new_tokens=20, do_sample=False, use_cache=False
    )
    model = ours(config, params)
    with jax.default_matmul_precision("highest"):
        got = generate.generate(model, jnp.asarray(prompt[0]), 20, jax.random.key(0), 0.0)
    assert np.asarray(got).tolist() == want[0].tolist()


@pytest.mark.parametrize("n, stage", [(1, 3), (4, 3), (3, 1)])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_and_out_and_in_again_is_the_same_to_the_bit(folders, tmp_path, name, n, stage):
    config, params = loaded(folders[name], n, stage)
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, (params,))
    hugging_face.export(tmp_path / "in", tmp_path / "out", like=folders[name], max_file_bytes=3e4)
    kept = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for key, value in theirs(name).state_dict().items():
        assert torch.equal(value, kept[key]), key
    again, back = loaded(tmp_path / "out", 2)
    assert again == config
    assert_bitwise(back, params)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_that_is_written_anew_is_read_as_the_same_by_both(folders, name):
    config = hugging_face.config(folders[name])
    known = hf.json_of(config, "float32")
    assert hf.config_of(known) == config
    kind = known["model_type"]
    again = transformers.AutoConfig.for_model(**{**known, "model_type": kind})
    model = transformers.AutoModelForCausalLM.from_config(again, attn_implementation="eager")
    model.load_state_dict(theirs(name).state_dict())
    assert np.array_equal(their_logits(model.eval()), their_logits(theirs(name)))


@pytest.mark.parametrize("name", decoder_presets.PRESETS)
def test_presets_are_models_of_theirs(name):
    preset = decoder_presets.preset(name)
    known = hf.json_of(preset, "bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**known)
        )
    shapes = {k: tuple(v.shape) for k, v in model.named_parameters()}
    assert {p.name: p.shape for p in hf.layout(preset).places} == as_saved(shapes, known)


def as_saved(shapes, known):
    """In files each expert has tensors of its own, and Mixtral's other names; since transformers 5
    a model in memory has stacks."""
    found = {}
    for name, shape in shapes.items():
        layer, _, kind = name.partition(".experts.")
        if kind == "gate_up_proj":
            (count, both, width), kinds = shape, ("gate_proj", "up_proj")
            parts = {kind: (both // 2, width) for kind in kinds}
        elif kind == "down_proj":
            count, *rest = shape
            parts = {kind: tuple(rest)}
        else:
            found[name] = shape
            continue
        for at in range(count):
            found |= {f"{layer}.experts.{at}.{k}.weight": own for k, own in parts.items()}
    if known["model_type"] != "mixtral":
        return found
    words = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}
    renamed = {}
    for name, shape in found.items():
        for newer, older in words.items():
            name = name.replace(newer, older)
        renamed[name] = shape
    return renamed


def test_a_window_that_is_null_is_none_and_one_that_is_not_there_is_their_default(folders):
    assert hugging_face.config(folders["mistral"]).window == 5
    assert hugging_face.config(folders["mistral, no window"]).window is None
    known = json.loads((folders["mistral"] / "config.json").read_text())
    assert hf.config_of(known | {"sliding_window": None}).window is None
    del known["sliding_window"]
    assert hf.config_of(known).window == 4096


def test_configs_of_transformers_4_are_read_too():
    known = {
        **{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 10},
        **{"num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": 32},
        "rope_theta": 500000.0,
        "rope_scaling": {
            **{"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    }
    config = hf.config_of(known)
    assert config.rope == decoder.Rope(500000.0, 8.0, (8192, 1.0, 4.0))
    assert (config.kv_heads, config.head_dim) == (4, 16)
    assert hf.config_of(known | {"rope_scaling": None}).rope == decoder.Rope(500000.0)
    gemma = {**known, "model_type": "gemma3_text", "rope_local_base_freq": 50.0}
    gemma |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_hidden_layers": 8}
    config = hf.config_of(gemma)
    assert (config.rope, config.local_rope) == (decoder.Rope(5e5, 8.0), decoder.Rope(50.0))
    assert config.sliding == (True,) * 5 + (False, True, True)


def test_of_a_model_with_images_the_text_is_read_and_the_rest_is_named(tmp_path, folders):
    text = json.loads((folders["gemma3"] / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {}
    for file in folders["gemma3"].glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(file)
    named = {f"language_model.{name}": value for name, value in tensors.items()}
    named["vision_tower.patches.weight"] = np.ones((2, 2), np.float32)
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    made_for, said = hugging_face.config(tmp_path), []
    like = zero_on(2).abstract(functools.partial(make, made_for))
    params = hugging_face.load(tmp_path, like, report=said.append)
    assert len(said) == 1 and "1 tensors" in said[0] and "vision_tower.patches.weight" in said[0]
    assert_bitwise(params, loaded(folders["gemma3"])[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen4"}, "'qwen4' is none of.*qwen3 is the nearest"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'.*default, linear"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_key_value_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"num_hidden_layers": 4, "layer_types": None}, "layers.3.*is missing"),
        ({"intermediate_size": 43}, r"mlp.gate_proj.weight is \[44, 32\], not \[43, 32\]"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_what_a_config_says_and_the_files_do_not_hold_is_refused(folders, tmp_path, change, words):
    for file in folders["qwen3"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    known = json.loads((folders["qwen3"] / "config.json").read_text()) | change
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=words):
        loaded(tmp_path)


def test_without_a_config_of_theirs_an_export_says_what_to_give(folders, tmp_path):
    _, params = loaded(folders["qwen3"])
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, (params,))
    with pytest.raises(ValueError, match="give --like DIR"):
        hugging_face.export(tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError, match="is no such model: .*missing"):
        hugging_face.export(tmp_path / "in", tmp_path / "out", like=folders["llama"])


@pytest.mark.parametrize("left", ["a stale index", "the head alone"])
def test_files_that_are_left_or_lack_the_embedding_are_read_as_transformers_reads_them(
    folders, tmp_path, left
):
    theirs("llama, tied").save_pretrained(tmp_path)
    if left == "a stale index":
        for file in folders["llama"].glob("*.safetensors*"):
            (tmp_path / file.name).symlink_to(file)
    else:
        own = safetensors.numpy.load_file(tmp_path / "model.safetensors")
        own["lm_head.weight"] = own.pop("model.embed_tokens.weight")
        meta = {"format": "pt"}
        safetensors.numpy.save_file(own, tmp_path / "model.safetensors", metadata=meta)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config, params = loaded(tmp_path)
    want = their_logits(read.eval())
    np.testing.assert_allclose(their_logits(theirs("llama, tied")), want, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(our_logits(config, params), want, atol=1e-4, rtol=1e-4)
