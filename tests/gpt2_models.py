"""Models of transformers' GPT-2 class beside ours, and fixtures with checkpoints and folders."""

import families  # first: without the network
import numpy as np
import pytest
import torch
import transformers
from exchange import GPTS, exported_in_files


def tokens_of(config):
    return np.random.default_rng(0).integers(0, config.vocab, (3, config.seq))


def their_logits(model, config):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens_of(config))).logits.float().numpy()


def their_config(config, **others):
    sizes = {"vocab_size": config.vocab, "n_positions": config.seq, "n_embd": config.width}
    sizes |= {"n_layer": config.layers, "n_head": config.heads}
    return transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **others)


def their_model(config, **others):
    return families.with_noise(lambda: transformers.GPT2LMHeadModel(their_config(config, **others)))


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
    made = {name: tmp_path_factory.mktemp("theirs") for name in families.FAMILIES}
    for name, folder in made.items():
        families.theirs(name).save_pretrained(folder, max_shard_size="30KB")
    return made
