"""Draws the picture of memory per stage in the README: `PYTHONPATH=. python docs/figures.py`.

Figure 1 of the paper with this library's own closed forms, which the tests hold against the
compiled program: GPT of 7.5 billion parameters, Adam, bf16, 64 devices.
"""

import pathlib

import jax
import matplotlib.pyplot as plt
import optax
from flax import nnx

from zero_jax import Zero, abstract_mesh, memory
from zero_jax.models import gpt

DEVICES = 64
COLORS = {"parameters": "#3b6ea5", "state": "#9bb8d9", "copy": "#e0a458", "gradients": "#c8553d"}
NAMES = {
    "parameters": "fp32 masters",
    "state": "Adam's moments",
    "copy": "gathered copy, bf16 (most at once)",
    "gradients": "gradients (most at once)",
}


def main() -> None:
    """Writes docs/memory.png."""
    config = gpt.preset("7.5b")
    shapes = jax.eval_shape(lambda: nnx.state(gpt.GPT(config, rngs=nnx.Rngs(0)), nnx.Param))
    zero, adam = Zero(abstract_mesh(DEVICES), 3, "bf16"), optax.adamw(1e-4)
    layer = 12 * config.width**2 + 13 * config.width  # the most that is gathered at once
    configs = [zero.config.at_stage(stage) for stage in memory.STAGES]
    stages = [memory.estimate(shapes, config, adam, window=layer) for config in configs]
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    left = [0.0] * 4
    for term, name in NAMES.items():
        widths = [stage.terms[term] / 1e9 for stage in stages]
        axes.barh(range(4), widths, left=left, color=COLORS[term], label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 1, row, f"{total:.1f} GB", va="center")
    axes.set_yticks(range(4), [f"stage {s}" for s in range(4)])
    axes.invert_yaxis()
    axes.set_xlim(0, 138)
    axes.set_xlabel("model states per device (GB = 1e9 bytes), 7.5B parameters, 64 devices")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    figure.savefig(pathlib.Path(__file__).with_name("memory.png"), dpi=150)


if __name__ == "__main__":
    main()
