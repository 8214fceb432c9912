"""States of 8 and 16 bits beside fp32: memory on H100s that need not be there, and the loss.

    python benchmarks/states.py              # 6 programs, 4 minutes on two cores
    python benchmarks/states.py --loss       # each in the default run of train.py, and a naive way
    python benchmarks/states.py --loss -- --model 124m --max-steps 200 --devices 1 \\
        --global-batch-size 8 --seq-len 64 --lr 1e-4

Stage 3, one row of 1024 tokens a device, AdamW, bf16 with gradients summed in fp32. The naive way
keeps the second moment in 8 bits too, but evenly spaced from 0 to the largest of each 128. Small
values of a block become 0, and the update divides by their root. Needs the extra `prove`; --loss
needs `train` instead, and passes the arguments after `--` to train.py.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from training.run_folder import RunFolder, finite
from zero_jax import Zero, abstract_mesh
from zero_jax.commands.case import Case
from zero_jax.models import families, optimizers

ROOT = pathlib.Path(__file__).parent.parent
CASES = (("1.5b", 8), ("7.5b", 64))
KINDS = ("fp32", "bf16", "8bit")
NAIVE, BLOCK, LAST = "naive", 128, 50
TOKENS = 1024


def compiled(model: str, devices: int, states: str) -> dict[str, Any]:
    """What one program holds and sends."""
    zero = Zero(
        abstract_mesh(devices), 3, precision="bf16", remat="block", optimizer_state_dtype=states
    )
    case = Case(families.preset(model), zero, "adamw", devices, TOKENS)
    plan = case.plan(3, target="h100")
    assert plan.compiled is not None and plan.time is not None
    return {
        "model": model,
        "devices": devices,
        "states": states,
        "arguments_gb": round(plan.compiled.argument_bytes / 1e9, 3),
        "arguments_as_predicted": plan.compiled.argument_bytes == plan.predicted.argument_bytes,
        "gb": round(plan.total_bytes / 1e9, 3),
        "forecast_error": round(plan.error, 4),
        "elements_per_param": round(plan.elements_per_param, 3),
        "step_seconds": round(plan.time.seconds, 4),
    }


def evenly_spaced(x: jax.Array) -> jax.Array:
    """Numbers from 0 up as the nearest of 256 that are evenly spaced up to a block's largest."""
    blocks = jnp.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    unit = jnp.max(blocks, 1, keepdims=True) / 255
    near = jnp.round(blocks / jnp.where(unit > 0, unit, 1)) * unit
    return near.reshape(-1)[: x.size].reshape(x.shape)


def naively(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same with Adam's second moments of large leaves so."""

    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    def rounded(node: Any) -> Any:
        if not is_adam(node):
            return node
        return node._replace(
            nu=jax.tree.map(lambda x: evenly_spaced(x) if x.size >= 4096 else x, node.nu)
        )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(grads, state, params)
        return updates, jax.tree.map(rounded, new, is_leaf=is_adam)

    return optax.GradientTransformation(tx.init, update)


def trained(states: str, arguments: list[str]) -> dict[str, float]:
    """Losses of a run: the mean of the last steps, and what is held out at the end."""
    with tempfile.TemporaryDirectory() as out:
        program = ["train.py", "--optimizer-state-dtype", states]
        if states == NAIVE:
            program = ["benchmarks/states.py", "--naive"]
        command = [sys.executable, *program, "--output-dir", f"{out}/run", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        run = RunFolder(pathlib.Path(out, "run"))
        train, held_out = finite(run.curve("loss")), finite(run.curve("val_loss"))
    means = float(np.mean([loss for _, loss in train][-LAST:]))
    return {"training": means, "held_out": held_out[-1][1]}


def main() -> None:
    if "--naive" in sys.argv:
        sys.argv.remove("--naive")
        plain = optimizers._MAKERS["adamw"]
        optimizers._MAKERS["adamw"] = lambda rate, decay: naively(plain(rate, decay))
        from training.main import entry

        sys.exit(entry())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("arguments", nargs="*", help="of train.py")
    given = parser.parse_args()
    if not given.loss:
        for model, devices in CASES:
            for states in KINDS:
                print(json.dumps(compiled(model, devices, states)), flush=True)
        return
    first: dict[str, float] = {}
    for states in (*KINDS, NAIVE):
        found = trained(states, given.arguments)
        first = first or found
        more = {f"{k}_over_fp32": round(v / first[k] - 1, 5) for k, v in found.items()}
        print(json.dumps({"states": states} | found | more), flush=True)


if __name__ == "__main__":
    main()
