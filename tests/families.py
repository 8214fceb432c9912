"""Tiny random models of transformers, one or more of each family, with the odd features on.

Models of its GPT-2 class beside ours, and fixtures with checkpoints and folders.
"""

import functools
import os

# No test may look for anything on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import transformers
from exchange import GPTS, exported_in_files

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
BY_KIND = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
           "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, head_dim=12, rope_parameters=LLAMA3),
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "mistral, no window": lambda: transformers.MistralConfig(
        **SIZES, sliding_window=None, head_dim=6),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=4,
        max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=6),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **{**EXPERTS, "num_experts_per_tok": 3}, head_dim=16, num_experts=6, norm_topk_prob=True),
    "qwen3_moe, weights as they are": lambda: transformers.Qwen3MoeConfig(
        **EXPERTS, head_dim=8, num_experts=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=6, layer_types=MIXED, query_pre_attn_scalar=9,
        rope_parameters=BY_KIND),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64)}  # fmt: skip


def with_noise(make):
    """A model none of whose parameters is zero or one, so that every bias and scale counts."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@functools.cache
def theirs(name):
    make = transformers.AutoModelForCausalLM.from_config
    return with_noise(lambda: make(FAMILIES[name](), attn_implementation="eager"))


def tokens(rows=2, length=23):
    return np.random.default_rng(0).integers(0, 97, (rows, length))


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(tokens())).logits.float().numpy()


def as_saved(named, mixtral):
    """Arrays by the names in files, where each expert has its own; a model in memory has stacks."""
    found = {}
    own = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, array in named:
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        stack, _, kind = name.rpartition(".")
        if not stack.endswith(".experts"):
            found[name] = array
            continue
        split = zip(own[:2], np.split(array, 2, 1), strict=True)
        parts = {own[2]: array} if kind == "down_proj" else dict(split)
        for theirs, part in parts.items():
            found |= {f"{stack}.{e}.{theirs}.weight": x for e, x in enumerate(part)}
    return found


def gpt2_tokens(config):
    return np.random.default_rng(0).integers(0, config.vocab, (3, config.seq))


def gpt2_logits(model, config):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(gpt2_tokens(config))).logits.float().numpy()


def gpt2_config(config):
    sizes = {"vocab_size": config.vocab, "n_positions": config.seq, "n_embd": config.width}
    sizes |= {"n_layer": config.layers, "n_head": config.heads}
    return transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)


def gpt2_model(config):
    return with_noise(lambda: transformers.GPT2LMHeadModel(gpt2_config(config)))


def by_transformers(folder):
    """The model by transformers, which must find every tensor and no other."""
    model, found = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """By name of the config: a folder in several files, exported from 4 devices."""
    folder = tmp_path_factory.mktemp
    return {name: exported_in_files(folder("gpt2"), own)[2] for name, own in GPTS.items()}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("theirs") for name in FAMILIES}
    for name, folder in made.items():
        theirs(name).save_pretrained(folder, max_shard_size="30KB")
    return made
