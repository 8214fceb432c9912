"""Modelled latencies of instructions for XLA's scheduler.

XLA for GPUs orders a program by estimates of the time of kernels and collectives, which do not know
the interconnect. A profile replaces them (profile-guided latency estimation): a file of names and
microseconds. Profiles are measured on a run; this one is made of the program itself, as compiled
before, and of a target's peak rates. The numbers fit the scheduler's model of the machine, and are
not times:

- In that model concurrent collectives cost nothing extra, here they share one interconnect: each
  gets as many times its latency as collectives may run at once.
- The scheduler works from the end of the program. Of reduce-scatters that only the update uses, the
  last would start at the very end, one right after the other. Each latency is increased by the time
  that it could have started earlier, at most to its double.
"""

from collections.abc import Mapping, Sequence

from zero_jax.hlo import roofline
from zero_jax.hlo.collectives import Collective, executions
from zero_jax.hlo.flops import Flops
from zero_jax.hlo.hlo_text import Program
from zero_jax.hlo.targets import Target

SUFFIX = ".pbtxt"  # of the only files that XLA reads as text


def modelled(
    program: Program, collectives: Sequence[Collective], target: Target, at_once: int
) -> Mapping[str, float]:
    """Returns the latencies of instructions in seconds, by their names.

    Arguments are those of `roofline.step_time`, and the number of collectives that XLA runs at a
    time. Raises ValueError if a loop has an unknown trip count.
    """
    flops = Flops(program)
    kernels = roofline.kernels(target, flops)
    latencies = {
        i.name: seconds
        for i, callers, _ in executions(program.entry)
        if all(caller.instruction.kind in roofline.CALLS for caller in callers)
        and (seconds := kernels.instruction(i)[0])  # raises in a loop of unknown length
        and i.kind not in roofline.CALLS
    }
    timeline = roofline.Timeline(flops, collectives, target)
    for_the_update = _only_for_the_update(flops)
    for c in collectives:
        if c.name in timeline.delays:
            latency = at_once * timeline.transfers[c.name].seconds
            if c.kind == "reduce-scatter" and c.name in for_the_update:
                latency += min(latency, timeline.delays[c.name])
            latencies[c.name] = latency
    return latencies


def text_of(seconds: Mapping[str, float]) -> str:
    """Returns the file that XLA reads.

    >>> print(text_of({"dot.1": 2e-3}), end="")
    costs { name: "dot.1" cost_us: 2000.000 }
    """
    return "".join(
        f'costs {{ name: "{name}" cost_us: {1e6 * latency:.3f} }}\n'
        for name, latency in seconds.items()
    )


def _only_for_the_update(flops: Flops) -> set[str]:
    """Returns instructions of the step itself, outside loops, that no matrix product waits for."""
    step = flops.program.entry.instructions
    awaited: set[str] = set()
    for i in reversed(step.values()):
        if i.name in awaited or flops.count(i):
            awaited.update(i.operands)
    return step.keys() - awaited
