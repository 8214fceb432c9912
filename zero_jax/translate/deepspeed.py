"""DeepSpeed's JSON, read into an `Asked`.

Stages have the same numbers. What differs: masters of fp32 are the parameters here, with no copy
of 16 bits at rest, so `offload_param` alone has nothing to move.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zero_jax.translate.account import AUTO, Account, flat
from zero_jax.translate.asked import Asked
from zero_jax.translate.deepspeed_update import TRAINER, auto, update
from zero_jax.translate.words_deepspeed import DEEPSPEED, ZERO


def read(
    tree: Mapping[str, Any], devices: int | None = None, mixed: str | None = None
) -> tuple[Asked, Account]:
    """What a configuration asks for, and the account of it.

    Args:
      tree: the JSON.
      devices: N, if it is known.
      mixed: accelerate's mixed_precision, which "auto" stands for; None without accelerate.

    >>> asked, _ = read({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    >>> asked.stage, asked.compute
    (2, 'bf16')
    """
    if isinstance(tree.get("zero_optimization"), bool):
        stage = {"stage": int(tree["zero_optimization"])}
        tree = {**tree, "zero_optimization": stage}
    if "bfloat16" in tree:
        tree = {("bf16" if key == "bfloat16" else key): value for key, value in tree.items()}
    account = Account(flat(tree), DEEPSPEED)
    asked = Asked(devices=devices)
    asked = _precision(account, _stage(account, asked), mixed)
    for part in (_offload, _plus_plus, _activations, _tensor_parallel, _batch):
        asked = part(account, asked)
    return update(account, asked), account


def _stage(account: Account, asked: Asked) -> Asked:
    stage = account.number(f"{ZERO}stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage is {stage}: DeepSpeed has stages 0 to 3")
    account.translated(f"{ZERO}stage", f"stage={int(stage)}: the numbers are the same")
    return dataclasses.replace(asked, stage=int(stage))


def _precision(account: Account, asked: Asked, mixed: str | None) -> Asked:
    on = {name: _enabled(account, name, mixed) for name in ("fp16", "bf16")}
    if all(on.values()):
        raise ValueError("fp16.enabled and bf16.enabled are both true: DeepSpeed takes one of them")
    compute = next((name for name, it in on.items() if it), mixed if mixed in on else "fp32")
    sent = account.get("communication_data_type") or compute
    if sent == AUTO:
        sent = compute
    reduce = "bf16" if sent in ("bf16", "bfp16", "bfloat16") else "fp32"
    for name, value in on.items():
        if account.get(f"{name}.enabled") != AUTO:
            beside = f"gradients are summed in {reduce}" + ", not in fp16" * (name == "fp16")
            said = f'Precision("{name}"), {beside}' if value else "off"
            account.translated(f"{name}.enabled", said)
    account.translated("communication_data_type", f"Precision(reduce={reduce!r})")
    if sent in ("fp16", "float16"):
        account.no_equal(
            "communication_data_type", "gradients are summed in fp32 or bf16, not fp16: fp32 here"
        )
    asked = dataclasses.replace(asked, compute=compute, reduce=reduce)
    return _loss_scale(account, asked)


def _enabled(account: Account, name: str, mixed: str | None) -> bool:
    key = f"{name}.enabled"
    if account.get(key) == AUTO and mixed is not None:
        account.translated(key, f'"auto" is mixed_precision, {mixed}')
        return mixed == name
    value = auto(account, key, False)
    if not isinstance(value, bool):
        raise ValueError(f'{key} is {value!r}: true, false or "auto" is needed')
    return value


def _loss_scale(account: Account, asked: Asked) -> Asked:
    keys = {name: f"fp16.{name}" for name in ("loss_scale", "initial_scale_power")}
    keys |= {name: f"fp16.{name}" for name in ("loss_scale_window", "hysteresis", "min_loss_scale")}
    every = " ".join([*keys.values(), "fp16.consecutive_hysteresis"])
    if asked.compute != "fp16":
        account.not_needed(every, f"only fp16 has a loss scale, and it is off: {asked.compute}")
        return asked
    power = account.number(keys["initial_scale_power"], 16)
    window = account.count(keys["loss_scale_window"], 1000)
    scale = account.number(keys["loss_scale"], 0)
    assert power is not None and scale is not None
    if not 0 <= power <= 126 or not 0 <= scale <= 2.0**126:
        raise ValueError(
            f"fp16 with initial_scale_power {power} and loss_scale {scale}: a scale is 1 to 2^126"
        )
    first = 2.0**power
    account.translated(keys["initial_scale_power"], f"Precision(initial_scale=2.0**{power})")
    account.translated(keys["loss_scale_window"], f"Precision(growth_interval={window})")
    if scale:
        account.no_equal(keys["loss_scale"], f"the scale always moves; it begins with {scale} here")
        first = float(scale)
    account.translated(keys["loss_scale"], "0 is a scale that moves, as here")
    lowered = account.number(keys["hysteresis"], 2)
    if lowered != 1:
        account.no_equal(
            keys["hysteresis"], f"the scale is halved at the first overflow, not after {lowered}"
        )
    account.not_needed("fp16.hysteresis", "1 is to halve the scale at once, as here")
    account.not_needed("fp16.consecutive_hysteresis", "the scale is halved at every overflow")
    least = account.number(keys["min_loss_scale"], 1)
    if least != 1:
        account.no_equal(
            keys["min_loss_scale"], "the scale goes down to 1, and no setting stops it"
        )
    account.not_needed(keys["min_loss_scale"], "the scale goes down to 1, as there")
    return dataclasses.replace(asked, initial_scale=first, growth_interval=window)


def _offload(account: Account, asked: Asked) -> Asked:
    optimizer = _place(account, "offload_optimizer", "cpu_offload")
    params = _place(account, "offload_param", "cpu_offload_params cpu_offload_param")
    keys = f"{ZERO}offload_optimizer.device {ZERO}cpu_offload"
    param_keys = " ".join(
        f"{ZERO}{key}"
        for key in ("offload_param.device", "cpu_offload_params", "cpu_offload_param")
    )
    ratio = account.number(f"{ZERO}offload_optimizer.ratio", 1)
    if ratio != 1:
        account.no_equal(
            f"{ZERO}offload_optimizer.ratio", "all states of the optimizer are offloaded"
        )
    account.not_needed(f"{ZERO}offload_optimizer.ratio", "all states are offloaded, as here")
    if optimizer == "none":
        account.not_needed(keys, "nothing is offloaded unless offload= says so")
        account.not_needed(
            f"{ZERO}offload_optimizer.nvme_path {ZERO}offload_param.nvme_path",
            "nothing is in files",
        )
        why = "nothing is offloaded unless offload= says so"
        if params != "none":
            why = (
                "it moves a copy of 16 bits, and here none is at rest: the masters of fp32 are the "
                'parameters, and offload="optimizer,params" moves those with the states'
            )
        account.not_needed(param_keys, why)
        return asked
    words = "optimizer" if params == "none" else "optimizer,params"
    folder = account.get(f"{ZERO}offload_optimizer.nvme_path")
    place = f":nvme={folder or '/local_nvme'}" if optimizer == "nvme" else ""
    if place and not folder:
        account.note(f"{ZERO}offload_optimizer.device", "no nvme_path is given: put yours here")
    account.translated(
        keys,
        f'offload="{words}{place}": the update runs on the device, in pieces'
        + (
            ""
            if params != "none"
            else '; masters stay there too, unless offload="optimizer,params"'
        ),
    )
    account.translated(f"{ZERO}offload_optimizer.nvme_path", f'offload="{words}{place}"')
    if params == "none":
        account.not_needed(param_keys, "nothing is offloaded unless offload= says so")
    else:
        account.translated(param_keys, f'offload="{words}{place}": the masters of fp32')
    if params not in ("none", optimizer):
        account.no_equal(f"{ZERO}offload_param.device", "states and masters rest in one place")
    account.not_needed(f"{ZERO}offload_param.nvme_path", "one folder holds states and masters")
    return dataclasses.replace(asked, offload=words + place)


def _place(account: Account, block: str, old: str) -> str:
    """none, cpu or nvme, as a block says or the flag that it was before."""
    place = account.get(f"{ZERO}{block}.device")
    if place is None:
        return "cpu" if any(account.asks(f"{ZERO}{key}") for key in old.split()) else "none"
    if place not in ("none", "cpu", "nvme"):
        raise ValueError(f"{ZERO}{block}.device is {place!r}: DeepSpeed has none, cpu and nvme")
    return str(place)


def _plus_plus(account: Account, asked: Asked) -> Asked:
    """ZeRO++ and MiCS."""
    weights, gradients = f"{ZERO}zero_quantized_weights", f"{ZERO}zero_quantized_gradients"
    group = account.count(f"{ZERO}zero_hpz_partition_size", 1) or 1
    mics = int(account.number(f"{ZERO}mics_shard_size", -1) or -1)
    changes: dict[str, Any] = {}
    for key, name, kind in ((weights, "gather", "int8"), (gradients, "scatter", "int4")):
        if account.asks(key):
            changes[name] = kind
            account.translated(key, f'Precision({name}="{kind}")')
        account.not_needed(key, f"off; Precision({name}=...) has it")
    if group > 1:
        changes |= {"group": group, "hierarchical": True}
        account.translated(
            f"{ZERO}zero_hpz_partition_size",
            f"make_mesh(replica=...) with {group} devices in each, and hierarchical=True",
        )
    elif mics > 1:
        changes |= {"group": mics}
        account.translated(
            f"{ZERO}mics_shard_size", f"make_mesh(replica=...) with {mics} devices in each"
        )
    account.not_needed(f"{ZERO}zero_hpz_partition_size", "1 is one group, as make_mesh()")
    account.not_needed(f"{ZERO}mics_shard_size", "-1 is one group, as make_mesh()")
    account.not_needed(
        f"{ZERO}mics_hierarchical_params_gather", "gathers stay in a replica of the mesh"
    )
    if group > 1 and asked.stage != 3:
        raise ValueError("zero_hpz_partition_size needs zero_optimization.stage 3, as in DeepSpeed")
    if changes and asked.stage == 0 and ("gather" in changes or "scatter" in changes):
        raise ValueError("quantised weights and gradients need zero_optimization.stage 1 to 3")
    return dataclasses.replace(asked, **changes)


def _activations(account: Account, asked: Asked) -> Asked:
    block = "activation_checkpointing."
    if not any(key.startswith(block) for key in account.values):
        return asked
    split = account.asks(f"{block}partition_activations")
    host = account.asks(f"{block}cpu_checkpointing")
    models = account.count("tensor_parallel.autotp_size", 1) or 1
    place = "+".join(["partitioned"] * (split and models > 1) + ["host"] * host)
    remat = f"block@{place}" if place else "block"
    on = (
        "there the model says which layers are checkpointed, here all are; of a model that "
        'checkpoints none remat="none" is the equal'
    )
    if split and models == 1:
        account.no_equal(
            f"{block}partition_activations",
            f'kept values are split over a model axis, and the file names none: remat="{remat}" '
            'here, "block@partitioned" with make_mesh(model=...)',
        )
    account.translated(f"{block}partition_activations", f'remat="{remat}": {on}')
    account.translated(f"{block}cpu_checkpointing", f'remat="{remat}": {on}')
    return dataclasses.replace(asked, remat=remat)


def _tensor_parallel(account: Account, asked: Asked) -> Asked:
    size = account.count("tensor_parallel.autotp_size", 1) or 1
    account.translated(
        "tensor_parallel.autotp_size",
        f"make_mesh(model={size}); the model's dims have names, or model_specs= says what is split",
    )
    return dataclasses.replace(asked, model=size)


def _batch(account: Account, asked: Asked) -> Asked:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {key: account.get(key) for key in keys}
    follows = given[keys[2]] == AUTO and all(isinstance(given[key], int) for key in keys[:2])
    for key in keys[: 2 if follows else 3]:
        auto(account, key)
    batch, rows, parts = (account.count(key) for key in keys)
    if given[keys[1]] == AUTO and batch is None:
        rows = TRAINER[keys[1]][1]
    if batch is not None and rows is None and parts is None:
        parts = 1
    asked = dataclasses.replace(asked, batch=batch, rows=rows, parts=parts)
    if None not in (batch, rows, parts) and asked.shares is not None:
        assert batch is not None and rows is not None and parts is not None
        if batch != rows * parts * asked.shares:
            raise ValueError(
                f"train_batch_size {batch} is not {rows} rows x {parts} micro-batches x "
                f"{asked.shares} devices: change one of them, or take another --devices N"
            )
    k, whole = asked.micro_batches(), asked.global_batch()
    if given[keys[0]] != AUTO:
        account.translated(keys[0], f"a batch of {whole} rows, over all devices")
    if given[keys[1]] != AUTO:
        account.translated(keys[1], f"micro_batches={k} of a batch of {whole} rows")
    if given[keys[2]] != AUTO:
        account.translated(keys[2], f"micro_batches={k}")
    elif follows:
        account.translated(keys[2], f"micro_batches={k}, which the two other sizes leave")
    return asked
