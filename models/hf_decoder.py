"""The tensors of Llama, Mistral, Qwen and Gemma in transformers, beside models/decoder.py.

One table of names for all.
"""

import itertools

from .decoder_config import DecoderConfig, layer_shapes
from .hf_places import SAME, TRANSPOSED, Layout, Place

PREFIX = "model."
HEAD = "lm_head.weight"
EMBEDDING = f"{PREFIX}embed_tokens.weight"
_MODULES = {
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/out": "self_attn.o_proj",
    "attn/q_norm": "self_attn.q_norm",
    "attn/k_norm": "self_attn.k_norm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_NORMS = {"mlp_norm": "post_attention_layernorm"}
_MIXTRAL = {
    "mlp/router": "block_sparse_moe.gate",
    "mlp/gate": "block_sparse_moe.experts.{}.w1",
    "mlp/up": "block_sparse_moe.experts.{}.w3",
    "mlp/down": "block_sparse_moe.experts.{}.w2",
}
_QWEN_MOE = {
    "mlp/router": "mlp.gate",
    "mlp/gate": "mlp.experts.{}.gate_proj",
    "mlp/up": "mlp.experts.{}.up_proj",
    "mlp/down": "mlp.experts.{}.down_proj",
}
# Where a norm follows attention too, that one has the name.
_MORE_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_IMAGES = ("vision_tower.", "multi_modal_projector.")


def layout(config: DecoderConfig) -> Layout:
    """Every tensor.

    >>> from .decoder_presets import preset
    >>> layout(preset("qwen3-8b")).places[1].name
    'model.layers.0.self_attn.q_proj.weight'
    """
    names = _MODULES | (_MORE_NORMS if config.post_norms else _NORMS)
    if config.mixture is not None:
        names |= _MIXTRAL if _is_mixtral(config) else _QWEN_MOE
    places = [Place(EMBEDDING, (config.vocab, config.width), "embed/embedding")]
    for at in range(config.layers):
        for path, shape in layer_shapes(config).items():
            module, kind = path.rsplit("/", 1)
            theirs = "bias" if kind == "bias" else "weight"
            name = f"{PREFIX}layers.{at}.{names[module]}.{theirs}"
            turn = SAME if len(shape) == 1 else TRANSPOSED
            # A tensor for each expert, where ours is a stack of them.
            for own in itertools.product((at,), *map(range, shape[:-2])):
                own_name = name.format(*own[1:])
                places.append(Place(own_name, shape[-2:][::-1], f"blocks/{path}", own, turn))
    places.append(Place(f"{PREFIX}norm.weight", (config.width,), "norm/scale"))
    if not config.tied:
        places.append(Place(HEAD, (config.vocab, config.width), "head/kernel"))
    return Layout(tuple(places), full_name, (HEAD, EMBEDDING) if config.tied else None)


def full_name(name: str) -> str | None:
    """A tensor's name with "model."; None for one that is no part of a model of text.

    >>> full_name("layers.0.mlp.up_proj.weight"), full_name("language_model.model.norm.weight")
    ('model.layers.0.mlp.up_proj.weight', 'model.norm.weight')
    """
    # Old versions saved a table of frequencies with every layer.
    if name.endswith("rotary_emb.inv_freq") or name.removeprefix(PREFIX).startswith(_IMAGES):
        return None
    # A model of text and images has that of text inside, as one version or the other saves it.
    name = name.removeprefix("language_model.").replace("model.language_model.", PREFIX, 1)
    if name.startswith(("embed_tokens.", "layers.", "norm.")):
        return PREFIX + name
    return name


def _is_mixtral(config: DecoderConfig) -> bool:
    return not config.qk_norm
