"""Beside PEFT and TRL, in PyTorch on the CPU: the same logits, the same masks."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import families as tiny
import jax
import jax.numpy as jnp
import numpy as np
import peft as their_peft
import pytest
import torch
import transformers

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
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 24))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "gemma3"])
def folder(request, tmp_path_factory):
    """A tiny model of transformers, saved by itself."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny.FAMILIES[request.param]())
    out = tmp_path_factory.mktemp(request.param.replace(",", ""))
    model.save_pretrained(out)
    return out


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_peft_loads_our_adapters_and_gives_our_logits(folder, tmp_path, base):
    """Beside a quantised base the rest of a logit is the error of the base alone, so PEFT is given
    the base as it opens."""
    config = interchange.config(folder)
    model = TextModel(config, Lora(rank=3, alpha=5.0, base=base))
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, frozen=model.frozen)
    held = zero.full(interchange.load(folder, zero.abstract(model.make)["base"], rounded=True))
    rng = np.random.default_rng(1)
    new = model.adapted.new(jax.eval_shape(model.own))
    lora = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 10, new)
    peft.save_adapter(lora, model.lora, config, tmp_path / "ours", str(folder))
    params = {"base": jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), held), "lora": lora}
    ours = model.model(model.adapted.merged(params))(jnp.asarray(TOKENS))

    opened = theirs(folder)
    if base != "fp32":
        zeros = jax.tree.map(jnp.zeros_like, lora)
        plain = model.adapted.merged(params | {"lora": zeros})
        with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(1, zero_jax.Zero(zero_jax.make_mesh(), stage=0).shard(plain))
        interchange.export(tmp_path / "run", tmp_path / "opened", like=folder)
        opened = theirs(tmp_path / "opened")
    adapted = their_peft.PeftModel.from_pretrained(opened, str(tmp_path / "ours")).eval()
    np.testing.assert_allclose(logits(adapted), ours, atol=1e-4)
    without = logits(theirs(folder))
    assert abs(without - np.asarray(ours)).max() > 1e-2, "they do something"


def test_we_load_peft_adapters_and_give_their_logits(folder, tmp_path):
    config = interchange.config(folder)
    own = theirs(folder)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = their_peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM"
    )
    adapted = their_peft.get_peft_model(own, settings).eval()
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "theirs")
    lora = peft.adapter_config(tmp_path / "theirs")
    model = TextModel(config, Lora(lora.rank, lora.alpha, base="fp32"))
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    whole = zero.full(interchange.load(folder, zero.abstract(model.own)))
    given = peft.load_adapter(tmp_path / "theirs", config)
    params = {"base": jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), whole), "lora": given}
    ours = model.model(model.adapted.merged(params))(jnp.asarray(TOKENS))
    np.testing.assert_allclose(logits(adapted), ours, atol=1e-4)
    peft.merge(folder, tmp_path / "theirs", tmp_path / "merged")
    np.testing.assert_allclose(logits(theirs(tmp_path / "merged")), ours, atol=1e-4)
