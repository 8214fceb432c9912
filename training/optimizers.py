"""The optimizer of a run, of those in `models.optimizers`, and its learning rate.

The rate rises linearly from 0, then falls as a cosine to a tenth of its peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from training.config import Config
from zero_jax.models import optimizers
from zero_jax.names import unknown

Rate = Callable[[Any], Any]
RATES = optimizers.RATES


def check_name(name: str) -> str:
    """Returns the name if an optimizer is called so.

    Raises:
        ValueError: naming the nearest one.
    """
    if name not in RATES:
        raise ValueError(unknown("optimizer", name, RATES, "Choose one of"))
    return name


def make(config: Config) -> optax.GradientTransformation:
    """The optimizer of a run.

    Args:
        config: Settings with `lr` and `warmup` decided, as by `resolve`.

    Raises:
        ValueError: No optimizer has that name.
    """
    name = check_name(config.optimizer)
    decay, clip = config.weight_decay, config.clip
    return optimizers.make(name, rate(config), weight_decay=decay, clip=clip)


def rate(config: Config) -> Rate:
    """The learning rate after so many updates, of settings with `lr` and `warmup` decided.

    >>> [round(float(rate(Config(lr=1.0, warmup=2, steps=6))(step)), 3) for step in (0, 1, 2, 6)]
    [0.0, 0.5, 1.0, 0.1]
    """
    assert config.lr is not None and config.warmup is not None
    return optax.warmup_cosine_decay_schedule(
        0.0, config.lr, config.warmup, config.steps, end_value=config.lr / 10
    )
