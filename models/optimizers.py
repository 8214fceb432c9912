"""The optimizers that a GPT of this folder is trained with: all of optax, with clipping and decay.

`train.py` runs them and `python -m zero_jax.plan` plans them. Weight decay is decoupled, and only
for kernels and embeddings: a bias or a scale of a norm stacked over layers is a matrix by its rank,
so leaves are told apart by name.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

PyTree = Any
Rate = Callable[[Any], Any]

# Peak rates that suit small GPTs. Of lamb and adafactor they are relative to a leaf's own size.
RATES = {
    "adamw": 4e-3,
    "sgd": 0.3,
    "lion": 5e-4,
    "adafactor": 0.03,
    "lamb": 0.02,
    "muon": 0.02,
}


def make(
    name: str, rate: Rate, *, weight_decay: float = 0.1, clip: float = 1.0
) -> optax.GradientTransformation:
    """The whole chain: clipping, the optimizer, decay and schedule.

    Args:
        name: One of RATES.
        rate: The learning rate after so many updates.
        weight_decay: Decay per step and unit of learning rate; of matrices only.
        clip: Largest global norm of the gradient; 0 never clips.

    >>> tx = make("sgd", optax.constant_schedule(0.1))
    >>> len(tx.init({"kernel": 1.0}))  # clipping, optimizer
    2
    """
    inner = _MAKERS[name](rate, weight_decay)
    return optax.chain(optax.clip_by_global_norm(clip), inner) if clip else inner


def decayed(params: PyTree) -> PyTree:
    """Returns True for each leaf with weight decay: kernels and embeddings.

    >>> decayed({"qkv": {"kernel": 1.0, "bias": 1.0}})
    {'qkv': {'bias': False, 'kernel': True}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: re.search("kernel|embedding", jax.tree_util.keystr(path)) is not None,
        params,
    )


def _then_decay(
    direction: optax.GradientTransformation, rate: Rate, decay: float
) -> optax.GradientTransformation:
    return optax.chain(
        direction,
        optax.add_decayed_weights(decay, decayed),
        optax.scale_by_learning_rate(rate),
    )


def _adafactor(rate: Rate, decay: float) -> optax.GradientTransformation:
    # optax's own decay is not multiplied by the rate. Without a rate it gives a step downhill.
    uphill = optax.chain(optax.adafactor(None), optax.scale(-1.0))
    return _then_decay(uphill, rate, decay)


def _muon(rate: Rate, decay: float) -> optax.GradientTransformation:
    # Kernels of the layers, stacked as (L, in, out), are orthogonalized one by one and decay;
    # embeddings and vectors follow Adam, at the same part of its own usual rate.
    def kernels(params: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: contrib.MuonDimensionNumbers(1, 2) if x.ndim == 3 else None, params
        )

    return contrib.muon(
        rate,
        weight_decay=decay,
        weight_decay_mask=decayed,
        adam_b2=0.95,
        adam_learning_rate=lambda step: rate(step) * RATES["adamw"] / RATES["muon"],
        muon_weight_dimension_numbers=kernels,
    )


_MAKERS: dict[str, Callable[[Rate, float], optax.GradientTransformation]] = {
    "adamw": lambda rate, decay: optax.adamw(rate, b2=0.95, weight_decay=decay, mask=decayed),
    "sgd": lambda rate, decay: _then_decay(optax.trace(0.9), rate, decay),
    "lion": lambda rate, decay: optax.lion(rate, weight_decay=decay, mask=decayed),
    "adafactor": _adafactor,
    "lamb": lambda rate, decay: optax.lamb(rate, weight_decay=decay, mask=decayed),
    "muon": _muon,
}
