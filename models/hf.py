"""Which of our models is which of transformers': config.json to config and back, and the layout."""

import difflib
from collections.abc import Mapping
from typing import Any

from .families import Config as Config
from .gpt_config import GPTConfig
from .hf_decoder import layout as decoder_layout
from .hf_decoder_config import MODEL_TYPES
from .hf_decoder_config import from_json as decoder_from_json
from .hf_decoder_config import to_json as decoder_to_json
from .hf_gpt2 import from_json as gpt2_from_json
from .hf_gpt2 import layout as gpt2_layout
from .hf_gpt2 import to_json as gpt2_to_json
from .hf_places import Layout as Layout
from .hf_places import Place as Place

_KINDS: dict[str, Any] = {"gpt2": gpt2_from_json, **dict.fromkeys(MODEL_TYPES, decoder_from_json)}


def config_of(known: Mapping[str, Any]) -> Config:
    """Returns the config of models/ for the content of a config.json.

    Raises:
      ValueError: The model type or a setting is unsupported; the message has the nearest type.
    """
    kind = known.get("model_type", "gpt2")
    if kind not in _KINDS:
        near = difflib.get_close_matches(str(kind), _KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"model_type is {kind!r}, which is unsupported: {near} is the nearest of "
            f"{', '.join(_KINDS)}"
        )
    found: Config = _KINDS[kind](known)
    return found


def json_of(config: Config, dtype: str) -> dict[str, Any]:
    """The content of a config.json for a config of ours, dropout left off.

    Raises:
      ValueError: no model of theirs computes this.
    """
    if isinstance(config, GPTConfig):
        return gpt2_to_json(config, dtype)
    return decoder_to_json(config, dtype)


def layout(config: Config) -> Layout:
    """Which tensor of theirs is where in ours."""
    return gpt2_layout(config) if isinstance(config, GPTConfig) else decoder_layout(config)
