"""The optimizer of a run and its learning rate: linear warmup, then cosine decay to a tenth."""

import optax

from training.config import Config
from zero_jax.models import optimizers


def make(config: Config) -> optax.GradientTransformation:
    """Returns the optimizer of a run."""
    decay, clip = config.weight_decay, config.max_grad_norm
    return optimizers.make(config.optimizer, rate(config), weight_decay=decay, clip=clip)


def rate(config: Config) -> optax.Schedule:
    """Returns the learning rate schedule, by number of updates.

    >>> config = Config(learning_rate=1.0, warmup_steps=2, max_steps=6)
    >>> [round(float(rate(config)(step)), 3) for step in (0, 1, 2, 6)]
    [0.0, 0.5, 1.0, 0.1]
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    assert peak is not None and warmup is not None
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, config.max_steps, end_value=peak / 10
    )
