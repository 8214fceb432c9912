"""Next-token cross entropy, the loss of every text model here.

Shapes: B batch, T tokens of a row, D width, V vocab.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .cross_entropy import chunked_cross_entropy
from .experts import Routed


def loss(
    model: Any,
    tokens_BxT1: jax.Array,
    mask_BxT: jax.Array | None = None,
    segments_BxT: jax.Array | None = None,
    positions_BxT: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    labels_BxT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the next-token cross entropy as (sum, weight), both fp32; the mean is their ratio.

    Args:
      model: A `gpt.GPT` or a `decoder.Decoder`.
      tokens_BxT1: Rows of T + 1 tokens. The first T are inputs, the last T are labels. With
        `labels_BxT`, rows of T inputs.
      mask_BxT: Weights of the labels; None means all one.
      segments_BxT: Document numbers of the inputs, for packed rows; a token attends within its
        document.
      positions_BxT: Positions of the inputs in their document; by default in the row.
      dropout_key: A typed PRNG key, for a model with dropout; None is deterministic.
      labels_BxT: The next token of each input. Context parallelism requires it, because a device
        has a part of each row.

    Raises:
      ValueError: A shape does not fit, or the rows are too long for the model.
    """
    inputs_BxT, labels_BxT, weights_BxT = _shifted(
        tokens_BxT1, labels_BxT, mask_BxT, segments_BxT, positions_BxT
    )
    more = {} if dropout_key is None else {"dropout_key": dropout_key}
    x_BxTxD = model.hidden(inputs_BxT, segments_BxT, positions_BxT, **more)
    return _cross_entropy(model, x_BxTxD, labels_BxT, weights_BxT)


def routed_loss(
    model: Any,
    tokens_BxT1: jax.Array,
    mask_BxT: jax.Array | None = None,
    segments_BxT: jax.Array | None = None,
    positions_BxT: jax.Array | None = None,
    labels_BxT: jax.Array | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Routed]:
    """Returns the training loss of a model with experts, and the statistics of its routers.

    Args:
      model: A `decoder.Decoder` with a `Mixture`.
      tokens_BxT1: See `loss`.
      mask_BxT: See `loss`.
      segments_BxT: See `loss`.
      positions_BxT: See `loss`.
      labels_BxT: See `loss`.

    Returns:
      ((sum, weight), routed). The sum adds the load-balancing loss and the router z-loss to the
      cross entropy, weighted by the mixture's `balance` and `z` and averaged over layers. `routed`
      has the routers' statistics of each row: means over layers, for `dropped_B` the sum.

    Raises:
      ValueError: The model has no experts, a shape does not fit, or the rows are too long.
    """
    mixture = model.config.mixture
    if mixture is None:
        raise ValueError("the model has no experts: use loss")
    inputs_BxT, labels_BxT, weights_BxT = _shifted(
        tokens_BxT1, labels_BxT, mask_BxT, segments_BxT, positions_BxT
    )
    x_BxTxD, routed = model.routed(inputs_BxT, segments_BxT, positions_BxT)
    assert routed is not None
    total, weight = _cross_entropy(model, x_BxTxD, labels_BxT, weights_BxT)
    balance_B, z_B = routed.balance_B.mean(0), routed.z_B.mean(0)
    extra_B = mixture.balance * balance_B + mixture.z * z_B
    total += jnp.sum(extra_B * weights_BxT.sum(1, dtype=jnp.float32))
    return (total, weight), Routed(balance_B, z_B, routed.dropped_B.sum(0))


def _shifted(
    tokens_BxT1: jax.Array,
    labels_BxT: jax.Array | None,
    mask_BxT: jax.Array | None,
    segments_BxT: jax.Array | None,
    positions_BxT: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns inputs, labels and the weights of the labels, (B, T) each.

    Raises:
      ValueError: A shape does not fit.
    """
    B, T = tokens_BxT1.shape
    if labels_BxT is None:
        T -= 1
    names = ("labels", "mask", "segments", "positions")
    arrays = (labels_BxT, mask_BxT, segments_BxT, positions_BxT)
    for name, array in zip(names, arrays, strict=True):
        if array is not None and array.shape != (B, T):
            raise ValueError(
                f"`{name}_BxT` has shape {array.shape}, and inputs have (B, T) = {(B, T)}: give "
                "one value for each predicted token, for example mask[:, 1:]"
            )
    known_BxT = tokens_BxT1[:, 1:] if labels_BxT is None else labels_BxT
    weights_BxT = jnp.ones((B, T)) if mask_BxT is None else mask_BxT
    inputs_BxT = tokens_BxT1[:, :-1] if labels_BxT is None else tokens_BxT1
    return inputs_BxT, known_BxT, weights_BxT


def _cross_entropy(
    model: Any, x_BxTxD: jax.Array, labels_BxT: jax.Array, weights_BxT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("loss"):
        return chunked_cross_entropy(
            x_BxTxD.reshape(-1, x_BxTxD.shape[-1]),
            model.head_VxD,
            labels_BxT.reshape(-1),
            weights_BxT.reshape(-1),
            model.config.loss_chunk,
        )
