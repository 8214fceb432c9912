"""The config.json of Llama, Mistral, Qwen and Gemma, beside models/decoder.py.

What a family fixes is in `_FAMILIES`, and a config.json is read in the words of transformers 4 and
5 (`rope_theta` and `rope_scaling`, or `rope_parameters`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .decoder_config import DecoderConfig, Mixture, Rope

_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "vocab_size": "vocab",
    "max_position_embeddings": "seq",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
_GEMMA = {"qk_norm": True, "post_norms": True, "norm_from_one": True}
# What a family fixes, and what its config says where a file leaves it out.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {},
    "qwen3_moe": {"qk_norm": True},
    "gemma3_text": _GEMMA,
}
MODEL_TYPES = (*_FAMILIES, "gemma3")
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
    "qwen3": {"head_dim": 128},
    "mixtral": {"num_experts_per_tok": 2, "num_key_value_heads": 8},
    "qwen3_moe": {
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
    },
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_ALL_SLIDE = ("mistral", "mixtral", "qwen3_moe")
# How a family calls the number of experts, and how many it has where its config does not say.
_EXPERTS = {"mixtral": ("num_local_experts", 8), "qwen3_moe": ("num_experts", 128)}
# What models/decoder.py does not compute, and what says that it is off.
_OFF = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
}


def from_json(given: Mapping[str, Any]) -> DecoderConfig:
    """The config of a model of theirs.

    Raises:
      ValueError: models/decoder.py computes something else, or a size is missing.
    """
    known: dict[str, Any] = dict(given)
    if known.get("model_type") == "gemma3":  # with images: of which this is the model of text
        known = {**known["text_config"], "model_type": "gemma3_text"}
    family = known.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"model_type {family!r} is none of {', '.join(MODEL_TYPES)}")
    # What is null is off; what is not there is as their class has it.
    known = {k: v for k, v in (_LEFT_OUT.get(family, {}) | known).items() if v is not None}
    for name, off in _OFF.items():
        if known.get(name, off) != off:
            raise ValueError(f"{name} {known[name]!r} is not what models/decoder.py does, {off}")
    sizes: dict[str, Any] = {ours: _size(known, theirs) for theirs, ours in _SIZES.items()}
    heads = sizes["heads"]
    sizes["kv_heads"] = _size(known, "num_key_value_heads", heads)
    sizes["head_dim"] = _size(known, "head_dim", sizes["width"] // max(heads, 1))
    activation = known.get("hidden_activation", known.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"its activation is {activation!r}, and models/decoder.py has "
            f"{' and '.join(_ACTIVATIONS)}"
        )
    if family == "qwen3_moe":
        sizes["hidden"] = _size(known, "moe_intermediate_size")
    rope, local_rope = _ropes(known, family)
    bias = bool(known.get("attention_bias", False))
    fixed = {"qkv_bias": bias, "out_bias": bias} | _FAMILIES[family]
    return DecoderConfig(
        **sizes,
        **fixed,
        **_windows(known, family, sizes["layers"]),
        tied=bool(known.get("tie_word_embeddings", False)),
        eps=float(known.get("rms_norm_eps", 1e-6)),
        rope=rope,
        local_rope=local_rope,
        mlp_bias=bool(known.get("mlp_bias", False)),
        mixture=_mixture(known, family),
        activation=_ACTIVATIONS[activation],
        embed_scale=sizes["width"] ** 0.5 if family == "gemma3_text" else 1.0,
        query_scale=_query_scale(known, family, sizes["head_dim"]),
    )


def _mixture(known: Mapping[str, Any], family: str) -> Mixture | None:
    """The experts of a config; every layer has them, or none."""
    if family not in _EXPERTS:
        return None
    if known.get("mlp_only_layers") or known.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "some of its layers have no experts, and in models/decoder.py all have or none"
        )
    name, many = _EXPERTS[family]
    many = known.get("num_experts", known.get("num_local_experts", many))  # the newest swap them
    return Mixture(
        _size(known, name, many),
        _size(known, "num_experts_per_tok"),
        normalised=family == "mixtral" or bool(known.get("norm_topk_prob", False)),
        balance=float(known.get("router_aux_loss_coef", 0.001)),
    )


def _size(known: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = known.get(name, otherwise)
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}, but it should be a number")
    return value


def _query_scale(known: Mapping[str, Any], family: str, head_dim: int) -> float | None:
    scalar = known.get("query_pre_attn_scalar") if family == "gemma3_text" else None
    return None if scalar in (None, head_dim) else float(scalar) ** -0.5


def _windows(known: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """Which layers slide, and how far they see."""
    window = known.get("sliding_window")
    if family in ("qwen2", "qwen3", "qwen3_moe") and not known.get("use_sliding_window", False):
        window = None
    if family == "llama" or window is None:
        return {}
    kinds = known.get("layer_types")
    if kinds is not None:
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    elif family == "gemma3_text":
        every = known.get("sliding_window_pattern", 6)
        slides = tuple((at + 1) % every != 0 for at in range(layers))
    elif family in _ALL_SLIDE:
        slides = (True,) * layers
    else:
        slides = tuple(at >= known.get("max_window_layers", 28) for at in range(layers))
    if not any(slides):
        return {}
    return {"window": int(window), "sliding": () if all(slides) else slides}


def _ropes(known: Mapping[str, Any], family: str) -> tuple[Rope, Rope | None]:
    """Of layers that see everything, and of those that slide if theirs is another."""
    given = known.get("rope_parameters") or known.get("rope_scaling") or {}
    theta = float(known.get("rope_theta", 10000.0))
    if "full_attention" in given:
        local = given.get("sliding_attention") or {}
        return _rope(given["full_attention"], theta, known), _rope(local, 10000.0, known)
    rope = _rope(given, theta, known)
    if family != "gemma3_text":
        return rope, None
    return rope, Rope(float(known.get("rope_local_base_freq", 10000.0)))


def _rope(given: Mapping[str, Any], theta: float, known: Mapping[str, Any]) -> Rope:
    kind = given.get("rope_type", given.get("type", "default"))
    theta = float(given.get("rope_theta") or theta)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, float(given["factor"]))
    if kind != "llama3":
        raise ValueError(
            f"its positions are of the kind {kind!r}, and models/decoder.py has default, linear "
            "and llama3"
        )
    length = given.get("original_max_position_embeddings", known.get("max_position_embeddings"))
    turns = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    return Rope(theta, float(given["factor"]), (int(length), *turns))


def to_json(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The content of their config.json, of the first family that computes this.

    Raises:
      ValueError: none does.
    """
    for family in _FAMILIES:
        known = _written(config, family, dtype)
        try:
            back = from_json(known)
        except ValueError:
            continue
        if _saved(back) == _saved(config):
            return known
    raise ValueError(
        f"no model of {', '.join(_FAMILIES)} computes what this config says, {config}: change what "
        "sets it apart"
    )


def _saved(config: DecoderConfig) -> DecoderConfig:
    """What a config.json says of a config, and no more: not how it is computed or trained."""
    mixture = config.mixture and dataclasses.replace(config.mixture, capacity=None, z=0.0)
    return dataclasses.replace(
        config,
        sliding=() if all(config.slides) else config.sliding,
        mixture=mixture,
        attention="auto",
        loss_chunk=1024,
    )


def _written(config: DecoderConfig, family: str, dtype: str) -> dict[str, Any]:
    activation = "gelu_pytorch_tanh" if config.activation == "gelu" else "silu"
    slides = ["sliding_attention" if s else "full_attention" for s in config.slides]
    mixed = len(set(slides)) > 1 or family == "gemma3_text"
    windowed: dict[str, Any] = {
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
        **({"layer_types": slides} if family not in ("llama", *_ALL_SLIDE) and mixed else {}),
    }
    rope = _rope_json(config.rope)
    if family == "gemma3_text":
        local = _rope_json(config.local_rope or config.rope)
        rope = {"full_attention": rope, "sliding_attention": local}
        scale = config.query_scale or config.head_dim**-0.5
        windowed |= {"query_pre_attn_scalar": round(scale**-2)}
    if config.mixture is not None and family in _EXPERTS:
        windowed |= {
            _EXPERTS[family][0]: config.mixture.experts,
            "num_experts_per_tok": config.mixture.chosen,
            "router_aux_loss_coef": config.mixture.balance,
            "moe_intermediate_size": config.hidden,
            "norm_topk_prob": config.mixture.normalised,
        }
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation" if family == "gemma3_text" else "hidden_act": activation,
        "rms_norm_eps": config.eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias and config.out_bias,
        "mlp_bias": config.mlp_bias,
        **windowed,
        "torch_dtype": dtype,
    }


def _rope_json(rope: Rope) -> dict[str, Any]:
    known: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.stretched is not None:
        length, least, most = rope.stretched
        known |= {"rope_type": "llama3", "original_max_position_embeddings": length}
        known |= {"low_freq_factor": least, "high_freq_factor": most}
    elif rope.factor != 1.0:
        known["rope_type"] = "linear"
    return (
        known if rope.factor == 1.0 and rope.stretched is None else known | {"factor": rope.factor}
    )
