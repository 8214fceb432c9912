"""Adapters as PEFT has them, and bases that are quantised as they are read."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from exchange import save, zero_on
from safetensors.numpy import load_file, save_file

import zero_jax
from zero_jax import interchange
from zero_jax.adapters.lora import Lora
from zero_jax.interchange import folder_config, peft
from zero_jax.models import decoder, gpt, hf
from zero_jax.plan.text_model import TextModel

TOKENS, EOS = {"pad_token_id": 3, "bos_token_id": 2}, "eos_token_id"
ENDS = [  # config.json and generation_config.json, and both after 7 ends a turn
    ({EOS: 0}, {EOS: 0, "top_k": 2}, {EOS: 7}, {EOS: [7, 0], "top_k": 2}),
    ({}, None, {EOS: 7}, None), ({EOS: [0, 1]}, {EOS: [0, 1]}, {EOS: [7, 0, 1]}, {EOS: [7, 0, 1]}),
    ({EOS: 0, **TOKENS}, None, {EOS: 7, **TOKENS}, {EOS: [7, 0], **TOKENS}),
    ({EOS: 7}, {EOS: 7}, {EOS: 7}, {EOS: 7})]  # fmt: skip
CONFIGS = {"decoder": decoder.DecoderConfig(
               layers=3, width=32, heads=4, kv_heads=2, head_dim=10, hidden=72, vocab=48, seq=16,
               qkv_bias=True, tied=True),
           "gpt": gpt.GPTConfig(layers=2, width=32, heads=4, vocab=48, seq=16)}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """New parameters of a model, its folder, and adapters that change it in the folder `out`."""
    config, made = CONFIGS[request.param], tmp_path_factory.mktemp("model")
    own, folder, out = jax.jit(TextModel(config).own)(jax.random.key(0)), made / "hf", made / "out"
    save(made / "run", own, {"heads": config.heads, "hf_config": hf.json_of(config, "float32")})
    interchange.export(made / "run", folder)
    model = TextModel(config, Lora(rank=3, alpha=5.0, base="fp32"))
    rng, new = np.random.default_rng(0), jax.eval_shape(model.make)["lora"]
    lora = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 10, new)
    peft.save_adapter(lora, model.lora, config, out, str(folder))
    return SimpleNamespace(config=config, own=own, folder=folder, model=model, lora=lora, out=out)


def test_adapters_come_back_bit_for_bit_in_files_named_as_peft_names_them(case):
    found = peft.load_adapter(case.out, case.config)
    jax.tree.map(np.testing.assert_array_equal, found, dict(case.lora))
    known = json.loads((case.out / "adapter_config.json").read_text())
    assert (known["r"], known["lora_alpha"], known["peft_type"]) == (3, 5.0, "LORA")
    names = set(load_file(case.out / "adapter_model.safetensors"))
    decodes = case.config is CONFIGS["decoder"]
    first = "model.layers.0.self_attn.q_proj" if decodes else "transformer.h.0.attn.c_attn"
    assert f"base_model.model.{first}.lora_A.weight" in names
    assert len(names) == 2 * (7 * 3 if decodes else 4 * 2)


def test_merged_is_the_model_with_its_adapters_added(case, tmp_path):
    peft.merge(case.folder, case.out, tmp_path / "merged", max_file_bytes=20_000)
    zero = zero_on(8)
    merged = zero.unshard(interchange.load(tmp_path / "merged", zero.eval_shape(case.model.own)))
    wanted = case.model.adapted.merged({"base": case.own, "lora": case.lora})
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    ours, theirs = ((at / "config.json").read_text() for at in (tmp_path / "merged", case.folder))
    assert json.loads(ours) == json.loads(theirs)


@pytest.mark.parametrize(("base", "n"), [("nf4", 3), ("int8", 8), ("bf16", 1)])
def test_a_base_is_read_as_the_bits_that_the_whole_would_have(case, base, n):
    model = TextModel(case.config, Lora(rank=3, base=base))
    zero = zero_jax.Zero(zero_on(n).mesh, stage=3, frozen=model.frozen)
    like = zero.eval_shape(model.make)["base"]
    read = interchange.load(case.folder, like, rounded=True)
    wanted = jax.jit(model.adapted.rests)(case.own)
    for a, b in zip(jax.tree.leaves(zero.unshard(read)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if base == "bf16":
        with pytest.raises(ValueError, match="float32.*bfloat16"):
            interchange.load(case.folder, like)


@pytest.mark.parametrize("known", ENDS)
def test_the_end_of_a_learned_turn_is_where_generation_stops(tmp_path, known):
    files = [tmp_path / "config.json", tmp_path / "generation_config.json"]
    for file, before in zip(files, known[:2], strict=True):
        if before is not None:
            file.write_text(json.dumps(before))
    folder_config.end_with(tmp_path, [7])
    after = (json.loads(file.read_text()) if file.exists() else None for file in files)
    assert (*after,) == known[2:]


def each(change):
    """A change of the adapter's first factors."""
    return lambda _, t: t.update({k: change(v) for k, v in t.items() if "_A" in k})


def shorter(rank, rows):
    """`r`, and pairs of other ranks: the first has rows[0], the others rows[1]."""

    def change(known, t):
        known["r"], first = rank, min(t).partition(".lora_")[0]
        for name, x in t.items():
            n = rows[not name.startswith(first)]
            t[name] = x[:n] if "_A" in name else x[:, :n]

    return change


FILE = "adapter_model.safetensors.*(mlp|attn)"
WRONG = [  # named by the error; changes the config and the tensors of an adapter
    (r"lora_A.* is missing", lambda _, t: [t.pop(name) for name in [*t][:2]]),
    ("attm", lambda _, t: [t.update({n.replace("attn", "attm"): t.pop(n)}) for n in [*t]]),
    (r"\[3, 31\]", each(lambda v: v[:, :-1])), (FILE, each(lambda v: v[1:])),
    (FILE, lambda _, t: [t.pop(name) for name in [*t] if "_B" in name]),
    ("base_model.model.x", lambda _, t: t.update({"base_model.model.x": np.zeros(1)})),
    ("NaN", each(lambda v: v * np.nan)),
    (r"`r` is 6.*\[3, ", shorter(6, (3, 3))),  # alpha / r would be another scale
    (r"`r` is 3.*\[2, ", shorter(3, (2, 3)))]  # fmt: skip
OTHERS = {"bias": "all", "peft_type": "IA3", "use_dora": True, "init_lora_weights": "pissa", "r": 0,
          "modules_to_save": ["lm_head"], "use_rslora": True, "rank_pattern": {"q_proj": 8},
          "alpha_pattern": {"q_proj": 8}, "lora_bias": True, "layer_replication": [[0, 2], [1, 3]],
          "lora_alpha": float("nan")}  # fmt: skip
WRONG += [
    (f"{name} {value!r}".replace("[", r"\["), lambda k, _, n=name, v=value: k.update({n: v}))
    for name, value in (*OTHERS.items(), ("r", 3.5))]  # fmt: skip


@pytest.mark.parametrize(("named", "change"), WRONG)
def test_adapters_that_can_not_be_loaded_are_refused(case, tmp_path, named, change):
    known = json.loads((case.out / "adapter_config.json").read_text())
    held = load_file(case.out / "adapter_model.safetensors")
    change(known, held)
    held = {name: np.ascontiguousarray(tensor) for name, tensor in held.items()}
    save_file(held, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=named):
        peft.load_adapter(tmp_path, case.config)


def test_folders_without_adapters_or_in_use_are_refused(case, tmp_path):
    with pytest.raises(ValueError, match="adapter_config.json"):
        peft.adapter_config(case.folder)
    with pytest.raises(ValueError, match="adapter_model.safetensors"):
        peft.load_adapter(case.folder, case.config)
    with pytest.raises(ValueError, match="not empty"):
        peft.merge(case.folder, case.out, case.folder)
    with pytest.raises(ValueError, match="'nowhere'"):
        peft.save_adapter({"nowhere": {}}, case.model.lora, case.config, tmp_path / "x")
