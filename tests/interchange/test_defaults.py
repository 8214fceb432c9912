"""A config.json that leaves keys out means what transformers' own config classes say."""

from dataclasses import astuple, fields

import numpy as np
import pytest
import transformers

from zero_jax.models import hf, hf_defaults

# fmt: off
SIZES = {"num_hidden_layers": 7, "hidden_size": 128, "num_attention_heads": 64,
         "intermediate_size": 96, "vocab_size": 99, "max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
GEMMA = {
    "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 3e-4, "tie_word_embeddings": False,
    "rope_theta": 777.0, "attention_bias": True, "query_pre_attn_scalar": 50, "sliding_window": 9}
SHARED = {
    "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 3e-4, "tie_word_embeddings": True,
    "rope_theta": 777.0, "rope_scaling": LLAMA3, "hidden_act": "gelu_new"}
EXPERTS = {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
KINDS = ["full_attention", "sliding_attention"] * 3 + ["full_attention"]
QWEN = {**SHARED, **WINDOW, "max_window_layers": 3, "layer_types": KINDS}
# A config of each family with no value that is a default, so that leaving a key out shows.
FULL = {
    "llama": {**SHARED, "attention_bias": True, "mlp_bias": True},
    "mistral": {**SHARED, "sliding_window": 9},
    "qwen2": QWEN, "qwen3": {**QWEN, "attention_bias": True},
    "mixtral": {**SHARED, **EXPERTS, "num_local_experts": 5, "sliding_window": 9},
    "qwen3_moe": {
        **SHARED, **EXPERTS, **WINDOW, "num_experts": 9, "attention_bias": True,
        "moe_intermediate_size": 20, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": []},
    "gemma3_text": {
        **GEMMA, "hidden_activation": "silu", "sliding_window_pattern": 3, "layer_types": KINDS,
        "rope_local_base_freq": 55.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}}
FULL = {family: {"model_type": family, **SIZES, **own} for family, own in FULL.items()}
FULL["gpt2"] = {"model_type": "gpt2", "n_layer": 3, "n_embd": 24, "n_head": 3, "vocab_size": 30,
                "n_positions": 40, "n_inner": 96, "activation_function": "gelu_pytorch_tanh",
                "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
# Keys of config classes without an effect, keys that must be off, and a name of transformers 5.
OTHERS = {
    "initializer_range", "use_cache", "attention_dropout", "output_router_logits", "pad_token_id",
    "bos_token_id", "eos_token_id", "pretraining_tp", "router_jitter_noise", "rope_parameters",
    "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"}
# fmt: on
NAMES = {"num_hidden_layers": "layers", "hidden_size": "width", "num_attention_heads": "heads"}
NAMES |= {"vocab_size": "vocab", "max_position_embeddings": "seq"}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}


def differences(known):
    """Names and pairs of values that the two models compute with where they differ.

    Or the message of our error; nothing where transformers refuses the config.
    """
    kind = known.get("model_type")
    try:
        their = transformers.AutoConfig.for_model(**known)
    except Exception:  # the strict classes have errors of their own
        their = None
    try:
        our = hf.config_of(known)
    except ValueError as error:
        return str(error)
    if their is None:
        return {}
    heads, gemma = their.num_attention_heads, kind == "gemma3_text"
    pairs = {ours: (getattr(their, name), getattr(our, ours)) for name, ours in NAMES.items()}
    pairs["tied"] = their.tie_word_embeddings, kind == "gpt2" or our.tied
    if kind == "gpt2":
        pairs["hidden"] = their.n_inner or 4 * their.n_embd, 4 * our.width
        pairs["eps"] = their.layer_norm_epsilon, 1e-5
        pairs["act"] = ACTIVATIONS[their.activation_function], "gelu"
        return different(pairs)
    # Classes without a head_dim have modules that take it from the file, or derive it.
    head_dim = getattr(their, "head_dim", None) or their.hidden_size // heads
    window, ropes = getattr(their, "sliding_window", None), their.rope_parameters
    if kind in ("qwen2", "qwen3", "gemma3_text"):
        slides = [at == "sliding_attention" for at in their.layer_types]
    else:  # their modules look at the window alone, and those of llama at none
        slides = [window is not None and kind != "llama"] * their.num_hidden_layers
    bias = getattr(their, "attention_bias", False) and kind not in ("mistral", "mixtral", "qwen2")
    hidden = their.moe_intermediate_size if kind == "qwen3_moe" else their.intermediate_size
    act = ACTIVATIONS[their.hidden_activation if gemma else their.hidden_act]
    scale = (their.query_pre_attn_scalar if gemma else head_dim) ** -0.5
    pairs |= {
        "kv_heads": (their.num_key_value_heads, our.kv_heads), "head_dim": (head_dim, our.head_dim),
        "hidden": (hidden, our.hidden), "eps": (their.rms_norm_eps, our.eps),
        "act": (act, our.activation), "qkv_bias": (bias or kind == "qwen2", our.qkv_bias),
        "out_bias": (bias, our.out_bias), "slides": (slides, [*our.slides]),
        "mlp_bias": (kind == "llama" and their.mlp_bias, our.mlp_bias),
        "window": (window if any(slides) else None, our.window),
        "rope": (rope(ropes["full_attention"] if gemma else ropes), astuple(our.rope)),
        "scale": (scale, our.query_scale or our.head_dim**-0.5)}  # fmt: skip
    if gemma:
        pairs["local rope"] = rope(ropes["sliding_attention"]), astuple(our.local_rope)
    if kind in ("mixtral", "qwen3_moe"):
        own, normalised = our.mixture, kind == "mixtral" or their.norm_topk_prob
        theirs = their.num_local_experts, their.num_experts_per_tok, their.router_aux_loss_coef
        pairs["mixture"] = theirs, (own.experts, own.chosen, own.balance)
        pairs["normalised"] = normalised, own.normalised
    return different(pairs)


def different(pairs):
    def same(theirs, ours):
        return np.isclose(theirs, ours) if isinstance(theirs, float) else theirs == ours

    return {name: pair for name, pair in pairs.items() if not same(*pair)}


def rope(given):
    """Base, factor and stretch."""
    names = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    stretched = tuple(given[n] for n in names) if given["rope_type"] == "llama3" else None
    factor = 1.0 if given["rope_type"] == "default" else given["factor"]
    return given["rope_theta"], factor, stretched


@pytest.mark.parametrize("family", FULL)
def test_each_key_left_out_or_null_means_what_transformers_says(family):
    """Or is an error that names it."""
    known = FULL[family]
    assert differences(known) == {}, "nothing is left out"
    # No release leaves these out, and an error names them.
    required = ["num_hidden_layers", "hidden_size", "intermediate_size"]
    required += ["num_attention_heads", "vocab_size"] if family != "gemma3_text" else []
    if family == "qwen3_moe":
        required.remove("intermediate_size")  # none of its layers has an MLP
    if family == "gpt2":
        required = ["n_layer", "n_embd", "n_head", "n_positions", "vocab_size"]
    for key in [*known][1:]:
        # Their modules fail where layers slide and nothing says how far.
        hidden = (key, "layer_types") if key == "use_sliding_window" else (key,)
        found = differences({name: value for name, value in known.items() if name not in hidden})
        assert key in found and isinstance(found, str) if key in required else not found, key
        found = differences(known | {key: None})
        named = "sliding_window" if key == "use_sliding_window" else key
        assert not found or (isinstance(found, str) and named in found), key
    bare = {key: known[key] for key in ("model_type", *required) if key in known}
    assert differences(bare) == {}
    if family == "gpt2":
        return
    kind = type(transformers.AutoConfig.for_model(family))
    own = {field.name for field in fields(kind)}
    shared = {field.name for field in fields(transformers.PretrainedConfig)}
    own = own - (shared - {"tie_word_embeddings"}) - OTHERS
    own = {hf_defaults._OTHER_NAMES.get(name, name) for name in own}
    assert own <= {*hf_defaults.DEFAULTS[family]}, "a key nobody reads"


def test_a_gemma_with_images_and_the_form_of_transformers_4_are_read_as_their_classes_do():
    text = {"hidden_size": 64, "intermediate_size": 96, "model_type": "gemma3_text"}
    text |= {"num_hidden_layers": 7, "sliding_window": 16}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert differences(text) == {}
    assert hf.config_of({"model_type": "gemma3", "text_config": text}) == hf.config_of(text)
    assert hf.config_of(text).activation == "gelu"
    old = {"type" if name == "rope_type" else name: value for name, value in LLAMA3.items()}
    config = hf.config_of(FULL["llama"] | {"rope_scaling": old})
    assert astuple(config.rope) == (777.0, 8.0, (64, 1.0, 4.0))
