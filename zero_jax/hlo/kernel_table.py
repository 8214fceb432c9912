"""Kernels of a compiled program by their modelled time beyond matrix products.

A kernel that moves more bytes than its products take time for is where a step can get faster: a
copy, a transpose, a conversion to fp32. Kernels of one operation and source line are one row.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

from zero_jax.hlo.flops import Flops, Totals
from zero_jax.hlo.hlo_text import Computation, Instruction, Program
from zero_jax.hlo.roofline import CALLS, kernels
from zero_jax.hlo.targets import Target

_ROWS = 30


@dataclasses.dataclass(frozen=True)
class KernelGroup:
    """Kernels of one operation and source line in one step.

    Attributes:
      operation: What the kernel does, by its name in the program, such as "loop_convert_fusion".
      source: Source line, "models/gpt.py:120"; "" if XLA does not report it.
      is_backward: True for kernels of the backward pass, recomputation included.
      runs: Number of kernels that run.
      seconds: Modelled time, the sum over kernels of the longer of compute and memory time.
      excess: Part of it beyond the matrix products.
      bytes: Bytes that the kernels read and write.
    """

    operation: str
    source: str
    is_backward: bool
    runs: int
    seconds: float
    excess: float
    bytes: int


def kernel_groups(program: Program, target: Target) -> list[KernelGroup]:
    """Returns the kernels of a program in groups, the largest excess first.

    Their seconds sum to `StepTime.kernel_seconds`.

    Args:
      program: A scheduled program, parsed.
      target: A target with peaks, see `roofline.step_time`.

    Example:
      >>> from zero_jax.hlo import hlo_text, targets
      >>> text = '''HloModule step, is_scheduled=true, num_partitions=1
      ... ENTRY %main (p: f32[1000000]) -> f32[1000000] {
      ...   %p = f32[1000000]{0} parameter(0)
      ...   ROOT %copy.3 = f32[1000000]{0} copy(%p)
      ... }'''
      >>> (group,) = kernel_groups(hlo_text.parse(text), targets.target("h100"))
      >>> group.operation, group.runs, group.bytes
      ('copy', 1, 8000000)
    """
    costs = kernels(target, Flops(program))
    found = collections.defaultdict[tuple[str, str, bool], list[float]](lambda: [0.0] * 4)
    for i, times in _executed(program.entry, 1, costs):
        seconds, products, _, traffic = costs.instruction(i)
        if traffic:
            key = re.sub(r"[.\d]+$", "", i.name), program.source(i), "transpose(jvp" in i.op_name
            added = times, times * seconds, times * (seconds - products), times * traffic
            found[key] = [a + b for a, b in zip(found[key], added, strict=True)]
    groups = [
        KernelGroup(*key, int(runs), seconds, excess, int(traffic))
        for key, (runs, seconds, excess, traffic) in found.items()
    ]
    return sorted(groups, key=lambda group: -group.excess)


def _executed(
    computation: Computation, times: int, costs: Totals
) -> Iterator[tuple[Instruction, int]]:
    """Yields the kernels that run, and how often; of a conditional those of the longest branch."""
    for i in computation.instructions.values():
        if i.kind not in CALLS:
            yield i, times
            continue
        calls = i.calls
        if i.kind == "conditional":
            calls = [max(calls, key=lambda call: costs.computation(call[0]))]
        for called, runs in calls:
            yield from _executed(called, times * (runs or 0), costs)


def format_kernels(groups: list[KernelGroup]) -> str:
    """Formats the largest groups, and the sum of all."""
    seconds = sum(group.seconds for group in groups)
    excess = sum(group.excess for group in groups)
    lines = [
        f"Kernels beyond matmuls: {1e3 * excess:.2f} of {1e3 * seconds:.2f} ms",
        f"{'excess ms':>10} {'ms':>9} {'GB':>8} {'runs':>6}  {'pass':8} {'kernel':36} source",
    ]
    lines += [
        f"{1e3 * g.excess:10.3f} {1e3 * g.seconds:9.3f} {g.bytes / 1e9:8.2f} {g.runs:6}  "
        f"{'backward' if g.is_backward else '':8} {g.operation[:36]:36} {g.source}"
        for g in groups[:_ROWS]
    ]
    return "\n".join(lines)
