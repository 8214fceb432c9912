"""Decoders by name, with the sizes that their makers published; a small one to try experts with.

Tests hold them to the published numbers of parameters.
"""

from typing import Any

from .decoder_config import DecoderConfig, Mixture, Rope, num_params
from .presets import chosen


def _llama(
    layers: int, width: int, heads: int, hidden: int, factor: float = 8.0, **more: Any
) -> DecoderConfig:
    known: dict[str, Any] = {
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 128256,
        "seq": 131072,
        "eps": 1e-5,
    } | more
    rope = Rope(500000.0, factor, (8192, 1.0, 4.0))
    return DecoderConfig(layers=layers, width=width, heads=heads, hidden=hidden, rope=rope, **known)


def _qwen(layers: int, width: int, heads: int, hidden: int, **more: Any) -> DecoderConfig:
    known: dict[str, Any] = {"head_dim": 128, "vocab": 151936, "rope": Rope(1e6)} | more
    return DecoderConfig(layers=layers, width=width, heads=heads, hidden=hidden, **known)


def _qwen25(
    layers: int, width: int, heads: int, kv_heads: int, hidden: int, **more: Any
) -> DecoderConfig:
    known = {"kv_heads": kv_heads, "qkv_bias": True, "seq": 32768} | more
    return _qwen(layers, width, heads, hidden, **known)


def _qwen3(layers: int, width: int, heads: int, hidden: int, **more: Any) -> DecoderConfig:
    known = {"kv_heads": 8, "qk_norm": True, "seq": 40960} | more
    return _qwen(layers, width, heads, hidden, **known)


def _qwen3_moe(layers: int, width: int, heads: int, hidden: int) -> DecoderConfig:
    mixture = Mixture(128, 8, balance=0.001)
    return _qwen3(layers, width, heads, hidden, kv_heads=4, mixture=mixture)


def _mistral(vocab: int, mixture: Mixture | None = None) -> DecoderConfig:
    return DecoderConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=14336,
        vocab=vocab,
        seq=32768,
        eps=1e-5,
        rope=Rope(1e6),
        mixture=mixture,
    )


def _gemma3(
    layers: int, width: int, heads: int, hidden: int, window: int, **more: Any
) -> DecoderConfig:
    known: dict[str, Any] = {"kv_heads": heads // 2, "head_dim": 256, "vocab": 262208}
    known |= {"seq": 131072, "rope": Rope(1e6, 8.0)} | more
    return DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        hidden=hidden,
        window=window,
        sliding=tuple((n + 1) % 6 != 0 for n in range(layers)),
        local_rope=Rope(1e4),
        tied=True,
        qk_norm=True,
        post_norms=True,
        norm_from_one=True,
        activation="gelu",
        embed_scale=width**0.5,
        **known,
    )


PRESETS: dict[str, DecoderConfig] = {
    "llama-3.1-8b": _llama(32, 4096, 32, 14336),
    "llama-3.1-70b": _llama(80, 8192, 64, 28672),
    "llama-3.1-405b": _llama(126, 16384, 128, 53248),
    "llama-3.2-1b": _llama(16, 2048, 32, 8192, 32.0, head_dim=64, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8192, 32.0, tied=True),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, head_dim=64, tied=True),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, tied=True),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944, vocab=152064),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824, vocab=152064),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648, vocab=152064),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568, vocab=152064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "mistral-7b": _mistral(32768),
    "mixtral-8x7b": _mistral(32000, Mixture(8, 2, balance=0.02)),
    "nano-experts": DecoderConfig(
        layers=4,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        hidden=128,
        vocab=50304,
        seq=1024,
        mixture=Mixture(8, 2, capacity=1.25, balance=0.01),
    ),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
    "gemma-3-1b": _gemma3(
        26, 1152, 4, 6912, 512, kv_heads=1, vocab=262144, seq=32768, rope=Rope(1e6)
    ),
    "gemma-3-4b": _gemma3(34, 2560, 8, 10240, 1024),
    "gemma-3-12b": _gemma3(48, 3840, 16, 15360, 1024),
    "gemma-3-27b": _gemma3(62, 5376, 32, 21504, 1024, head_dim=128, query_scale=168**-0.5),
}


def preset(name: str, **overrides: Any) -> DecoderConfig:
    """Returns the named config of `PRESETS`, with fields replaced.

    >>> preset("qwen3-8b").layers
    36

    Raises:
      ValueError: no preset has that name.
    """
    return chosen(PRESETS, name, num_params, **overrides)
