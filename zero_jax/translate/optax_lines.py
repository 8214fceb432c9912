"""Optimizers and rates of PyTorch, DeepSpeed and Megatron-LM as lines of optax.

Sources: DeepSpeed's `engine.py` (its Adam is AdamW unless adam_w_mode is false) and
`lr_schedules.py` (warm-ups are logarithmic unless warmup_type is "linear"), Megatron's
`optimizer_param_scheduler.py`.
"""

from typing import Any

from zero_jax.translate.asked import Rate, Tx

_DECAY = "it decays matrices only"


def call(name: str, **given: Any) -> str:
    """A call of optax with a rate; what is None is left out.

    >>> call("adamw", b1=0.9, mask=None)
    'optax.adamw(lr, b1=0.9)'
    """
    words = [f"{key}={value!r}" for key, value in given.items() if value is not None]
    return f"optax.{name}({', '.join(['lr', *words])})"


def adamw(b1: float, b2: float, eps: float, decay: float, masked: bool = False) -> Tx:
    """AdamW; without decay it is Adam. Megatron's decays no biases and norms: `masked`."""
    differs = _if((b1, b2, eps) != (0.9, 0.95, 1e-8), "its betas are 0.9 and 0.95, its eps 1e-8")
    made = call("adamw", b1=b1, b2=b2, eps=eps, weight_decay=decay)
    if decay and masked:
        return Tx(made[:-1] + ", mask=decayed)", "adamw", decay, True, differs)
    return Tx(made, "adamw", decay, False, differs + _if(decay != 0, _DECAY))


def adam_l2(b1: float, b2: float, eps: float, decay: float, masked: bool = False) -> Tx:
    """Adam of a loss with a penalty: the decay is added to the gradient."""
    made = _penalised(call("adam", b1=b1, b2=b2, eps=eps), decay, masked)
    return Tx(made, None if decay else "adamw", 0.0, bool(decay and masked))


def lamb(b1: float, b2: float, eps: float, decay: float) -> Tx:
    """LAMB."""
    made = call("lamb", b1=b1, b2=b2, eps=eps, weight_decay=decay)
    return Tx(made, "lamb", decay, False, _if(decay != 0, _DECAY))


def lion(b1: float, b2: float, decay: float, masked: bool = False) -> Tx:
    """Lion."""
    made = call("lion", b1=b1, b2=b2, weight_decay=decay)
    if decay and masked:
        return Tx(made[:-1] + ", mask=decayed)", "lion", decay, True)
    return Tx(made, "lion", decay, False, _if(decay != 0, _DECAY))


def sgd(momentum: float, nesterov: bool, decay: float, masked: bool = False) -> Tx:
    """SGD of PyTorch, whose decay is added to the gradient."""
    inner = call("sgd", momentum=momentum or None, nesterov=nesterov or None)
    differs = _if(momentum != 0.9 or nesterov, "its momentum is 0.9")
    differs += _if(decay != 0 and not masked, _DECAY)
    return Tx(_penalised(inner, decay, masked), "sgd", decay, bool(decay and masked), differs)


def adagrad(eps: float, decay: float) -> Tx:
    """Adagrad of PyTorch."""
    inner = call("adagrad", initial_accumulator_value=0.0, eps=eps)
    return Tx(_penalised(inner, decay), None, decay)


def _penalised(inner: str, decay: float, masked: bool = False) -> str:
    """A call whose gradients have the decay of weights added first."""
    of = f"{decay!r}, mask=decayed" if masked else f"{decay!r}"
    return f"optax.chain(optax.add_decayed_weights({of}), {inner})" if decay else inner


def _if(when: bool, text: str) -> tuple[str, ...]:
    return (text,) if when else ()


def constant(lr: float) -> Rate:
    """One rate for all steps."""
    return Rate((f"lr = {lr!r}",), lr)


def deepspeed_warmup(low: float, high: float, warmup: int, logarithmic: bool) -> Rate:
    """WarmupLR: it rises, and stays.

    >>> print(*deepspeed_warmup(0.0, 1e-3, 10, True).lines, sep="\\n")
    def lr(step):
        return 0.0 + 0.001 * jnp.minimum(jnp.log1p(step) / math.log(10), 1.0)
    """
    if not logarithmic:
        line = f"lr = optax.linear_schedule({low!r}, {high!r}, {max(warmup, 2)})"
        return Rate((line,), high, warmup=warmup)
    part = f"jnp.minimum(jnp.log1p(step) / math.log({max(warmup, 2)}), 1.0)"
    lines = ("def lr(step):", f"    return {low!r} + {high - low!r} * {part}")
    return Rate(lines, high, warmup=warmup)


def deepspeed_falling(low: float, high: float, warmup: str, total: str, logarithmic: bool) -> Rate:
    """WarmupDecayLR: it rises, then falls linearly back to where it began."""
    warmup, falls = _at_least_two(warmup), _falls(warmup, total)
    lines = (
        "def lr(step):",
        f"    up = {_rise(warmup, logarithmic)}",
        f"    down = jnp.maximum({total} - step, 0) / {falls}",
        f"    return {low!r} + {high - low!r} * jnp.where(step < {warmup}, up, down)",
    )
    return Rate(lines, high, _number(warmup), _number(total))


def deepspeed_cosine(
    lr: float, low: float, end: float, warmup: str, total: str, logarithmic: bool
) -> Rate:
    """WarmupCosineLR: parts of the optimizer's rate."""
    warmup, falls = _at_least_two(warmup), _falls(warmup, total)
    lines = (
        "def lr(step):",
        f"    up = {low!r} + {1 - low!r} * {_rise(warmup, logarithmic)}",
        f"    turn = jnp.pi * (step - {warmup} + 1) / {falls}",
        f"    down = {end!r} + {1 - end!r} * (1 + jnp.cos(turn)) / 2",
        f"    return {lr!r} * jnp.where(step < {warmup}, up, down)",
    )
    return Rate(lines, lr, _number(warmup), _number(total))


def _at_least_two(warmup: str) -> str:
    """Steps in which a rate rises: DeepSpeed takes 2 for less, whose logarithm is not 0."""
    return str(max(2, int(warmup))) if warmup.isdigit() else warmup


def _falls(warmup: str, total: str) -> str:
    """Steps in which it falls, at least 1 as there."""
    up = _at_least_two(warmup)
    if up.isdigit() and total.isdigit():
        return str(max(1, int(total) - int(up)))
    return f"({total} - {up})"


def _rise(warmup: str, logarithmic: bool) -> str:
    return f"jnp.log1p(step) / math.log({warmup})" if logarithmic else f"step / {warmup}"


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def megatron(
    style: str, first: float, peak: float, end: float, warmup: int, decay: int, steps: int | None
) -> Rate | None:
    """The rate of Megatron-LM: linear from `first`, then as `style` says until step `decay`.

    Returns:
      None for a style that optax has no function for.
    """
    up = f"optax.linear_schedule({first!r}, {peak!r}, {warmup})"
    if style == "constant":
        return Rate((f"lr = {up if warmup else repr(peak)}",), peak, warmup, steps)
    if style == "cosine":
        of = f"{first!r}, {peak!r}, {warmup}, {decay}, end_value={end!r}"
        line = f"lr = optax.warmup_cosine_decay_schedule({of})"
        usual = first == 0 and steps == decay and abs(end - peak / 10) < 1e-12
        return Rate((line,), peak, warmup, steps, usual)
    if style != "linear":
        return None
    down = f"optax.linear_schedule({peak!r}, {end!r}, {decay - warmup})"
    if not warmup:
        return Rate((f"lr = {down}",), peak, warmup, steps)
    lines = (f"up = {up}", f"down = {down}", f"lr = optax.join_schedules([up, down], [{warmup}])")
    return Rate(lines, peak, warmup, steps)
