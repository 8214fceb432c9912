"""Peak of a training step's temporaries, predicted from its trace: no compiler, no device.

`operations.py` reads the trace, `buffers.py` says which values are in memory and when. Operations
run in the order of the trace, since the engine writes out when layers are gathered and gradients
reduced (`engine/layers.py`). No number is fitted: `docs/plan-accuracy.md` has the errors.

Terms at the peak; L layers, B sequences, T tokens, D width, c bytes of the compute dtype, r of the
reduce dtype:

  copy       gathered parameters: stage 0 at most cΨ (0 if c = 4), 1 and 2 cΨ, 3 those of a layer
             and of the next
  gradients  of parameters: stage 0, and 1 of several micro-batches, the full cΨ, else fp32 shards
             4Ψ/N (of scanned matrices rΨ/N, if there is one micro-batch), and those of one layer or
             two in full until they are reduced
  saved      from forward to backward: remat "block" L·B·T·D·c, "block_sqrt" about √L·B·T·D·c;
             "dots" the results of products, for a GPT L·B·T·9·D·c;
             "none" all that the backward pass reads
  loss       logits and their gradients, a chunk at a time
  work       activations of one layer while it runs, forward or backward

Source: ZeRO (arXiv:1910.02054), sections 3 and 6, for what there is to count.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zero_jax.engine.lifetimes import Leaf
from zero_jax.plan.buffers import KERNELS, SUMS_OVER_DEVICES, Buffer, Lifetimes, readers_of
from zero_jax.plan.operations import (
    LOOP,
    LOOP_END,
    LinearStep,
    Operation,
    Value,
    device_part,
    linear_step,
)
from zero_jax.tracing.jaxpr import AnyJaxpr

TERMS = ("copy", "gradients", "saved", "loss", "work")


class Temporaries(NamedTuple):
    """Bytes by term at the peak of a step, and those in host memory between the passes."""

    terms: dict[str, int]
    host: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.terms.values())


def temporaries(
    jaxpr: AnyJaxpr,
    leaves: Sequence[Leaf] = (),
    given: int | None = None,
    *,
    parts: int = 1,
    on_gpu: bool = False,
) -> Temporaries:
    """Predicts the temporaries of a traced training step, which has a `shard_map` in it.

    Args:
      jaxpr: The step, `jax.jit(step).trace(...).jaxpr`.
      leaves: The parameters; they are the first inputs of that `shard_map`.
      given: Number of all inputs; arrays that the loss closes over come before them.
      parts: MP, the size of the model axis.
      on_gpu: True for a program of XLA for GPUs.
    """
    part = device_part(jaxpr)
    first = len(part.invars) - (given or len(part.invars))
    cuts = [leaf.cut for leaf in leaves]
    split = [None if cut.model is None else cut.model % len(cut.shape) for cut in cuts]
    step = linear_step(part, [None] * first + split, parts)
    weights = step.inputs[first : first + len(leaves)]
    of_layers = {w for w, leaf in zip(weights, leaves, strict=True) if leaf.in_layer}
    buffers = Lifetimes(step, on_gpu).buffers()
    changes = Counter[int]()
    for buffer in buffers:
        changes[buffer.start] += buffer.value.bytes
        changes[buffer.stop + 1] -= buffer.value.bytes
    times = sorted(changes)
    held = itertools.accumulate(changes[time] for time in times)
    worst, _ = max(zip(times, held, strict=True), key=operator.itemgetter(1), default=(0, 0))
    live = [buffer for buffer in buffers if buffer.start <= worst <= buffer.stop]
    return Temporaries(_by_term(step, live, {*weights}, of_layers), _host_bytes(step))


def _by_term(
    step: LinearStep, live: Sequence[Buffer], weights: set[Value], of_layers: set[Value]
) -> dict[str, int]:
    """Returns the bytes of buffers by term."""
    operations, terms = step.operations, dict.fromkeys(TERMS, 0)
    copies, gradients = _copies_of(weights, operations), _only_summed(operations)
    transposed = (at for at, o in enumerate(operations) if "transpose(" in o.context)
    backward, layers = next(transposed, 0), _copies_of(of_layers, operations)
    forward = (at for at in range(backward) if not layers.isdisjoint(operations[at].inputs))
    loops = [(o.name == LOOP) - (o.name == LOOP_END) for o in operations]
    depth = list(itertools.accumulate(loops))
    reads = range(max(forward, default=backward), backward + 1)
    last_layer = next(at for at in reads if depth[at] == depth[backward])  # with its loop
    for buffer in live:
        if buffer.value in copies:
            term = "copy"
        elif buffer.value in gradients:
            term = "gradients"
        elif last_layer < buffer.made_at < backward:
            term = "loss"
        else:
            term = "saved" if buffer.made_at < backward <= buffer.stop / 2 else "work"
        terms[term] += buffer.value.bytes
    return terms


def _copies_of(weights: set[Value], operations: Sequence[Operation]) -> set[Value]:
    """Returns the weights, and values made of weights alone by casts and gathers."""
    weights = set(weights)
    for operation in operations:
        arrays = [value for value in operation.inputs if value.shape]  # no positions of slices
        if operation.shared:
            weights.update(new for old, new in operation.shared if old in weights)
        elif operation.name in KERNELS - {"all_gather"} or not arrays:
            continue
        elif weights.issuperset(arrays):
            weights.update(operation.outputs)
    return weights


def _only_summed(operations: Sequence[Operation]) -> set[Value]:
    """Returns gradients: values that lead to sums over devices and to results alone."""
    found, readers = set[Value](), readers_of(operations)

    def sums(operation: Operation, value: Value) -> bool:
        ends = operation.name in (LOOP, LOOP_END)
        made = [new for old, new in operation.shared if old is value]
        moves = operation.name in (*SUMS_OVER_DEVICES, "dynamic_update_slice")
        allowed = ends or moves or operation.name not in KERNELS
        return allowed and found.issuperset(made if made or ends else operation.outputs)

    for operation in reversed(operations):
        for value in operation.outputs:
            if all(sums(operations[r], value) for r in readers[value]):
                found.add(value)
    return found


def _host_bytes(step: LinearStep) -> int:
    """Returns the bytes put into host memory; of a loop its stack, not the slices of it."""
    ended = {v for o in step.operations if o.name == LOOP_END for v in o.inputs}
    ended.update(value for value in step.results if value is not None)
    return sum(
        value.stored_bytes
        for operation in step.operations
        for value in operation.outputs
        if value.on_host
        and (operation.name == LOOP or (operation.name == "device_put" and value not in ended))
    )
