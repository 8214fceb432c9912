"""Comparison of a run with the checkpoint that it resumes from.

The comparison precedes the restore of any array. Each setting has one of three rules:

refuse    it decides the shape of the saved state, or the meaning of the saved numbers
warn      the run may resume, with other results than the former run
free      all others: where and how fast a step is computed, and logging

`optimizers.py` has the rule of the schedule over `--max-steps`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from training.config import Config, flag
from training.data_files import fingerprint, open_regular
from zero_jax.checkpoint.manifest import Manifest

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
# Settings that determine the order of samples; all else follows from --data.
_ORDER = ("seq_len", "global_batch_size", "seed", "loss_on", "long_documents")
_REORDERED = "the order of samples would change"
# Contents with a checksum: the message of a change, a way out, and whether it may change.
_CONTENTS = {
    "tokenizer": ("--tokenizer (or that of --init-from) has another vocabulary than in", "", False),
    "base": (
        "--init-from holds other weights, which the saved adapters do not fit, than in",
        " (with --lora-init-from to start from the saved adapters)",
        False,
    ),
    "data": ("--data changed since", " for a new run", True),
    "chat template": (
        "The chat template of --tokenizer (or --init-from) changed since",
        " for a new run",
        True,
    ),
}


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The settings and the data of a run, as its checkpoints save them."""

    settings: Mapping[str, Any]  # from `plan.facts`
    order: Mapping[str, Any]  # settings that determine the order of samples
    contents: Mapping[str, str]  # checksums of data, tokenizer, template and frozen model, by name

    def compare(self, manifest: Manifest, directory: pathlib.Path) -> list[str]:
        """Compares the run with the checkpoint it resumes from; returns the warnings.

        Raises:
            ValueError: The run can't resume from it, or `train.py` did not write it.
        """
        extra, before = manifest.extra, manifest.config
        where = f"{directory}, step {manifest.step}"
        names = [*before, *extra] if isinstance(before, dict) and isinstance(extra, dict) else []
        if not {"max_steps", "sample", "order"} <= {*names}:
            raise ValueError(
                f"--output-dir: train.py did not write the checkpoint in {where}, or an older "
                "release of it: its settings or data position are missing. Give another "
                "--output-dir, or restore it with zero_jax.Checkpoints"
            )
        _check_order(self.order, extra["order"], where)
        warnings = check_settings(self.settings, before, where)
        return warnings + changed_contents(self.contents, extra.get("contents", {}), where)


def check_settings(settings: Mapping[str, Any], before: Mapping[str, Any], where: str) -> list[str]:
    """Returns one warning for each setting that may change and does, in a resumed run.

    Args:
        settings: Those of the run.
        before: Those of the run that saved the checkpoint.
        where: Names the checkpoint.

    Raises:
        ValueError: A setting changes that must not.

    >>> message = check_settings({"weight_decay": 0.1}, {"weight_decay": 0.2}, "DIR, step 4")
    >>> message[0][:55]
    '--weight-decay 0.1 is given, and DIR, step 4, was train'
    """
    now, former = _with_defaults(settings), _with_defaults(before)
    changed = [name for name in now if name in former and now[name] != former[name]]
    refused = {name: why for name, why in REFUSE.items() if name in changed}
    clipping = [known.get("max_grad_norm") for known in (now, former)]
    if None not in clipping and 0 in clipping and "max_grad_norm" in changed:
        refused["max_grad_norm"] = "clipping changes the structure of the saved state"
    bases = [known.get("init_from") for known in (now, former)]
    if "init_from" in changed and now.get("lora_rank") is not None and None in bases:
        refused["init_from"] = "the saved adapters are trained with another base model"
    sizes, old = now.get("hf_config", {}), former.get("hf_config", {})
    differ = [
        f"{k} {sizes[k]} instead of {old[k]}" for k in sizes if sizes[k] != old.get(k, sizes[k])
    ]
    if differ:
        name = "init_from" if bases[0] else "model"
        refused.setdefault(name, f"the models differ ({'; '.join(differ[:3])})")
    for name, why in refused.items():
        adapters = former.get("lora_rank") is not None and former.get("init_from")
        more = " (and --lora-init-from for the adapters of the former run)" if adapters else ""
        raise ValueError(
            _message(name, now.get(name), former.get(name), where, why)
            + f", or another --output-dir for a new run{more}"
        )
    if now.get("max_steps") != former.get("max_steps"):
        changed = [
            name for name in changed if name != "warmup_steps"
        ]  # follows from --max-steps by default
    warned = [name for name in WARN if name in changed]
    return [_message(name, now[name], former[name], where, WARN[name]) for name in warned]


def changed_contents(
    contents: Mapping[str, str], before: Mapping[str, str], where: str
) -> list[str]:
    """Returns warnings about data with as many samples as before, and other content.

    Raises:
        ValueError: The tokenizer has another vocabulary, or the frozen model other weights.
    """
    warnings = []
    for name, now in contents.items():
        former = before.get(name, now)  # older releases saved no checksums
        if former == now:
            continue
        subject, detail, may_change = _CONTENTS[name]
        message = f"{subject} {where} (checksum {now}, before {former}). "
        way_out = f"Give the former {name}, or another --output-dir{detail}"
        if not may_change:
            raise ValueError(message + way_out)
        position = "The run resumes at the same position in the changed data. "
        warnings.append(message + position + way_out)
    return warnings


def base_checksum(config: Config) -> dict[str, str]:
    """Returns a checksum of the frozen model under adapters; empty for other runs.

    Reads at most 64 MiB of its files.
    """
    if config.init_from is None or config.lora_rank is None:
        return {}
    folder = pathlib.Path(config.init_from)
    # The same files as the model is read from; others in the folder are not part of it.
    single, parts = folder / "model.safetensors", sorted(folder.glob("model-*.safetensors"))
    files = [single] if single.exists() else parts or sorted(folder.glob("*.safetensors"))
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


def _check_order(order: Mapping[str, Any], before: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError` if the order of samples differs from that of the saved run."""
    for name, value in order.items():
        former = before.get(name)
        if former == value:
            continue
        if name in _ORDER:
            message = _message(name, value, former, where, _REORDERED)
            raise ValueError(f"{message}, or another --output-dir")
        known = name.replace("_", " ")
        raise ValueError(
            f"--data has {known} {value}, and {where}, was trained with {known} {former}: "
            f"{_REORDERED}. Restore the former data, or give another --output-dir"
        )


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in defaults that depend on other settings; as JSON, so that equal runs are equal."""
    rank = settings.get("lora_rank")
    defaults = {} if rank is None else {"lora_alpha": 2.0 * rank, "lora_base_dtype": "bf16"}
    known: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return {k: defaults.get(k) if value is None else value for k, value in known.items()}


def _message(name: str, now: object, former: object, where: str, why: str) -> str:
    return (
        f"{_option(name, now)} is given, and {where}, was trained with {_option(name, former)}: "
        f"{why}. Give {_option(name, former)} to resume"
    )


def _option(name: str, value: object) -> str:
    return f"no {flag(name)}" if value is None else f"{flag(name)} {value}"
