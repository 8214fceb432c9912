"""The optimizer and the schedule of DeepSpeed's JSON, and what "auto" stands for.

Its `Adam` is AdamW unless `adam_w_mode` is false, and warm-ups are logarithmic unless
`warmup_type` is "linear". "auto" is filled in by the program that reads the file, transformers'
Trainer say: what that has unless told otherwise stands here.
"""

import dataclasses
from typing import Any

from zero_jax.translate import optax_lines
from zero_jax.translate.account import AUTO, Account
from zero_jax.translate.asked import Asked, Rate, Tx

# What the Trainer of transformers has unless it is told otherwise, and what it calls that.
TRAINER: dict[str, tuple[str, Any]] = {
    "optimizer.params.lr": ("learning_rate", 5e-5),
    "optimizer.params.betas": ("adam_beta1, adam_beta2", (0.9, 0.999)),
    "optimizer.params.eps": ("adam_epsilon", 1e-8),
    "optimizer.params.weight_decay": ("weight_decay", 0.0),
    "scheduler.params.warmup_min_lr": ("always 0", 0.0),
    "scheduler.params.warmup_max_lr": ("learning_rate", 5e-5),
    "scheduler.params.warmup_num_steps": ("warmup_steps", 0),
    "scheduler.params.total_num_steps": ("max_steps", None),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "train_batch_size": (
        "per_device_train_batch_size x gradient_accumulation_steps x devices",
        None,
    ),
    "fp16.enabled": ("fp16", False),
    "bf16.enabled": ("bf16", False),
}
_OPTIMIZER = "optimizer.params."
_SCHEDULER = "scheduler.params."
_ADAMS = {"adam", "adamw", "onebitadam", "zerooneadam"}
_LAMBS = {"lamb", "onebitlamb"}


def auto(account: Account, key: str, default: Any = None) -> Any:
    """A setting; for "auto" what the Trainer has unless told otherwise, and that is said."""
    value = account.get(key, default)
    if value != AUTO:
        return value
    name, usual = TRAINER[key]
    stands = "yours to fill in" if usual is None else f"{usual} unless given, which stands here"
    account.translated(key, f'"auto" is the Trainer\'s ({name}): {stands}')
    return usual


def update(account: Account, asked: Asked) -> Asked:
    """Clipping, optimizer and rate, as lines of optax."""
    given = account.get("gradient_clipping")
    usual = auto(account, "gradient_clipping") if given == AUTO else 0.0
    clip = float(account.number("gradient_clipping", usual) or 0.0)
    if clip < 0:
        raise ValueError(f"gradient_clipping is {clip}: a norm is needed, or 0 to clip never")
    if given != AUTO:
        account.translated(
            "gradient_clipping",
            f"optax.clip_by_global_norm({clip})"
            if clip
            else "0 never clips, and nothing stands here",
        )
    if (kind := account.get("scheduler.type")) in ("WarmupLR", "WarmupDecayLR"):
        said = f"{kind} sets the rate in its place, from warmup_min_lr to warmup_max_lr"
        account.translated(f"{_OPTIMIZER}lr", said)
    tx, lr = _optimizer(account)
    rate = _rate(account, lr)
    if rate is None and lr is not None:
        rate = optax_lines.constant(lr)
    return dataclasses.replace(asked, clip=clip, tx=tx, rate=rate)


def _numbers(account: Account, block: str, **usual: float) -> dict[str, float]:
    """Numbers of a block, "auto" filled in; `translated` says of each where it is."""
    found = {}
    for name, default in usual.items():
        key = block + name
        value = auto(account, key, default)
        if account.get(key) in (None, AUTO):
            found[name] = default if value is None else float(value)
        else:
            given = account.number(key)
            assert given is not None
            found[name] = float(given)
            account.translated(key, "in the line of optax" if block == _OPTIMIZER else "in lr")
    return found


def _optimizer(account: Account) -> tuple[Tx | None, float | None]:
    """The optimizer of the file and its rate; None where there is none."""
    kind = account.get("optimizer.type")
    if kind is None:
        return None, None
    name = str(kind).lower()
    if name not in _ADAMS | _LAMBS | {"lion", "sgd", "adagrad"}:
        return None, _rate_alone(account, kind)
    wide = name in _LAMBS | _ADAMS
    usual = (0.9, 0.999) if wide else (0.9, 0.99)
    betas = auto(account, f"{_OPTIMIZER}betas", usual)
    pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not (pair and all(isinstance(beta, int | float) for beta in betas)):
        raise ValueError(f"{_OPTIMIZER}betas is {betas!r}: two numbers are needed")
    if account.get(f"{_OPTIMIZER}betas") != AUTO:
        account.translated(f"{_OPTIMIZER}betas", "in the line of optax")
    b1, b2 = map(float, betas)
    torch = account.asks(f"{_OPTIMIZER}torch_adam")
    decay_usual = 0.01 if torch and _decoupled(account, name) else 0.0
    own = _numbers(account, _OPTIMIZER, lr=1e-3, eps=1e-8, weight_decay=decay_usual, momentum=0.0)
    lr, eps, decay = own["lr"], own["eps"], own["weight_decay"]
    _odd(account)
    if name in _ADAMS:
        make = optax_lines.adamw if _decoupled(account, name) else optax_lines.adam_l2
        tx = make(b1, b2, eps, decay)
    elif name in _LAMBS:
        tx = optax_lines.lamb(b1, b2, eps, decay)
    elif name == "lion":
        tx = optax_lines.lion(b1, b2, decay)
    elif name == "sgd":
        tx = optax_lines.sgd(own["momentum"], account.asks(f"{_OPTIMIZER}nesterov"), decay)
        account.translated(f"{_OPTIMIZER}nesterov", "in the line of optax")
    else:
        tx = optax_lines.adagrad(own["eps"] if f"{_OPTIMIZER}eps" in account else 1e-10, decay)
    if name.startswith(("onebit", "zeroone")):
        account.no_equal(
            "optimizer.type",
            "gradients of 1 bit are not sent here; its plain optimizer stands in its place, and "
            'Precision(scatter="int4") sends 4 bits at stages 1 to 3',
        )
    account.translated("optimizer.type", tx.call.partition("(lr")[0])
    return tx, lr


def _rate_alone(account: Account, kind: object) -> float:
    """Of an optimizer that nobody knows its rate, and the rest has no equal."""
    lr = _numbers(account, _OPTIMIZER, lr=1e-3)["lr"]
    account.no_equal("optimizer.type", f"no reader knows {kind}: write its line of optax yourself")
    own = " ".join(key for key in account.values if key.startswith(_OPTIMIZER))
    account.no_equal(own, f"it belongs to {kind}")
    return lr


def _decoupled(account: Account, name: str) -> bool:
    """Whether weights decay beside the gradient, as in AdamW."""
    return name != "adam" or account.get(f"{_OPTIMIZER}adam_w_mode", True) is not False


def _odd(account: Account) -> None:
    """What optimizers of DeepSpeed have, and those of optax don't, or always do."""
    account.translated(
        f"{_OPTIMIZER}adam_w_mode", "optax.adamw if true; else decay is added to the gradient"
    )
    account.not_needed(
        f"{_OPTIMIZER}torch_adam {_OPTIMIZER}fused {_OPTIMIZER}foreach",
        "XLA compiles the update",
    )
    if account.get(f"{_OPTIMIZER}bias_correction", True) is False:
        account.no_equal(
            f"{_OPTIMIZER}bias_correction", "optax always corrects the bias of the moments"
        )
    account.not_needed(f"{_OPTIMIZER}bias_correction", "optax always corrects it")
    if account.asks(f"{_OPTIMIZER}amsgrad"):
        account.no_equal(f"{_OPTIMIZER}amsgrad", "optax.amsgrad is another line: write it yourself")
    account.not_needed(f"{_OPTIMIZER}amsgrad", "off, as here")
    account.no_equal(
        f"{_OPTIMIZER}max_coeff {_OPTIMIZER}min_coeff", "optax.lamb does not bound its trust ratio"
    )
    account.no_equal(
        " ".join(
            _OPTIMIZER + key
            for key in (
                "freeze_step",
                "var_freeze_step",
                "var_update_scaler",
                "local_step_scaler",
                "local_step_clipper",
                "cuda_aware",
                "comm_backend_name",
                "coeff_beta",
                "factor_max",
                "factor_min",
                "factor_threshold",
            )
        ),
        "it belongs to gradients of 1 bit, which are not sent here",
    )


def _rate(account: Account, lr: float | None) -> Rate | None:
    kind = account.get("scheduler.type")
    if kind is None:
        return None
    if kind not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        account.no_equal("scheduler.type", f"write a function of the step for {kind} as lr=")
        account.no_equal(
            " ".join(key for key in account.values if key.startswith(_SCHEDULER)),
            f"it belongs to {kind}",
        )
        return None
    shape = account.get(f"{_SCHEDULER}warmup_type", "log")
    account.translated(
        "scheduler.type",
        'the function lr (there its value of step n is used at step n + 1); "log" unless said',
    )
    account.translated(f"{_SCHEDULER}warmup_type", "in lr")
    account.not_needed(f"{_SCHEDULER}last_batch_iteration", "a checkpoint has the step")
    steps = ("warmup_num_steps", "total_num_steps")
    unknown = [name for name in steps if account.get(_SCHEDULER + name) == AUTO]
    if kind != "WarmupLR" and f"{_SCHEDULER}total_num_steps" not in account:
        raise ValueError(f"scheduler.params.total_num_steps is missing: {kind} needs it")
    named = {name: _step(account, _SCHEDULER + name) for name in steps}
    logarithmic = shape != "linear"
    args = (named["warmup_num_steps"], named["total_num_steps"], logarithmic)
    if kind == "WarmupCosineLR":
        own = _numbers(account, _SCHEDULER, warmup_min_ratio=0.0, cos_min_ratio=1e-4)
        low, end = own["warmup_min_ratio"], own["cos_min_ratio"]
        rate = optax_lines.deepspeed_cosine(1e-3 if lr is None else lr, low, end, *args)
    else:
        own = _numbers(account, _SCHEDULER, warmup_min_lr=0.0, warmup_max_lr=1e-3)
        low, high = own["warmup_min_lr"], own["warmup_max_lr"]
        if kind == "WarmupDecayLR":
            rate = optax_lines.deepspeed_falling(low, high, *args)
        elif unknown:
            return optax_lines.constant(high)
        else:
            rate = optax_lines.deepspeed_warmup(low, high, int(args[0]), logarithmic)
    if unknown:
        line = 'warmup, total = 100, 1000  # "auto": put the steps of your run here'
        rate = dataclasses.replace(rate, lines=(line, *rate.lines))
    return rate


def _step(account: Account, key: str) -> str:
    """A number of steps as Python: the number, or a name where it is filled in later."""
    if account.get(key) == AUTO:
        name, _ = TRAINER[key]
        constant = account.get("scheduler.type") == "WarmupLR"
        place = "0 unless given, which is a constant lr" if constant else "put yours into the lines"
        account.translated(key, f'"auto" is the Trainer\'s ({name}): {place}')
        return "warmup" if "warmup" in key else "total"
    account.translated(key, "in lr")
    rises = "warmup" in key
    number = account.number(key, 1000 if rises else None)
    if number is not None and (number != int(number) or number < (0 if rises else 1)):
        raise ValueError(f"{key} is {number!r}: a whole number of steps is needed")
    return "total" if number is None else str(int(number))
