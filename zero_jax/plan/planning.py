"""What a training step will hold, send and take on one device, before any device is there.

A plan has up to two halves. The prediction comes from shapes and the trace alone, in under a
second for any size of model: arguments exactly, temporaries by `forecast`. The proof comes from
the program that XLA compiled for the target: `hlo.Audit`. Both are data, to be asserted on.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding

from zero_jax.collectives.precision import Precision
from zero_jax.engine.grads import LossFn
from zero_jax.engine.lifetimes import Layers
from zero_jax.engine.optimizer import ZeroTransform
from zero_jax.engine.settings import Settings
from zero_jax.engine.step import TrainStep
from zero_jax.hlo import auditor, prove, roofline
from zero_jax.hlo.targets import Target
from zero_jax.hlo.targets import target as target_of
from zero_jax.offload import tiers
from zero_jax.offload.tiers import HOST, Offload
from zero_jax.plan import expert_words, forecast, plan_text, proof, update_forecast
from zero_jax.plan.memory import sent_per_param, words_per_param
from zero_jax.plan.predicted import Predicted
from zero_jax.plan.turned import turned_bytes
from zero_jax.sharding import layout
from zero_jax.sharding.mesh import (
    MODEL,
    AnyMesh,
    axis_size,
    batch_sharding,
    data_axis,
    experts_size,
    on_gpu,
)
from zero_jax.sharding.model_axis import ModelAxis
from zero_jax.sharding.paths import trained_part

PyTree = Any
_WORD_BYTES = 2  # as the paper counts: bf16 or fp16


class AnyZero(Protocol):
    """What plans ask of a `Zero`, which stands above this package."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def mesh(self) -> AnyMesh: ...
    @property
    def stage(self) -> Any: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def remat(self) -> str: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def offload(self) -> Offload: ...
    @property
    def memory_limit(self) -> float | None: ...
    @property
    def frozen(self) -> Any: ...
    @property
    def model_axis(self) -> ModelAxis: ...
    @property
    def settings(self) -> Settings: ...
    def at_stage(self, stage: int) -> Self: ...
    def abstract(self, fn: Callable[..., PyTree], *args: Any) -> PyTree: ...
    def optimizer(self, tx: optax.GradientTransformation) -> ZeroTransform: ...
    def train_step(
        self, loss_fn: LossFn, tx: optax.GradientTransformation, *, has_aux: bool = False
    ) -> Any: ...
    def plan(
        self, loss_fn: LossFn, tx: optax.GradientTransformation, *args: Any, **options: Any
    ) -> "Plan": ...
    def choose(
        self, loss_fn: LossFn, tx: optax.GradientTransformation, *args: Any, **options: Any
    ) -> Self: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step on one mesh: what is predicted, and what was compiled.

    Attributes:
      stage: 0 to 3.
      micro_batches: k.
      remat: the policy.
      axes: sizes of the mesh's axes by name.
      num_params: Ψ.
      layers: what layers were found in the loss, and under which policy.
      window: elements of the largest layer or leaf that is gathered at once.
      predicted: bytes by term.
      trained: the part of Ψ that is not frozen.
      update_words: that the update sends, beside ZeRO's, for products of matrices that are cut.
      token_words: that are sent to experts which stay with their devices, and back.
      travelling: the part of Ψ that does not stay so.
      precision: dtypes of the step, by which sent elements are counted in bytes.
      compiled: the audit of the compiled program, None if only predicted.
      target: what it was compiled for, None for the devices of the mesh itself.
      time: a lower bound of the step's time, None if only predicted or without figures.
    """

    stage: int
    micro_batches: int
    remat: str
    axes: Mapping[str, int]
    num_params: int
    layers: tuple[Layers, ...]
    window: int
    predicted: Predicted
    trained: float = 1.0
    update_words: float = 0.0
    token_words: float = 0.0
    travelling: float = 1.0
    precision: Precision = Precision()
    compiled: auditor.Audit | None = None
    target: Target | None = None
    time: roofline.StepTime | None = None

    def __str__(self) -> str:
        return plan_text.format_plan(self)

    @property
    def total_bytes(self) -> int:
        """Compiled if there is a compiled program, else predicted."""
        return self.predicted.total_bytes if self.compiled is None else self.compiled.total_bytes

    @property
    def error(self) -> float:
        """Predicted over compiled total, minus one; nan if only predicted."""
        if self.compiled is None:
            return float("nan")
        return self.predicted.total_bytes / self.compiled.total_bytes - 1

    @property
    def model_parallel(self) -> int:
        """MP."""
        return self.axes.get(MODEL, 1)

    @property
    def words_per_param(self) -> float:
        """Words that ZeRO sends per device and step over Ψ / MP: counted if compiled, else the
        paper's and those of the update, more than are sent where an embedding is looked up. What
        tensor parallelism sends along `model` is not among them."""
        if self.compiled is not None:
            return self.compiled.words_per_param(self.num_params, self.model_parallel)
        own = self.update_words + self.token_words
        zeros = words_per_param(self.stage, self.micro_batches, self.remat, self.trained)
        return self.travelling * zeros + own / max(self.num_params / self.model_parallel, 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends a step: counted if compiled, else in closed form.

        As for `words_per_param`, but what tensor parallelism sends is counted if compiled. A ring's
        factor (N-1)/N is left out, and so are the scales of int8 and int4.
        """
        if self.compiled is not None:
            sent = self.compiled.hidden()
            return sent.hidden + sent.exposed
        known = (self.stage, self.micro_batches, self.remat, self.trained)
        gathered, reduced = sent_per_param(*known)
        precision, psi = self.precision, self.num_params / self.model_parallel
        each = gathered * precision.gather_bytes + reduced * precision.scatter_bytes
        update = self.update_words * 4  # of fp32 momentum and what is made of it
        tokens = self.token_words * precision.compute.itemsize
        return self.travelling * psi * each + update + tokens

    @property
    def host_bytes_sent(self) -> int:
        """Bytes that go to host memory and back per device and step, predicted."""
        predicted = self.predicted
        return 2 * (predicted.host_states + self.micro_batches * predicted.host_saved)

    @property
    def host_words_per_param(self) -> float:
        """Elements of 2 bytes among `host_bytes_sent`, over Ψ / MP."""
        return self.host_bytes_sent / _WORD_BYTES / max(self.num_params / self.model_parallel, 1)

    @property
    def host_seconds(self) -> float:
        """Seconds that `host_bytes_sent` take on the target's link if nothing overlaps; 0 without
        a target or its figure. No part of `time`."""
        link = self.time.target.host_wire if self.time else 0.0
        return self.host_bytes_sent / link if link else 0.0

    @property
    def countable(self) -> bool:
        """Whether it is known how often each collective runs: no loop depends on data."""
        found = () if self.compiled is None else self.compiled.collectives
        return all(c.runs is not None or c.group_size == 1 for c in found)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: `predicted`, and where compiled all that was read from it."""
        known: dict[str, Any] = {
            "stage": self.stage,
            "micro_batches": self.micro_batches,
            "remat": self.remat,
            "mesh": dict(self.axes),
            "num_params": self.num_params,
            "predicted": {
                "total_bytes": self.predicted.total_bytes,
                "argument_bytes": self.predicted.argument_bytes,
                "alias_bytes": self.predicted.alias_bytes,
                "terms": self.predicted.terms,
            },
            "words_per_param": self.words_per_param if self.countable else None,
            "sent_bytes": self.sent_bytes if self.countable else None,
        }
        if self.compiled is None:
            return known
        return known | {
            "target": self.target.name if self.target else None,
            "error": self.error,
            "compiled": self.compiled.as_dict(),
            "hidden_fraction": {
                "layer_loop": self.compiled.hidden(layers_only=True).fraction,
                "step": self.compiled.hidden().fraction,
            }
            if self.countable
            else None,
            "covered_fraction": self.time.covered if self.time else None,
            "collectives": [c.as_dict() for c in self.compiled.collectives],
            "flops": self.compiled.flops,
            "flops_not_counted": list(self.compiled.uncounted),
            "step_time": dataclasses.asdict(self.time) if self.time else None,
            "not_shown": list(prove.not_shown(self.target)) if self.target else [],
        }


def of(
    zero: AnyZero,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    params: PyTree,
    batch: PyTree,
    *extras: Any,
    has_aux: bool = False,
    compile: bool = False,
    target: str | Target | None = None,
    topology: str | None = None,
    model_flops: float | None = None,
    latencies: str | pathlib.Path | None = None,
) -> Plan:
    """Plans the step of a `Zero`; what `Zero.plan` calls.

    Args:
      zero: with a stage from 0 to 3.
      loss_fn: as for `Zero.train_step`.
      tx: as for `Zero.train_step`.
      params: parameters at rest, from `Zero.init` or `Zero.abstract`.
      batch: the global batch, arrays or ShapeDtypeStructs.
      *extras: further arguments of the loss.
      has_aux: as for `Zero.train_step`.
      compile: whether to compile the step too, for the devices of the mesh.
      target: compiles for devices that need not be there: "h100", "a100", "h200", "b200", "v5p"
        or "cpu", or a `targets.Target` of your own; needs the extra `prove`.
      topology: how those hang together, "8x1x8" for 8 hosts of 8; full hosts by default.
      model_flops: FLOPs of forward and backward on one device, without recomputation.
      latencies: file, "step.pbtxt" say, into which is written how long instructions take on the
        target; the step is compiled again by it, and a run that is given it is scheduled as the
        program that was proven: `proof.flags`.

    Raises:
      ValueError: the target is unknown or cannot be compiled for here, or the mesh has no devices.
    """
    aim = None if target is None else target_of(target)
    if topology is not None and aim is None:
        raise ValueError(f"topology={topology!r} is that of a target: name it, target='h100' say")
    if aim is not None:
        prove.check(aim, zero.mesh.size, topology)
    proof.check(latencies, aim)
    step: TrainStep = zero.train_step(loss_fn, tx, has_aux=has_aux)
    # As this Zero lays them out, wherever they come from.
    shapes = zero.abstract(lambda full: full, jax.eval_shape(layout.logical, params))
    wrapped = tx if isinstance(tx, ZeroTransform) else zero.optimizer(tx)
    args = (shapes, wrapped.init(shapes), _placed(batch, batch_sharding(zero.mesh)), *extras)
    plan = _predict(step, args, _is_for_gpus(zero.mesh, aim))
    if not compile and aim is None:
        return plan
    own = proof.Proof(step, args, zero.mesh, aim, topology)
    compiled = own.compiled(latencies)
    time = own.time(compiled, model_flops)
    return dataclasses.replace(plan, compiled=compiled, target=aim, time=time)


def _is_for_gpus(mesh: AnyMesh, target: Target | None) -> bool:
    """Whether a step is compiled by XLA for GPUs; so are steps for devices that nobody names."""
    if target is not None:
        return target.platform == "cuda"
    return isinstance(mesh, AbstractMesh) or on_gpu(mesh)


def _predict(step: TrainStep, args: tuple[Any, ...], of_gpus: bool) -> Plan:
    params, opt_state, batch, *extras = args
    counts = [len(jax.tree.leaves(tree)) for tree in (params, batch, extras)]
    given = sum(counts) + 1  # the loss scale
    settings = step.settings
    full = jax.eval_shape(layout.logical, params)
    cuts, traced = settings.splitter(full), step.read(*args)
    jaxpr = step.trace(*args).jaxpr
    temporaries = forecast.forecast(
        *(jaxpr, counts[0], given),
        split=[None if c.model is None else c.model % len(c.shape) for c in cuts],
        parts=settings.model_axis.size,
        habits=forecast.Habits(
            of_gpus and settings.gathers_ahead(traced.layers), settings.bucket_bytes, of_gpus
        ),
    )
    terms = dict(temporaries.terms)
    if of_gpus and settings.stage == 3 and (turned := turned_bytes(traced.leaves)):
        terms["turned"] = turned
    update = update_forecast.forecast(settings, step.transformation.plain, full)
    worst = max(terms, update.terms, key=lambda terms: sum(terms.values()))
    host = tiers.bytes_on(params, HOST) + tiers.bytes_on(opt_state, HOST)
    streams = {}
    if host:
        # Stages 1 and 2 are done with the masters once they have gathered them.
        fetched = tiers.bytes_on(params, HOST) if settings.stage in (0, 3) else 0
        pieces = min(2 * settings.offload.piece_bytes, host)
        streams = {"fetched": fetched, "pieces": pieces}
    return Plan(
        stage=settings.stage,
        micro_batches=settings.micro_batches,
        remat=settings.remat,
        axes=dict(settings.mesh.shape),
        num_params=sum(x.size for x in jax.tree.leaves(full)),
        layers=tuple(traced.layers),
        window=traced.window,
        trained=trained_part(full, settings.frozen),
        precision=settings.precision,
        update_words=update.words,
        token_words=expert_words.tokens(jaxpr.jaxpr),
        travelling=expert_words.travelling(
            cuts, axis_size(settings.mesh, data_axis(settings.mesh)) // experts_size(settings.mesh)
        ),
        predicted=Predicted(
            parameters=tiers.bytes_on(params),
            optimizer_state=tiers.bytes_on(opt_state),
            batch=tiers.bytes_on(batch) + tiers.bytes_on(extras),
            temporaries=worst | streams,
            host_states=host,
            host_saved=temporaries.host,
        ),
    )


def _placed(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """A batch as ShapeDtypeStructs whose rows are split over the devices."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x), sharding=sharding),
        batch,
    )
