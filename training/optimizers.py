"""The optimizer of a run and its learning rate: linear warmup, then cosine decay to a tenth."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax

from training.config import Config
from zero_jax.models import optimizers

Rate = Callable[[Any], Any]
RATES = optimizers.RATES


def make(config: Config) -> optax.GradientTransformation:
    """Returns the optimizer of a run."""
    decay, clip = config.weight_decay, config.max_grad_norm
    return optimizers.make(config.optimizer, rate(config), weight_decay=decay, clip=clip)


def rescheduled(config: Config, before: Mapping[str, Any], step: int) -> str:
    """Returns a warning if another `--max-steps` than before changes the learning rate, else "".

    >>> config = Config(learning_rate=1.0, warmup_steps=2, max_steps=12)
    >>> said = rescheduled(config, {"max_steps": 6, "learning_rate": 1.0, "warmup_steps": 2}, 6)
    >>> said.partition(": ")[0]
    '--max-steps 12 is given, and step 6 was trained with --max-steps 6'
    >>> "is 0.69 instead of 0.1" in said, "--lr 0.145 to resume at the former rate" in said
    (True, True)
    """
    names = ("max_steps", "learning_rate", "warmup_steps")
    schedule = {name: before.get(name) for name in names}
    steps = schedule["max_steps"]
    if None in schedule.values() or steps == config.max_steps:
        return ""
    former = float(rate(dataclasses.replace(config, **schedule))(step))
    now = float(rate(config)(step))
    if abs(now - former) <= 1e-6 * former:
        return ""
    assert config.learning_rate is not None
    same = config.learning_rate * former / now if now else 0.0
    keep = f"--lr {same:.3g} to resume at the former rate, or " if now else ""
    return (
        f"--max-steps {config.max_steps} is given, and step {step} was trained with --max-steps "
        f"{steps}: the learning rate is {now:.2g} instead of {former:.2g}, because the cosine "
        f"schedule spans all steps. Give {keep}--max-steps {steps} for the former schedule"
    )


def rate(config: Config) -> Rate:
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
