"""Settings of a run, validated once, and values derived from them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from flax.core import spmd
from jax.sharding import PartitionSpec

from zero_jax.collectives.gather_scatter import BUCKET_BYTES, Wire, check_bucket
from zero_jax.collectives.precision import Precision, as_precision
from zero_jax.collectives.quantised import BITS
from zero_jax.engine import compiler
from zero_jax.engine.lifetimes import LIFETIMES, TOUCH, Layers
from zero_jax.low_bit.state import FP32, check_kind
from zero_jax.names import parse_bytes
from zero_jax.offload import host
from zero_jax.remat import policies
from zero_jax.sharding.layout import Partitioner
from zero_jax.sharding.mesh import (
    MODEL,
    REPLICA,
    AnyMesh,
    Axis,
    axis_size,
    batch_axes,
    check_mesh,
    data_axis,
    experts_size,
    model_size,
    names,
)
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


@dataclasses.dataclass(frozen=True)
class Config:
    """Validated settings of a `Zero`, which documents them and the forms that each may have.

    Raises:
      ValueError: A stage, mesh, precision, policy or count is not supported.
    """

    mesh: AnyMesh
    stage: Any = 3
    precision: Precision = Precision()
    grad_accum_steps: int = 1
    remat: Any = "none"
    frozen: Frozen = None
    param_specs: tuple[tuple[str, PartitionSpec], ...] | None = None
    logical_axis_rules: Rules | None = None
    sequence_parallel: bool = False
    bucket_bytes: int = BUCKET_BYTES
    memory_limit: int | None = None
    offload: host.Offload = host.NONE
    secondary_shards: bool = False
    skip_nonfinite: bool = True
    optimizer_state_dtype: str = FP32

    def __post_init__(self) -> None:
        self._check_numbers()
        check_mesh(self.mesh)
        self._settle("precision", as_precision(self.precision))
        self._settle("bucket_bytes", check_bucket(self.bucket_bytes, self._devices))
        if self.memory_limit is not None:
            self._settle("memory_limit", parse_bytes(self.memory_limit, "memory_limit"))
        self._settle("offload", host.settle(host.parse(self.offload), self.mesh))
        self._check_states()
        if self.offload.activations:
            self._move_activations()
        policy = policies.check(self.remat, self.mesh)
        self._settle("remat", str(policy) if policy.policy is None else policy)
        if self.param_specs is not None:
            self._settle("param_specs", check_specs(self.param_specs))
        rules = (
            spmd.get_logical_axis_rules()
            if self.logical_axis_rules is None
            else self.logical_axis_rules
        )
        self._settle("logical_axis_rules", check_rules(rules))
        self._check_sequences(policy)
        self._check_precision()
        if self.secondary_shards and (self.stage != 3 or self.mesh.shape.get(REPLICA, 1) == 1):
            raise ValueError(
                f"`secondary_shards`=True with `stage`={self.stage!r} on {dict(self.mesh.shape)}: "
                f"stage 3 and an axis {REPLICA!r} are required. Use stage=3 with "
                "zero_jax.make_mesh(replica=...), or leave `secondary_shards` out"
            )

    def _settle(self, name: str, value: Any) -> None:
        """Replaces the user's value of a field by its validated form."""
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        if self.stage not in (0, 1, 2, 3, AUTO) or isinstance(self.stage, bool):
            raise ValueError(
                f"`stage`={self.stage!r}: ZeRO has stages 0 (nothing partitioned), 1 (optimizer "
                "state), 2 (and gradients) and 3 (and parameters). Use 3 for least memory, or "
                '"auto" for the shortest modelled step that fits'
            )
        if not (isinstance(self.remat, str | policies.Remat) or callable(self.remat)):
            raise ValueError(
                f"`remat`={self.remat!r}: the name of a policy, a zero_jax.Remat or a function of "
                'jax.checkpoint_policies is required, for example remat="block"'
            )
        if not isinstance(self.grad_accum_steps, int) or self.grad_accum_steps < 1:
            raise ValueError(
                f"`grad_accum_steps`={self.grad_accum_steps!r}: an int of at least 1 is required"
            )

    def _check_sequences(self, policy: policies.Remat) -> None:
        if self.sequence_parallel and model_size(self.mesh) == 1:
            raise ValueError(
                "`sequence_parallel`=True shards sequences over the model axis, but the mesh has "
                "none: use zero_jax.make_mesh(model=...)"
            )
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
                "`skip_nonfinite`=False with fp16: skipped steps lower the loss scale. Use bf16, "
                "or leave `skip_nonfinite` on"
            )
        for name in ("param_comm_dtype", "grad_comm_dtype"):
            bits = getattr(self.precision, name)
            if bits is not None and (self.stage == 0 or self._devices == 1):
                raise ValueError(
                    f"`{name}`={bits!r} with `stage`={self.stage!r} on "
                    f"{data_axis(self.mesh)}={self._devices}: nothing is communicated there. Use "
                    f"stages 1 to 3 on at least 2 devices, or leave `{name}` out"
                )

    def _check_states(self) -> None:
        if check_kind(self.optimizer_state_dtype) != FP32 and self.offload.in_files:
            raise ValueError(
                f'`optimizer_state_dtype`="{self.optimizer_state_dtype}" with '
                f'`offload`="{self.offload}": state in files is fp32. Use offload="optimizer" '
                "(host memory), or leave `optimizer_state_dtype` out"
            )

    def _move_activations(self) -> None:
        if self.stage == AUTO or self.offload.tier != "host":
            raise ValueError(
                f'`offload`="{self.offload}" with `stage`={self.stage!r}: activations require the '
                'host tier and a stage from 0 to 3. Use remat="block@host" instead'
            )
        self._settle("remat", policies.on_host(self.remat))

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

    @property
    def shards(self) -> int:
        """N, the number of shards of a parameter."""
        return 1 if self.stage == 0 else self._devices

    @property
    def _devices(self) -> int:
        return axis_size(self.mesh, data_axis(self.mesh))

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
        data = data_axis(self.mesh)
        return (*names(data), REPLICA) if self.secondary_shards else data

    @property
    def splitter(self) -> Partitioner:
        """Returns the partition of each leaf of a full tree of arrays or ShapeDtypeStructs."""
        axis, experts = data_axis(self.mesh), experts_size(self.mesh)
        return Partitioner(self.shards, self.model_axis, self.parts, axis, experts)

    @property
    def wire(self) -> Wire:
        """Communication dtypes and the bucket size."""
        known = self.precision
        return Wire(
            compute=known.compute,
            reduce=known.reduce,
            bucket=self.bucket_bytes,
            gather_bits=BITS[known.param_comm_dtype],
            scatter_bits=BITS[known.grad_comm_dtype],
        )

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
        words = max((layer.elements for layer in layers), default=0)
        gathered = self.precision.compute.itemsize if self.wire.gather_bits is None else 1
        return words * gathered, words * self.wire.reduce.itemsize

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that the batch is split over.

        Losses and modules use them to reduce over devices: `jax.lax.pmean(x, zero.batch_axes)`,
        `nn.BatchNorm(axis_name=zero.batch_axes)`.
        """
        return batch_axes(self.mesh)

    @property
    def model_axis(self) -> ModelAxis:
        """Partition of leaves and named activations over `model`."""
        size = model_size(self.mesh)
        if size == 1:
            return ModelAxis(1, self.param_specs)
        rules = (*(self.logical_axis_rules or ()), *MEGATRON)
        sequences = SEQUENCE if self.sequence_parallel else ()
        return ModelAxis(size, self.param_specs, (*rules, *sequences))
