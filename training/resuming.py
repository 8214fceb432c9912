"""Settings that may, or must not, change when a run resumes from a checkpoint.

`check_settings` compares the settings saved with the checkpoint with those of the command line,
before any array is read. Each setting has one of three rules:

refuse    it decides the shape of the saved state, or the meaning of the saved numbers
warn      the run may go on, but not as the former run would have
free      all others: where and how fast a step is computed, and what is written beside it

`saving.py` has the rules of data, `optimizers.py` those of the schedule over `--max-steps`.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from training.config import Config, flag
from training.data_files import fingerprint, open_regular

# Reasons, by setting. A setting that older releases did not save is not compared.
REFUSE = {
    "optimizer": "the saved optimizer state has another structure",
    "lora_rank": "the saved adapters have another rank, or there are none",
    "lora_alpha": "the saved adapters have another scale, alpha / rank",
    "lora_targets": "the saved adapters belong to other matrices",
    "vocab_size": "the saved embedding has another number of rows",
}
WARN = {
    "learning_rate": "the learning rate changes",
    "warmup_steps": "the learning rate changes",
    "weight_decay": "the updates change",
    "max_grad_norm": "the updates change",
    "expert_capacity_factor": "experts process another number of tokens",
    "lora_base_dtype": "the frozen model is rounded differently",
    "compute_dtype": "the dtype of the computation changes",
    "reduce_dtype": "gradients are summed in another dtype",
    "param_comm_dtype": "parameters are rounded differently when they are gathered",
    "grad_comm_dtype": "gradients are rounded differently when they are reduced",
}
_WITH_STEPS = {"warmup_steps"}  # follows from --max-steps where it is not given


def check_release(before: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError` if a checkpoint has settings under the names of an older release.

    Args:
        before: Settings saved with the checkpoint.
        where: The checkpoint, in words.
    """
    if "max_steps" not in before:
        raise ValueError(
            f"--output-dir: an older release of train.py wrote the checkpoint in {where}: its "
            "settings have other names and no `max_steps`. Give another --output-dir, or resume "
            "with that release"
        )


def check_settings(settings: Mapping[str, Any], before: Mapping[str, Any], where: str) -> list[str]:
    """Compares the settings of a run with those saved in the checkpoint it resumes from.

    Args:
        settings: From `plan.facts`.
        before: Those of the run that saved the checkpoint.
        where: The checkpoint, in words.

    Returns:
        One warning for each setting that may change and does.

    Raises:
        ValueError: A setting changes that must not.

    >>> said = check_settings({"weight_decay": 0.1}, {"weight_decay": 0.2}, "DIR, step 4")
    >>> said[0][:55]
    '--weight-decay 0.1 is given, and DIR, step 4, was train'
    """
    now, former = _filled_in(settings), _filled_in(before)
    for name, why in REFUSE.items():
        if name in now and name in former and now[name] != former[name]:
            raise ValueError(_said(name, now[name], former[name], where, why) + _ways_out(former))
    clip, clipped = now.get("max_grad_norm"), former.get("max_grad_norm")
    if None not in (clip, clipped) and bool(clip) != bool(clipped):
        why = "the saved state has another structure with clipping than without"
        raise ValueError(_said("max_grad_norm", clip, clipped, where, why) + _ways_out(former))
    beside = now.get("lora_rank") is not None and "init_from" in now and "init_from" in former
    if beside and (now["init_from"] is None) != (former["init_from"] is None):
        why = "the saved adapters are trained with another base model"
        said = _said("init_from", now["init_from"], former["init_from"], where, why)
        raise ValueError(said + _ways_out(former))
    if differences := _architecture(now, former):
        name = "init_from" if now.get("init_from") else "model"
        raise ValueError(
            f"{flag(name)} {now.get(name)} is given, and {where}, was trained with {flag(name)} "
            f"{former.get(name)}: the models differ ({differences}). Give {flag(name)} "
            f"{former.get(name)} to resume" + _ways_out(former)
        )
    return [
        _said(name, now[name], former[name], where, why)
        for name, why in WARN.items()
        if name in now and name in former and now[name] != former[name]
        if name not in _WITH_STEPS or now.get("max_steps") == former.get("max_steps")
    ]


def base_checksum(config: Config) -> dict[str, str]:
    """A checksum of the frozen model that adapters stand beside; empty for other runs.

    At most 64 MiB of its files are read.
    """
    if config.init_from is None or config.lora_rank is None:
        return {}
    folder = pathlib.Path(config.init_from)
    # As the model is read: other files beside a single one, or beside its parts, are no part of it.
    one, parts = folder / "model.safetensors", sorted(folder.glob("model-*.safetensors"))
    files = [one] if one.exists() else parts or sorted(folder.glob("*.safetensors"))
    sizes = [os.stat(path).st_size for path in files]

    def read(start: int, length: int) -> bytes:
        parts = []
        for path, size in zip(files, sizes, strict=True):
            if start < size and length > 0:
                with open_regular(path) as file:
                    file.seek(start)
                    parts.append(file.read(min(length, size - start)))
                length -= len(parts[-1])
            start = max(0, start - size)
        return b"".join(parts)

    return {"base": fingerprint(read, sum(sizes))}


def _filled_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the defaults that depend on others, so that equal runs are equal."""
    known = dict(settings)
    if known.get("lora_rank") is None:
        for name in ("lora_alpha", "lora_targets", "lora_base_dtype"):
            known.pop(name, None)
        return known
    if "lora_alpha" in known and known["lora_alpha"] is None:
        known["lora_alpha"] = 2.0 * known["lora_rank"]
    if "lora_base_dtype" in known:
        known["lora_base_dtype"] = known["lora_base_dtype"] or "bf16"
    return known


def _architecture(now: Mapping[str, Any], former: Mapping[str, Any]) -> str:
    """Describes the first differences between the sizes of the models."""
    mine, theirs = (json.loads(json.dumps(own.get("hf_config"))) for own in (now, former))
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return ""
    both = [n for n in mine if n in theirs and mine[n] != theirs[n]]
    return "; ".join(f"{name} {mine[name]} instead of {theirs[name]}" for name in both[:3])


def _said(name: str, now: Any, former: Any, where: str, why: str) -> str:
    return (
        f"{_given(name, now)} is given, and {where}, was trained with {_given(name, former)}: {why}"
        f". Give {_given(name, former)} to resume as before"
    )


def _given(name: str, value: Any) -> str:
    return f"no {flag(name)}" if value is None else f"{flag(name)} {value}"


def _ways_out(former: Mapping[str, Any]) -> str:
    beside = former.get("lora_rank") is not None and former.get("init_from")
    more = " (and --lora-init-from for the adapters of the former run)" if beside else ""
    return f", or another --output-dir for a new run{more}"
