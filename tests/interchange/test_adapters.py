"""Adapters as PEFT has them, and bases that are quantised as they are read."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zero_jax
from zero_jax import interchange
from zero_jax.adapters.lora import Lora
from zero_jax.interchange import exporter, peft
from zero_jax.models import decoder, gpt, hf
from zero_jax.plan.text_model import TextModel

DECODER = decoder.DecoderConfig(
    layers=3,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=10,
    hidden=72,
    vocab=48,
    seq=16,
    qkv_bias=True,
    tied=True,
)
CONFIGS = {"decoder": DECODER, "gpt": gpt.GPTConfig(layers=2, width=32, heads=4, vocab=48, seq=16)}
KEY = jax.random.key(0)


@pytest.fixture(scope="module", params=list(CONFIGS))
def config(request):
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    """A model of transformers with new weights."""
    made = tmp_path_factory.mktemp("model")
    params = zero_jax.Zero(zero_jax.make_mesh(), stage=3).init(TextModel(config).own, KEY)
    known = {"heads": config.heads, "hf_config": hf.json_of(config, "float32")}
    with zero_jax.Checkpoints(made / "run") as checkpoints:
        checkpoints.save(1, params, config=known)
    interchange.export(made / "run", made / "hf")
    return made / "hf"


def filled(model):
    """Adapters that do something."""
    rng = np.random.default_rng(0)
    new = model.adapted.new(jax.eval_shape(model.own))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 10, new)


@pytest.fixture(scope="module")
def adapter(config, folder, tmp_path_factory):
    model = TextModel(config, Lora(rank=3, alpha=5.0, base="fp32"))
    lora = filled(model)
    out = tmp_path_factory.mktemp("adapter") / "out"
    peft.save_adapter(lora, model.lora, config, out, str(folder))
    return model, lora, out


def test_adapters_come_back_bit_for_bit(config, adapter):
    _, lora, out = adapter
    found = peft.load_adapter(out, config)
    assert found.keys() == lora.keys()
    for path, own in lora.items():
        for part in ("a", "b"):
            np.testing.assert_array_equal(found[path][part], own[part])


def test_files_are_named_as_peft_names_them(config, adapter):
    _, _, out = adapter
    known = json.loads((out / "adapter_config.json").read_text())
    assert (known["r"], known["lora_alpha"], known["peft_type"]) == (3, 5.0, "LORA")
    names = set(load_file(out / "adapter_model.safetensors"))
    first = (
        "model.layers.0.self_attn.q_proj" if config is DECODER else "transformer.h.0.attn.c_attn"
    )
    assert f"base_model.model.{first}.lora_A.weight" in names
    assert len(names) == 2 * (7 * 3 if config is DECODER else 4 * 2)


def test_merged_is_the_model_with_its_adapters_added(config, folder, adapter, tmp_path):
    model, lora, out = adapter
    peft.merge(folder, out, tmp_path / "merged", max_file_bytes=20_000)
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    like = zero.abstract(model.own)
    base, merged = (zero.full(interchange.load(at, like)) for at in (folder, tmp_path / "merged"))
    whole = jax.tree.map(lambda x: jax.numpy.asarray(np.asarray(x.addressable_data(0))), base)
    wanted = model.adapted.merged({"base": whole, "lora": lora})
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )


@pytest.mark.parametrize("base", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_base_is_read_as_the_bits_that_the_whole_would_have(config, folder, base, n):
    model = TextModel(config, Lora(rank=3, base=base))
    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    zero = zero_jax.Zero(mesh, stage=3, frozen=model.frozen)
    read = interchange.load(folder, zero.abstract(model.make)["base"], rounded=True)
    full = zero_jax.Zero(mesh, stage=0).init(TextModel(config).own, KEY)
    wanted = jax.jit(model.adapted.rests)(zero_jax.logical(full))
    for a, b in zip(jax.tree.leaves(zero.full(read)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_base_is_rounded_only_if_that_is_asked_for(config, folder):
    model = TextModel(config, Lora(rank=3, base="bf16"))
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, frozen=model.frozen)
    with pytest.raises(ValueError, match="is float32, which bfloat16 does not hold"):
        interchange.load(folder, zero.abstract(model.make)["base"])


def changed(out, tmp_path, tensors=lambda known: known, config=lambda known: known):
    made = tmp_path / "changed"
    made.mkdir()
    save_file(
        tensors(load_file(out / "adapter_model.safetensors")), made / "adapter_model.safetensors"
    )
    known = config(json.loads((out / "adapter_config.json").read_text()))
    (made / "adapter_config.json").write_text(json.dumps(known))
    return made


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda t: dict(list(t.items())[2:]), "in 1 layers of 2|in 2 layers of 3"),
        (lambda t: {k.replace("attn", "attm"): v for k, v in t.items()}, "is no matrix of it"),
        (
            lambda t: {k: v[:, :-1].copy() if "_A" in k else v for k, v in t.items()},
            "the adapter 31 x",
        ),
        (lambda t: {k: v for k, v in t.items() if "_A" in k}, "no pair of A and B"),
        (lambda t: {k: v[1:].copy() if "_A" in k else v for k, v in t.items()}, "no pair"),
        (lambda t: t | {"base_model.model.x": np.zeros(1)}, "is no part of a LoRA adapter"),
    ],
)
def test_adapters_of_another_model_are_refused(config, adapter, tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        peft.load_adapter(changed(adapter[2], tmp_path, tensors), config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_rslora": True}, "use_rslora True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"r": 0}, "r 0"),
        ({"r": 3.5}, "r 3.5"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
    ],
)
def test_adapters_of_another_kind_are_refused(adapter, tmp_path, more, message):
    made = changed(adapter[2], tmp_path, config=lambda known: known | more)
    with pytest.raises(ValueError, match=f"{message}.*nothing that can be loaded"):
        peft.adapter_config(made)


@pytest.mark.parametrize(
    ("rank", "rows", "message"),
    [
        (6, lambda at: 3, "`r` is 6.* has 3"),
        (3, lambda at: 2 if at == 0 else 3, "`r` is 3, and .* 1 of .* has 2"),
    ],
)
def test_a_rank_that_is_not_that_of_the_config_is_refused(
    config, adapter, tmp_path, rank, rows, message
):
    """alpha / r would be another scale; NumPy can't stack several ranks."""

    def shorter(tensors):
        pairs = sorted({name.partition(".lora_")[0] for name in tensors})
        return {
            name: (t[: rows(at)] if "_A" in name else t[:, : rows(at)]).copy()
            for name, t in tensors.items()
            for at in [pairs.index(name.partition(".lora_")[0])]
        }

    made = changed(adapter[2], tmp_path, shorter, lambda known: known | {"r": rank})
    with pytest.raises(ValueError, match=message):
        peft.load_adapter(made, config)


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 0, "top_k": 2}, (7, [7, 0])),
        ({"eos_token_id": [0, 1]}, {"eos_token_id": [0, 1]}, ([7, 0, 1], [7, 0, 1])),
        ({"eos_token_id": 0, "pad_token_id": 3, "bos_token_id": 2}, None, (7, [7, 0])),
        ({}, None, (7, None)),
        ({"eos_token_id": 7}, {"eos_token_id": 7}, (7, 7)),
    ],
)
def test_what_ends_a_learned_turn_is_where_generation_stops(tmp_path, config, generation, wanted):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    exporter.end_with(tmp_path, [7])
    known = json.loads((tmp_path / "config.json").read_text())
    assert known == {"model_type": "llama"} | config | {"eos_token_id": wanted[0]}
    path = tmp_path / "generation_config.json"
    made = json.loads(path.read_text()) if path.exists() else None
    others = {name: own for name, own in config.items() if name != "eos_token_id"}
    expected = others if generation is None else generation
    assert made == (None if wanted[1] is None else expected | {"eos_token_id": wanted[1]})


def test_what_is_no_adapter_or_in_use_is_refused(config, folder, adapter, tmp_path):
    model, _, out = adapter
    with pytest.raises(ValueError, match="no config of an adapter"):
        peft.adapter_config(folder)
    with pytest.raises(ValueError, match="is missing"):
        peft.load_adapter(folder, config)
    with pytest.raises(ValueError, match="already and not empty"):
        peft.merge(folder, out, folder)
    with pytest.raises(ValueError, match="stands beside no matrix"):
        peft.save_adapter({"nowhere": {}}, model.lora, config, tmp_path / "x")
