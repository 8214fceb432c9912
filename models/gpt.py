"""The GPT-2 family in Flax NNX: pre-norm blocks, learned positions, tied head.

Every parameter of the blocks is one array stacked over layers, and one scan applies them, so a
deep model compiles as fast as a shallow one. Compute follows the dtype of the parameters; layer
norm statistics, softmax and loss are fp32. Logits of a training batch never exist at once:
`chunked_cross_entropy` holds (loss_chunk, vocab) of them, and its gradients cost (V, D) + (M, D)
words in fp32.

Shapes: B batch, T tokens of a row, D width, N heads, H head dim, V vocab, L layers,
M tokens of a batch, C chunks of K tokens (C * K >= M), S length of a text.

GPT-2: Radford et al., Language Models are Unsupervised Multitask Learners (2019). The shapes of
the larger models follow Rajbhandari et al., arXiv:1910.02054.
"""

import dataclasses
import difflib
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])

ATTENTION = ("auto", "xla", "cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT, and how it computes.

    Attributes:
      layers: number of blocks.
      width: D, the size of the residual stream.
      heads: attention heads; must divide `width`.
      vocab: rows of the embedding, GPT-2's 50257 rounded up to a multiple of 128.
      seq: longest row of tokens, the number of learned positions.
      dropout: rate on the embedding and on both residual branches of a block, 0 for none.
      attention: "cudnn", "xla", or "auto": cuDNN on a GPU where dtype and head dim allow it.
      loss_chunk: tokens whose logits exist at once, loss_chunk * vocab * 4 bytes.
    """

    layers: int
    width: int
    heads: int
    vocab: int = 50304
    seq: int = 1024
    dropout: float = 0.0
    attention: str = "auto"
    loss_chunk: int = 1024

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocab", "seq", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least 1.")
        if self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} must divide width={self.width}, which leaves a remainder of "
                f"{self.width % self.heads}; choose another number of heads, width // 64 say."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"dropout={self.dropout}, but a rate must lie in [0, 1); use 0.0 to switch it off."
            )
        if self.attention not in ATTENTION:
            raise ValueError(
                f"attention={self.attention!r}, but it must be one of {ATTENTION}; "
                '"auto" picks one for the device.'
            )


def _config(layers: int, width: int, heads: int) -> GPTConfig:
    return GPTConfig(layers=layers, width=width, heads=heads)


PRESETS: dict[str, GPTConfig] = {
    "nano": GPTConfig(layers=4, width=128, heads=4, vocab=256, seq=128),
    "124m": _config(12, 768, 12),
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
    "1t": _config(128, 25600, 200),
}


def preset(name: str, **overrides: Any) -> GPTConfig:
    """Returns the named config of `PRESETS`, with fields replaced.

    >>> preset("124m", vocab=50257).layers
    12

    Raises:
      ValueError: no preset has that name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"No preset is called {name!r}; the nearest is {near!r}. "
            f"Choose one of {', '.join(PRESETS)}, or write a GPTConfig."
        )
    return dataclasses.replace(PRESETS[name], **overrides)


def num_params(config: GPTConfig) -> int:
    """Counts the parameters: V·D + T·D + L·(12·D² + 13·D) + 2·D, the head being tied."""
    d = config.width
    return (config.vocab + config.seq) * d + config.layers * (12 * d * d + 13 * d) + 2 * d


def flops_per_token(config: GPTConfig) -> int:
    """Counts the model FLOPs of one token, forward and backward: 6·(12·L·D² + V·D) + 12·L·D·T.

    Two per multiply-add and three passes (forward, and two products backward) make 6 for each
    parameter that multiplies: 12·D² in a block, V·D in the tied head; the lookup of an embedding
    is none. Scores and mixing add 2 · 2·D·T a layer and pass, for a row of T = `seq` tokens,
    counted in full although the causal mask wastes half. Recomputation is not counted.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    d, layers = config.width, config.layers
    return 6 * (12 * layers * d * d + config.vocab * d) + 12 * layers * d * config.seq


def _keep_dtype(arrays: _Arrays, /, *, dtype: Any = None, inexact: bool = True) -> _Arrays:
    # nnx.Embed casts to the dtype it was born with, which would undo a cast of the parameters.
    return arrays


def _embed(rows: int, width: int, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(0.02)
    return nnx.Embed(rows, width, embedding_init=init, promote_dtype=_keep_dtype, rngs=rngs)


def _linear(inputs: int, outputs: int, stddev: float, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, kernel_init=nnx.initializers.normal(stddev), rngs=rngs)


def _layer_norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def _split(key: jax.Array | None, num: int) -> Any:
    return (None,) * num if key is None else jax.random.split(key, num)


class Attention(nnx.Module):
    """Causal self-attention of `heads` heads, through `jax.nn.dot_product_attention`."""

    def __init__(self, config: GPTConfig, out_stddev: float, rngs: nnx.Rngs):
        self.heads = config.heads
        self.implementation = config.attention
        self.qkv = _linear(config.width, 3 * config.width, 0.02, rngs)
        self.proj = _linear(config.width, config.width, out_stddev, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        B, T, D = x_BxTxD.shape
        qkv_Bx3xTxNxH = self.qkv(x_BxTxD).reshape(B, T, 3, self.heads, D // self.heads)
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = jnp.unstack(qkv_Bx3xTxNxH, axis=2)
        mixed_BxTxNxH = jax.nn.dot_product_attention(
            q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, is_causal=True, implementation=self._choose(q_BxTxNxH)
        )
        return self.proj(mixed_BxTxNxH.reshape(B, T, D))

    def _choose(self, q_BxTxNxH: jax.Array) -> Any:
        if self.implementation != "auto":
            return self.implementation
        # What cuDNN's fused kernel takes; it alone keeps no (T, T) scores for the backward pass.
        fits = q_BxTxNxH.dtype in (jnp.bfloat16, jnp.float16) and q_BxTxNxH.shape[-1] % 8 == 0
        return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


class MLP(nnx.Module):
    """D to 4·D and back, with GELU between."""

    def __init__(self, config: GPTConfig, out_stddev: float, rngs: nnx.Rngs):
        self.up = _linear(config.width, 4 * config.width, 0.02, rngs)
        self.down = _linear(4 * config.width, config.width, out_stddev, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x_BxTxD)))


class Block(nnx.Module):
    """One pre-norm layer; a key of None makes it deterministic."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        # Two branches a layer add to the residual stream, whose variance this keeps near 1.
        out_stddev = 0.02 / (2 * config.layers) ** 0.5
        self.rate = config.dropout
        self.ln1 = _layer_norm(config.width, rngs)
        self.attn = Attention(config, out_stddev, rngs)
        self.ln2 = _layer_norm(config.width, rngs)
        self.mlp = MLP(config, out_stddev, rngs)

    def __call__(self, x_BxTxD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        attn_key, mlp_key = _split(key, 2)
        x_BxTxD = x_BxTxD + _dropout(self.attn(self.ln1(x_BxTxD)), self.rate, attn_key)
        return x_BxTxD + _dropout(self.mlp(self.ln2(x_BxTxD)), self.rate, mlp_key)


class GPT(nnx.Module):
    """A GPT whose `blocks` hold every layer's parameters, stacked as (L, ...).

    All its variables are `nnx.Param`: dropout keys are arguments, not state.
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.config = config
        self.wte = _embed(config.vocab, config.width, rngs)
        self.wpe = _embed(config.seq, config.width, rngs)
        self.blocks = stacked(rngs)
        self.ln_f = _layer_norm(config.width, rngs)

    def hidden(self, tokens_BxT: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns the final hidden states (B, T, D), after the last layer norm.

        Args:
          tokens_BxT: token ids, T at most `config.seq`.
          dropout_key: a typed key of `jax.random.key`; None is deterministic.

        Raises:
          ValueError: the rows are longer than there are positions.
        """
        config, T = self.config, tokens_BxT.shape[-1]
        if T > config.seq:
            raise ValueError(
                f"Rows of {T} tokens were given, but the model has {config.seq} positions; "
                f"cut the rows, or build it with seq={T} or more."
            )
        key = dropout_key if config.dropout > 0.0 else None
        embed_key, blocks_key = _split(key, 2)
        key_L = None if blocks_key is None else jax.random.split(blocks_key, config.layers)
        x_BxTxD = self.wte(tokens_BxT) + self.wpe(jnp.arange(T))
        x_BxTxD = _dropout(x_BxTxD, config.dropout, embed_key)
        return self.ln_f(_apply_blocks(self.blocks, x_BxTxD, key_L))

    def head(self, x_BxTxD: jax.Array) -> jax.Array:
        """Returns fp32 logits (B, T, V) of hidden states, by the tied embedding."""
        embed_VxD = self.wte.embedding[...]
        return jnp.einsum("...d,vd->...v", x_BxTxD, embed_VxD, preferred_element_type=jnp.float32)

    def __call__(self, tokens_BxT: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns fp32 logits (B, T, V); for training, `loss` needs far less memory."""
        return self.head(self.hidden(tokens_BxT, dropout_key))


@nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry, graph_updates=False)
def _apply_blocks(block: Block, x_BxTxD: jax.Array, key: jax.Array | None) -> jax.Array:
    return block(x_BxTxD, key)


def loss(
    model: GPT,
    tokens_BxT1: jax.Array,
    mask: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the next-token cross entropy as (sum, weight), both fp32; the mean is their ratio.

    Args:
      model: the model.
      tokens_BxT1: rows of T + 1 tokens; the first T are read, the last T predicted.
      mask: weights (B, T) of the predicted tokens, None for all one.
      dropout_key: a typed key, None for deterministic.

    Raises:
      ValueError: the mask's shape does not fit, or the rows are too long for the model.
    """
    labels_BxT = tokens_BxT1[:, 1:]
    if mask is not None and mask.shape != labels_BxT.shape:
        raise ValueError(
            f"mask has shape {mask.shape}, but rows of T + 1 tokens {tokens_BxT1.shape} need "
            f"(B, T) = {labels_BxT.shape}: one weight for each predicted token, mask[:, 1:] say."
        )
    x_BxTxD = model.hidden(tokens_BxT1[:, :-1], dropout_key)
    weights_BxT = jnp.ones(labels_BxT.shape) if mask is None else mask
    return chunked_cross_entropy(
        x_BxTxD.reshape(-1, x_BxTxD.shape[-1]),
        model.wte.embedding[...],
        labels_BxT.reshape(-1),
        weights_BxT.reshape(-1),
        model.config.loss_chunk,
    )


def chunked_cross_entropy(
    x_MxD: jax.Array, embed_VxD: jax.Array, labels_M: jax.Array, weights_M: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted cross entropy of `x @ embed.T` as (sum, weight), chunk by chunk.

    The gradient of a cross entropy needs nothing that comes after it but one scalar. So when it
    is differentiated the forward scan, which has the logits at hand, also makes dx (M, D) and
    dE (V, D) in fp32; the backward pass scales them and casts. Logits are computed once, exist
    `chunk` tokens at a time, and the embedding is not kept for the backward pass.

    Args:
      x_MxD: hidden states.
      embed_VxD: the embedding.
      labels_M: the right rows of the embedding, each in [0, V) even where its weight is 0.
      weights_M: weights of the tokens, numbers or booleans; differentiable too.
      chunk: tokens in a chunk at most; it need not divide M.

    Returns:
      The weighted sum of the tokens' losses and the sum of the weights, both fp32.
    """
    M, D = x_MxD.shape
    weights_M = weights_M.astype(jnp.float32)
    weight = jnp.sum(weights_M)
    count = max(1, -(-M // chunk))
    rows = -(-M // count)  # equal chunks: M just over a multiple of `chunk` pads only a little
    pad = count * rows - M
    x_CxKxD = jnp.pad(x_MxD, ((0, pad), (0, 0))).reshape(count, rows, D)
    labels_CxK = jnp.pad(labels_M, (0, pad)).reshape(count, rows)
    weights_CxK = jnp.pad(weights_M, (0, pad)).reshape(count, rows)
    return _cross_entropy(*_vary_alike(x_CxKxD, embed_VxD, labels_CxK, weights_CxK)), weight


def _vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    # Inside jax.shard_map tokens differ from device to device and parameters may not. A custom
    # gradient must vary as its argument does, so the difference is settled out here, where jax
    # knows that it transposes to a sum. Anywhere else this does nothing.
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]  # jax >= 0.10
    missing = [tuple(frozenset().union(*varying) - axes) for axes in varying]
    return [
        jax.lax.pcast(array, axes, to="varying") if axes else array
        for array, axes in zip(arrays, missing, strict=True)
    ]


def _token_losses(
    x_KxD: jax.Array, embed_VxD: jax.Array, labels_K: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns one chunk's losses (K,) and log-probabilities (K, V), in fp32."""
    logits_KxV = jnp.einsum("kd,vd->kv", x_KxD, embed_VxD, preferred_element_type=jnp.float32)
    logp_KxV = jax.nn.log_softmax(logits_KxV)
    return -jnp.take_along_axis(logp_KxV, labels_K[:, None], axis=1)[:, 0], logp_KxV


@jax.custom_vjp
def _cross_entropy(
    x_CxKxD: jax.Array, embed_VxD: jax.Array, labels_CxK: jax.Array, weights_CxK: jax.Array
) -> jax.Array:
    losses_CxK = jax.lax.map(
        lambda chunk: _token_losses(chunk[0], embed_VxD, chunk[1])[0], (x_CxKxD, labels_CxK)
    )
    return jnp.sum(losses_CxK * weights_CxK)


def _cross_entropy_fwd(
    x_CxKxD: jax.Array, embed_VxD: jax.Array, labels_CxK: jax.Array, weights_CxK: jax.Array
) -> tuple[jax.Array, Any]:
    dtype = jnp.promote_types(x_CxKxD.dtype, embed_VxD.dtype)
    # softmax - onehot is as small as 1 / V, too small for fp16, so it is cast times a power of
    # two that puts the largest weight near 2**14; the backward pass takes the power out again.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(weights_CxK)))
    scale = jnp.ldexp(jnp.float32(1), 14 - exponent)

    def body(dembed_VxD: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        x_KxD, labels_K, weights_K = chunk
        losses_K, logp_KxV = _token_losses(x_KxD, embed_VxD, labels_K)
        hit_KxV = labels_K[:, None] == jnp.arange(embed_VxD.shape[0])
        dlogits_KxV = (jnp.exp(logp_KxV) - hit_KxV) * (weights_K * scale)[:, None]
        dlogits_KxV = dlogits_KxV.astype(dtype)
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        dx_KxD = dot("kv,vd->kd", dlogits_KxV, embed_VxD)
        return dembed_VxD + dot("kv,kd->vd", dlogits_KxV, x_KxD), (losses_K, dx_KxD)

    dembed_VxD, (losses_CxK, dx_CxKxD) = jax.lax.scan(
        body,
        jnp.zeros_like(embed_VxD, dtype=jnp.float32),
        (x_CxKxD, labels_CxK, weights_CxK),
    )
    # Empty arrays carry the dtypes of x and embed, which the backward pass must return.
    dtypes = jnp.zeros((0,), x_CxKxD.dtype), jnp.zeros((0,), embed_VxD.dtype)
    residuals = dx_CxKxD, dembed_VxD, losses_CxK, scale, dtypes
    return jnp.sum(losses_CxK * weights_CxK), residuals


def _cross_entropy_bwd(residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    dx_CxKxD, dembed_VxD, losses_CxK, scale, (x_like, embed_like) = residuals
    factor = cotangent / scale
    return (
        (dx_CxKxD * factor).astype(x_like.dtype),
        (dembed_VxD * factor).astype(embed_like.dtype),
        None,
        losses_CxK * cotangent,
    )


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def generate(
    model: GPT, prompt_T: jax.Array, steps: int, key: jax.Array, temperature: float = 1.0
) -> jax.Array:
    """Samples a continuation, for a look at what the model has learned.

    Each step runs the whole window of the last `config.seq` tokens: no cache, one compilation.

    Args:
      model: the model.
      prompt_T: at least one token id.
      steps: tokens to sample.
      key: a typed key.
      temperature: divides the logits; 0 always takes the likeliest token.

    Returns:
      The prompt and its continuation, (T + steps,).

    Raises:
      ValueError: the prompt is empty or not one row.
    """
    if prompt_T.ndim != 1 or prompt_T.size == 0:
        raise ValueError(
            f"The prompt has shape {prompt_T.shape}, but it must be one row of at least one "
            "token; pass jnp.zeros(1, int) to start from token 0."
        )
    graphdef, state = nnx.split(model)
    return _generate(graphdef, state, prompt_T, key, temperature, model.config.seq, steps)


@functools.partial(jax.jit, static_argnames=("graphdef", "seq", "steps"))
def _generate(
    graphdef: Any,
    state: Any,
    prompt_T: jax.Array,
    key: jax.Array,
    temperature: float,
    seq: int,
    steps: int,
) -> jax.Array:
    given, total = prompt_T.size, prompt_T.size + steps
    text_S = jnp.pad(prompt_T, (0, max(total, seq) - given))

    def step(position: jax.Array, text_S: jax.Array) -> jax.Array:
        model: GPT = nnx.merge(graphdef, state)
        start = jnp.maximum(position - seq, 0)
        window_T = jax.lax.dynamic_slice(text_S, (start,), (seq,))
        x_D = model.hidden(window_T[None])[0, position - start - 1]
        logits_V = model.head(x_D)
        noise_V = jax.random.gumbel(jax.random.fold_in(key, position), logits_V.shape)
        return text_S.at[position].set(jnp.argmax(logits_V + temperature * noise_V))

    return jax.lax.fori_loop(given, total, step, text_S)[:total]
