"""A mixture of experts in place of a layer's MLP: a router sends each token to K of E.

Each row of tokens is routed by itself, so numbers do not depend on how rows lie on devices. An
expert takes at most C tokens of a row; of those that are too many, second choices go first, then
the last in the row: they are dropped, which leaves the residual stream as it was.

Shapes: B batch, T tokens of a row, D width, E experts, K of them for a token, C capacity,
F width of an expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .decoder_config import DecoderConfig
from .dims import named

STDDEV = 0.02  # of new matrices


class Routed(NamedTuple):
    """Statistics of a router, for each row.

    Attributes:
      balance_B: Load-balancing loss: E · Σ (fraction of choices of an expert) · (its mean
        probability); 1 if all experts have equally many tokens. Source: Fedus et al., Switch
        Transformers, arXiv:2101.03961.
      z_B: Router z-loss: mean square of the logits' logsumexp. Source: Zoph et al., ST-MoE,
        arXiv:2202.08906.
      dropped_B: Number of the T · K choices dropped because an expert was full, int32.
    """

    balance_B: jax.Array
    z_B: jax.Array
    dropped_B: jax.Array


class Kernel(nnx.Module):
    """One array of weights."""

    def __init__(
        self, shape: tuple[int, ...], names: tuple[str | None, ...], stddev: float, rngs: nnx.Rngs
    ):
        init = named(nnx.initializers.normal(stddev), *names)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))


class Experts(nnx.Module):
    """E gated MLPs, stacked as (E, ...), and their router."""

    def __init__(self, config: DecoderConfig, out_stddev: float, rngs: nnx.Rngs):
        assert config.mixture is not None
        E, D, F = config.mixture.experts, config.width, config.hidden
        self.mixture = config.mixture
        self.router = Kernel((D, E), ("embed", None), STDDEV, rngs)
        columns, rows = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.gate = Kernel((E, D, F), columns, STDDEV, rngs)
        self.up = Kernel((E, D, F), columns, STDDEV, rngs)
        self.down = Kernel((E, F, D), rows, out_stddev, rngs)
        self.activation = nnx.silu if config.activation == "silu" else nnx.gelu

    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, Routed]:
        E, C = self.mixture.experts, self.mixture.room(x_BxTxD.shape[1])
        logits_BxTxE = jnp.einsum(
            "btd,de->bte", x_BxTxD, self.router.kernel[...], preferred_element_type=jnp.float32
        )
        weights_BxTxK, chosen_BxTxK = self._choose(logits_BxTxE)
        places_BxTxK = jax.vmap(lambda chosen: _places(chosen, E))(chosen_BxTxK)
        sent_BxExCxD = jax.vmap(lambda x, chosen, places: _sent(x, chosen, places, E, C))(
            x_BxTxD, chosen_BxTxK, places_BxTxK
        )
        made_BxExCxD = self._run(sent_BxExCxD)
        back_BxTxKxD = jax.vmap(_back)(made_BxExCxD, chosen_BxTxK, places_BxTxK)
        out_BxTxD = jnp.einsum("btk,btkd->btd", weights_BxTxK.astype(x_BxTxD.dtype), back_BxTxKxD)
        return out_BxTxD, self._routed(logits_BxTxE, chosen_BxTxK, places_BxTxK >= C)

    def _choose(self, logits_BxTxE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of the experts that each token goes to, and which they are."""
        probs_BxTxE = jax.nn.softmax(logits_BxTxE)
        weights_BxTxK, chosen_BxTxK = jax.lax.top_k(probs_BxTxE, self.mixture.chosen)
        if self.mixture.normalised:
            weights_BxTxK /= weights_BxTxK.sum(-1, keepdims=True)
        return weights_BxTxK, chosen_BxTxK

    def _run(self, x_BxExCxD: jax.Array) -> jax.Array:
        """Each expert on its tokens."""
        gate_BxExCxF = jnp.einsum("becd,edf->becf", x_BxExCxD, self.gate.kernel[...])
        up_BxExCxF = jnp.einsum("becd,edf->becf", x_BxExCxD, self.up.kernel[...])
        gated_BxExCxF = self.activation(gate_BxExCxF) * up_BxExCxF
        return jnp.einsum("becf,efd->becd", gated_BxExCxF, self.down.kernel[...])

    def _routed(
        self, logits_BxTxE: jax.Array, chosen_BxTxK: jax.Array, dropped_BxTxK: jax.Array
    ) -> Routed:
        E = self.mixture.experts
        probs_BxE = jax.nn.softmax(logits_BxTxE).mean(1)
        parts_BxE = jax.nn.one_hot(chosen_BxTxK, E).mean((1, 2))
        return Routed(
            E * jnp.sum(parts_BxE * probs_BxE, -1),
            jnp.mean(jax.nn.logsumexp(logits_BxTxE, -1) ** 2, -1),
            jnp.sum(dropped_BxTxK, (1, 2), dtype=jnp.int32),
        )


def _places(chosen_TxK: jax.Array, experts: int) -> jax.Array:
    """How many choices of the same expert come before each; it has room where those are below C."""
    first_KT = chosen_TxK.T.ravel()  # first choices before second ones
    counted_KTxE = jnp.cumsum(jax.nn.one_hot(first_KT, experts, dtype=jnp.int32), 0)
    places_KT = jnp.take_along_axis(counted_KTxE, first_KT[:, None], 1)[:, 0] - 1
    return places_KT.reshape(chosen_TxK.T.shape).T


def _sent(
    x_TxD: jax.Array, chosen_TxK: jax.Array, places_TxK: jax.Array, experts: int, room: int
) -> jax.Array:
    """What each expert is sent: a token in each place, zeros where there is none."""
    T = x_TxD.shape[0]
    tokens_TxK = jnp.broadcast_to(jnp.arange(T)[:, None], chosen_TxK.shape)
    none_ExC = jnp.full((experts, room), T)
    source_ExC = none_ExC.at[chosen_TxK, places_TxK].set(tokens_TxK, mode="drop")
    return x_TxD.at[source_ExC].get(mode="fill", fill_value=0)


def _back(made_ExCxD: jax.Array, chosen_TxK: jax.Array, places_TxK: jax.Array) -> jax.Array:
    """What each token gets back of its experts; zeros where it was dropped."""
    return made_ExCxD.at[chosen_TxK, places_TxK].get(mode="fill", fill_value=0)
