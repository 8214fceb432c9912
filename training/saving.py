"""The checkpoints of a run, in the subfolder `checkpoints` of its folder, and how it resumes.

Before any array is restored, a run is compared with the one that it resumes. A setting in `REFUSE`
decides the shape of the saved state, or the meaning of its numbers, and must not change. One in
`WARN` may change the results. All others are free: where and how fast a step is computed, and
logging.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from training.config import Config
from training.data_files import fingerprint, open_regular
from training.multiprocess import say
from training.run_folder import CHECKPOINTS
from training.trainer import States, Trainer
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints, on_first_process
from zero_jax.checkpoint.directory import AFTER, folders, set_aside
from zero_jax.checkpoint.manifest import ITEM, Manifest
from zero_jax.commands.command_line import flag
from zero_jax.interchange.safetensor_files import model_files

Settings = Mapping[str, Any]

_SETTINGS = {field.name for field in dataclasses.fields(Config)}
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
    "max_steps": "the learning rate changes, because its schedule spans all steps",
    "weight_decay": "the updates change",
    "max_grad_norm": "the updates change",
    "expert_capacity_factor": "experts process another number of tokens",
    "lora_base_dtype": "the frozen model is rounded differently",
    "compute_dtype": "the dtype of the computation changes",
    "reduce_dtype": "gradients are summed in another dtype",
    "matmul_dtype": "operands of matrix products are rounded differently",
    "fp8_params": "operands of matrix products are rounded differently",
    "param_comm_dtype": "parameters are rounded differently when they are gathered",
    "grad_comm_dtype": "gradients are rounded differently when they are reduced",
}
# Contents with a checksum: their flag, the reason, and whether they may change.
_CONTENTS = {
    "tokenizer": ("--tokenizer (or --init-from)", "the vocabularies differ", False),
    "base": (
        "--init-from",
        "the saved adapters do not fit other weights, but --lora-init-from starts from them",
        False,
    ),
    "data": ("--data", "the run resumes at the same position in changed data", True),
    "chat template": ("--tokenizer (or --init-from)", "the chat templates differ", True),
}


def compare(known: Settings, manifest: Manifest, directory: pathlib.Path) -> list[str]:
    """Returns warnings about changes since a checkpoint; others raise ValueError.

    `known` are the settings from `plan.facts`, with those that determine the order of samples, and
    checksums of the contents.
    """
    parts, where = (manifest.extra, manifest.config), f"{directory}, step {manifest.step}"
    # Older releases saved `order` and `contents` in `extra`, and the oldest no `contents`.
    before = {k: v for part in parts if isinstance(part, dict) for k, v in part.items()}
    if not {"max_steps", "order", "sample"} <= before.keys():
        raise ValueError(
            f"--output-dir: train.py did not write the checkpoint in {where}, or an older release "
            "of it: its settings or data position are missing. Give another --output-dir, or "
            "restore it with zero_jax.Checkpoints"
        )
    for name, value in known["order"].items():
        former = before["order"].get(name)
        if former != value:
            why = "the order of samples would change"
            raise ValueError(_setting_message(name, value, former, where, why))
    warnings = check_settings(known, before, where)
    return warnings + changed_contents(known["contents"], before.get("contents", {}), where)


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
        raise ValueError(_setting_message(name, now.get(name), former.get(name), where, why))
    warned = [name for name in WARN if name in changed]
    if {"warmup_steps", "max_steps"} <= {*warned}:
        warned.remove("warmup_steps")  # follows from --max-steps by default
    return [_setting_message(name, now[name], former[name], where, WARN[name]) for name in warned]


def changed_contents(
    contents: Mapping[str, str], before: Mapping[str, str], where: str
) -> list[str]:
    """Returns warnings about data with as many samples as before, and other content.

    Raises ValueError if the tokenizer has another vocabulary, or the frozen model other weights.
    """
    warnings = []
    for name, now in contents.items():
        former = before.get(name, now)
        if former != now:
            label, why, may_change = _CONTENTS[name]
            given, known = (f"{label} with checksum {checksum}" for checksum in (now, former))
            if not may_change:
                raise ValueError(_message(given, known, where, why))
            warnings.append(_message(given, known, where, why))
    return warnings


def base_checksum(config: Config) -> dict[str, str]:
    """Returns a checksum of the frozen model under adapters, from at most 64 MiB of its files.

    Empty for other runs.
    """
    if config.init_from is None or config.lora_rank is None:
        return {}
    files = model_files(pathlib.Path(config.init_from))
    sizes = [path.stat().st_size for path in files]

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


def _setting_message(name: str, now: object, former: object, where: str, why: str) -> str:
    # Another name is a number of the data.
    label = flag(name) if name in _SETTINGS else f"--data of {name.replace('_', ' ')}"
    given, known = (f"no {label}" if x is None else f"{label} {x}" for x in (now, former))
    return _message(given, known, where, why)


def _message(given: str, known: str, where: str, why: str) -> str:
    return (
        f"{given} is given, and {where}, was trained with {known}: {why}. Give {known} to resume, "
        "or another --output-dir for a new run"
    )


def newest_step(out: pathlib.Path) -> int | None:
    """Returns the step of the newest complete checkpoint of a run in this folder."""
    with Checkpoints(out / CHECKPOINTS, read_only=True) as checkpoints:
        return max(checkpoints.steps, default=None)


def check_resume(config: Config, known: Settings) -> bool:
    """Returns whether --output-dir holds a run to resume, finished or killed; prints warnings.

    One process calls it, before anything is written there. `Saver` reports a checkpoint that is
    damaged, or missing at --resume-step, because it names the other checkpoints.
    """
    if config.output_dir is None or not config.save_steps:
        return False
    directory = pathlib.Path(config.output_dir, CHECKPOINTS).resolve()
    if not directory.is_dir():
        return False
    if not config.resume:
        raise ValueError(
            f"--no-resume is given, and {config.output_dir} has checkpoints: use another "
            "--output-dir, or leave --no-resume out to resume from them"
        )
    step = config.resume_step
    if step is None or (directory / f"{AFTER}{step}").exists():
        step = newest_step(directory.parent)
    with contextlib.suppress(Damaged):
        if step is not None and (directory / str(step)).exists():
            manifest = Manifest.read(directory / str(step) / ITEM)
            for warning in compare(known, manifest, directory):
                say("warning:", warning)
    return True


def _set_aside_later(directory: pathlib.Path, step: int) -> None:
    """Makes a checkpoint the latest, and moves the later ones to a subfolder."""
    try:
        folders(directory, step)
    except ValueError as error:
        raise ValueError(f"--resume-step {step}: {error}") from error
    aside = directory / f"{AFTER}{step}"
    if (later := set_aside(directory, step)) is None:
        say(f"--resume-step {step} was applied by an earlier start: {aside} exists")
    elif later:
        say(f"Later checkpoints ({', '.join(map(str, later))}) are moved to {aside}")


class Saver(contextlib.AbstractContextManager["Saver"]):
    """Saves and restores checkpoints in a folder; all processes create one and call it alike."""

    def __init__(self, trainer: Trainer, known: Settings):
        self._trainer, self._known, config = trainer, known, trainer.plan.config
        self.saved: int | None = None  # step of the newest one, also if it is still being written
        self._checkpoints = None
        directory, step = trainer.out / CHECKPOINTS, config.resume_step
        if step is not None:
            on_first_process(lambda: _set_aside_later(directory, step))
        if config.save_steps:
            kept = {"keep": config.save_total_limit, "keep_every": config.keep_every_steps}
            self._checkpoints = Checkpoints(directory, **kept)

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    def resume(self) -> tuple[States, int, Any] | None:
        """Returns the states, the step and the position in the data of the latest checkpoint.

        The states have this run's dtypes. None if there is no checkpoint.
        """
        checkpoints = self._checkpoints
        if checkpoints is None or checkpoints.latest is None:
            return None
        try:
            like = self._trainer.like(checkpoints.manifest().config)
            restored = checkpoints.restore(like, say=lambda _: None)
        except Damaged as error:
            *earlier, latest = checkpoints.steps
            if not earlier:
                raise
            steps = ", ".join(map(str, earlier))
            raise Damaged(
                f"{error}. This is step {latest}; earlier steps are {steps}: use --resume-step "
                f"{earlier[-1]}"
            ) from error
        say(f"Resuming from {checkpoints.directory}, {restored}")
        self.saved = restored.step
        states = self._trainer.full_states(restored.tree)
        return states, restored.step, restored.extra["sample"]

    def save(self, step: int, states: States, place: Any, *, now: bool) -> bool:
        """Saves at multiples of `save_steps`, or `now`, unless this step is saved already.

        `place` is the position in the data after this step. True if a save has started.
        """
        if self._checkpoints is None or step == (self.saved or 0):
            return False
        if now or step % self._trainer.plan.config.save_steps == 0:
            tree = self._trainer.saved_states(states)
            extra = {"sample": self._trainer.gather_place(place)}
            self._checkpoints.save(step, tree, config=self._known, extra=extra)
            self.saved = step
        return self.saved == step
