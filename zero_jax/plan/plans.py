"""The plan of one step: predicted bytes, the audit of the compiled program, and both as text."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zero_jax.engine.lifetimes import Layers
from zero_jax.hlo import aot, auditor, roofline
from zero_jax.hlo.fp8_products import Fp8Products
from zero_jax.hlo.targets import Target
from zero_jax.plan.tables import gigabytes, table
from zero_jax.remat import policies
from zero_jax.sharding.mesh import MODEL

_WORD_BYTES = 2  # as the paper counts: bf16 or fp16
_MUCH = 0.25  # of a step
_UNROLLED = "unrolled: its stacks of saved activations would be zeroed, filled and read"


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Predicted peak bytes of one device in a step, by purpose.

    Attributes:
      parameters: fp32 master parameters on the device, 4Ψ/N, padding included (stage 0: 4Ψ).
      optimizer_state: Optimizer state on the device, from the shapes of any optax transformation;
        Adam 8Ψ/N. Includes the 16 bytes of the guard.
      batch: The rows of this device, and the extra arguments.
      temporaries: Bytes by term of `temporaries.TERMS`. Offload adds fetched (master parameters
        while the model uses them) and pieces (two pieces of the streamed update). If the update has
        a higher peak than forward and backward, see `planning.Update`.
      host_states: Host memory of offloaded states: 8Ψ/N of Adam's state, 4Ψ/N of fp32 master
        parameters.
      host_saved: Host memory of activations that a remat policy offloads between forward and
        backward.
    """

    parameters: int
    optimizer_state: int
    batch: int
    temporaries: Mapping[str, int]
    host_states: int = 0
    host_saved: int = 0

    @property
    def host(self) -> int:
        """Total bytes in host memory."""
        return self.host_states + self.host_saved

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term; those on the device sum to `total_bytes`."""
        names = ("parameters", "optimizer_state", "batch")
        stored = {name: getattr(self, name) for name in names}
        return {**stored, **self.temporaries, "host": self.host}

    @property
    def alias_bytes(self) -> int:
        """Bytes of donated arguments, whose memory the outputs reuse."""
        return self.parameters + self.optimizer_state

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments of the compiled program; predicted exactly."""
        return self.alias_bytes + self.batch

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + sum(self.temporaries.values())


class Sent(NamedTuple):
    """Elements and bytes; an all-reduce sends its elements twice."""

    elements: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step on one mesh: predicted memory and communication, and the compiled program if any.

    Attributes:
      stage: ZeRO stage, 0 to 3.
      grad_accum_steps: Number of gradient-accumulation steps, k.
      remat: Remat policy.
      axes: Sizes of the mesh axes by name.
      num_params: Number of parameters, Ψ.
      layers: Layers found in the loss, with their remat policy.
      window: Elements of the largest layer or leaf that is gathered at once.
      predicted: Predicted bytes by term.
      trained: Fraction of Ψ that is not frozen.
      sent: Elements and bytes that each device sends per step, by kind of collective, counted in
        the trace; "update" for those of an update of partitioned matrices.
      fp8_params: Paths of the parameters that are multiplied in fp8.
      not_fp8: Paths of other matrices that are in products or layers, if some are.
      fp8_flops: FLOPs of the products in fp8 of the traced step, on all devices of `model`.
      fp8: Products in fp8 of the compiled program; None without any, or if only predicted.
      compiled: Audit of the compiled program; None if only predicted.
      target: Target of the compilation; None for the devices of the mesh.
      time: Modelled lower bound of the step time; None if only predicted, or if the device has no
        known peaks.
    """

    stage: int
    grad_accum_steps: int
    remat: str | policies.Remat
    axes: Mapping[str, int]
    num_params: int
    layers: tuple[Layers, ...]
    window: int
    predicted: Predicted
    trained: float = 1.0
    sent: Mapping[str, Sent] = dataclasses.field(default_factory=dict)
    fp8_params: tuple[str, ...] = ()
    not_fp8: tuple[str, ...] = ()
    fp8_flops: int = 0
    fp8: Fp8Products | None = None
    compiled: auditor.Audit | None = None
    target: Target | None = None
    time: roofline.StepTime | None = None

    def __str__(self) -> str:
        parts = [format_stages([self]), format_layers(self)]
        return "\n".join(parts if self.compiled is None else [*parts, "", format_proof(self, 0)])

    @property
    def total_bytes(self) -> int:
        """Bytes per device: of the compiled program if there is one, otherwise predicted."""
        return self.predicted.total_bytes if self.compiled is None else self.compiled.total_bytes

    @property
    def error(self) -> float:
        """Predicted over compiled total bytes, minus one; nan if only predicted."""
        if self.compiled is None:
            return float("nan")
        return self.predicted.total_bytes / self.compiled.total_bytes - 1

    @property
    def model_parallel(self) -> int:
        """Tensor-parallel degree, MP."""
        return self.axes.get(MODEL, 1)

    @property
    def elements_per_param(self) -> float:
        """Elements that ZeRO sends per device and step, divided by Ψ / MP.

        Counted in the compiled program if there is one, otherwise in the trace. Tensor-parallel
        communication along `model` is excluded.

        Raises:
          ValueError: A loop with a collective has an unknown trip count; see `countable`.
        """
        if self.compiled is not None:
            return self.compiled.elements_per_param(self.num_params, self.model_parallel)
        elements = sum(sent.elements for sent in self.sent.values())
        return elements / max(self.num_params / self.model_parallel, 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends per step, counted as `elements_per_param`.

        Excludes a ring's factor (N-1)/N. Tensor-parallel communication is included only if
        compiled.

        Raises:
          ValueError: A loop with a collective has an unknown trip count; see `countable`.
        """
        if self.compiled is not None:
            return sum(c.sent_bytes for c in self.compiled.collectives)
        return sum(sent.bytes for sent in self.sent.values())

    @property
    def host_bytes_sent(self) -> int:
        """Predicted bytes moved to and from host memory per device and step."""
        predicted = self.predicted
        return 2 * (predicted.host_states + self.grad_accum_steps * predicted.host_saved)

    @property
    def host_elements_per_param(self) -> float:
        """`host_bytes_sent` in elements of 2 bytes, divided by Ψ / MP."""
        return self.host_bytes_sent / _WORD_BYTES / max(self.num_params / self.model_parallel, 1)

    @property
    def host_seconds(self) -> float:
        """Seconds to move `host_bytes_sent` over the target's host link without overlap.

        It is 0 if there is no target or its link bandwidth is unknown. Not included in `time`.
        """
        link = self.time.target.host_wire if self.time else 0.0
        return self.host_bytes_sent / link if link else 0.0

    @property
    def countable(self) -> bool:
        """True if every collective runs a known number of times per step."""
        found = () if self.compiled is None else self.compiled.collectives
        return all(c.runs is not None or c.group_size == 1 for c in found)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON: the prediction and, if compiled, the audit."""
        audit, time, predicted = self.compiled, self.time, self.predicted
        names = ("stage", "grad_accum_steps", "num_params")
        sizes = ("total_bytes", "argument_bytes", "alias_bytes", "terms")
        known: dict[str, Any] = {
            **{name: getattr(self, name) for name in names},
            "remat": str(self.remat),
            "mesh": dict(self.axes),
            "predicted": {name: getattr(predicted, name) for name in sizes},
            "elements_per_param": self.elements_per_param if self.countable else None,
            "sent_bytes": self.sent_bytes if self.countable else None,
        }
        if audit is None:
            return known
        loops = {"layer_loop": True, "step": False} if self.countable else {}
        fractions = {k: audit.overlap(layers_only=v).fraction for k, v in loops.items()}
        return known | {
            "target": self.target.name if self.target else None,
            "error": self.error,
            "compiled": audit.as_dict(),
            "concurrent_fraction": fractions or None,
            "overlapped_fraction": time.overlapped if time else None,
            "collectives": [c.as_dict() for c in audit.collectives],
            "flops": audit.flops,
            "fp8": dataclasses.asdict(self.fp8) if self.fp8 else None,
            "flops_not_counted": list(audit.uncounted),
            "step_time": dataclasses.asdict(time) if time else None,
            "not_shown": self.not_shown,
        }

    @property
    def not_shown(self) -> list[str]:
        """Limits of the compile check."""
        return list(aot.NOT_SHOWN[self.target.platform]) if self.target else []


def format_stages(plans: Sequence[Plan], memory_bytes: int = 0) -> str:
    """Formats predicted bytes per device: one row per term, one column per stage.

    Args:
      plans: One plan per column.
      memory_bytes: Available bytes, to add a row that says which plans fit; 0 omits it.
    """
    terms = [plan.predicted.terms for plan in plans]
    rows = [["", *(f"stage {plan.stage}" for plan in plans)]]
    for name in term_names(plans):
        if any(of.get(name) for of in terms):
            rows.append([name, *(gigabytes(of.get(name, 0)) for of in terms)])
    rows.append(["total", *(gigabytes(p.predicted.total_bytes) for p in plans)])
    if any(p.compiled for p in plans):
        rows.append(["compiled", *(gigabytes(p.total_bytes) if p.compiled else "" for p in plans)])
        rows.append(["error", *(f"{p.error:+.1%}" if p.compiled else "" for p in plans)])
    if memory_bytes:
        fits = ("fits" if p.total_bytes <= memory_bytes else "does not fit" for p in plans)
        rows.append([f"in {gigabytes(memory_bytes)}", *fits])
    elements, sizes = zip(*(_sent(plan, 3) for plan in plans), strict=True)
    return table([*rows, ["elements sent / Ψ", *elements], ["sent per step", *sizes]])


def format_layers(plan: Plan) -> str:
    """Formats the layers found in the loss, and their remat policies."""
    if not plan.layers:
        return "layers: none found, so remat has no effect"
    found = [
        f"{x.count} {'scanned' if x.scanned else 'unrolled'} of {x.elements:,} parameters, remat "
        f"{x.policy}" + (f" ({said})" if (said := x.fallback or _UNROLLED * x.unrolled) else "")
        for x in plan.layers
    ]
    return "layers: " + "; ".join(found) + _fp8_params(plan)


def _fp8_params(plan: Plan) -> str:
    """Formats which matrices of layers are multiplied in fp8, and which are not."""
    if not plan.fp8_params:
        return ""
    others = f"; not in fp8: {', '.join(plan.not_fp8)}" if plan.not_fp8 else ""
    return f"\nmultiplied in fp8: {', '.join(plan.fp8_params)}{others}"


def format_proof(plan: Plan, memory_bytes: int) -> str:
    """Formats the audit of the compiled program, and the limits of the check."""
    audit = plan.compiled
    assert audit is not None
    name = plan.target.name if plan.target else "these devices"
    fits, (elements, size) = "", _sent(plan, 4)
    if memory_bytes:
        word = "fits" if audit.total_bytes <= memory_bytes else "does NOT fit"
        fits = f": {word} in {gigabytes(memory_bytes)}"
    flops = "unknown" if audit.flops is None else f"{audit.flops / 1e12:,.1f} TFLOP"
    kept = f"{gigabytes(audit.temp_bytes)}, fragmentation {audit.fragmentation:.3f}"
    rows = [
        ["total", gigabytes(audit.total_bytes) + fits],
        ["  arguments", f"{audit.argument_bytes:,} (predicted {plan.predicted.argument_bytes:,})"],
        ["  aliased", f"{audit.alias_bytes:,} (predicted {plan.predicted.alias_bytes:,})"],
        ["  temporaries", kept],
        ["  outputs not aliased", gigabytes(audit.output_bytes - audit.alias_bytes)],
        ["  host", gigabytes(audit.host_bytes)],
        ["predicted", f"{gigabytes(plan.predicted.total_bytes)} ({plan.error:+.1%})"],
        ["elements sent / Ψ", elements],
        ["sent per step", size],
        ["  whole step", _overlap(plan, layers_only=False)],
        ["  in layer loops", _overlap(plan, layers_only=True)],
        *([] if plan.time is None else [["  overlapped", _overlapped(plan.time)]]),
        ["matmuls", flops],
    ]
    if plan.fp8 is not None:
        rows.append(["  in fp8", _in_fp8(plan)])
    if audit.uncounted:
        rows.append(["  not counted", ", ".join(audit.uncounted)])
    parts = [f"Stage {plan.stage} compiled for {name}", table(rows, "<"), "", "Largest temporaries"]
    parts += [
        f"  {gigabytes(t.bytes):>10}  {t.shape[:40]:40}  {t.source}"
        for t in audit.peak.temporaries[:8]
    ]
    parts += ["", "Collectives", auditor.format_table(audit)]
    if plan.time is not None:
        parts += ["", "Step time", roofline.format_step_time(plan.time)]
        parts += [f"- {line}" for line in plan.time.assumptions]
        if audit.host_bytes:
            crossing = f"up to {gigabytes(2 * audit.host_bytes)} per step"
            if plan.host_seconds:
                crossing += f", {plan.host_seconds:.4f} s without overlap"
            parts += [f"- Transfers to host memory are not part of the step time: {crossing}."]
    if plan.not_shown:
        parts += ["", "Not shown by a compile check", *(f"- {line}" for line in plan.not_shown)]
    return "\n".join(parts)


def _sent(plan: Plan, digits: int) -> tuple[str, str]:
    """Formats the elements per parameter and the bytes that a plan sends."""
    if not plan.countable:
        return "?", "?"
    return f"{plan.elements_per_param:.{digits}f}", gigabytes(plan.sent_bytes)


def _overlap(plan: Plan, *, layers_only: bool) -> str:
    if plan.compiled is None or not plan.countable:
        return "unknown: a loop around a collective depends on data"
    sent = plan.compiled.overlap(layers_only=layers_only)
    return (
        f"{gigabytes(sent.concurrent)} concurrent with a matmul, {gigabytes(sent.exposed)} exposed"
    )


def _in_fp8(plan: Plan) -> str:
    """Formats the products in fp8, or those that the devices emulate."""
    assert plan.fp8 is not None
    if not plan.fp8.count:
        return f"emulated: {plan.fp8_flops / 1e12:,.4g} TFLOP of numbers rounded to fp8"
    return f"{plan.fp8.flops / 1e12:,.1f} TFLOP, {plan.fp8.count:,} products"


def _overlapped(time: roofline.StepTime) -> str:
    """Formats the communication time that matrix products are long enough to overlap."""
    said = f"{time.overlapped:.0%} of {time.communication_seconds:.4f} s of communication"
    exposed = time.exposed_seconds / time.seconds if time.seconds else 0.0
    advice = f"; exposed for {exposed:.0%} of the step: compare meshes with `plan meshes`"
    return said + (advice if exposed >= _MUCH else "")


def term_names(plans: Sequence[Plan]) -> list[str]:
    """Returns the names of the terms of all plans."""
    return list(dict.fromkeys(name for plan in plans for name in plan.predicted.terms))
