"""Settings of a run, validated once, and values derived from them."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Self, TypeVar, overload

from flax.core import spmd
from jax.sharding import PartitionSpec

from zero_jax.collectives.gather_scatter import BUCKET_BYTES, Wire, check_bucket
from zero_jax.collectives.precision import Precision, as_precision
from zero_jax.collectives.quantised import BITS
from zero_jax.context_parallel.attention import Exchange
from zero_jax.engine import compiler
from zero_jax.engine.lifetimes import LIFETIMES, TOUCH, Layers
from zero_jax.low_bit.state import FP32, OptimizerStateDtype, check_kind
from zero_jax.names import parse_bytes
from zero_jax.offload import host
from zero_jax.remat import policies
from zero_jax.sharding import mesh as meshes
from zero_jax.sharding.layout import Partitioner
from zero_jax.sharding.mesh import MODEL, REPLICA, AnyMesh, Axis
from zero_jax.sharding.named_dims import (
    MEGATRON,
    SEQUENCE,
    ModelAxis,
    Rules,
    check_rules,
    check_specs,
)
from zero_jax.sharding.paths import Frozen

AUTO = "auto"
Stage = Literal[0, 1, 2, 3, "auto"]
Remat = str | policies.Remat | Callable[..., Any]  # or a policy of `jax.checkpoint_policies`
ParamSpecs = Mapping[str, PartitionSpec] | Sequence[tuple[str, PartitionSpec]] | None
MeshAxes = str | Sequence[str] | None
AxisRules = Mapping[str, MeshAxes] | Sequence[tuple[str, MeshAxes]] | None
Given = TypeVar("Given")
Kept = TypeVar("Kept")


class Converted(Generic[Given, Kept]):
    """A field of a dataclass that is given in several forms, and kept in one: see `Config`.

    Type checkers take the type of the constructor's argument from `__set__`.
    """

    def __init__(self, convert: Callable[[Given], Kept], default: Given) -> None:
        self._convert, self._default = convert, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, config: None, owner: type) -> Given: ...
    @overload
    def __get__(self, config: object, owner: type) -> Kept: ...
    def __get__(self, config: object | None, owner: type) -> Given | Kept:
        # `dataclasses` asks the class for the default.
        return self._default if config is None else vars(config)[self._name]

    def __set__(self, config: object, value: Given) -> None:
        vars(config)[self._name] = self._convert(value)


def _stage(given: Stage) -> Any:
    if given not in (0, 1, 2, 3, AUTO) or isinstance(given, bool):
        raise ValueError(
            f"`stage`={given!r}: use 0 (nothing partitioned), 1 (optimizer state), 2 (and "
            'gradients) or 3 (and parameters), or "auto" for the shortest modelled step that fits'
        )
    return given


def _steps(given: int) -> int:
    if not isinstance(given, int) or given < 1:
        raise ValueError(f"`grad_accum_steps`={given!r}: an int of at least 1 is required")
    return given


def _remat(given: Remat) -> Any:
    if not (isinstance(given, str | policies.Remat) or callable(given)):
        raise ValueError(f'`remat`={given!r}: the name of a policy is required, such as "block"')
    policy = policies.parse(given)
    return str(policy) if policy.policy is None else policy


def _specs(given: ParamSpecs) -> tuple[tuple[str, PartitionSpec], ...] | None:
    return None if given is None else check_specs(dict(given))


def _rules(given: AxisRules) -> Rules:
    return check_rules(spmd.get_logical_axis_rules() if given is None else given)


def _memory_limit(given: float | str | None) -> int | None:
    return None if given is None else parse_bytes(given, "memory_limit")


def _exchange(given: Exchange | None) -> Exchange | None:
    if given not in (None, *typing.get_args(Exchange)):
        raise ValueError(
            f"`context_exchange`={given!r}: use {' or '.join(typing.get_args(Exchange))}, or None"
        )
    return given


@dataclasses.dataclass(frozen=True)
class Config:
    """Validated settings of a `Zero`, which documents them and the forms that each may have.

    Raises:
      ValueError: A stage, mesh, precision, policy or count is not supported.
    """

    mesh: AnyMesh
    stage: Converted[Stage, Any] = Converted(_stage, 3)
    precision: Converted[Precision | str, Precision] = Converted(as_precision, Precision())
    grad_accum_steps: Converted[int, int] = Converted(_steps, 1)
    remat: Converted[Remat, Any] = Converted(_remat, "none")
    frozen: Frozen = None
    param_specs: Converted[ParamSpecs, tuple[tuple[str, PartitionSpec], ...] | None] = Converted(
        _specs, None
    )
    logical_axis_rules: Converted[AxisRules, Rules] = Converted(_rules, None)
    sequence_parallel: bool = False
    bucket_bytes: int = BUCKET_BYTES
    memory_limit: Converted[float | str | None, int | None] = Converted(_memory_limit, None)
    offload: Converted[str | host.Offload | None, host.Offload] = Converted(host.parse, None)
    secondary_shards: bool = False
    context_exchange: Converted[Exchange | None, Exchange | None] = Converted(_exchange, None)
    skip_nonfinite: bool = True
    optimizer_state_dtype: Converted[OptimizerStateDtype, str] = Converted(check_kind, "fp32")

    def __post_init__(self) -> None:
        meshes.check_mesh(self.mesh)
        self._settle("bucket_bytes", check_bucket(self.bucket_bytes, self._devices))
        self._settle("offload", host.settle(self.offload, self.mesh))
        self._check_offload()
        if self.offload.activations:
            self._settle("remat", policies.on_host(self.remat))
        self._check_sequences(policies.check(self.remat, self.mesh))
        self._check_precision()
        if self.context_exchange is not None and meshes.context_size(self.mesh) == 1:
            raise ValueError(
                f"`context_exchange`={self.context_exchange!r} on {dict(self.mesh.shape)}: no "
                "tokens are exchanged. Use make_mesh(context=...), or leave it out"
            )
        if self.secondary_shards and (self.stage != 3 or self.mesh.shape.get(REPLICA, 1) == 1):
            raise ValueError(
                f"`secondary_shards`=True with `stage`={self.stage!r} on {dict(self.mesh.shape)}: "
                f"use stage 3 and make_mesh({REPLICA}=...), or leave `secondary_shards` out"
            )

    def _settle(self, name: str, value: Any) -> None:
        """Replaces the value of a field by the one that fits the mesh."""
        object.__setattr__(self, name, value)

    def _check_offload(self) -> None:
        if self.optimizer_state_dtype != FP32 and self.offload.in_files:
            raise ValueError(
                f'`optimizer_state_dtype`="{self.optimizer_state_dtype}": state in files is fp32. '
                f'Use offload="optimizer" (host memory), not `offload`="{self.offload}"'
            )
        if self.offload.activations and (self.stage == AUTO or self.offload.tier != "host"):
            raise ValueError(
                f'`offload`="{self.offload}" with `stage`={self.stage!r}: activations require the '
                'host tier and a stage from 0 to 3. Use remat="block@host" instead'
            )

    def _check_sequences(self, policy: policies.Remat) -> None:
        if self.sequence_parallel and meshes.model_size(self.mesh) == 1:
            raise ValueError("`sequence_parallel` needs a model axis: use make_mesh(model=...)")
        if self.sequence_parallel and not self._by_sequence:
            raise ValueError(
                f"`sequence_parallel`=True, but `logical_axis_rules`={self.logical_axis_rules} "
                f"keep {SEQUENCE[0][0]!r} off the model axis: leave one of the two out"
            )
        if self._by_sequence and policy.partitioned:
            raise ValueError(
                f"`remat`={self.remat!r}: sequences are sharded over the model axis, so saved "
                "activations are partitioned already. Leave partitioned out"
            )

    def _check_precision(self) -> None:
        if not self.skip_nonfinite and self.precision.scaled:
            raise ValueError(
                "`skip_nonfinite`=False: fp16 skips steps to lower its loss scale. Use bf16"
            )
        if self.precision.matmul_dtype and meshes.on_gpu(self.mesh):
            version = str(getattr(self.mesh.local_devices[0], "compute_capability", ""))
            numbers = version.split(".")
            if all(map(str.isdecimal, numbers)) and tuple(map(int, numbers)) < (8, 9):
                raise ValueError(
                    f"`matmul_dtype`={self.precision.matmul_dtype!r} on GPUs of compute capability "
                    f"{version}: 8.9 or later is required. Leave `matmul_dtype` out"
                )
        for name in ("param_comm_dtype", "grad_comm_dtype"):
            bits = getattr(self.precision, name)
            if bits not in (None, "fp8") and (self.stage == 0 or self._devices == 1):
                raise ValueError(
                    f"`{name}`={bits!r} with `stage`={self.stage!r} on "
                    f"{meshes.data_axis(self.mesh)}={self._devices}: nothing is communicated. Use "
                    f"stages 1 to 3 on at least 2 devices, or leave `{name}` out"
                )

    @property
    def resolved(self) -> Self:
        """The settings that place arrays; stage="auto" stores the same shards as stage 3."""
        return self.at_stage(3) if self.stage == AUTO else self

    def at_stage(self, stage: Stage) -> Self:
        """Returns the same settings at another stage, without options which that stage lacks."""
        precision = self.precision
        if stage == 0:
            precision = dataclasses.replace(precision, param_comm_dtype=None, grad_comm_dtype=None)
        secondary_shards = self.secondary_shards and stage == 3
        return dataclasses.replace(
            self, stage=stage, precision=precision, secondary_shards=secondary_shards
        )

    def without_fp8(self) -> Self:
        """Returns the same settings with products in the compute dtype."""
        known = self.precision
        sent = None if known.param_comm_dtype == "fp8" else known.param_comm_dtype
        plain = dataclasses.replace(
            known, matmul_dtype=None, fp8_params=None, param_comm_dtype=sent
        )
        return dataclasses.replace(self, precision=plain)

    @property
    def shards(self) -> int:
        """N, the number of shards of a parameter."""
        return 1 if self.stage == 0 else self._devices

    @property
    def _devices(self) -> int:
        return meshes.axis_size(self.mesh, meshes.data_axis(self.mesh))

    @property
    def _by_sequence(self) -> bool:
        """True if activations between layers are split over `model`."""
        return self.model_axis.axis_of(SEQUENCE[0][0]) == MODEL

    @property
    def parts(self) -> int:
        """R, the number of parts that each stored shard is split into over `replica`."""
        return self.mesh.shape[REPLICA] if self.secondary_shards else 1

    @property
    def rest_axes(self) -> Axis:
        """The mesh axis, or axes, over which stored shards are partitioned."""
        data = meshes.data_axis(self.mesh)
        return (*meshes.names(data), REPLICA) if self.secondary_shards else data

    @property
    def splitter(self) -> Partitioner:
        """Returns the partition of each leaf of a full tree of arrays or ShapeDtypeStructs."""
        axis, experts = meshes.data_axis(self.mesh), meshes.experts_size(self.mesh)
        return Partitioner(self.shards, self.model_axis, self.parts, axis, experts)

    @property
    def wire(self) -> Wire:
        """Communication dtypes and the bucket size."""
        known = self.precision
        bits = BITS[known.param_comm_dtype], BITS[known.grad_comm_dtype]
        return Wire(known.compute, known.reduce, self.bucket_bytes, *bits)

    def compiler_options(self, layers: Sequence[Layers]) -> compiler.XlaOptions:
        """Returns the `compiler_options` of `jax.jit` for a step on GPUs.

        Args:
          layers: Layers of the traced loss.
        """
        return compiler.options(self.bucket_bytes, self.shards, self._layer_bytes(layers))

    def _layer_bytes(self, layers: Sequence[Layers]) -> tuple[int, int] | None:
        """Returns the gathered bytes and the gradient bytes sent of the largest layer.

        Returns None if layers are not gathered one by one.
        """
        # Sequence parallelism gathers activations too, for which the limits would also hold.
        if LIFETIMES[self.stage].copy != TOUCH or self._by_sequence:
            return None
        size = self.precision.compute.itemsize if self.wire.gather_bits is None else 1
        largest = max(layers, key=lambda layer: layer.elements, default=Layers(0, 0, False, ""))
        gathered = size * (largest.elements - largest.fp8_elements) + largest.fp8_elements
        return gathered, largest.elements * self.wire.reduce.itemsize

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that the batch is split over.

        Losses and modules use them to reduce over devices: `jax.lax.pmean(x, zero.batch_axes)`,
        `nn.BatchNorm(axis_name=zero.batch_axes)`.
        """
        return meshes.batch_axes(self.mesh)

    @property
    def model_axis(self) -> ModelAxis:
        """Partition of leaves and named activations over `model`."""
        size = meshes.model_size(self.mesh)
        if size == 1:
            return ModelAxis(1, self.param_specs)
        sequences = SEQUENCE if self.sequence_parallel else ()
        rules = (*self.logical_axis_rules, *MEGATRON, *sequences)
        return ModelAxis(size, self.param_specs, rules)


# Signatures show the forms that may be given, also that of `Zero`, which has the same fields.
for _field in dataclasses.fields(Config):
    if typing.get_origin(_field.type) is Converted:
        _field.type = typing.get_args(_field.type)[0]
        Config.__init__.__annotations__[_field.name] = _field.type
