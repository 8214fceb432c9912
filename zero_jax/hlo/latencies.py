"""How long instructions take, told to XLA's scheduler: as the roofline has it, in place of a guess.

XLA for GPUs orders a program by what it thinks that kernels and collectives take. Its guess knows
no wires; a profile takes its place (profile-guided latency estimation): a file of names and
microseconds. Real ones are measured on a run; this one is made of the program itself, as compiled
before, and of a target's figures, so that the overlap that is proven is that of the run.

What is told are numbers for the scheduler's model of the machine, not times:

- What is under way at once is free to it, where here it shares one wire: each collective is told as
  many times longer as may be under way.
- It works from the end of the program, and takes several that are under way for independent. Of
  sums that only the update waits for the last would begin at the very end, one right after the
  other. Each is told longer by as much as it could have begun before it did, at most twice as long.
"""

from collections.abc import Mapping, Sequence

from zero_jax.hlo import roofline
from zero_jax.hlo.flops import Flops
from zero_jax.hlo.hlo_text import Program
from zero_jax.hlo.runs import runs
from zero_jax.hlo.targets import Target
from zero_jax.hlo.traffic import Collective

SUFFIX = ".pbtxt"


def of(
    program: Program, collectives: Sequence[Collective], target: Target, at_once: int
) -> Mapping[str, float]:
    """What the scheduler is told that instructions take, in seconds, by their names.

    Args:
      program: a scheduled program, parsed.
      collectives: its collectives.
      target: as for `roofline.step_time`.
      at_once: how many of them XLA has under way at a time.
    """
    found = _kernels(program, target)
    own = roofline.play(program, collectives, target).runs
    alone = _only_for_the_update(program)
    for c in collectives:
        if c.name not in own:
            continue
        run = own[c.name]
        told = at_once * run.took
        sums = c.kind == "reduce-scatter" and c.name in alone
        found[c.name] = told + (min(told, run.began - run.could) if sums else 0.0)
    return found


def text(seconds: Mapping[str, float]) -> str:
    """The file that XLA reads.

    >>> print(text({"dot.1": 2e-3}), end="")
    costs { name: "dot.1" cost_us: 2000.000 }
    """
    lines = (
        f'costs {{ name: "{name}" cost_us: {1e6 * told:.3f} }}\n' for name, told in seconds.items()
    )
    return "".join(lines)


def _kernels(program: Program, target: Target) -> dict[str, float]:
    """Of each kernel its seconds, by the name of its instruction."""
    totals = roofline.kernels(program, target, Flops(program))
    found = {}
    for run in runs(program):
        if all(c.instruction.kind in roofline.CALLS for c in run.callers):
            seconds = totals.instruction(run.computation, run.instruction)[0]
            if seconds and run.instruction.kind not in roofline.CALLS:
                found[run.instruction.name] = seconds
    return found


def _only_for_the_update(program: Program) -> set[str]:
    """What is made in the step itself, outside of loops, and no matrix product waits for."""
    flops, step = Flops(program), program.computations[program.entry]
    waited: set[str] = set()
    for i in reversed(list(step.instructions.values())):
        if i.name in waited or flops.instruction(step, i)[0]:
            waited.update(i.operands)
    return set(step.instructions) - waited
