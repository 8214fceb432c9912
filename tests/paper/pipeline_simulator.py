"""Runs the order of passes that each device of a pipeline is given: idle time, memory, words.

A pass is ("F", "B" or "W", chunk, micro-batch). Chunk c of device i is stage c·p + i of the model.
F waits for the stage before, B for the stage after, W for its own B; nothing else makes a device
wait, and sending takes no time. The orders of the papers are in `pipeline_orders`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

Pass = tuple[str, int, int]
Orders = Sequence[Sequence[Pass]]

WHOLE = {"F": 1.0, "B": 2.0}  # the backward pass in one piece
APART = {"F": 1.0, "B": 1.0, "W": 1.0}


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of it.

    Attributes:
      starts, ends: of each pass, by device.
      work: of one device, all the same.
    """

    starts: tuple[dict[Pass, float], ...]
    ends: tuple[dict[Pass, float], ...]
    work: float

    @property
    def idle(self) -> float:
        """Of a device, from the first pass of a step to its last pass anywhere."""
        return max(max(ends.values()) for ends in self.ends) - self.work

    @property
    def idle_between(self) -> float:
        """The most that a device waits between its own first pass and its own last one."""
        spans = zip(self.starts, self.ends, strict=True)
        return max(max(e.values()) - min(s.values()) for s, e in spans) - self.work


def run(orders: Orders, times: Mapping[str, float]) -> Run:
    """Starts every pass as soon as its device is free and what it needs is there.

    Raises:
      ValueError: a pass waits for one that never comes, or comes after it on its own device; or
        devices have different passes.
    """
    passes = set(orders[0])
    if any(set(order) != passes or len(order) != len(passes) for order in orders):
        raise ValueError("every device runs the same passes, each once")
    chunks = 1 + max(chunk for order in orders for _, chunk, _ in order)
    starts: tuple[dict[Pass, float], ...] = tuple({} for _ in orders)
    ends: tuple[dict[Pass, float], ...] = tuple({} for _ in orders)
    free, done = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for i, order in enumerate(orders):
            while done[i] < len(order):
                needs = list(_needs(i, order[done[i]], len(orders), chunks))
                if not all(need in ends[device] for device, need in needs):
                    break
                now, ready = order[done[i]], [ends[device][need] for device, need in needs]
                starts[i][now] = max([free[i], *ready])
                free[i] = ends[i][now] = starts[i][now] + times[now[0]] / chunks
                done[i], moved = done[i] + 1, True
    stuck = [
        f"device {i} at {order[n]}"
        for i, (order, n) in enumerate(zip(orders, done, strict=True))
        if n < len(order)
    ]
    if stuck:
        raise ValueError("deadlock: " + ", ".join(stuck))
    return Run(starts, ends, sum(times[kind] for kind, _, _ in orders[0]) / chunks)


def _needs(device: int, now: Pass, devices: int, chunks: int) -> Iterator[tuple[int, Pass]]:
    kind, chunk, row = now
    stage = chunk * devices + device
    if kind == "F" and stage:
        yield (stage - 1) % devices, ("F", (stage - 1) // devices, row)
    if kind == "B":
        yield device, ("F", chunk, row)
        if stage + 1 < devices * chunks:
            yield (stage + 1) % devices, ("B", (stage + 1) // devices, row)
    if kind == "W":
        yield device, ("B", chunk, row)


def peak(order: Sequence[Pass], after_b: float = 1.0) -> float:
    """Activations that a device holds at most, in micro-batches of all its chunks.

    From F to B one is held, from B to W `after_b` of it.
    """
    apart = any(kind == "W" for kind, _, _ in order)
    steps = {"F": 1.0, "B": after_b - 1.0, "W": -after_b} if apart else {"F": 1.0, "B": -1.0}
    held = most = 0.0
    for kind, _, _ in order:
        held += steps[kind]
        most = max(most, held)
    return most / (1 + max(chunk for _, chunk, _ in order))


def sent(device: int, order: Sequence[Pass], devices: int) -> int:
    """Outputs and gradients of a stage that a device sends to others."""
    last = (1 + max(chunk for _, chunk, _ in order)) * devices - 1
    edge = {"F": last, "B": 0}  # whose outputs, and whose gradients of inputs, nobody waits for
    if devices == 1:
        return 0
    return sum(edge.get(kind, last) != c * devices + device for kind, c, _ in order if kind in edge)


def stashed(order: Sequence[Pass]) -> tuple[int, int]:
    """Versions of its weights that a device holds at most, and by how many updates one is late.

    Every B is an update at once and uses the weights of its F, as PipeDream has it.
    """
    now, used, most, late = 0, {}, 1, 0
    for kind, _, row in order:
        if kind == "F":
            used[row] = now
        else:
            late = max(late, now - used.pop(row))
            now += 1
        most = max(most, len({now, *used.values()}))
    return most, late
