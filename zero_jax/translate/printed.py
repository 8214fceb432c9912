"""What is asked for as Python and as a command line of train.py, and the account as text."""

import json
import math
import shlex
import textwrap
from collections.abc import Sequence

from zero_jax.translate.account import NO_EQUAL, NOT_NEEDED, TRANSLATED, UNKNOWN, Row
from zero_jax.translate.asked import SHARES, Asked

_WIDTH = 100
_TITLES = {
    NO_EQUAL: "without an equal",
    UNKNOWN: "unknown",
    NOT_NEEDED: "not needed",
    TRANSLATED: "translated",
}
# A rate of train.py that is put where the file has none, so that the lines can be run.
_NO_RATE = "1e-4"


def python(asked: Asked) -> str:
    """Lines that make the mesh, the Zero, the optimizer and the step.

    >>> print(python(Asked(stage=2)))
    import optax
    import zero_jax
    <BLANKLINE>
    mesh = zero_jax.make_mesh()  # every device on data
    zero = zero_jax.Zero(mesh, stage=2)
    tx = optax.adamw(1e-4)  # the file names none that is known here: put yours
    step = zero.train_step(loss_fn, tx)
    # params = zero.init(...); opt_state = zero.optimizer(tx).init(params)
    """
    lines = [*_mesh(asked), _zero(asked), *_tx(asked)]
    whole = asked.global_batch()
    note = "" if whole is None else f"  # a batch of {whole} rows, over all devices"
    lines.append(f"step = zero.train_step(loss_fn, tx){note}")
    lines.append("# params = zero.init(...); opt_state = zero.optimizer(tx).init(params)")
    text = "\n".join(lines)
    used = [name for name in ("math",) if f"{name}." in text]
    used += ["jax.numpy as jnp"] if "jnp." in text else []
    imports = [f"import {name}" for name in [*used, "optax", "zero_jax"]]
    if asked.tx is not None and asked.tx.masked:
        imports.append("from zero_jax.models.optimizers import decayed")
    return "\n".join(imports) + "\n\n" + text


def _mesh(asked: Asked) -> list[str]:
    many = "every device" if asked.devices is None else f"{asked.devices} devices"
    sizes = {"replica": asked.replica, "experts": asked.experts, "model": asked.model}
    words = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if asked.group is not None:
        replicas = asked.replicas
        text = f"len(jax.devices()) // {asked.group}" if replicas is None else str(replicas)
        words = [f"replica={text}", *words]
    note = f"  # {many}" + ("" if words else " on data")
    lines = [f"mesh = zero_jax.make_mesh({', '.join(words)}){note}"]
    if asked.group is not None and asked.replicas is None:
        lines = ["import jax", "", *lines]
    if SHARES in str(asked.micro_batches()):
        over = f" // {asked.model}" if asked.model > 1 else ""
        lines.append(f"{SHARES} = mesh.size{over}  # devices that share the batch")
    return lines


def _zero(asked: Asked) -> str:
    words = ["mesh", f"stage={asked.stage}"]
    precision = _precision(asked)
    words += [f"precision={precision}"] if precision else []
    k = asked.micro_batches()
    words += [f"micro_batches={k}"] if k != 1 else []
    for name, usual in {"remat": "none", "offload": None, "states": "fp32"}.items():
        value = getattr(asked, name)
        words += [f"{name}={json.dumps(value)}"] if value != usual else []
    words += [
        f"{name}=True" for name in ("sequence_parallel", "hierarchical") if getattr(asked, name)
    ]
    line = f"zero = zero_jax.Zero({', '.join(words)})"
    if len(line) <= _WIDTH:
        return line
    return "zero = zero_jax.Zero(\n" + "".join(f"    {word},\n" for word in words) + ")"


def _precision(asked: Asked) -> str:
    words = [f'"{asked.compute}"']
    words += [f'reduce="{asked.reduce}"'] if asked.reduce != "fp32" else []
    for name in ("gather", "scatter"):
        words += [f'{name}="{getattr(asked, name)}"'] if getattr(asked, name) else []
    for name in ("initial_scale", "growth_interval"):
        value = getattr(asked, name)
        words += [f"{name}={_power(value)}"] if value is not None else []
    if len(words) > 1:
        return f"zero_jax.Precision({', '.join(words)})"
    return words[0] if asked.compute != "fp32" else ""


def _power(value: float) -> str:
    """A number of Python, a power of two as such."""
    power = math.log2(value)
    return f"2.0**{power:.0f}" if isinstance(value, float) and power.is_integer() else repr(value)


def _tx(asked: Asked) -> list[str]:
    lines: list[str] = []
    note = ""
    if asked.tx is None:
        made = f"optax.adamw({_NO_RATE if asked.rate is None else 'lr'})"
        note = "  # the file names none that is known here: put yours"
    else:
        made = asked.tx.call
    if asked.rate is not None:
        own = asked.rate.lines
        apart = [""] if any(line.startswith("def ") for line in own) else []
        lines += [*apart, *own, *apart]
    elif asked.tx is not None:
        lines.append(f"lr = {_NO_RATE}  # the file names no rate: put yours here")
    parts = [f"optax.clip_by_global_norm({asked.clip})", made] if asked.clip else [made]
    if len(parts) == 1:
        return [*lines, f"tx = {made}{note}"]
    line = f"tx = optax.chain({', '.join(parts)}){note}"
    if len(line) <= _WIDTH:
        return [*lines, line]
    return [*lines, f"tx = optax.chain({note}", *(f"    {part}," for part in parts), ")"]


def command(asked: Asked) -> tuple[str, list[str]]:
    """The command line of train.py, and what it has otherwise than the file.

    Returns:
      The command, or an empty text where it needs the number of devices; and sentences.

    >>> command(Asked(stage=1, compute="bf16", reduce="bf16"))[0]
    'python train.py --stage 1 --compute bf16 --reduce bf16 --remat none --clip 0'
    """
    k, whole, mesh = asked.micro_batches(), asked.global_batch(), asked.mesh()
    needs = [
        f"{name} {value}"
        for name, value in (("--micro-batches", k), ("--batch", whole))
        if isinstance(value, str)
    ]
    if mesh is None and (asked.model, asked.experts, asked.replica, asked.group) != (1, 1, 1, None):
        needs.append("--mesh")
    if needs:
        said = ", ".join(needs)
        return "", [f"it depends on the number of devices, say --devices N ({said}; D devices)"]
    words = ["--stage", asked.stage, *(["--mesh", mesh] if mesh else [])]
    words += [] if whole is None else ["--batch", whole]
    words += [] if k == 1 else ["--micro-batches", k]
    words += [] if asked.compute == "fp32" else ["--compute", asked.compute]
    for name, usual in {"reduce": "fp32", "gather": None, "scatter": None, "remat": ""}.items():
        value = getattr(asked, name)
        words += [f"--{name}", value] if value != usual else []
    for name, usual in {"offload": None, "states": "fp32"}.items():
        value = getattr(asked, name)
        words += [f"--{name}", value] if value != usual else []
    words += ["--sequence-parallel"] if asked.sequence_parallel else []
    words += ["--hierarchical"] if asked.hierarchical else []
    words += [*_update(asked), "--clip", f"{asked.clip:g}", *asked.train]
    return "python train.py " + shlex.join(map(str, words)), _differs(asked)


def _update(asked: Asked) -> list[object]:
    words: list[object] = []
    tx, rate = asked.tx, asked.rate
    if tx is not None and tx.name is not None:
        words += ["--optimizer", tx.name]
        words += [] if tx.weight_decay is None else ["--weight-decay", tx.weight_decay]
    if rate is not None:
        words += ["--lr", rate.peak]
        if rate.steps is not None:
            words += ["--steps", rate.steps, "--warmup", min(rate.warmup or 0, rate.steps - 1)]
    return words


def _differs(asked: Asked) -> list[str]:
    """What train.py has otherwise than the file, in sentences."""
    found = []
    if asked.tx is not None:
        if asked.tx.name is None:
            found.append("it has no such optimizer: --optimizer is yours to choose")
        found += asked.tx.differs
    if asked.experts > 1:
        found.append("its default model has no experts: --model mixtral-8x7b say, or --hf")
    rate = asked.rate
    if rate is not None and not rate.cosine:
        found.append("its rate rises linearly and falls as a cosine to a tenth")
    if rate is not None and rate.steps is None and rate.warmup:
        found.append(f"the file has no total of steps: --warmup {rate.warmup} with your --steps")
    usual = (2.0**16, 2000)
    if asked.compute == "fp16" and (asked.initial_scale, asked.growth_interval) not in (
        usual,
        (None, None),
    ):
        found.append("its loss scale begins with 2^16 and doubles after 2000 good steps")
    return found


def account(rows: Sequence[Row]) -> str:
    """Settings by what became of them, each with its sentence; those of one sentence together."""
    blocks = []
    for verdict, title in _TITLES.items():
        own = [row for row in rows if row.verdict == verdict]
        if own:
            whys = dict.fromkeys(row.why for row in own)
            lines = [_entry([row for row in own if row.why == why]) for why in whys]
            blocks.append("\n".join([f"# {title} ({len(own)})", *lines]))
    return "\n\n".join(blocks)


def _entry(rows: Sequence[Row]) -> str:
    names = ", ".join(f"{row.key} {row.given}".strip() for row in rows)
    text = f"{names}: {rows[0].why}"
    wrapper = textwrap.TextWrapper(_WIDTH, "#   ", "#     ", break_on_hyphens=False)
    return wrapper.fill(text)
