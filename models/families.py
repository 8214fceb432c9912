"""All transformers of this package, by the name of a preset or by their config."""

import dataclasses
from typing import Any

from flax import nnx

from .attend import AttentionFn
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .decoder_config import flops_per_token as flops_of_decoder
from .decoder_config import num_params as params_of_decoder
from .decoder_presets import PRESETS as DECODERS
from .gpt import GPT
from .gpt_config import PRESETS as GPTS
from .gpt_config import GPTConfig
from .gpt_config import flops_per_token as flops_of_gpt
from .gpt_config import num_params as params_of_gpt
from .next_token import loss as loss
from .next_token import routed_loss as routed_loss
from .presets import chosen

Config = GPTConfig | DecoderConfig
Model = GPT | Decoder

PRESETS: dict[str, Config] = {**GPTS, **DECODERS}


def preset(name: str, **overrides: Any) -> Config:
    """Returns the named config of `PRESETS`, with fields replaced.

    >>> preset("124m", vocab=50257).layers, preset("qwen3-8b").layers
    (12, 36)

    Args:
      name: Name of a preset.
      **overrides: Fields to replace.

    Raises:
      ValueError: No preset has that name.
    """
    return chosen(PRESETS, name, num_params, **overrides)


def with_capacity(config: Config, capacity: float | None) -> Config:
    """Returns the config with another `Mixture.capacity`; unchanged for None.

    Raises:
      ValueError: The model has no experts, or the capacity is not positive.

    >>> with_capacity(preset("mixtral-8x7b"), 1.25).mixture.capacity
    1.25
    """
    if capacity is None:
        return config
    mixture = getattr(config, "mixture", None)
    if mixture is None:
        raise ValueError(
            f"`capacity`={capacity}: the model has no experts. Leave it out, or use a model with "
            "experts, for example mixtral-8x7b"
        )
    return dataclasses.replace(config, mixture=dataclasses.replace(mixture, capacity=capacity))


def build(config: Config, rngs: nnx.Rngs, attention_fn: AttentionFn | None = None) -> Model:
    """Builds the model of a config, with new parameters.

    Args:
      config: Config of the model.
      rngs: Keys of the parameters.
      attention_fn: Causal attention in place of the model's, for example `zero_jax.attention`. It
        is called as `attention_fn(query, key, value, segment_ids=..., window=..., scale=...)`, with
        `implementation=config.attention` too unless that is "auto".
    """
    if isinstance(config, GPTConfig):
        return GPT(config, rngs, attention_fn)
    return Decoder(config, rngs, attention_fn)


def num_params(config: Config) -> int:
    """Counts the parameters of a config's model.

    >>> num_params(preset("llama-3.1-8b"))
    8030261248
    """
    return params_of_gpt(config) if isinstance(config, GPTConfig) else params_of_decoder(config)


def flops_per_token(config: Config, tokens: int, *, masked: bool = False) -> float:
    """Counts the model FLOPs of one token of a row of `tokens`, forward and backward.

    Args:
      config: Config of the model.
      tokens: Tokens of a row.
      masked: If True, counts only the pairs of tokens that the causal mask leaves.
    """
    if isinstance(config, GPTConfig):
        return flops_of_gpt(config, tokens, masked=masked)
    return flops_of_decoder(config, tokens, masked=masked)
