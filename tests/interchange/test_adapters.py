"""Adapters as PEFT has them, and bases that are quantised as they are read."""

import json

import jax
import numpy as np
import pytest
from exchange import save, zero_on
from safetensors.numpy import load_file, save_file

import zero_jax
from zero_jax import interchange
from zero_jax.adapters.lora import Lora
from zero_jax.interchange import exporter, peft
from zero_jax.models import decoder, gpt, hf
from zero_jax.plan.text_model import TextModel

# fmt: off
DECODER = decoder.DecoderConfig(
    layers=3, width=32, heads=4, kv_heads=2, head_dim=10, hidden=72, vocab=48, seq=16,
    qkv_bias=True, tied=True)
# fmt: on
CONFIGS = {"decoder": DECODER, "gpt": gpt.GPTConfig(layers=2, width=32, heads=4, vocab=48, seq=16)}
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def own(config):
    """New parameters of the model."""
    return jax.jit(TextModel(config).own)(jax.random.key(0))


@pytest.fixture(scope="module")
def folder(config, own, tmp_path_factory):
    """They as a model of transformers."""
    made = tmp_path_factory.mktemp("model")
    save(made / "run", own, {"heads": config.heads, "hf_config": hf.json_of(config, "float32")})
    interchange.export(made / "run", made / "hf")
    return made / "hf"


@pytest.fixture(scope="module")
def adapter(config, folder, tmp_path_factory):
    """A model with adapters that change it, the adapters, and their folder."""
    model = TextModel(config, Lora(rank=3, alpha=5.0, base="fp32"))
    new = jax.eval_shape(model.make)["lora"]
    lora = jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32) / 10, new)
    out = tmp_path_factory.mktemp("adapter") / "out"
    peft.save_adapter(lora, model.lora, config, out, str(folder))
    return model, lora, out


def test_adapters_come_back_bit_for_bit_in_files_named_as_peft_names_them(config, adapter):
    _, lora, out = adapter
    found = peft.load_adapter(out, config)
    jax.tree.map(np.testing.assert_array_equal, found, dict(lora))
    known = json.loads((out / "adapter_config.json").read_text())
    assert (known["r"], known["lora_alpha"], known["peft_type"]) == (3, 5.0, "LORA")
    names = set(load_file(out / "adapter_model.safetensors"))
    decodes = config is DECODER
    first = "model.layers.0.self_attn.q_proj" if decodes else "transformer.h.0.attn.c_attn"
    assert f"base_model.model.{first}.lora_A.weight" in names
    assert len(names) == 2 * (7 * 3 if decodes else 4 * 2)


def test_merged_is_the_model_with_its_adapters_added(config, own, folder, adapter, tmp_path):
    model, lora, out = adapter
    peft.merge(folder, out, tmp_path / "merged", max_file_bytes=20_000)
    zero = zero_on(8)
    merged = zero.full(interchange.load(tmp_path / "merged", zero.abstract(model.own)))
    wanted = model.adapted.merged({"base": own, "lora": lora})
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    ours, theirs = ((at / "config.json").read_text() for at in (tmp_path / "merged", folder))
    assert json.loads(ours) == json.loads(theirs)


@pytest.mark.parametrize(("base", "n"), [("nf4", 3), ("int8", 8), ("bf16", 1)])
def test_a_base_is_read_as_the_bits_that_the_whole_would_have(config, own, folder, base, n):
    model = TextModel(config, Lora(rank=3, base=base))
    zero = zero_jax.Zero(zero_on(n).mesh, stage=3, frozen=model.frozen)
    like = zero.abstract(model.make)["base"]
    read = interchange.load(folder, like, rounded=True)
    wanted = jax.jit(model.adapted.rests)(own)
    for a, b in zip(jax.tree.leaves(zero.full(read)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if base == "bf16":
        with pytest.raises(ValueError, match="float32.*bfloat16"):
            interchange.load(folder, like)


# fmt: off
ENDS = [  # config.json and generation_config.json, and both after 7 ends a turn
    ({"eos_token_id": 0}, {"eos_token_id": 0, "top_k": 2},
     {"eos_token_id": 7}, {"eos_token_id": [7, 0], "top_k": 2}),
    ({"eos_token_id": [0, 1]}, {"eos_token_id": [0, 1]},
     {"eos_token_id": [7, 0, 1]}, {"eos_token_id": [7, 0, 1]}),
    ({"eos_token_id": 0, "pad_token_id": 3, "bos_token_id": 2}, None,
     {"eos_token_id": 7, "pad_token_id": 3, "bos_token_id": 2},
     {"eos_token_id": [7, 0], "pad_token_id": 3, "bos_token_id": 2}),
    ({}, None, {"eos_token_id": 7}, None),
    ({"eos_token_id": 7}, {"eos_token_id": 7}, {"eos_token_id": 7}, {"eos_token_id": 7})]
# fmt: on


@pytest.mark.parametrize(("config", "generation", "config_after", "generation_after"), ENDS)
def test_the_end_of_a_learned_turn_is_where_generation_stops(
    tmp_path, config, generation, config_after, generation_after
):
    one, other = tmp_path / "config.json", tmp_path / "generation_config.json"
    one.write_text(json.dumps(config))
    if generation is not None:
        other.write_text(json.dumps(generation))
    exporter.end_with(tmp_path, [7])
    assert json.loads(one.read_text()) == config_after
    assert (json.loads(other.read_text()) if other.exists() else None) == generation_after


def tensors(change):
    """A change of the tensors of an adapter, none of its config."""
    return lambda known, held: (known, change(held))


def settings(**more):
    return lambda known, held: (known | more, held)


def shorter(rank, rows):
    """`r`, and pairs of other ranks: the first has rows[0], the others rows[1]."""

    def change(known, held):
        first = min(held).partition(".lora_")[0]
        ranks = {name: rows[not name.startswith(first)] for name in held}
        cut = {n: t[: ranks[n]] if "_A" in n else t[:, : ranks[n]].copy() for n, t in held.items()}
        return known | {"r": rank}, cut

    return change


OTHERS = [{"bias": "all"}, {"peft_type": "IA3"}, {"use_dora": True}, {"init_lora_weights": "pissa"}]
OTHERS += [{"modules_to_save": ["lm_head"]}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 8}}]
OTHERS += [{"alpha_pattern": {"q_proj": 8}}, {"lora_bias": True}, {"r": 0}, {"r": 3.5}]
OTHERS += [{"layer_replication": [[0, 2], [1, 3]]}, {"lora_alpha": float("nan")}]


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("blocks/", tensors(lambda t: dict(list(t.items())[2:]))),
        ("attm", tensors(lambda t: {k.replace("attn", "attm"): v for k, v in t.items()})),
        ("31 x", tensors(lambda t: {k: v[:, :-1] if "_A" in k else v for k, v in t.items()})),
        (
            "adapter_model.safetensors.*(mlp|attn)",
            tensors(lambda t: {k: v for k, v in t.items() if "_A" in k}),
        ),
        (
            "adapter_model.safetensors.*(mlp|attn)",
            tensors(lambda t: {k: v[1:] if "_A" in k else v for k, v in t.items()}),
        ),
        ("base_model.model.x", tensors(lambda t: t | {"base_model.model.x": np.zeros(1)})),
        ("NaN", tensors(lambda t: {k: v * np.nan for k, v in t.items()})),
        ("`r` is 6.* 3", shorter(6, (3, 3))),  # alpha / r would be another scale
        ("`r` is 3.* 2", shorter(3, (2, 3))),
        *(
            (f"{name} {value!r}".replace("[", r"\["), settings(**{name: value}))
            for more in OTHERS
            for name, value in more.items()
        ),
    ],
)
def test_adapters_that_can_not_be_loaded_are_refused(config, adapter, tmp_path, named, change):
    known = json.loads((adapter[2] / "adapter_config.json").read_text())
    known, held = change(known, load_file(adapter[2] / "adapter_model.safetensors"))
    held = {name: np.ascontiguousarray(tensor) for name, tensor in held.items()}
    save_file(held, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=named):
        peft.load_adapter(tmp_path, config)


def test_folders_without_adapters_or_in_use_are_refused(config, folder, adapter, tmp_path):
    model, _, out = adapter
    for named, call in [
        ("adapter_config.json", lambda: peft.adapter_config(folder)),
        ("adapter_model.safetensors", lambda: peft.load_adapter(folder, config)),
        ("not empty", lambda: peft.merge(folder, out, folder)),
        (
            "'nowhere'",
            lambda: peft.save_adapter({"nowhere": {}}, model.lora, config, tmp_path / "x"),
        ),
    ]:
        with pytest.raises(ValueError, match=named):
            call()
