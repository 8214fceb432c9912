"""The YAML of `accelerate config`, read into an `Asked`: DDP, FSDP, FSDP2, DeepSpeed, Megatron-LM.

FSDP's strategies are stages: FULL_SHARD and reshard_after_forward are 3, SHARD_GRAD_OP and its
absence 2, NO_SHARD 0; the hybrid ones partition inside a host, which is an axis `replica` over
hosts. FSDP sends gradients in the dtype of mixed_precision, DDP in fp32.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from zero_jax.translate import deepspeed
from zero_jax.translate.account import Account, flat
from zero_jax.translate.asked import Asked
from zero_jax.translate.files import parse_json
from zero_jax.translate.words_accelerate import ACCELERATE
from zero_jax.translate.words_deepspeed import ZERO

_STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
_PLAIN: tuple[str, ...] = (
    "NO",
    "MULTI_GPU",
    "MULTI_CPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_HPU",
)
_PLAIN += ("MULTI_SDAA", "MULTI_MUSA", "XLA", "TPU")
KINDS = (*_PLAIN, "DEEPSPEED", "FSDP", "MEGATRON_LM")
_FSDP = "fsdp_config.fsdp_"
_SIZES = "parallelism_config.parallelism_config_"
_MEGATRON = "megatron_lm_config.megatron_lm_"
# Which settings of accelerate are which of DeepSpeed's.
_INLINE = {
    "zero_stage": f"{ZERO}stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": f"{ZERO}offload_optimizer.device",
    "offload_optimizer_nvme_path": f"{ZERO}offload_optimizer.nvme_path",
    "offload_param_device": f"{ZERO}offload_param.device",
    "offload_param_nvme_path": f"{ZERO}offload_param.nvme_path",
}
# Reads a file that is named in this one; None if it is not there.
Open = Callable[[str], Mapping[str, Any] | None]


def opener(folder: pathlib.Path) -> Open:
    """Finds a DeepSpeed JSON beside the YAML, or from where the command runs."""

    def read(name: str) -> Mapping[str, Any] | None:
        for path in (folder / name, pathlib.Path(name)):
            if path.is_file():
                return parse_json(path.read_text(), str(path))
        return None

    return read


def read(
    tree: Mapping[str, Any], devices: int | None = None, opened: Open = lambda name: None
) -> tuple[Asked, list[tuple[str, Account]]]:
    """What a file asks for, and the accounts of it and of the DeepSpeed file that it names.

    >>> asked, _ = read({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, devices=8)
    >>> asked.stage, asked.compute, asked.mesh()
    (0, 'bf16', 'data=8')
    """
    account = Account(flat(tree), ACCELERATE)
    kind = _kind(account)
    if devices is None:
        devices = _devices(account, kind)
    account.translated("num_processes num_machines", _where(devices))
    mixed = _mixed(account)
    asked = Asked(compute="bf16" if mixed == "fp8" else mixed)
    if kind in _PLAIN and mixed != "no":
        account.note("mixed_precision", "gradients are summed in fp32, as there")
    more: list[tuple[str, Account]] = []
    if kind == "DEEPSPEED":
        asked, more = _deepspeed(account, "bf16" if mixed == "fp8" else mixed, devices, opened)
    elif kind == "FSDP":
        asked = _fsdp(account, asked)
    elif kind == "MEGATRON_LM":
        asked = _megatron(account, asked)
    _unused(account, kind)
    sizes = _sizes(account, asked, devices)
    return dataclasses.replace(asked, **sizes, devices=devices), [("", account), *more]


def _kind(account: Account) -> str:
    given = account.get("distributed_type")
    kind = "NO" if given is False else str(given).upper()
    if kind not in KINDS:
        raise ValueError(f"distributed_type is {given!r}: it is one of {', '.join(KINDS)}")
    stages = {"DEEPSPEED": "the stage of its zero_stage", "FSDP": "stage 2 or 3 by its strategy"}
    stages["MEGATRON_LM"] = "stage 1 by its distributed optimizer"
    account.translated("distributed_type", stages.get(kind, "stage=0: nothing is partitioned"))
    return kind


def _devices(account: Account, kind: str) -> int | None:
    given = account.number("num_processes", 1 if kind == "NO" else -1)
    if given is not None and given > 0:
        return account.count("num_processes", 1)
    return None


def _where(devices: int | None) -> str:
    return (
        "--devices N says how many" if devices is None else f"a mesh of so many devices, {devices}"
    )


def _mixed(account: Account) -> str:
    given = account.get("mixed_precision")
    if given is None and account.get("fp16") is True:
        given = "fp16"
    name = "no" if given in (None, False) else str(given).lower()
    if name not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(f"mixed_precision is {given!r}: it is one of no, fp16, bf16 and fp8")
    if name == "fp8":
        account.no_equal("mixed_precision", "Precision has fp32, bf16 and fp16; bf16 stands here")
    compute = "fp32" if name == "no" else name
    account.translated("mixed_precision fp16", f'Precision("{compute}")')
    return compute


def _fsdp(account: Account, asked: Asked) -> Asked:
    version = account.number(f"{_FSDP}version", 1)
    if version not in (1, 2):
        raise ValueError(f"fsdp_version is {account.get(f'{_FSDP}version')!r}: it is 1 or 2")
    stage, hybrid = _strategy(account, int(version))
    account.translated(f"{_FSDP}version", "the version says how the strategy is written")
    hosts = account.count("num_machines", 1) or 1
    checkpointed = account.asks(f"{_FSDP}activation_checkpointing")
    offload = "optimizer,params" if account.asks(f"{_FSDP}offload_params") else None
    why = 'remat="block"' if checkpointed else 'remat="none": activations are kept'
    account.translated(f"{_FSDP}activation_checkpointing", why)
    why = "nothing is offloaded unless offload= says so"
    if offload:
        why = f'offload="{offload}": the update runs on the device, in pieces'
    account.translated(f"{_FSDP}offload_params", why)
    reduce = "bf16" if asked.compute == "bf16" else "fp32"
    if asked.compute != "fp32":
        account.note("mixed_precision", f"gradients are sent in {reduce}")
    return dataclasses.replace(
        asked,
        stage=stage,
        reduce=reduce,
        offload=offload,
        remat="block" if checkpointed else "none",
        replica=hosts if hybrid else 1,
    )


def _strategy(account: Account, version: int) -> tuple[int, bool]:
    """The stage, and whether states repeat on every host."""
    old, new = f"{_FSDP}sharding_strategy", f"{_FSDP}reshard_after_forward"
    if version == 2:
        stage = 3 if account.get(new, True) is True or account.asks(new) else 2
        kept = "gathered again for the backward pass" if stage == 3 else "gathered once a step"
        account.translated(new, f"stage={stage}: parameters are {kept}")
        account.not_needed(old, "FSDP2 does not read it: reshard_after_forward says")
        return stage, False
    key = old if account.get(old) is not None else new
    given = account.get(key, "FULL_SHARD")
    names = list(_STRATEGIES)
    name = str(given).upper()
    if name.isdigit() and 1 <= int(name) <= len(names):
        name = names[int(name) - 1]
    if name not in _STRATEGIES:
        raise ValueError(f"{key} is {given!r}: it is one of {', '.join(names)}")
    stage, hybrid = _STRATEGIES[name]
    where = ", make_mesh(replica=num_machines)" if hybrid else ""
    account.translated(key, f"stage={stage}{where}")
    account.not_needed(new, "sharding_strategy says it")
    return stage, hybrid


def _sizes(account: Account, asked: Asked, devices: int | None) -> dict[str, Any]:
    """Axes of the mesh that parallelism_config names."""
    model = account.count(f"{_SIZES}tp_size", 1) or 1
    replica = account.count(f"{_SIZES}dp_replicate_size", 1) or 1
    data = account.count(f"{_SIZES}dp_shard_size")
    others = [account.count(f"{_SIZES}{name}_size", 1) or 1 for name in ("cp", "sp")]
    account.translated(f"{_SIZES}tp_size", f"make_mesh(model={model})")
    account.translated(f"{_SIZES}dp_replicate_size", f"make_mesh(replica={replica})")
    account.translated(f"{_SIZES}dp_shard_size", "data, which all other devices are on")
    if data is not None and devices is not None:
        product = model * replica * data * others[0] * others[1]
        if product != devices:
            raise ValueError(
                f"the sizes of parallelism_config make {product} devices, and num_processes is "
                f"{devices}: make them equal"
            )
    return {"model": max(model, asked.model), "replica": max(replica, asked.replica)}


def _deepspeed(
    account: Account, mixed: str, devices: int | None, opened: Open
) -> tuple[Asked, list[tuple[str, Account]]]:
    name = account.get("deepspeed_config.deepspeed_config_file")
    tree = opened(str(name)) if name else None
    if name and tree is None:
        account.no_equal(
            "deepspeed_config.deepspeed_config_file",
            "that file is not here: translate it by itself, what it says is missing above",
        )
    if tree is not None:
        account.translated(
            "deepspeed_config.deepspeed_config_file", "read too, see its own settings"
        )
        asked, own = deepspeed.read(tree, devices, mixed)
        for key in _INLINE:
            account.not_needed(f"deepspeed_config.{key}", f"{name} says it")
        return asked, [(str(name), own)]
    made: dict[str, Any] = {mixed: {"enabled": True}} if mixed in ("fp16", "bf16") else {}
    made = flat(made)
    for key, there in _INLINE.items():
        value = account.get(f"deepspeed_config.{key}")
        if value is not None:
            made[there] = value
    made.setdefault(f"{ZERO}stage", 2)
    asked, own = deepspeed.read(made, devices, mixed)
    said = {row.key: row for row in own.rows()}
    for key, there in _INLINE.items():
        if there in said:
            account.say(f"deepspeed_config.{key}", said[there].verdict, said[there].why)
    if mixed == "fp16":
        account.note("mixed_precision", "the loss scale is DeepSpeed's, with a window of 1000")
    if mixed == "bf16":
        account.note("mixed_precision", "gradients are sent in bf16")
    return asked, []


def _megatron(account: Account, asked: Asked) -> Asked:
    model = account.count(f"{_MEGATRON}tp_degree", 1) or 1
    parts = account.count(f"{_MEGATRON}num_micro_batches", 1)
    stage = 1 if account.asks(f"{_MEGATRON}use_distributed_optimizer") else 0
    split = account.asks(f"{_MEGATRON}sequence_parallelism") and model > 1
    clip = float(account.number(f"{_MEGATRON}gradient_clipping", 1.0) or 0.0)
    account.translated(f"{_MEGATRON}tp_degree", f"make_mesh(model={model})")
    account.translated(f"{_MEGATRON}num_micro_batches", f"micro_batches={parts}")
    account.translated(f"{_MEGATRON}use_distributed_optimizer", f"stage={stage}")
    account.translated(f"{_MEGATRON}sequence_parallelism", f"sequence_parallel={split}")
    account.translated(f"{_MEGATRON}gradient_clipping", f"optax.clip_by_global_norm({clip})")
    if account.asks(f"{_MEGATRON}recompute_activations"):
        account.no_equal(
            f"{_MEGATRON}recompute_activations",
            'attention alone is computed again there; remat="block" computes layers again, '
            '"names:..." keeps what the model marks',
        )
    account.not_needed(f"{_MEGATRON}recompute_activations", 'off: remat="none"')
    return dataclasses.replace(
        asked, model=model, parts=parts, stage=stage, sequence_parallel=split, clip=clip
    )


def _unused(account: Account, kind: str) -> None:
    """Blocks of another kind than the file's are not read by accelerate either."""
    blocks = {
        "DEEPSPEED": "deepspeed_config",
        "FSDP": "fsdp_config",
        "MEGATRON_LM": "megatron_lm_config",
    }
    for owner, block in blocks.items():
        own = [key for key in account.values if key == block or key.startswith(f"{block}.")]
        if owner != kind or own == [block]:
            account.not_needed(" ".join(own), f"only distributed_type {owner} reads it")
