"""The config.json of Llama, Mistral, Qwen and Gemma, beside models/decoder.py.

`_FAMILIES` has what a family fixes, hf_defaults.py the value of a key that a file leaves out. Both
forms of a config.json are read, those of transformers 4 (`rope_theta`, `rope_scaling`) and of
transformers 5 (`rope_parameters`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .decoder_config import DecoderConfig, Mixture, Rope
from .hf_defaults import DEFAULTS, SIZES, check_tensors, complete, flag, number, size

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
_GEMMA = {"qk_norm": True, "post_norms": True, "norm_from_one": True}
# What a family fixes.
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
_FULL, _SLIDES = "full_attention", "sliding_attention"
# The families with experts, and how each names their number.
_EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
# What models/decoder.py does not compute, and the value that says that it is off.
_OFF = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
}


def from_json(given: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config of models/decoder.py for the content of a config.json.

    Raises:
      ValueError: models/decoder.py computes something else, or a size is missing.
    """
    given = _text_of(given)
    family = given.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(
            f"model_type is {family!r}, but it must be one of {', '.join(MODEL_TYPES)}"
        )
    _check_off(given)
    known = complete(given, family)
    # Where all layers have experts, no layer has the MLP of intermediate_size.
    hidden = {"hidden": "moe_intermediate_size"} if family == "qwen3_moe" else {}
    names = {ours: theirs for theirs, ours in SIZES.items()} | hidden
    sizes: dict[str, Any] = {ours: size(known, theirs) for ours, theirs in names.items()}
    if known["num_key_value_heads"] is None:
        known["num_key_value_heads"] = sizes["heads"]
    if known["head_dim"] is None:
        known["head_dim"] = sizes["width"] // sizes["heads"]
    sizes["kv_heads"] = size(known, "num_key_value_heads")
    sizes["head_dim"] = size(known, "head_dim")
    named = "hidden_activation" if family == "gemma3_text" else "hidden_act"
    activation = known[named]
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{named} is {activation!r}, but models/decoder.py supports only "
            f"{' and '.join(_ACTIVATIONS)}"
        )
    mixture = _mixture(known, family)
    check_tensors("num_hidden_layers", sizes["layers"], mixture.experts if mixture else 0)
    rope, local_rope = _ropes(known, family)
    bias = flag(known, "attention_bias")
    fixed = {"qkv_bias": bias, "out_bias": bias} | _FAMILIES[family]
    return DecoderConfig(
        **sizes,
        **fixed,
        **_windows(known, given.get("layer_types"), family, sizes["layers"]),
        tied=flag(known, "tie_word_embeddings"),
        eps=number(known, "rms_norm_eps"),
        rope=rope,
        local_rope=local_rope,
        mlp_bias=flag(known, "mlp_bias"),
        mixture=mixture,
        activation=_ACTIVATIONS[activation],
        embed_scale=sizes["width"] ** 0.5 if family == "gemma3_text" else 1.0,
        query_scale=_query_scale(known, family, sizes["head_dim"]),
    )


def _text_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the text config of a model of text and images; other configs unchanged."""
    if given.get("model_type") != "gemma3":
        return given
    text = given.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(
            f"text_config is {text!r}, but it must have the settings of the text model"
        )
    # transformers 5 reads the outer key, transformers 4 the inner one.
    outer, inner = (at.get("tie_word_embeddings", True) for at in (given, text))
    if outer != inner:
        raise ValueError(
            f"tie_word_embeddings is {outer!r}, and {inner!r} in text_config: make them equal"
        )
    return {**text, "model_type": "gemma3_text"}


def _check_off(given: Mapping[str, Any]) -> None:
    for name, off in _OFF.items():
        if given.get(name) not in (None, off):
            raise ValueError(
                f"{name} is {given[name]!r}, but models/decoder.py supports only {off}"
            )


def _mixture(known: Mapping[str, Any], family: str) -> Mixture | None:
    """Returns the experts of a config; all layers have experts, or none."""
    if family not in _EXPERTS:
        return None
    for name, every in (("mlp_only_layers", None), ("decoder_sparse_step", 1)):
        if (known.get(name, every) or None) != every:
            raise ValueError(
                f"{name} is {known[name]!r}, so some layers have no experts. In models/decoder.py "
                "all layers have experts, or none"
            )
    return Mixture(
        size(known, "num_local_experts"),
        size(known, "num_experts_per_tok"),
        normalised=family == "mixtral" or flag(known, "norm_topk_prob"),
        balance=number(known, "router_aux_loss_coef", least=-1e-9),
    )


def _query_scale(known: Mapping[str, Any], family: str, head_dim: int) -> float | None:
    if family != "gemma3_text":
        return None
    scalar = number(known, "query_pre_attn_scalar")
    return None if scalar == head_dim else scalar**-0.5


def _windows(known: Mapping[str, Any], named: Any, family: str, layers: int) -> dict[str, Any]:
    """Returns the layers with sliding-window attention, and their window.

    Args:
      known: The keys of the family.
      named: The file's layer_types, which some families ignore.
      family: Name of the family.
      layers: Number of layers.
    """
    window = known.get("sliding_window")
    if "use_sliding_window" in known and not flag(known, "use_sliding_window"):
        window = None
    if named is not None and (
        not isinstance(named, list)
        or len(named) != layers
        or any(kind not in (_FULL, _SLIDES) for kind in named)
    ):
        raise ValueError(
            f"layer_types is {str(named)[:200]}, but it must have {_FULL} or {_SLIDES} for each "
            f"of {layers} layers"
        )
    if "layer_types" in known and named is not None:
        slides = tuple(kind == _SLIDES for kind in named)
    elif family == "gemma3_text":
        every = size(known, "sliding_window_pattern")
        slides = tuple((at + 1) % every != 0 for at in range(layers))
    elif window is None or family == "llama":
        slides = (False,) * layers
    elif family in _ALL_SLIDE:
        slides = (True,) * layers
    else:
        first = known["max_window_layers"]
        if type(first) is not int:
            raise ValueError(f"max_window_layers is {first!r}, but it must be a number")
        slides = tuple(at >= first for at in range(layers))
    if any(slides) and window is None:
        raise ValueError(f"layer_types has {_SLIDES}, but sliding_window sets no window")
    if named is not None and slides != tuple(kind == _SLIDES for kind in named):
        raise ValueError(
            f"layer_types is ignored by a {family} of transformers, whose layers all have "
            f"{_SLIDES if any(slides) else _FULL} here. Remove it, or use another model_type"
        )
    if not any(slides):
        return {}
    return {
        "window": size(known, "sliding_window"),
        "sliding": () if all(slides) else slides,
    }


def _ropes(known: Mapping[str, Any], family: str) -> tuple[Rope, Rope | None]:
    """Returns the RoPE of full attention, and that of sliding windows if it differs."""
    scaling, given = known["rope_scaling"] or {}, known["rope_parameters"] or {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(known[name] or {}, Mapping):
            raise ValueError(f"{name} is {known[name]!r}, but it must have settings")
    theta = number(known, "rope_theta")
    if family != "gemma3_text":
        given = scaling or given
        if _FULL in given or _SLIDES in given:
            raise ValueError(
                f"rope_parameters by kind of layer are supported for gemma3, not for {family}"
            )
        return _rope(given, theta, known), None
    if given and not {*given} & {_FULL, _SLIDES}:
        raise ValueError(f"rope_parameters of gemma3 must have {_FULL} and {_SLIDES}")
    local, local_theta = given.get(_SLIDES) or {}, number(known, "rope_local_base_freq")
    full = given.get(_FULL) or {}
    if scaling:
        full = {**full, **scaling}
    return _rope(full, theta, known), _rope(local, local_theta, known)


def _rope(given: Mapping[str, Any], theta: float, known: Mapping[str, Any]) -> Rope:
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters has {given!r}, but it must have settings")
    _check_off(given)
    kind = given.get("rope_type", given.get("type", "default"))
    own = {"rope_theta": theta, **given}
    theta = number(own, "rope_theta")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, number(own, "factor"))
    if kind != "llama3":
        raise ValueError(
            f"rope_type is {kind!r}, but models/decoder.py supports only default, linear and llama3"
        )
    own = {"original_max_position_embeddings": known["max_position_embeddings"], **given}
    turns = number(own, "low_freq_factor"), number(own, "high_freq_factor")
    length = size(own, "original_max_position_embeddings")
    return Rope(theta, number(own, "factor"), (length, *turns))


def to_json(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns the content of a config.json, for the first family that computes this model.

    Raises:
      ValueError: No family computes it.
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
        f"no model of {', '.join(_FAMILIES)} computes this config, {config}: change the setting "
        "that none of them has"
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
        mlp_chunk=None,
    )


def _written(config: DecoderConfig, family: str, dtype: str) -> dict[str, Any]:
    activation = "gelu_pytorch_tanh" if config.activation == "gelu" else "silu"
    slides = [_SLIDES if s else _FULL for s in config.slides]
    windowed: dict[str, Any] = {
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
        **({"layer_types": slides} if "layer_types" in DEFAULTS[family] else {}),
    }
    rope = _rope_json(config.rope)
    if family == "gemma3_text":
        local = _rope_json(config.local_rope or config.rope)
        rope = {_FULL: rope, _SLIDES: local}
        scale = config.query_scale or config.head_dim**-0.5
        windowed |= {"query_pre_attn_scalar": round(scale**-2)}
    if config.mixture is not None and family in _EXPERTS:
        windowed |= {
            _EXPERTS[family]: config.mixture.experts,
            "num_experts_per_tok": config.mixture.chosen,
            "router_aux_loss_coef": config.mixture.balance,
            "moe_intermediate_size": config.hidden,
            "norm_topk_prob": config.mixture.normalised,
        }
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
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
