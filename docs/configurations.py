"""The largest model that each configuration of the paper trains on 32 GB devices.

    python docs/configurations.py        # five programs compiled for H100, some minutes

As in the paper: 400 devices, MP 16, 16 sequences of 1024 for each 16 devices. Layers of one width
are added while the predicted step fits; then the step is compiled, and layers are added or taken
away until the compiled step fits and is within 1 % of the limit. Writes configurations.json, and
prints the table of performance-tables.md. Needs the extra `prove`.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax

from zero_jax import Precision, Zero, abstract_mesh, paper_config
from zero_jax.commands.case import Case
from zero_jax.models import gpt

DEVICES, MP, ROWS = 400, 16, 16
# The largest model of the paper, in billions, and the width of the layers.
PAPER = {"c1": 40, "c2": 60, "c3": 50, "c4": 140, "c5": 150}
WIDTH = 8192
# A V100 of 32 GB has 34.1e9 bytes: this leaves 6 % to what no program shows.
LIMIT = 32_000_000_000
FILE = pathlib.Path(__file__).parent / "configurations.json"


def case_of(name: str, layers: int) -> Case:
    """A model of that many layers under a configuration."""
    config = gpt.GPTConfig(layers=layers, width=WIDTH, heads=WIDTH // 128)
    mesh = abstract_mesh(DEVICES // MP, model=MP)
    zero = Zero(mesh, precision=Precision("bf16", reduce_dtype="bf16"), **paper_config(name))
    return Case(config, zero, "adamw", ROWS * DEVICES // MP)


def most_layers(name: str, limit: int) -> int:
    """The most layers whose predicted step fits."""
    low, high = 1, 1024
    while low < high:
        middle = (low + high + 1) // 2
        case = case_of(name, middle)
        fits = case.plan(case.zero.config.stage).total_bytes <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def largest(name: str, limit: int) -> dict:
    """The largest model under a configuration, predicted and compiled."""
    foretold = layers = most_layers(name, limit)
    too_many = None
    while True:
        tried = case_of(name, layers)
        compiled = tried.plan(tried.zero.config.stage, target="h100")
        room = limit / compiled.total_bytes
        print(name, layers, compiled.total_bytes, flush=True)
        if room < 1:
            too_many = layers
            layers -= max(1, round(layers * (1 - room)))
            continue
        case, plan = tried, compiled
        # Half a percent less than what would fill it, since a layer less costs a whole compile.
        more = int(layers * (room * 0.995 - 1))
        if room < 1.01 or more < 1 or too_many is not None:
            break
        layers += more
    return {
        "configuration": name,
        "layers": case.config.layers,
        "width": case.config.width,
        "params": gpt.num_params(case.config),
        "predicted_params": gpt.num_params(case_of(name, foretold).config),
        "compiled_bytes": plan.total_bytes,
        "host_bytes": plan.compiled.host_bytes,
        "error": plan.error,
        "jax": jax.__version__,
    }


def main() -> None:
    """Compiles, writes the data and prints the table."""
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for name in PAPER:
        rows.append(largest(name, LIMIT))
        FILE.write_text(json.dumps({"limit": LIMIT, "rows": rows}, indent=1) + "\n")
    print("| | paper | predicted | compiled | layers x width | GB | host GB |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| `{r['configuration']}` | {PAPER[r['configuration']]}B "
            f"| {r['predicted_params'] / 1e9:.0f}B | {r['params'] / 1e9:.0f}B "
            f"| {r['layers']} x {r['width']} | {r['compiled_bytes'] / 1e9:.1f} "
            f"| {r['host_bytes'] / 1e9:.1f} |"
        )


if __name__ == "__main__":
    main()
