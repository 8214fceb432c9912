"""Plans of a training step: memory, communication and time per device, without any device.

A plan has up to two halves. The prediction comes from shapes and the trace alone, in under a
second for any size of model: arguments exactly, temporaries by `temporaries.py`. The compile check
comes from the program that XLA compiled for the target: `hlo.Audit`. Both are data that tests can
use.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding

from zero_jax.context_parallel import cudnn
from zero_jax.engine import parameters
from zero_jax.engine.config import Config
from zero_jax.engine.grads import LossFn
from zero_jax.engine.lifetimes import Leaf
from zero_jax.engine.optimizer import ZeroTransform
from zero_jax.engine.step import TrainStep
from zero_jax.engine.transformations import without_frozen
from zero_jax.hlo import aot, auditor, roofline, targets
from zero_jax.hlo.targets import Target
from zero_jax.low_bit.state import FP32
from zero_jax.matrix_updates.update import AssignedUpdate, assigned_update
from zero_jax.offload.host import HOST, is_on_host
from zero_jax.plan import fp8_check
from zero_jax.plan.operations import device_part
from zero_jax.plan.peak_memory import temporaries
from zero_jax.plan.plans import Plan, Predicted, Sent
from zero_jax.sharding import layout
from zero_jax.sharding.layout import state_partitions
from zero_jax.sharding.mesh import MODEL, AnyMesh, abstract_of, batch_sharding, on_gpu
from zero_jax.sharding.paths import PyTree, trained_part
from zero_jax.tracing.dataflow import collective_axes, executed
from zero_jax.tracing.jaxpr import bytes_of, shape_of

_KINDS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
_KINDS |= {"all_to_all": "all-to-all", "ppermute": "collective-permute"}
_KINDS |= dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce")


def of(
    config: Config,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    params: PyTree,
    batch: PyTree,
    *extras: PyTree,
    has_aux: bool = False,
    compile: bool = False,
    target: str | Target | None = None,
    topology: str | None = None,
    model_flops: float | None = None,
    latencies: str | pathlib.Path | None = None,
) -> Plan:
    """Plans a training step; `Zero.plan` calls it.

    Args:
      config: Mesh and settings, with a stage from 0 to 3.
      loss_fn: See `Zero.train_step`.
      tx: The plain optax transformation.
      params: Sharded parameters, from `Zero.init` or `Zero.eval_shape`.
      batch: The global batch, arrays or ShapeDtypeStructs.
      *extras: Further arguments of the loss.
      has_aux: See `Zero.train_step`.
      compile: If True, also compile the step for the devices of the mesh.
      target: Compile ahead of time for "h100", "a100", "h200", "b200", "v5p" or "cpu", or for a
        `targets.Target`. No such device is needed. Requires the extra `prove`.
      topology: Topology of the target: "8x1x8" for 8 hosts of 8; full hosts by default.
      model_flops: FLOPs of forward and backward on one device, without recomputation.
      latencies: Path of a .pbtxt file, such as "step.pbtxt". Modelled instruction latencies on the
        target are written to it, and the step is compiled again with them. A run with the XLA flag
        `releases.LATENCIES` and this path gets the same schedule.

    Returns:
      The plan; without `compile` and `target` it has no compiled program.

    Raises:
      ValueError: The target is unknown, this machine cannot compile for it, `topology` or
        `latencies` does not fit it, or the mesh has no devices.
    """
    aim, mesh = None if target is None else targets.target(target), config.mesh
    if config.precision.matmul_dtype and aim and aim.platform != "cpu" and not aim.fp8_flops:
        raise ValueError(
            f"`matmul_dtype`={config.precision.matmul_dtype!r} on {aim.name}, which has no matrix "
            "products in fp8: use h100 or a later GPU, or leave `matmul_dtype` out"
        )
    aot.check(aim, mesh.size, topology, latencies)
    wrapped = ZeroTransform(tx, config)
    step = TrainStep(config, loss_fn, wrapped, has_aux=has_aux)
    # Sharded as these settings say, for parameters of any mesh and stage.
    full = jax.eval_shape(layout.unpad, params)
    shapes = parameters.eval_shape(config, lambda full: full, full)
    args = (shapes, wrapped.init(shapes), _shapes(batch, mesh, batch_sharding(mesh)), *extras)
    # A mesh without devices or target is one of GPUs.
    of_gpus = isinstance(mesh, AbstractMesh) or on_gpu(mesh)
    of_gpus = of_gpus if aim is None else aim.platform == "cuda"
    with _attention_kernels_of(aim, mesh):
        plan = _predict(step, args, of_gpus)
        if aim is not None:
            abstract = abstract_of(mesh)
            audit = aot.compile_for(
                *(aim, step.function, _shapes(args, abstract), abstract),
                topology=topology,
                options=step.compiler_options(*args) if of_gpus else {},
                latencies=latencies,
            )
    if aim is None and not compile:
        return plan
    if aim is None and isinstance(mesh, AbstractMesh):
        raise ValueError(
            "the mesh has no devices to compile for: set `target`, such as target='h100', "
            "or use zero_jax.make_mesh()"
        )
    if aim is None:
        audit = auditor.audit(step.lower(*args).compile(), dict(mesh.shape))
    known, time = aim, None
    if known is None and not isinstance(mesh, AbstractMesh):
        known = targets.of_kind(mesh.devices.flat[0].device_kind)
    if known is not None and known.platform == "cuda" and audit.flops is not None:
        time = roofline.step_time(audit.program, audit.collectives, known, model_flops)
    fp8 = None
    if plan.fp8_flops:
        name = aim.name if aim else "these devices"
        parts = config.model_axis.size
        fp8 = fp8_check.check(audit.program, plan.fp8_flops, parts, name, of_gpus=of_gpus)
    return dataclasses.replace(plan, compiled=audit, target=aim, time=time, fp8=fp8)


def _attention_kernels_of(
    target: Target | None, mesh: AnyMesh
) -> contextlib.AbstractContextManager[None]:
    """Traces steps with the attention kernels of the target, else those of the mesh's devices.

    A mesh without devices or target is one of H100s.
    """
    if target is None and not isinstance(mesh, AbstractMesh):
        return contextlib.nullcontext()
    aim = target or targets.target("h100")
    return cudnn.compiling_for(aim.platform, aim.compute_capability)


def _predict(step: TrainStep, args: tuple[PyTree, ...], of_gpus: bool) -> Plan:
    params, opt_state, batch, *extras = args
    leaves, rows, others = (len(jax.tree.leaves(tree)) for tree in (params, batch, extras))
    settings, parts = step.settings, step.settings.model_axis.size
    full = jax.eval_shape(layout.unpad, params)
    traced, jaxpr = step.read(*args), step.trace(*args).jaxpr
    given = leaves + rows + others + 1  # the loss scale
    peak = temporaries(jaxpr, traced.leaves, given, parts=parts, on_gpu=of_gpus)
    terms, update = peak.terms, predict_update(settings, step.transformation.plain, full)
    if of_gpus and settings.stage == 3 and (transposed := _transposed_bytes(traced.leaves)):
        terms = {**terms, "transposed": transposed}
    if update.bytes > sum(terms.values()):
        terms = {"update": update.bytes}
    host = bytes_on(params, HOST) + bytes_on(opt_state, HOST)
    streams = {}
    if host:
        # Stages 1 and 2 are done with the masters once they have gathered them.
        fetched = bytes_on(params, HOST) if settings.stage in (0, 3) else 0
        # The update follows the backward pass: beside its pieces there are fp32 gradients alone.
        shards = sum(math.prod(leaf.cut.device_shape) for leaf in traced.leaves)
        gradients = int(4 * shards * trained_part(full, settings.frozen))
        pieces = min(2 * settings.offload.piece_bytes, host)
        pieces = max(0, gradients + pieces - sum(terms.values()))
        streams = {"fetched": fetched, "pieces": pieces}
    sent = _sent(device_part(jaxpr), settings.mesh.shape)
    sent["update"] = Sent(update.elements, 4 * update.elements)  # fp32 momentum and what it becomes
    return Plan(
        stage=settings.stage,
        grad_accum_steps=settings.grad_accum_steps,
        remat=settings.remat,
        axes=dict(settings.mesh.shape),
        num_params=sum(x.size for x in jax.tree.leaves(full)),
        layers=tuple(traced.layers),
        window=traced.window,
        trained=trained_part(full, settings.frozen),
        sent=sent,
        fp8_params=tuple(traced.leaves[param.at].path for param in traced.fp8),
        not_fp8=tuple(traced.not_fp8),
        fp8_flops=fp8_check.traced_flops(device_part(jaxpr)) if traced.fp8 else 0,
        predicted=Predicted(
            parameters=bytes_on(params),
            optimizer_state=bytes_on(opt_state),
            batch=bytes_on(batch) + bytes_on(extras),
            temporaries=terms | streams,
            host_states=host,
            host_saved=peak.host,
        ),
    )


def bytes_on(tree: PyTree, kind: str = "device") -> int:
    """Returns the bytes of one device's shards in one kind of memory."""
    return sum(_leaf_bytes(x) for x in jax.tree.leaves(tree) if is_on_host(x) == (kind == HOST))


def _leaf_bytes(leaf: PyTree) -> int:
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    sharding = getattr(leaf, "sharding", None)
    shape = np.shape(leaf)
    if isinstance(sharding, NamedSharding):
        shape = sharding.shard_shape(shape)
    return int(np.prod(shape)) * jax.dtypes.result_type(leaf).itemsize


def _sent(jaxpr: jex.Jaxpr, axes: Mapping[str, int]) -> dict[str, Sent]:
    """Returns the elements and bytes that a device sends, by kind of collective.

    Those along `model` alone are left out. Others run where the trace is manual over `model`, on
    shapes of one device. Operations whose results are not read are not compiled, nor counted.
    """
    sent: dict[str, Sent] = {}
    for eqn, times in executed(jaxpr):
        kind = _KINDS.get(eqn.primitive.name)
        names = collective_axes(eqn)
        devices = math.prod(size for axis, size in axes.items() if axis in names)
        if kind and names != {MODEL} and devices > 1:
            arrays = eqn.outvars if kind == "all-gather" else eqn.invars
            runs = times * (2 if kind == "all-reduce" else 1)
            before = sent.get(kind, Sent(0, 0))
            elements = runs * sum(math.prod(shape_of(x)) for x in arrays)
            size = runs * sum(map(bytes_of, arrays))
            sent[kind] = Sent(before.elements + elements, before.bytes + size)
    return sent


def _shapes(tree: PyTree, mesh: AnyMesh, sharding: NamedSharding | None = None) -> PyTree:
    """Returns arrays as ShapeDtypeStructs, with this sharding or their own one on another mesh."""

    def shape(x: PyTree) -> jax.ShapeDtypeStruct:
        own = sharding or getattr(x, "sharding", None)
        placed = None
        if isinstance(own, NamedSharding):
            placed = NamedSharding(mesh, own.spec, memory_kind=own.memory_kind)
        dtype = getattr(x, "dtype", None) or jax.dtypes.result_type(x)
        return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=placed)

    return jax.tree.map(shape, tree)


class Update(NamedTuple):
    """Elements that a device sends, of any dtype, and the temporaries at the peak in bytes."""

    elements: float = 0
    bytes: int = 0


def predict_update(config: Config, tx: optax.GradientTransformation, full: PyTree) -> Update:
    """Predicts the update of a plain transformation, given the full parameters.

    An elementwise one communicates nothing. One that needs full matrices (Muon, Shampoo, GaLore)
    sends each to its assigned device and receives the results, see `matrix_updates`. Other products
    over sharded dims (those of vectors) are partitioned by XLA.
    """
    if config.shards == 1 or config.offload.optimizer or config.optimizer_state_dtype != FP32:
        return Update()  # nothing is sharded; or it is elementwise
    update = assigned(config, tx, full)
    traced = [jax.make_jaxpr(one)(*(v.aval for v in one.reads)) for one in update.exchanges]
    peaks = [temporaries(one).bytes for one in traced]
    sent = sum(one.sent for one in update.exchanges)
    return Update(sent + update.left, max(peaks, default=0))


def assigned(config: Config, tx: optax.GradientTransformation, full: PyTree) -> AssignedUpdate:
    """Returns the traced update of full parameters, with its exchanges of matrices."""
    plain = without_frozen(tx, config.frozen)
    state, loss = jax.eval_shape(plain.init, full), jax.ShapeDtypeStruct((), "float32")
    cuts = config.splitter(full)
    traced = jax.make_jaxpr(lambda g, s, p, loss: plain.update(g, s, p, value=loss))(
        *(full, state, full, loss)
    )
    partitions = [*cuts, *state_partitions(state, full, cuts), *cuts]
    return assigned_update(traced, partitions, config.mesh)


def _transposed_bytes(leaves: Sequence[Leaf]) -> int:
    """Returns the bytes of scanned leaves that XLA for GPUs transposes.

    A gather along a later dim needs that dim first in memory. XLA transposes the fp32 master
    parameters of all layers before the loop, once for both passes; it transposes gradients one by
    one. The experts of a layer (E, D, F) are split along D if N does not divide E.
    """
    cuts = [leaf.cut for leaf in leaves if leaf.opens and leaf.cut.by_layer]
    # Dims of one layer before the sharded one, which is counted from the end.
    before = [cut.device_shape[1 : len(cut.shape) + (cut.dim or 0)] for cut in cuts]
    pairs = zip(cuts, map(math.prod, before), strict=True)
    return sum(4 * math.prod(cut.device_shape) for cut, size in pairs if size > 1)
