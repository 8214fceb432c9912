"""The checkpoints of a run, in the subfolder `checkpoints` of its folder, and how it resumes.

A checkpoint also saves the position in the data. A resumed run, in any number of processes, sees
every sample or document of an epoch once.

Before any array is restored, a run is compared with the one that it resumes. A setting in `REFUSE`
decides the shape of the saved state, or the meaning of its numbers, and must not change. One in
`WARN` may change the results. All others are free: where and how fast a step is computed, and
logging. `optimizers.py` has the rule of the schedule over `--max-steps`.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from training.config import Config, flag
from training.data_files import fingerprint, open_regular
from training.multiprocess import say
from training.run_folder import CHECKPOINTS
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints, on_first_process
from zero_jax.checkpoint.directory import folders, set_aside
from zero_jax.checkpoint.manifest import ITEM, Manifest

PyTree = Any
Settings = Mapping[str, Any]

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

    settings: Settings  # from `plan.facts`
    order: Settings  # settings that determine the order of samples
    contents: Mapping[str, str]  # checksums of data, tokenizer, template and frozen model, by name

    def compare(self, manifest: Manifest, directory: pathlib.Path) -> list[str]:
        """Returns warnings about changes since a checkpoint; others raise ValueError."""
        extra, before = manifest.extra, manifest.config
        where = f"{directory}, step {manifest.step}"
        names = [*before, *extra] if isinstance(before, dict) and isinstance(extra, dict) else []
        if not {"max_steps", "sample", "order"} <= {*names}:
            raise ValueError(
                f"--output-dir: train.py did not write the checkpoint in {where}, or an older "
                "release of it: its settings or data position are missing. Give another "
                "--output-dir, or restore it with zero_jax.Checkpoints"
            )
        for name, value in self.order.items():
            former = extra["order"].get(name)
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
        warnings = check_settings(self.settings, before, where)
        return warnings + changed_contents(self.contents, extra.get("contents", {}), where)


def check_settings(settings: Settings, before: Settings, where: str) -> list[str]:
    """Returns one warning for each setting that may change and does, in a resumed run.

    Raises ValueError if a setting changes that must not. `where` names the checkpoint.

    >>> message = check_settings({"weight_decay": 0.1}, {"weight_decay": 0.2}, "DIR, step 4")
    >>> message[0][:55]
    '--weight-decay 0.1 is given, and DIR, step 4, was train'
    """
    now, former = _with_defaults(settings), _with_defaults(before)
    changed = [name for name in now if name in former and now[name] != former[name]]
    refused = {name: why for name, why in REFUSE.items() if name in changed}
    if "max_grad_norm" in changed and 0 in (now["max_grad_norm"], former["max_grad_norm"]):
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
    warned = [name for name in WARN if name in changed]
    if "warmup_steps" in warned and now.get("max_steps") != former.get("max_steps"):
        warned.remove("warmup_steps")  # follows from --max-steps by default
    return [_message(name, now[name], former[name], where, WARN[name]) for name in warned]


def changed_contents(
    contents: Mapping[str, str], before: Mapping[str, str], where: str
) -> list[str]:
    """Returns warnings about data with as many samples as before, and other content.

    Raises ValueError if the tokenizer has another vocabulary, or the frozen model other weights.
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
    """Returns a checksum of the frozen model under adapters, from at most 64 MiB of its files.

    Empty for other runs.
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


def _with_defaults(settings: Settings) -> dict[str, Any]:
    """Fills in defaults that depend on other settings; as JSON, so that equal runs are equal."""
    rank = settings.get("lora_rank")
    defaults = {} if rank is None else {"lora_alpha": 2.0 * rank, "lora_base_dtype": "bf16"}
    known: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return {k: defaults.get(k) if value is None else value for k, value in known.items()}


def _message(name: str, now: object, former: object, where: str, why: str) -> str:
    given, before = (
        f"no {flag(name)}" if x is None else f"{flag(name)} {x}" for x in (now, former)
    )
    return (
        f"{given} is given, and {where}, was trained with {before}: {why}. Give {before} to resume"
    )


def newest_step(out: pathlib.Path) -> int | None:
    """Returns the step of the newest complete checkpoint of a run in this folder."""
    if not (out / CHECKPOINTS).is_dir():
        return None
    with Checkpoints(out / CHECKPOINTS, read_only=True) as checkpoints:
        return max(checkpoints.steps, default=None)


def check_resume(config: Config, record: RunRecord) -> bool:
    """Returns whether --output-dir holds a run to resume, finished or killed.

    One process calls it, before anything is written there. `Saver` reports a checkpoint that is
    damaged, or missing at --resume-step, because it names the other checkpoints.
    """
    if config.output_dir is None or not config.save_steps:
        return False
    out = pathlib.Path(config.output_dir)
    directory = (out / CHECKPOINTS).resolve()
    if not directory.is_dir():
        return False
    if not config.resume:
        raise ValueError(
            f"--no-resume is given, and {out} has checkpoints: use another "
            "--output-dir, or leave --no-resume out to resume from them"
        )
    with contextlib.suppress(Damaged):
        step = newest_step(out) if config.resume_step is None else config.resume_step
        if step is not None and (directory / str(step)).exists():
            record.compare(Manifest.read(directory / str(step) / ITEM), directory)
    return True


def _set_aside_later(directory: pathlib.Path, step: int) -> None:
    """Makes a checkpoint the latest, and moves the later ones to a subfolder."""
    try:
        folders(directory, step)
    except ValueError as error:
        raise ValueError(f"--resume-step {step}: {error}") from error
    later, aside = set_aside(directory, step), directory / f"after-{step}"
    if later is None:
        say(
            f"--resume-step {step} was applied by an earlier start ({aside} exists): resuming from "
            "the latest checkpoint"
        )
    elif later:
        steps = ", ".join(map(str, later))
        say(f"Resuming from step {step}: the later checkpoints ({steps}) are moved to {aside}")


class Saver(contextlib.AbstractContextManager["Saver"]):
    """Saves and restores checkpoints in a folder; all processes create one and call it alike."""

    def __init__(self, config: Config, out: pathlib.Path, record: RunRecord):
        self._every, self._record = config.save_steps, record
        self.before: Settings = {}  # of the run that saved the restored one
        self.place: Any = None  # position in the data from which to train; None: the beginning
        self.saved: int | None = None  # step of the newest one, also if it is still being written
        self._checkpoints = None
        directory, step = out / CHECKPOINTS, config.resume_step
        if step is not None:
            on_first_process(lambda: _set_aside_later(directory, step))
        if config.save_steps:
            kept = {"keep": config.save_total_limit, "keep_every": config.keep_every_steps}
            self._checkpoints = Checkpoints(directory, **kept)

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    def resume(self, like: Callable[[Settings], PyTree]) -> tuple[PyTree, int] | None:
        """Returns the tree and the step of the latest checkpoint; None if there is none.

        `like` returns a tree like the saved one, from the settings of the run that saved it.
        """
        if self._checkpoints is None or self._checkpoints.latest is None:
            return None
        manifest = self._checkpoints.manifest()
        warnings = self._record.compare(manifest, self._checkpoints.directory)
        self.before = manifest.config
        try:
            restored = self._checkpoints.restore(like(manifest.config), say=lambda _: None)
        except Damaged as error:
            *earlier, latest = self._checkpoints.steps
            if not earlier:
                raise
            raise Damaged(
                f"{error}. This is step {latest}; earlier steps are "
                f"{', '.join(map(str, earlier))}: use --resume-step {earlier[-1]} to resume from "
                "the last of them"
            ) from error
        say(f"Resuming from {self._checkpoints.directory}, {restored}")
        for line in warnings:
            say(f"warning: {line}")
        self.saved, self.place = restored.step, restored.extra["sample"]
        return restored.tree, restored.step

    def save(self, step: int, tree: PyTree, place: Callable[[], Any], *, now: bool = False) -> bool:
        """Saves at multiples of `save_steps`, or `now`, unless this step is saved already.

        `place` returns the position in the data after this step. True if a save has started.
        """
        if self._checkpoints is None or step == (self.saved or 0):
            return False
        if now or step % self._every == 0:
            record = self._record
            extra = {"sample": place(), "order": record.order, "contents": record.contents}
            self._checkpoints.save(step, tree, config=record.settings, extra=extra)
            self.saved = step
        return self.saved == step
