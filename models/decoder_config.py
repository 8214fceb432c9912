"""The shapes of the decoder family: configs, presets by name, parameters and FLOPs in closed form.

Presets have the sizes that their makers published; tests hold them to the published numbers of
parameters.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .gpt_config import ATTENTION
from .presets import chosen

ACTIVATIONS = ("silu", "gelu")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
      theta: the base of the frequencies.
      factor: by which positions are stretched.
      stretched: of Llama 3.1 the positions it was trained on first, and how many turns on those a
        frequency makes at most to be stretched wholly, and at least to be left alone, between
        which it is stretched in part; None stretches all.
    """

    theta: float = 10000.0
    factor: float = 1.0
    stretched: tuple[int, float, float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, and how it computes.

    Attributes:
      layers: number of blocks.
      width: D, the size of the residual stream.
      heads: N, heads of queries.
      kv_heads: M, heads of keys and values; must divide `heads`.
      head_dim: H, even.
      hidden: F, the width of the gated MLP.
      vocab: V, rows of the embedding.
      seq: the longest row of tokens it is made for.
      tied: whether the head is the embedding.
      eps: of the norms.
      rope: of all layers, or of those that see everything.
      window: how many positions a sliding layer sees; None where no layer slides.
      sliding: for each layer whether it slides; empty for all, if there is a window.
      local_rope: of sliding layers; None for `rope`.
      qkv_bias, out_bias, mlp_bias: whether those matrices have biases.
      qk_norm: whether queries and keys are normalised, head by head.
      post_norms: whether what attention and MLP add is normalised too.
      norm_from_one: whether the scale of a norm is one plus its parameter.
      activation: of the MLP's gate, "silu" or "gelu" (by tanh).
      embed_scale: what embedded tokens are multiplied by.
      query_scale: what scores are multiplied by; None for 1 / √H.
      attention: "cudnn", "xla" (in blocks of queries), or "auto": cuDNN on a GPU where dtype and
        head dim allow it.
      loss_chunk: tokens whose logits exist at once, loss_chunk * vocab * 4 bytes.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    seq: int
    tied: bool = False
    eps: float = 1e-6
    rope: Rope = Rope()
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    local_rope: Rope | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_from_one: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    query_scale: float | None = None
    attention: str = "auto"
    loss_chunk: int = 1024

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "kv_heads", "head_dim", "hidden", "vocab", "seq")
        for name in (*sizes, "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least 1.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} must divide heads={self.heads}: each head of keys is "
                "read by as many heads of queries."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim}, but rotary positions turn pairs: make it even."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window}, but a position sees itself at least: give 1 or more."
            )
        if self.sliding and (self.window is None or len(self.sliding) != self.layers):
            raise ValueError(
                f"sliding names {len(self.sliding)} layers of {self.layers}, with "
                f"window={self.window}: give one for each layer, and the window that they see."
            )
        for name, known in (("attention", ATTENTION), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}, but it must be one of {known}.")

    @property
    def slides(self) -> tuple[bool, ...]:
        """For each layer whether it sees `window` positions only."""
        return self.sliding or (self.window is not None,) * self.layers


def _llama(
    layers: int, width: int, heads: int, hidden: int, factor: float = 8.0, **more: Any
) -> Any:
    known: dict[str, Any] = {
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 128256,
        "seq": 131072,
        "eps": 1e-5,
    } | more
    rope = Rope(500000.0, factor, (8192, 1.0, 4.0))
    return DecoderConfig(layers=layers, width=width, heads=heads, hidden=hidden, rope=rope, **known)


def _qwen(layers: int, width: int, heads: int, hidden: int, **more: Any) -> Any:
    known: dict[str, Any] = {"head_dim": 128, "vocab": 151936, "rope": Rope(1e6)} | more
    return DecoderConfig(layers=layers, width=width, heads=heads, hidden=hidden, **known)


def _qwen25(layers: int, width: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> Any:
    known = {"kv_heads": kv_heads, "qkv_bias": True, "seq": 32768} | more
    return _qwen(layers, width, heads, hidden, **known)


def _qwen3(layers: int, width: int, heads: int, hidden: int, **more: Any) -> Any:
    return _qwen(layers, width, heads, hidden, kv_heads=8, qk_norm=True, seq=40960, **more)


def _gemma3(layers: int, width: int, heads: int, hidden: int, window: int, **more: Any) -> Any:
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
    "mistral-7b": DecoderConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=14336,
        vocab=32768,
        seq=32768,
        eps=1e-5,
        rope=Rope(1e6),
    ),
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


def layer_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Path and shape of each parameter of one block.

    >>> layer_shapes(preset("qwen3-8b"))["attn/k/kernel"]
    (4096, 1024)
    """
    D, F, H = config.width, config.hidden, config.head_dim
    queries, keys = config.heads * H, config.kv_heads * H
    matrices = {
        "attn/q": (D, queries, config.qkv_bias),
        "attn/k": (D, keys, config.qkv_bias),
        "attn/v": (D, keys, config.qkv_bias),
        "attn/out": (queries, D, config.out_bias),
        "mlp/gate": (D, F, config.mlp_bias),
        "mlp/up": (D, F, config.mlp_bias),
        "mlp/down": (F, D, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs, bias) in matrices.items():
        shapes[f"{name}/kernel"] = inputs, outputs
        if bias:
            shapes[f"{name}/bias"] = (outputs,)
    norms = {"attn_norm": D, "mlp_norm": D}
    if config.post_norms:
        norms |= {"attn_post_norm": D, "mlp_post_norm": D}
    if config.qk_norm:
        norms |= {"attn/q_norm": H, "attn/k_norm": H}
    return shapes | {f"{name}/scale": (size,) for name, size in norms.items()}


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Path and shape of each parameter; those of blocks are stacked over layers.

    >>> shapes(preset("llama-3.1-8b"))["head/kernel"]
    (128256, 4096)
    """
    ends: dict[str, tuple[int, ...]] = {"embed/embedding": (config.vocab, config.width)}
    layer = layer_shapes(config)
    ends |= {f"blocks/{path}": (config.layers, *shape) for path, shape in layer.items()}
    ends["norm/scale"] = (config.width,)
    if not config.tied:
        ends["head/kernel"] = (config.vocab, config.width)
    return ends


def num_params(config: DecoderConfig) -> int:
    """Counts the parameters.

    >>> num_params(preset("llama-3.1-8b"))
    8030261248
    """
    total = 0
    for shape in shapes(config).values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def flops_per_token(config: DecoderConfig, tokens: int) -> int:
    """Counts the model FLOPs of one token of a row of `tokens`, forward and backward.

    Six for each element of a matrix that multiplies (the head's too, not the lookup of the
    embedding), and 12·N·H for each position a layer sees, counted in full although the causal mask
    wastes half; a sliding layer sees its window at most. Recomputation is not counted.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    layer = sum(a * b for a, b in (s for s in layer_shapes(config).values() if len(s) == 2))
    matrices = config.layers * layer + config.vocab * config.width
    local = tokens if config.window is None else min(tokens, config.window)
    seen = sum(local if slides else tokens for slides in config.slides)
    return 6 * matrices + 12 * config.heads * config.head_dim * seen
