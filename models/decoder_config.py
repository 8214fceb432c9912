"""Configs of the decoder family: shapes, parameters and FLOPs in closed form."""

import dataclasses
import math
from collections.abc import Mapping

from .gpt_config import ATTENTION, check_chunk

ACTIVATIONS = ("silu", "gelu")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
      theta: Base of the frequencies.
      factor: Position scaling factor.
      stretched: Llama 3.1's frequency-dependent scaling: (original context length, low frequency
        factor, high frequency factor). A frequency with fewer rotations over the original context
        than the low factor is divided by `factor`. One with more than the high factor is unchanged,
        and those between are interpolated. None scales all.
    """

    theta: float = 10000.0
    factor: float = 1.0
    stretched: tuple[int, float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Mixture of experts in place of the MLP.

    Attributes:
      experts: E, the number of experts.
      chosen: K, the number of experts per token.
      normalised: If True, the weights of the K experts are normalised to sum to one.
      capacity: Maximum tokens of a row per expert, as a multiple of T · K / E; the rest is dropped.
        None drops nothing, and needs E / K times the matrix products.
      balance: Coefficient of the load-balancing loss.
      z: Coefficient of the router z-loss, the mean square of the logits' logsumexp.

    Raises:
      ValueError: `chosen` is not between 1 and `experts`, or `capacity` is not positive.
    """

    experts: int
    chosen: int
    normalised: bool = True
    capacity: float | None = None
    balance: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"`chosen`={self.chosen} with `experts`={self.experts}: a number from 1 to the "
                "number of experts is required"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(
                f"`capacity`={self.capacity}: a positive number is required, for example 1.25, or "
                "None to drop no token"
            )

    def room(self, tokens: int) -> int:
        """Returns C, the number of tokens of a row that an expert takes.

        >>> Mixture(8, 2, capacity=1.25).room(1024), Mixture(8, 2).room(1024)
        (320, 1024)
        """
        if self.capacity is None:
            return tokens
        return min(tokens, math.ceil(self.capacity * tokens * self.chosen / self.experts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Config of a decoder: shape, options and kernels.

    Attributes:
      layers: Number of blocks.
      width: D, the size of the residual stream.
      heads: N, the number of query heads.
      kv_heads: M, the number of key and value heads; must divide `heads`.
      head_dim: H, even.
      hidden: F, the width of the gated MLP, or of one expert.
      vocab: V, the rows of the embedding.
      seq: Maximum sequence length in tokens.
      tied: If True, the head is the embedding.
      eps: Epsilon of the norms.
      rope: Rotary embedding of all layers, or of full-attention layers if `local_rope` is set.
      window: Attention window of sliding layers, in positions; None without sliding layers.
      sliding: For each layer, True if it uses the sliding window. Empty applies `window`, if set,
        to all layers.
      local_rope: Rotary embedding of sliding layers; None uses `rope`.
      qkv_bias, out_bias, mlp_bias: If True, those matrices have biases.
      qk_norm: If True, queries and keys are normalised per head.
      post_norms: If True, the outputs of attention and MLP are normalised too.
      norm_from_one: If True, the scale of a norm is one plus its parameter.
      mixture: Mixture of experts in place of the MLP; None for a dense MLP.
      activation: Activation of the MLP's gate, "silu" or "gelu" (tanh approximation).
      embed_scale: Factor of token embeddings.
      query_scale: Factor of attention scores; None means 1 / √H.
      attention: "cudnn", "xla" (in blocks of queries), or "auto": cuDNN on a GPU if dtype and
        head dim allow it.
      loss_chunk: Tokens whose logits exist at once, loss_chunk * vocab * 4 bytes.
      mlp_chunk: Tokens of a device whose MLP activations exist at once, computed again in the
        backward pass; None for all. For long rows, for example 4096.

    Raises:
      ValueError: A field is out of range, or fields contradict each other.
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
    mixture: Mixture | None = None
    activation: str = "silu"
    embed_scale: float = 1.0
    query_scale: float | None = None
    attention: str = "auto"
    loss_chunk: int = 1024
    mlp_chunk: int | None = None

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "kv_heads", "head_dim", "hidden", "vocab", "seq")
        for name in (*sizes, "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}`={getattr(self, name)}: at least 1 is required")
        check_chunk(self.mlp_chunk)
        if self.mixture is not None and self.mlp_chunk is not None:
            raise ValueError(
                f"`mlp_chunk`={self.mlp_chunk}, but experts take the tokens of a whole row: leave "
                "it out"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"`kv_heads`={self.kv_heads} must divide `heads`={self.heads}: each head of keys "
                "serves the same number of heads of queries"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"`head_dim`={self.head_dim}: an even number is required, because rotary "
                "positions rotate pairs"
            )
        if self.mixture is not None and self.mlp_bias:
            raise ValueError("`mlp_bias`=True, but experts have no biases: leave it out")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"`window`={self.window}: at least 1 is required, because a position sees itself"
            )
        if self.sliding and (self.window is None or len(self.sliding) != self.layers):
            raise ValueError(
                f"`sliding` has {len(self.sliding)} values for {self.layers} layers, with "
                f"`window`={self.window}: give one for each layer, and a window"
            )
        for name, known in (("attention", ATTENTION), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}`={getattr(self, name)!r}: use one of {known}")

    @property
    def slides(self) -> tuple[bool, ...]:
        """For each layer, True if it attends to `window` positions only."""
        return self.sliding or (self.window is not None,) * self.layers


def layer_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each parameter of one block, by path.

    >>> from .decoder_presets import preset
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
    }
    shapes: dict[str, tuple[int, ...]] = {}
    if config.mixture is None:
        matrices |= {
            "mlp/gate": (D, F, config.mlp_bias),
            "mlp/up": (D, F, config.mlp_bias),
            "mlp/down": (F, D, config.mlp_bias),
        }
    else:
        E = config.mixture.experts
        shapes |= {"mlp/router/kernel": (D, E), "mlp/gate/kernel": (E, D, F)}
        shapes |= {"mlp/up/kernel": (E, D, F), "mlp/down/kernel": (E, F, D)}
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
    """Returns the shape of each parameter, by path; those of blocks are stacked over layers.

    >>> from .decoder_presets import preset
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

    >>> from .decoder_presets import preset
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


def flops_per_token(config: DecoderConfig, tokens: int, *, masked: bool = False) -> float:
    """Counts the model FLOPs of one token of a row of `tokens`, forward and backward.

    Six for each element of a matrix that multiplies, and 12·N·H for each position a layer attends
    to. The head is included, the embedding lookup is not. For experts, the K that a token is routed
    to are counted. Attention is counted in full although the causal mask wastes half; a sliding
    layer attends to its window at most. `masked` counts what the mask leaves, the mean over the
    row. Recomputation is not counted.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    chosen = 1 if config.mixture is None else config.mixture.chosen
    layer = sum(
        math.prod(shape[-2:]) * (chosen if len(shape) == 3 else 1)
        for shape in layer_shapes(config).values()
        if len(shape) > 1
    )
    matrices = config.layers * layer + config.vocab * config.width
    local = tokens if config.window is None else min(tokens, config.window)
    each = [local if slides else tokens for slides in config.slides]
    seen: float = sum(each)
    if masked:  # the first tokens of a row see fewer
        seen = sum(size - size * (size - 1) / (2 * tokens) for size in each)
    return 6 * matrices + 12 * config.heads * config.head_dim * seen
