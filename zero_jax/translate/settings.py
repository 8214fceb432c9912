"""The arguments of zero_jax, optax and train.py that a DeepSpeed JSON or accelerate YAML asks for.

keys.yaml is the table of their keys, and describes itself.
"""

import dataclasses
import importlib.resources
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from zero_jax.names import nearest

VERDICTS = "unsupported", "unknown", "not needed", "translated"
UNSUPPORTED, UNKNOWN, NOT_NEEDED, TRANSLATED = VERDICTS
AUTO = "auto"
_OFF = ("false", "null", "no", "none", "", "0", "{}")
NUMBER, COUNT = "number", "whole number of at least 1"
_ZERO, _ADAM, _LR = "zero_optimization.", "optimizer.params.", "scheduler.params."
_FSDP, _SIZES = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
# Arguments of make_mesh, Precision, Zero and train.py by name, the call of an optimizer, and its
# rate. A size that depends on unknown devices is an expression: `D` devices share the batch.
Arguments = dict[str, Any]
Row = tuple[str, str, str, str]  # a key of the file, its value, how it is handled, and a sentence


@dataclasses.dataclass(frozen=True)
class Key:
    """How a key is handled; keys.yaml explains the fields."""

    why: str
    verdict: str
    kind: str | Mapping[str, Any] = ""
    default: Any = None
    trainer: str = ""
    auto: Any = None
    same: str = ""


_TABLE = yaml.safe_load((importlib.resources.files(__package__) / "keys.yaml").read_text("utf-8"))
_PARTS = ("aliases", "optimizers", "schedules", "switch")
ALIASES, OPTIMIZERS, SCHEDULES, SWITCH = map(_TABLE.pop, _PARTS)
KEYS: dict[str, Key] = {}
for _verdict, _groups in _TABLE.items():
    for _group in _groups:
        _names = _group.pop("keys", [])
        for _block, _inner in _group.pop("blocks", {}).items():
            _names += [f"{_block}.{name}" for name in _inner]
        KEYS |= dict.fromkeys(_names, Key(verdict=_verdict, **_group))


def shown(value: object) -> str:
    """Returns a value as a JSON or YAML has it, shortened."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return text if len(text) <= 40 else text[:37] + "..."


def parse(name: str, value: Any, kind: str | Mapping[str, Any]) -> Any:
    """Returns a value as its kind has it; raises `ValueError` if it is of another kind."""
    text = shown(value)
    if isinstance(kind, Mapping):
        if (short := text.removesuffix(".0").lower()) in kind:
            return kind[short]
        raise ValueError(f"`{name}` is {text}: give one of {', '.join(kind)}")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    is_whole = number % 1 == 0 and number >= (kind == COUNT)
    if not math.isfinite(number) or not (is_whole or kind == NUMBER):
        raise ValueError(f"`{name}` is {text}: give a {kind}")
    return number if kind == NUMBER else int(number)


class File:
    """Values by the names of the table, and sentences about them.

    Attributes:
      values: Values by the names of the table.
      keys: Each key of the file, its name in the table, and its value.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = dict(values)
        self.keys = [(key, key, value) for key, value in values.items()]
        self.said: dict[str, Key] = {}

    def __getitem__(self, name: str) -> Any:
        """Returns a value as the table describes it, its default, or that of the Trainer."""
        value, key = self.values.get(name), KEYS[name]
        if value is None or value == AUTO:
            return key.auto if value and key.trainer else key.default
        label = next((label for label, of, _ in self.keys if of == name), name)
        return parse(label, value, key.kind) if key.kind else value

    def renamed(self) -> "File":
        """Replaces the names of an accelerate YAML, and old ones, by those of DeepSpeed."""
        self.keys = [(key, ALIASES.get(key, key), value) for key, _, value in self.keys]
        self.values = {name: value for _, name, value in self.keys} | {
            key: value for key, name, value in self.keys if key == name
        }
        return self

    def join(self, path: str, other: "File") -> None:
        """Adds the values of a DeepSpeed JSON, which replace those of the same meaning."""
        for key in ALIASES.keys() & self.values.keys():
            self.say(key, f"{path} replaces it", NOT_NEEDED)
        self.values |= other.values
        self.keys += [(f"{path}: {key}", name, value) for key, name, value in other.keys]

    def row(self, label: str, name: str, value: object, made: Arguments) -> Row:
        """Returns how a key is handled, where the file becomes these arguments."""
        parts, given = name.split("."), shown(value)
        blocks = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        if said := [self.said[block] for block in blocks if block in self.said]:
            return label, given, said[0].verdict, said[0].why
        key = KEYS.get(name)
        for block in blocks:
            if key is None and f"{block}.*" in KEYS:
                key, value = KEYS[f"{block}.*"], self.values.get(f"{block}.enabled", value or True)
        if key is None:
            near = nearest(name, [known for known in KEYS if not known.endswith("*")])
            return label, given, UNKNOWN, f"the nearest key is {near}"
        if given == AUTO and key.trainer:
            default = tuple(key.auto) if isinstance(key.auto, list) else key.auto
            usual = "yours to fill in" if default is None else f"{default} unless given"
            return label, given, TRANSLATED, f"{key.trainer} of the Trainer, {usual}"
        off = shown(value).removesuffix(".0").lower() in ((key.same,) if key.same else _OFF)
        if key.verdict == UNSUPPORTED and off:
            return label, given, NOT_NEEDED, "off, or the same in zero_jax"
        return label, given, key.verdict, key.why.format_map(made)

    def say(self, name: str, why: str, verdict: str = TRANSLATED) -> None:
        """Replaces the sentence of a key or of a block, unless that was done before."""
        self.said.setdefault(name, Key(why, verdict=verdict))


def arguments(file: File, kind: str, devices: int | None) -> Arguments:
    """Returns the arguments that a file asks for, or raises `ValueError`.

    `kind` is accelerate's distributed_type, DEEPSPEED for a DeepSpeed JSON.
    """
    stage, hosts, remat, offload = file[f"{_ZERO}stage"], 1, _remat(file), _offload(file)
    if kind == "FSDP":
        stage, hosts = _stage_and_replicas(file)
        remat = "block" if file[f"{_FSDP}activation_checkpointing"] else "none"
        offload = "optimizer,params" if file[f"{_FSDP}offload_params"] else None
    if devices is None and (kind == "NO" or file["num_processes"] > 0):
        devices = max(int(file["num_processes"]), 1)
    model = max(file[f"{_SIZES}tp_size"], file["tensor_parallel.autotp_size"])
    replica: int | str = max(file[f"{_SIZES}dp_replicate_size"], hosts)
    hpz = file[f"{_ZERO}zero_hpz_partition_size"]
    group = max(hpz, int(file[f"{_ZERO}mics_shard_size"]))
    inner = model * (group if group > 1 else replica)
    sizes = [file[f"{_SIZES}{a}_size"] or 1 for a in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
    fixed = math.prod(parse("parallelism_config", size, COUNT) for size in sizes)
    if devices and f"{_SIZES}dp_shard_size" in file.values and devices != fixed:
        raise ValueError(f"parallelism_config is for {fixed} devices, not {devices}: change one")
    if devices and devices % inner:
        raise ValueError(f"{devices} devices are no multiple of {inner}: give another --devices N")
    if group > 1:
        replica = devices // inner if devices else f"len(jax.devices()) // {inner}"
    if (norm := file["gradient_clipping"]) < 0:
        raise ValueError("`gradient_clipping` is negative: give a norm, or 0 for none")
    made = dict.fromkeys(("call", "optimizer", "weight_decay", "lr"))
    made |= dict.fromkeys(("learning_rate", "warmup_steps", "max_steps"))
    made |= {"stage": stage, "remat": remat, "offload": offload, "devices": devices}
    made |= {"replica": replica, "model": model, "secondary_shards": hpz > 1}
    made["max_grad_norm"] = norm
    made |= _batch(file, devices and devices // model) | _precision(file, kind)
    return made | _optimizer(file) | _rate(file)


def _precision(file: File, kind: str) -> Arguments:
    mixed, sent, on = file["mixed_precision"], file["communication_data_type"], []
    in_fp8 = str(file.values.get("mixed_precision")).lower() == "fp8"
    for name in ("fp16", "bf16"):
        enabled = file[f"{name}.enabled"]
        if "distributed_type" in file.values and file.values.get(f"{name}.enabled") == AUTO:
            file.say(f"{name}.enabled", f"mixed_precision decides it, which is {mixed}")
            enabled = mixed == name
        on += [name] * enabled
    if len(on) == 2:
        raise ValueError("`fp16.enabled` and `bf16.enabled` are both true: set one to false")
    compute, scale, interval = on[0] if on else mixed, None, None
    if sent in ("fp16", "float16"):
        file.say("communication_data_type", "use bf16, or fp32 as above", UNSUPPORTED)
    sent = {"DEEPSPEED": sent or compute, "FSDP": compute}.get(kind)
    for name in file.values:
        if compute != "fp16" and name.startswith("fp16.") and name != "fp16.enabled":
            file.say(name, "fp16 is off", NOT_NEEDED)
    if compute == "fp16" and kind == "DEEPSPEED":
        scale = file["fp16.loss_scale"] or 2.0 ** min(file["fp16.initial_scale_power"], 127.0)
        interval = file["fp16.loss_scale_window"]
        if not 1 <= scale <= 2.0**126:
            raise ValueError("`fp16.loss_scale` or its power: give a scale of 1 to 2^126")
    made = {"compute_dtype": compute, "initial_scale": scale, "growth_interval": interval}
    made["reduce_dtype"] = "bf16" if sent in ("bf16", "bfp16", "bfloat16") else "fp32"
    made["matmul_dtype"] = "fp8" if in_fp8 else None
    made["param_comm_dtype"] = "int8" if file[f"{_ZERO}zero_quantized_weights"] else None
    made["grad_comm_dtype"] = "int4" if file[f"{_ZERO}zero_quantized_gradients"] else None
    return made


def _offload(file: File) -> str | None:
    optimizer, params = (file[f"{_ZERO}offload_{x}.device"] for x in ("optimizer", "param"))
    if optimizer == "none" != params:
        why = 'no 16-bit copy is stored; offload="optimizer,params" moves the fp32 parameters'
        file.say(f"{_ZERO}offload_param.device", why, NOT_NEEDED)
    elif params not in ("none", optimizer):
        file.say(f"{_ZERO}offload_param.device", "use that of the optimizer", UNSUPPORTED)
    folder = file[f"{_ZERO}offload_optimizer.nvme_path"] or "/local_nvme"
    parts = "optimizer" if params == "none" else "optimizer,params"
    return {"none": None, "cpu": parts, "nvme": f"{parts}:nvme={folder}"}[optimizer]


def _remat(file: File) -> str:
    block = "activation_checkpointing."
    if not any(name.startswith(block) for name in file.values):
        return "none"
    split, host = file[f"{block}partition_activations"], file[f"{block}cpu_checkpointing"]
    if split and file["tensor_parallel.autotp_size"] == 1:
        why = 'without tensor parallelism: use make_mesh(model=) and "block@partitioned"'
        file.say(f"{block}partition_activations", why, UNSUPPORTED)
        split = False
    places = "+".join(["partitioned"] * split + ["host"] * host)
    return f"block@{places}" if places else "block"


def _stage_and_replicas(file: File) -> tuple[int, int]:
    old, new = f"{_FSDP}sharding_strategy", f"{_FSDP}reshard_after_forward"
    if file[f"{_FSDP}version"] == 2:
        file.say(old, "FSDP2 reads reshard_after_forward", NOT_NEEDED)
        if file.values.get(new) not in (None, AUTO):
            parse(new, file.values[new], SWITCH)  # the name of a strategy is one of FSDP 1
        return file[new][0], 1
    stage, hybrid = file[new if file.values.get(old) is None else old]
    return stage, file["num_machines"] if hybrid else 1


def _batch(file: File, shares: int | None) -> Arguments:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, rows, parts = (file[name] for name in names)
    rows = None if batch and file.values.get(names[1]) == AUTO else rows
    parts = None if file.values.get(names[2]) == AUTO else parts
    unit = (rows or 1) * (parts or 1) * (shares or 1)
    if batch and (batch % unit or (rows and parts and shares and batch != unit)):
        sizes = f"{rows or 1} rows x {parts or 1} micro-batches x {shares or 'D'} devices"
        raise ValueError(f"`train_batch_size` {batch} is not {sizes}: change one, or --devices N")
    if batch and rows and not parts:
        file.say(names[2], "the two other sizes decide it")
        parts = batch // unit if shares or batch == unit else f"{batch // unit} // D"
    batch = batch or (rows and (unit if shares else f"{unit} * D"))
    return {"global_batch_size": batch, "grad_accum_steps": parts or 1}


def _optimizer(file: File) -> Arguments:
    kind, lr = str(file["optimizer.type"] or "").lower(), file[f"{_ADAM}lr"]
    if not kind:
        return {}
    made: Arguments = {"lr": [f"lr = {lr}"], "learning_rate": lr}
    if file["scheduler.type"] in ("WarmupLR", "WarmupDecayLR"):
        file.say(f"{_ADAM}lr", "scheduler.params.warmup_max_lr replaces it")
    if kind not in OPTIMIZERS:
        file.say(f"{_ADAM}lr", f"lr = {lr}")
        file.say("optimizer", "unknown: write the call of optax yourself", UNSUPPORTED)
        return made
    decay = file[f"{_ADAM}weight_decay"]
    is_coupled = kind == "adam" and not file[f"{_ADAM}adam_w_mode"]
    if decay is None:
        decay = 0.01 if file[f"{_ADAM}torch_adam"] and not is_coupled else 0.0
    known = OPTIMIZERS["coupled adam" if is_coupled and decay else kind]
    if "why" in known:
        file.say("optimizer.type", known["why"], UNSUPPORTED)
    betas, eps = file[f"{_ADAM}betas"] or known["betas"], file[f"{_ADAM}eps"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"`optimizer.params.betas` is {shown(betas)}: give two numbers")
    b1, b2 = (parse(f"{_ADAM}betas", beta, NUMBER) for beta in betas)
    numbers = {"b1": b1, "b2": b2, "eps": known["eps"] if eps is None else eps, "decay": decay}
    numbers |= {name: file[f"{_ADAM}{name}"] for name in ("momentum", "nesterov")}
    made["call"] = known["call"].format(**numbers)
    return made | {"optimizer": known["train"], "weight_decay": known["train"] and decay}


def _rate(file: File) -> Arguments:
    """Returns a schedule of DeepSpeed's `lr_schedules.py` as a function of the step."""
    kind, names = file["scheduler.type"], (f"{_LR}warmup_num_steps", f"{_LR}total_num_steps")
    if kind not in SCHEDULES:
        file.say("scheduler", "unknown: write lr as a function of the step", UNSUPPORTED)
        return {}
    warmup, total = (None if file.values.get(name) == AUTO else file[name] for name in names)
    high, low = file[f"{_LR}warmup_max_lr"], file[f"{_LR}warmup_min_lr"]
    if kind == "WarmupLR" and warmup is None:
        return {"lr": [f"lr = {high}"], "learning_rate": high}
    if kind != "WarmupLR" and total is None and file.values.get(names[1]) != AUTO:
        raise ValueError(f"`{names[1]}` is missing: {kind} needs it")
    if kind == "WarmupCosineLR":  # its bounds are parts of the optimizer's rate
        high, low = file[f"{_ADAM}lr"], file[f"{_LR}warmup_min_ratio"]
    up = None if warmup is None else max(2, warmup)  # of 1 step the logarithm would be 0
    is_linear = file[f"{_LR}warmup_type"] == "linear"
    values = {"high": high, "low": low, "least": file[f"{_LR}cos_min_ratio"]}
    values |= {"up": up or 100, "total": total or 1000}
    values["rise"] = "step / warmup" if is_linear else "jnp.log1p(step) / math.log(warmup)"
    is_known = warmup is not None and total is not None
    values["hint"] = "" if is_known else '  # "auto": put the steps of your run here'
    code = SCHEDULES[kind].format(**values)
    made = {"lr": ["", *code.splitlines(), ""], "learning_rate": high}
    return {**made, "max_steps": total, "warmup_steps": up}
