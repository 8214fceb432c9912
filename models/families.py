"""All transformers here by the name of a preset or by their config, whatever their family."""

from typing import Any

from flax import nnx

from .decoder import Decoder
from .decoder_config import PRESETS as DECODERS
from .decoder_config import DecoderConfig
from .decoder_config import flops_per_token as flops_of_decoder
from .decoder_config import num_params as params_of_decoder
from .gpt import GPT
from .gpt_config import PRESETS as GPTS
from .gpt_config import GPTConfig
from .gpt_config import flops_per_token as flops_of_gpt
from .gpt_config import num_params as params_of_gpt
from .next_token import loss as loss
from .presets import chosen

Config = GPTConfig | DecoderConfig
Model = GPT | Decoder

PRESETS: dict[str, Config] = {**GPTS, **DECODERS}


def preset(name: str, **overrides: Any) -> Config:
    """Returns the named config of `PRESETS`, with fields replaced.

    >>> preset("124m", vocab=50257).layers, preset("qwen3-8b").layers
    (12, 36)

    Raises:
      ValueError: no preset has that name.
    """
    return chosen(PRESETS, name, num_params, **overrides)


def build(config: Config, rngs: nnx.Rngs) -> Model:
    """The model of a config, with new parameters."""
    return GPT(config, rngs) if isinstance(config, GPTConfig) else Decoder(config, rngs)


def num_params(config: Config) -> int:
    """Counts the parameters.

    >>> num_params(preset("llama-3.1-8b"))
    8030261248
    """
    return params_of_gpt(config) if isinstance(config, GPTConfig) else params_of_decoder(config)


def flops_per_token(config: Config, tokens: int) -> int:
    """Counts the model FLOPs of one token of a row of `tokens`, forward and backward."""
    if isinstance(config, GPTConfig):
        return flops_of_gpt(config, tokens)
    return flops_of_decoder(config, tokens)
