"""Beside PEFT, in PyTorch on the CPU: adapters of either give the same logits in the other."""

import jax
import jax.numpy as jnp
import numpy as np
import peft as their_peft
import pytest
import torch
import transformers
from exchange import save, zero_on
from families import their_logits, tokens

import zero_jax
from zero_jax import interchange
from zero_jax.adapters.lora import Lora
from zero_jax.interchange import peft
from zero_jax.plan.text_model import TextModel

pytestmark = [
    pytest.mark.interchange,
    # PEFT asks transformers for a name that is on its way out.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def merged_logits(model, base, lora):
    params = {"base": jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), base), "lora": lora}
    merged = jax.jit(model.adapted.merged)(params)
    return merged, np.asarray(jax.jit(lambda p: model.model(p)(jnp.asarray(tokens())))(merged))


CASES = [*((family, "fp32") for family in FAMILIES), ("llama", "nf4")]


@pytest.mark.parametrize(("family", "base"), CASES)
def test_peft_loads_our_adapters_and_gives_our_logits(folders, family, base, tmp_path):
    """PEFT gets a quantised base as it opens, so that the error of the base is in both."""
    folder = folders[family]
    config = interchange.config(folder)
    model = TextModel(config, Lora(rank=3, alpha=5.0, base=base))
    zero = zero_jax.Zero(zero_on(8).mesh, stage=3, frozen=model.frozen)
    held = zero.full(interchange.load(folder, zero.abstract(model.make)["base"], rounded=True))
    rng, new = np.random.default_rng(1), jax.eval_shape(model.make)["lora"]
    lora = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 10, new)
    peft.save_adapter(lora, model.lora, config, tmp_path / "ours", str(folder))
    _, ours = merged_logits(model, held, lora)
    plain, own = opened(folder), folder
    if base != "fp32":
        zeros = jax.tree.map(jnp.zeros_like, lora)
        save(tmp_path / "run", merged_logits(model, held, zeros)[0])
        own = tmp_path / "opened"
        interchange.export(tmp_path / "run", own, like=folder)
    adapted = their_peft.PeftModel.from_pretrained(opened(own), str(tmp_path / "ours")).eval()
    np.testing.assert_allclose(their_logits(adapted), ours, atol=1e-4, rtol=1e-4)
    assert abs(their_logits(plain) - ours).max() > 1e-2, "they change the model"


@pytest.mark.parametrize("family", FAMILIES)
def test_we_load_peft_adapters_and_give_their_logits(folders, family, tmp_path):
    folder = folders[family]
    config = interchange.config(folder)
    how = {"target_modules": MODULES, "task_type": "CAUSAL_LM"}
    settings = their_peft.LoraConfig(r=3, lora_alpha=5, **how)
    adapted = their_peft.get_peft_model(opened(folder), settings).eval()
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "theirs")
    lora, zero = peft.adapter_config(tmp_path / "theirs"), zero_on(8)
    model = TextModel(config, Lora(lora.rank, lora.alpha, base="fp32"))
    base = zero.full(interchange.load(folder, zero.abstract(model.own)))
    _, ours = merged_logits(model, base, peft.load_adapter(tmp_path / "theirs", config))
    np.testing.assert_allclose(their_logits(adapted), ours, atol=1e-4, rtol=1e-4)
    peft.merge(folder, tmp_path / "theirs", tmp_path / "merged")
    merged = their_logits(opened(tmp_path / "merged"))
    np.testing.assert_allclose(merged, ours, atol=1e-4, rtol=1e-4)
