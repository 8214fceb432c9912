"""Defaults of config.json: each family's keys, and the value of one that a file leaves out.

They are those of transformers' config classes (`LlamaConfig`, `Gemma3TextConfig`, ...) and differ
from family to family. A model ignores the keys outside its family's table, here as there.
`tests/interchange/test_defaults.py` compares every key with the installed transformers.
"""

import math
from collections.abc import Mapping
from typing import Any

# Tensors of a model, a bound that holds before anything is built from a config.json: 100,000 are
# those of 61 layers with 500 experts each.
MOST_TENSORS = 1_000_000
# Sizes that every published file names, so a file without one is an error.
SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "vocab_size": "vocab",
    "max_position_embeddings": "seq",
}
_ALL = {
    **dict.fromkeys(SIZES),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "head_dim": None,
}
_WINDOW_OF_LAYERS = {"max_window_layers": 28, "layer_types": None}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **_ALL,
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        **_ALL,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        **_ALL,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        **_QWEN_WINDOW,
        **_WINDOW_OF_LAYERS,
    },
    "qwen3": {
        **_ALL,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
        **_QWEN_WINDOW,
        **_WINDOW_OF_LAYERS,
    },
    "mixtral": {
        **_ALL,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_moe": {
        **_ALL,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "attention_bias": False,
        **_QWEN_WINDOW,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "gemma3_text": {
        **{name: value for name, value in _ALL.items() if name != "hidden_act"},
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
    },
}
# A newer name of a key, and the older one; files have either.
_OTHER_NAMES = {"num_experts": "num_local_experts"}


def complete(given: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Returns the keys of a family, those that a config.json leaves out as its class has them.

    >>> complete({"hidden_size": 8, "rope_theta": 5e5}, "mixtral")["rms_norm_eps"]
    1e-05

    Raises:
      ValueError: A key is there under two names with different values.
    """
    known = dict(given)
    for newer, older in _OTHER_NAMES.items():
        value = known.pop(newer, None)
        if value is not None and known.setdefault(older, value) != value:
            raise ValueError(f"{newer} is {value!r} and {older} {known[older]!r}: remove one")
    return {name: known.get(name, value) for name, value in DEFAULTS[family].items()}


def size(known: Mapping[str, Any], name: str) -> int:
    """Returns a size: an integer from 1, below 2**31.

    Raises:
      ValueError: It is something else.
    """
    value = known[name]
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}, but it must be a number")
    if not 1 <= value < 2**31:
        raise ValueError(f"{name} is {value}, but it must be at least 1 and below 2**31")
    return value


def number(known: Mapping[str, Any], name: str, least: float = 0.0) -> float:
    """Returns a finite number above `least`.

    Raises:
      ValueError: It is something else.
    """
    value = known.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, but it must be a number")
    if not (math.isfinite(value) and value > least):
        raise ValueError(f"{name} is {value}, but it must be finite and above {least:g}")
    return float(value)


def flag(known: Mapping[str, Any], name: str) -> bool:
    """Returns a setting that is true or false; False where the family has no such key.

    Raises:
      ValueError: It is neither.
    """
    value = known.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, but it must be true or false")
    return value


def check_tensors(name: str, layers: int, experts: int = 0) -> None:
    """Checks that a model has no more tensors than any could have; `name` is the key of layers.

    Raises:
      ValueError: It would have more.
    """
    if layers * max(12, 3 * experts) > MOST_TENSORS:
        of = f" with {experts} experts each" if experts else ""
        raise ValueError(
            f"{name} is {layers}{of}, which are more than {MOST_TENSORS:,} tensors. No model has "
            "so many, so config.json is damaged"
        )
