"""The optimizer of a run, of those in `models.optimizers`, and its learning rate.

The rate rises linearly from 0, then falls as a cosine to a tenth of its peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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


def rescheduled(config: Config, before: Mapping[str, Any], step: int) -> str | None:
    """Returns a warning if another `--steps` than before changes the learning rate, or None.

    Args:
        config: Settings with `lr` and `warmup` decided, as by `resolve`.
        before: Those of the run that is resumed.
        step: The step it is resumed from.

    >>> config = Config(lr=1.0, warmup=2, steps=12)
    >>> said = rescheduled(config, {"steps": 6, "lr": 1.0, "warmup": 2}, 6)
    >>> said.partition(": ")[0]
    '--steps 12 is given, and step 6 was trained with --steps 6'
    >>> "is 0.69 instead of 0.1" in said, "--lr 0.145 to resume at the former rate" in said
    (True, True)
    """
    steps, lr, warmup = (before.get(name) for name in ("steps", "lr", "warmup"))
    if None in (steps, lr, warmup) or steps == config.steps:
        return None
    former = float(rate(dataclasses.replace(config, steps=steps, lr=lr, warmup=warmup))(step))
    now = float(rate(config)(step))
    if abs(now - former) <= 1e-6 * former:
        return None
    assert config.lr is not None
    keep = f"--lr {config.lr * former / now:.3g} to resume at the former rate, or " if now else ""
    return (
        f"--steps {config.steps} is given, and step {step} was trained with --steps {steps}: the "
        "cosine of the learning rate is spread over all steps, so that the rate at step "
        f"{step} is {now:.2g} instead of {former:.2g}. Give {keep}--steps {steps} for the former "
        "schedule"
    )


def rate(config: Config) -> Rate:
    """The learning rate after so many updates, of settings with `lr` and `warmup` decided.

    >>> [round(float(rate(Config(lr=1.0, warmup=2, steps=6))(step)), 3) for step in (0, 1, 2, 6)]
    [0.0, 0.5, 1.0, 0.1]
    """
    assert config.lr is not None and config.warmup is not None
    return optax.warmup_cosine_decay_schedule(
        0.0, config.lr, config.warmup, config.steps, end_value=config.lr / 10
    )
