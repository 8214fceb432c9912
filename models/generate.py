"""Sampling from a trained model.

Shapes: T tokens of a prompt, S of the whole text, W of the window that the model reads, V vocab.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx


class Model(Protocol):
    """A causal model of rows of at most `config.seq` tokens."""

    config: Any

    def hidden(self, tokens_BxT: jax.Array) -> jax.Array: ...
    def logits(self, x_BxTxD: jax.Array) -> jax.Array: ...


def generate(
    model: Any, prompt_T: jax.Array, steps: int, key: jax.Array, temperature: float = 1.0
) -> jax.Array:
    """Samples a continuation.

    Each step runs the model on the last `config.seq` tokens: no KV cache, one compilation.

    Args:
      model: A `gpt.GPT` or a `decoder.Decoder`.
      prompt_T: At least one token id.
      steps: Number of tokens to sample.
      key: A typed PRNG key.
      temperature: Sampling temperature; 0 is greedy decoding.

    Returns:
      The prompt and its continuation, (T + steps,).

    Raises:
      ValueError: The prompt is empty or not one row.
    """
    if prompt_T.ndim != 1 or prompt_T.size == 0:
        raise ValueError(
            f"`prompt_T` has shape {prompt_T.shape}, but one row of at least one token is "
            "required, for example jnp.zeros(1, int)"
        )
    graphdef, state = nnx.split(model)
    window = min(model.config.seq, prompt_T.size + steps)
    return _generate(graphdef, state, prompt_T, key, temperature, window, steps)


@functools.partial(jax.jit, static_argnames=("graphdef", "window", "steps"))
def _generate(
    graphdef: Any,
    state: Any,
    prompt_T: jax.Array,
    key: jax.Array,
    temperature: float,
    window: int,
    steps: int,
) -> jax.Array:
    given, total = prompt_T.size, prompt_T.size + steps
    text_S = jnp.pad(prompt_T, (0, steps))

    def step(position: jax.Array, text_S: jax.Array) -> jax.Array:
        model: Model = nnx.merge(graphdef, state)
        start = jnp.maximum(position - window, 0)
        window_W = jax.lax.dynamic_slice(text_S, (start,), (window,))
        x_D = model.hidden(window_W[None])[0, position - start - 1]
        logits_V = model.logits(x_D)
        noise_V = jax.random.gumbel(jax.random.fold_in(key, position), logits_V.shape)
        return text_S.at[position].set(jnp.argmax(logits_V + temperature * noise_V))

    return jax.lax.fori_loop(given, total, step, text_S)
