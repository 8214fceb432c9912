"""Configs of the GPT family: presets by name, parameters and FLOPs in closed form.

GPT-2: Radford et al., Language Models are Unsupervised Multitask Learners (2019). The shapes of
the larger models follow Rajbhandari et al., arXiv:1910.02054.
"""

import dataclasses
from typing import Any

from .presets import chosen

ATTENTION = ("auto", "xla", "cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Config of a GPT: shape, options and kernels.

    Attributes:
      layers: Number of blocks.
      width: D, the size of the residual stream.
      heads: Number of attention heads; must divide `width`.
      vocab: Rows of the embedding; GPT-2's 50257 rounded up to a multiple of 128.
      seq: Maximum sequence length in tokens, the number of learned positions.
      dropout: Dropout rate of the embedding and of both residual branches of a block; 0 for none.
      attention: "cudnn", "xla" (in blocks of queries), or "auto": cuDNN on a GPU if dtype and
        head dim allow it.
      loss_chunk: Tokens whose logits exist at once, loss_chunk * vocab * 4 bytes.
      mlp_chunk: Tokens of a device whose MLP activations exist at once, computed again in the
        backward pass; None for all. For long rows, for example 4096.

    Raises:
      ValueError: A field is out of range, or `heads` does not divide `width`.
    """

    layers: int
    width: int
    heads: int
    vocab: int = 50304
    seq: int = 1024
    dropout: float = 0.0
    attention: str = "auto"
    loss_chunk: int = 1024
    mlp_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocab", "seq", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}`={getattr(self, name)}: at least 1 is required")
        check_chunk(self.mlp_chunk)
        if self.width % self.heads:
            raise ValueError(
                f"`heads`={self.heads} must divide `width`={self.width}, and leaves a remainder "
                f"of {self.width % self.heads}. Use another number of heads, for example width // "
                "64"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"`dropout`={self.dropout}: a rate in [0, 1) is required, for example 0.0 to "
                "switch it off"
            )
        if self.attention not in ATTENTION:
            raise ValueError(
                f'`attention`={self.attention!r}: use one of {ATTENTION}; "auto" picks one for '
                "the device"
            )


def check_chunk(mlp_chunk: int | None) -> None:
    """Raises ValueError for a chunk without tokens."""
    if mlp_chunk is not None and mlp_chunk < 1:
        raise ValueError(f"`mlp_chunk`={mlp_chunk}: at least 1 is required, or None for all tokens")


def _config(layers: int, width: int, heads: int, loss_chunk: int = 1024) -> GPTConfig:
    return GPTConfig(layers=layers, width=width, heads=heads, loss_chunk=loss_chunk)


PRESETS: dict[str, GPTConfig] = {
    "nano": GPTConfig(layers=4, width=128, heads=4, vocab=256, seq=64),
    # Each chunk reads the embedding and adds to its gradient. Chunks of 2048 tokens move 6 % fewer
    # bytes per step than chunks of 1024, in 0.3 GB more (16 rows of 1024 tokens, for an H200).
    "124m": _config(12, 768, 12, loss_chunk=2048),
    "1.5b": _config(48, 1600, 25),
    "7.5b": _config(36, 4096, 32),
    "8b": _config(72, 3072, 24),
    "13b": _config(62, 4096, 32),
    "17b": _config(78, 4256, 28),
    "20b": _config(98, 4096, 32),
    "40b": _config(88, 6144, 48),
    "60b": _config(132, 6144, 48),
    "100b": _config(125, 8192, 64),
    "128b": _config(101, 10240, 80),
    "170b": _config(212, 8192, 64),
    "1t": _config(128, 25600, 160),
}


def preset(name: str, **overrides: Any) -> GPTConfig:
    """Returns the named config of `PRESETS`, with fields replaced.

    >>> preset("124m", vocab=50257).layers
    12

    Raises:
      ValueError: no preset has that name.
    """
    return chosen(PRESETS, name, num_params, **overrides)


def num_params(config: GPTConfig) -> int:
    """Counts the parameters: V·D + T·D + L·(12·D² + 13·D) + 2·D, the head being tied."""
    d = config.width
    return (config.vocab + config.seq) * d + config.layers * (12 * d * d + 13 * d) + 2 * d


def flops_per_token(config: GPTConfig, tokens: int, *, masked: bool = False) -> float:
    """Counts the model FLOPs of one token of a row of T tokens: 6·(12·L·D² + V·D) + 12·L·D·T.

    Forward and backward: two per multiply-add and three passes (forward, and two products
    backward) make 6 for each parameter that multiplies: 12·D² in a block, V·D in the tied head;
    the lookup of an embedding is none. Scores and mixing add 2 · 2·D·T a layer and pass, counted
    in full although the causal mask wastes half; `masked` counts what it leaves, (T + 1) / 2 for T.
    Recomputation is not counted.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    d, layers = config.width, config.layers
    seen = (tokens + 1) / 2 if masked else tokens
    return 6 * (12 * layers * d * d + config.vocab * d) + 12 * layers * d * seen
