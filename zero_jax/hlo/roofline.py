"""Modelled step time on a target: a roofline of compute, memory and interconnect.

XLA's schedule has the kernels, the bytes each reads and writes, and the collectives that run
concurrently. A kernel takes the longer of its matrix products and its memory traffic at the
target's peaks (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009). A collective
takes the time of a ring; collectives run one after the other on one interconnect. The device waits
for communication that no matrix product overlaps:

  step = sum of max(FLOPs / peak, bytes / bandwidth) over kernels + exposed communication time.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero_jax.hlo import replica_groups
from zero_jax.hlo.collectives import KINDS, Collective
from zero_jax.hlo.flops import Cost, Flops, Totals
from zero_jax.hlo.hlo_text import VIEWS, Computation, Instruction, Program
from zero_jax.hlo.kernels import traffic_bytes
from zero_jax.hlo.targets import Target

# They move nothing in device memory; collectives take time on the interconnect.
_NO_KERNEL = VIEWS | KINDS | {"parameter", "constant", "after-all", "domain", "recv"}
_NO_KERNEL |= {"partition-id", "replica-id"}
_RING = {"all-gather", "reduce-scatter", "all-reduce"}
_TO_ALL = {"all-to-all", "ragged-all-to-all"}
CALLS = {"while", "conditional", "call", "async"}  # the instructions that they run are kernels


@dataclass(frozen=True)
class StepTime:
    """Modelled time of one step on one device of a target, under `assumptions`.

    Attributes:
      seconds: kernel_seconds + exposed_seconds.
      kernel_seconds: Sum over kernels of the longer of compute and memory time.
      compute_seconds: Time of matrix products alone.
      memory_seconds: Time of memory traffic alone.
      communication_seconds: Time of collectives alone.
      exposed_seconds: Exposed communication time.
      overlapped_seconds: Communication time overlapped by matrix products.
      flops: FLOPs of matrix products.
      traffic_bytes: Bytes that kernels read from and write to device memory.
      communication_bytes: Bytes sent by each device.
      model_flops_fraction: Model FLOPs utilization, a fraction of the target's peak; None without
        `model_flops`.
      target: Target whose peaks were used.
      assumptions: Sentences about the model.
    """

    seconds: float
    kernel_seconds: float
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    exposed_seconds: float
    overlapped_seconds: float
    flops: int
    traffic_bytes: int
    communication_bytes: float
    model_flops_fraction: float | None
    target: Target
    assumptions: tuple[str, ...]

    @property
    def overlapped(self) -> float:
        """Fraction of communication time that matrix products overlap; 1.0 if nothing is sent."""
        seconds = self.communication_seconds
        return self.overlapped_seconds / seconds if seconds else 1.0


def step_time(
    program: Program,
    collectives: Sequence[Collective],
    target: Target,
    model_flops: float | None = None,
) -> StepTime:
    """Models the time of one run of a compiled program on a target.

    Args:
      program: A scheduled program, parsed.
      collectives: Its collectives, from `collectives.of_program`.
      target: A target from `targets.target`. "cpu" has no peaks. If the fast interconnect joins
        more or fewer devices than a host, `dataclasses.replace` its `host_devices`.
      model_flops: FLOPs of a step on one device, without recomputation.

    Raises:
      ValueError: The target has no peaks, or a loop has an unknown trip count.

    Example:
      >>> from zero_jax.hlo import hlo_text, targets
      >>> text = '''HloModule step, is_scheduled=true, num_partitions=1
      ... ENTRY %main (p: f32[1000000]) -> f32[1000000] {
      ...   %p = f32[1000000]{0} parameter(0)
      ...   ROOT %c = f32[1000000]{0} copy(%p)
      ... }'''
      >>> time = step_time(hlo_text.parse(text), (), targets.target("h100"))
      >>> time.traffic_bytes, f"{time.seconds * 1e6:.2f} microseconds"
      (8000000, '2.39 microseconds')
    """
    if not all(x > 0 for x in (target.flops, target.memory_bandwidth, target.slow_wire)):
        raise ValueError(
            f"`target`={target.name!r} has no FLOP/s, memory bandwidth or interconnect bandwidth: "
            "use an accelerator, for example 'h100'"
        )
    flops = Flops(program)
    seconds, products, work, traffic = kernels(target, flops).computation(program.entry)
    clock = Timeline(flops, collectives, target).clock
    step = seconds + clock.waited
    fraction = model_flops / target.flops / step if model_flops and step else None
    return StepTime(
        seconds=step,
        kernel_seconds=seconds,
        compute_seconds=products,
        memory_seconds=traffic / target.memory_bandwidth,
        communication_seconds=clock.communication_seconds,
        exposed_seconds=clock.waited,
        overlapped_seconds=max(0.0, clock.communication_seconds - clock.waited),
        flops=int(work),
        traffic_bytes=int(traffic),
        communication_bytes=clock.communication_bytes,
        model_flops_fraction=fraction,
        target=target,
        assumptions=_assumptions(target, flops, collectives),
    )


def format_step_time(t: StepTime) -> str:
    """Formats the step, its kernels, its communication and the model FLOPs utilization."""
    lines = [
        f"step     {t.seconds:9.4f} s  on {t.target.name}, at its peak rates",
        f"kernels  {t.kernel_seconds:9.4f} s  compute {t.compute_seconds:.4f} s "
        f"({t.flops / 1e12:.1f} TFLOP), memory {t.memory_seconds:.4f} s "
        f"({t.traffic_bytes / 1e9:.1f} GB)",
        f"sending  {t.communication_seconds:9.4f} s  overlapped {t.overlapped_seconds:.4f} s "
        f"({t.overlapped:.0%}), exposed {t.exposed_seconds:.4f} s "
        f"({t.communication_bytes / 1e9:.1f} GB)",
    ]
    if t.model_flops_fraction is not None:
        lines.append(f"model    {t.model_flops_fraction:9.1%}    of the peak FLOP/s")
    return "\n".join(lines)


class Transfer(NamedTuple):
    """Load of the interconnect by one run of a collective."""

    seconds: float
    bytes: float


@dataclass
class Clock:
    """Progress of the device and of the interconnect."""

    now: float = 0.0  # seconds of products and of waiting so far
    free: float = 0.0  # when all that was started is sent
    waited: float = 0.0
    communication_seconds: float = 0.0
    communication_bytes: float = 0.0

    @property
    def behind(self) -> float:
        """Seconds for which the interconnect is busy from now on."""
        return max(0.0, self.free - self.now)

    def send(self, transfer: Transfer) -> float:
        """Starts a transfer; returns when it ends."""
        self.free = max(self.now, self.free) + transfer.seconds
        self.communication_seconds += transfer.seconds
        self.communication_bytes += transfer.bytes
        return self.free

    def wait(self, end: float) -> None:
        """Lets the device wait until then."""
        self.waited += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def repeat(self, before: "Clock", times: int) -> None:
        """Repeats all that has happened since `before`."""
        self.free += times * (self.now - before.now)
        for name in ("now", "waited", "communication_seconds", "communication_bytes"):
            now = getattr(self, name)
            setattr(self, name, now + times * (now - getattr(before, name)))


class Timeline:
    """The schedule of a program, played through.

    Matrix products take their time, other instructions none. There is one interconnect: a
    collective starts when those before it have ended. It ends when its bytes are sent, and where
    the program needs its result earlier, the device waits.

    Attributes:
      clock: The clock at the end of the program.
      transfers: Load of the interconnect by the collectives, by their names.
      delays: Seconds by which the last run of each collective could have started earlier, when its
        operands were computed or received, by its name.
    """

    def __init__(self, flops: Flops, collectives: Sequence[Collective], target: Target):
        self._flops, self._target, program = flops, target, flops.program
        self.transfers = {
            c.name: _transfer(c, program.num_devices, target)
            for c in collectives
            if c.sent_elements
        }
        self.clock, self.delays = Clock(), dict[str, float]()
        self._play(program.entry)

    def _play(self, computation: Computation, *, waits: bool = True) -> float:
        """Plays a computation, in which the device waits or not; returns when all is sent."""
        ends: dict[str, float] = {}  # of operations that were started
        begin, ready_at = self.clock.now, dict[str, float]()
        for i in computation.instructions.values():
            ready = max((ready_at.get(name, begin) for name in i.operands), default=begin)
            before = self.clock.now
            if i.continues:
                end = max((ends[name] for name in i.operands if name in ends), default=before)
            else:
                end = self._one(i, ready)
            blocks = i.opcode.endswith("-done") if i.continues else not i.asynchronous
            if blocks and waits:
                self.clock.wait(end)
            else:
                ends[i.name] = end
            ready_at[i.name] = ready if end <= before else max(ready, end)
        return max(ends.values(), default=self.clock.now)

    def _one(self, i: Instruction, ready: float) -> float:
        """Plays an instruction; returns when all that it sends is sent."""
        if i.name in self.transfers:
            self.delays[i.name] = max(self.clock.now, self.clock.free) - ready
            return self.clock.send(self.transfers[i.name])
        match i.kind:
            case "while":
                self._loop(i.called[0], i.trip_count or 0)
            case "conditional":
                self._most_expensive(i.called)
            case "call" | "async":
                return max(self._play(called, waits=not i.asynchronous) for called in i.called)
            case _:
                self.clock.now += self._target.product_seconds(*self._flops.instruction(i))
        return self.clock.now

    def _loop(self, body: Computation, trips: int) -> None:
        for remaining in reversed(range(trips)):
            before = dataclasses.replace(self.clock)
            self._play(body)
            if math.isclose(self.clock.behind, before.behind, abs_tol=1e-12):
                self.clock.repeat(before, remaining)  # all others are like this one
                return

    def _most_expensive(self, branches: Sequence[Computation]) -> None:
        before, ends = self.clock, []
        for branch in branches:
            self.clock = dataclasses.replace(before)
            self._play(branch)
            ends.append(self.clock)
        self.clock = max(ends, key=lambda clock: clock.now)


def kernels(target: Target, flops: Flops) -> Totals:
    """Sums (seconds, seconds of products, FLOPs, bytes of traffic) of the kernels that run."""
    nothing = (0.0, 0.0, 0, 0)

    def kernel(i: Instruction) -> Cost | None:
        if i.kind in CALLS:
            return None
        if i.kind in _NO_KERNEL or i.continues:
            return nothing
        work, traffic = flops.instruction(i), traffic_bytes(i)
        products = target.product_seconds(*work)
        return max(products, traffic / target.memory_bandwidth), products, work[0], traffic

    return Totals(kernel, nothing)


def _transfer(c: Collective, num_devices: int, target: Target) -> Transfer:
    """Returns the communication time of one run of a collective."""
    n, rounds = c.group_size, 1 + (c.kind == "all-reduce")
    sent = rounds * c.bytes * ((n - 1) / n if c.kind in _RING | _TO_ALL else 1.0)
    in_host = _devices_per_host(c, num_devices, target.host_devices)
    if c.kind in _RING:
        return Transfer(sent / target.ring_wire(n, in_host), sent)
    inside = sent if in_host == n else 0.0
    if c.kind in _TO_ALL:  # parts for devices of the same host stay in it
        inside = c.bytes * (in_host - 1) / n
    crossing = min(target.fast_wire, target.slow_wire)
    return Transfer(inside / target.fast_wire + (sent - inside) / crossing, sent)


def _devices_per_host(c: Collective, num_devices: int, host_devices: int) -> int:
    """Returns the smallest number of devices on one host in a collective's group or pair.

    Devices are numbered host by host, as in a mesh over full hosts.
    """
    groups = replica_groups.parse(c.replica_groups, num_devices).rows
    hosts = (collections.Counter(device // host_devices for device in group) for group in groups)
    return min(count for host in hosts for count in host.values())


def _assumptions(
    target: Target, flops: Flops, collectives: Sequence[Collective]
) -> tuple[str, ...]:
    any_fp8 = flops.computation(flops.program.entry)[1] > 0
    fast, slow, in_host = target.fast_wire / 1e9, target.slow_wire / 1e9, target.host_devices
    fp8 = f" ({target.fp8_flops / 1e12:.4g} in fp8)" if any_fp8 else ""
    found = [
        f"Every kernel reaches the peaks of {target.name}: {target.flops / 1e12:.4g} TFLOP/s of "
        f"16-bit matrix products{fp8}, whatever the dtype, and {target.memory_bandwidth / 1e9:.4g} "
        "GB/s of memory; a run reaches less.",
        "A kernel takes the longer of its matrix products and its memory traffic, other arithmetic "
        "is free; kernels run one after the other, without launch gaps.",
        "A kernel reads its operands from memory once and writes its results there; caches and "
        "repeated reads are ignored.",
        f"Collectives are rings without latency: {fast:.4g} GB/s a device within a host of "
        f"{in_host}; between hosts {slow:.4g} GB/s for each device that the group has on a host, "
        f"{min(fast, in_host * slow):.4g} GB/s for all; devices are numbered host by host. An "
        "all-to-all sends only the parts for other hosts between hosts.",
        "All collectives share one interconnect, one after the other as they are started. They "
        "overlap with matrix products scheduled meanwhile, and with no other kernel.",
    ]
    if any(c.conditional for c in collectives):
        found.append("The more expensive branch of a conditional runs.")
    if documents := flops.documents():
        found.append(
            "cuDNN's attention over a packed row takes as long as over one document. A row has at "
            f"most {documents} documents; with more the kernel runs again."
        )
    if uncounted := flops.uncounted():
        found.append(f"The FLOPs of these library calls are left out: {', '.join(uncounted)}.")
    return tuple(found)
