"""The settings of a run, validated once, and the values derived from them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from flax.core import spmd

from zero_jax.collectives.buckets import BUCKET_BYTES, check_bucket
from zero_jax.collectives.gather_scatter import Wire
from zero_jax.collectives.precision import Precision
from zero_jax.collectives.quantised import BITS
from zero_jax.engine import compiler
from zero_jax.engine.lifetimes import LIFETIMES, TOUCH, Layers
from zero_jax.engine.transformations import Frozen
from zero_jax.offload import tiers
from zero_jax.remat import policies
from zero_jax.remat.policies import Policy
from zero_jax.sharding.cuts import Splitter
from zero_jax.sharding.expert_axis import ExpertAxis
from zero_jax.sharding.mesh import (
    MODEL,
    REPLICA,
    AnyMesh,
    axis_size,
    batch_axes,
    check_mesh,
    data_axis,
    experts_size,
    model_size,
    names,
)
from zero_jax.sharding.model_axis import MEGATRON, SEQUENCE, ModelAxis, check_rules, check_specs
from zero_jax.states.narrow import FP32, check_kind

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run; `Zero` documents each field.

    Raises:
      ValueError: A stage, mesh, precision, policy or count is not supported.
    """

    mesh: AnyMesh
    stage: Any = 3
    precision: Any = Precision()
    micro_batches: int = 1
    remat: str = "none"
    frozen: Frozen = None
    model_specs: Any = None
    axis_rules: Any = None
    sequence_parallel: bool = False
    bucket_bytes: int = BUCKET_BYTES
    memory_limit: float | None = None
    offload: Any = None
    hierarchical: bool = False
    guard: bool = True
    states: str = FP32

    def __post_init__(self) -> None:
        self._check_numbers()
        check_mesh(self.mesh)
        self._settle("bucket_bytes", check_bucket(self.bucket_bytes, self._devices))
        self._settle("offload", tiers.settle(tiers.parse(self.offload), self.mesh))
        self._check_states()
        if self.offload.activations:
            self._move_activations()
        policy = policies.check(self.remat, self.mesh)
        if self.model_specs is not None:
            self._settle("model_specs", check_specs(self.model_specs))
        rules = spmd.get_logical_axis_rules() if self.axis_rules is None else self.axis_rules
        self._settle("axis_rules", check_rules(rules))
        self._check_sequences(policy)
        if not isinstance(self.precision, Precision):
            self._settle("precision", Precision(self.precision))
        self._check_precision()
        if self.hierarchical and (self.stage != 3 or self.mesh.shape.get(REPLICA, 1) == 1):
            raise ValueError(
                f"hierarchical=True with stage={self.stage!r} on {dict(self.mesh.shape)}: states "
                f"are cut over {REPLICA!r} too and joined once a step; use stage=3 and "
                "zero_jax.make_mesh(replica=...), or leave it out"
            )

    def _settle(self, name: str, value: Any) -> None:
        """Replaces the user's value of a field by its validated form."""
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        if self.stage not in (0, 1, 2, 3, AUTO) or isinstance(self.stage, bool):
            raise ValueError(
                f"stage={self.stage!r}: ZeRO has stages 0 (nothing partitioned), 1 (optimizer "
                "state), 2 (and gradients) and 3 (and parameters). Use stage=3 for least memory, "
                'or "auto" for the shortest modelled step that fits'
            )
        limit = self.memory_limit
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (number and 1 <= limit < float("inf")):
            raise ValueError(f"memory_limit={limit!r}: give bytes a device, 80e9 say")
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            raise ValueError(f"micro_batches={self.micro_batches!r}: use an int of at least 1")

    def _check_sequences(self, policy: Policy) -> None:
        if self.sequence_parallel and model_size(self.mesh) == 1:
            raise ValueError(
                "sequence_parallel=True splits sequences over the model axis, and this mesh has "
                "none: make it with zero_jax.make_mesh(model=...)"
            )
        if self.sequence_parallel and not self._by_sequence:
            raise ValueError(
                f"sequence_parallel=True, but axis_rules={self.axis_rules} keep "
                f"{SEQUENCE[0][0]!r} off the model axis: leave one of the two out"
            )
        if self._by_sequence and policy.partitioned:
            raise ValueError(
                f"remat={self.remat!r} with sequences that are split over the model axis: what is "
                "kept is split already, leave out partitioned"
            )

    def _check_precision(self) -> None:
        if not self.guard and self.precision.scaled:
            raise ValueError(
                "guard=False with fp16: its loss scale is lowered by steps that are skipped; use "
                "bf16, or leave the guard on"
            )
        for what, bits in (("gather", self.precision.gather), ("scatter", self.precision.scatter)):
            if bits is not None and (self.stage == 0 or self._devices == 1):
                raise ValueError(
                    f"{what}={bits!r} with stage={self.stage!r} on {data_axis(self.mesh)}="
                    f"{self._devices}: nothing is gathered or scattered there; use stages 1 to 3 "
                    "and 2 devices or more, or leave it out"
                )

    def _check_states(self) -> None:
        if check_kind(self.states) != FP32 and self.offload.in_files:
            raise ValueError(
                f'states="{self.states}" with offload="{self.offload}": states in files are fp32; '
                'use offload="optimizer", which keeps them in host memory, or leave states out'
            )

    def _move_activations(self) -> None:
        if self.stage == AUTO or self.offload.tier != "host":
            raise ValueError(
                f'offload="{self.offload}" with stage={self.stage!r}: activations go to host '
                'memory, of a stage that is named: remat="block@host" says the same'
            )
        self._settle("remat", policies.on_host(self.remat))

    def at_stage(self, stage: int) -> Self:
        """Returns the same settings at another stage, without options which that stage lacks."""
        precision = self.precision
        if stage == 0:
            precision = dataclasses.replace(precision, gather=None, scatter=None)
        hierarchical = self.hierarchical and stage == 3
        return dataclasses.replace(
            self, stage=stage, precision=precision, hierarchical=hierarchical
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
        return self.mesh.shape[REPLICA] if self.hierarchical else 1

    @property
    def rest_axes(self) -> Any:
        """The mesh axis, or axes, over which stored shards are partitioned."""
        data = data_axis(self.mesh)
        return (*names(data), REPLICA) if self.hierarchical else data

    @property
    def splitter(self) -> Splitter:
        """Returns the partition of each leaf of a full tree of arrays or ShapeDtypeStructs."""
        axis, experts = data_axis(self.mesh), ExpertAxis(experts_size(self.mesh))
        return Splitter(self.shards, self.model_axis, self.parts, axis, experts)

    @property
    def wire(self) -> Wire:
        """Communication dtypes and the bucket size."""
        known = self.precision
        return Wire(
            compute=known.compute,
            reduce=known.reduce,
            bucket=self.bucket_bytes,
            gather_bits=BITS[known.gather],
            scatter_bits=BITS[known.scatter],
        )

    def compiler_options(self, layers: Sequence[Layers]) -> dict[str, Any]:
        """Returns the `compiler_options` of `jax.jit` for a step on GPUs.

        Args:
          layers: Layers of the traced loss.
        """
        # The loop over micro-batches must be none of those whose next turn XLA gathers for, where
        # layers are not scanned: a turn reads all weights, and all would be held at once.
        in_loops = self.micro_batches == 1 or _scanned(layers)
        own = self.bucket_bytes, self.shards, self._layer_bytes(layers), in_loops
        return compiler.options(*own)

    def gathers_ahead(self, layers: Sequence[Layers]) -> bool:
        """Returns whether XLA for GPUs prefetches a layer while the layer before it computes."""
        return compiler.gathers_ahead(self.bucket_bytes, self._layer_bytes(layers))

    def _layer_bytes(self, layers: Sequence[Layers]) -> tuple[int, int] | None:
        """Returns the gathered bytes and the gradient bytes sent of the largest layer.

        Returns None if layers are not gathered one by one.
        """
        # XLA would fetch activations ahead too, and compute them twice for it.
        if LIFETIMES[self.stage].copy != TOUCH or self._by_sequence:
            return None
        words = max((layer.words for layer in layers), default=0)
        gathered = self.wire.compute.itemsize if self.wire.gather_bits is None else 1
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
            return ModelAxis(1, self.model_specs)
        rules = (*self.axis_rules, *MEGATRON, *(SEQUENCE if self.sequence_parallel else ()))
        return ModelAxis(size, self.model_specs, rules)


def _scanned(layers: Sequence[Layers]) -> bool:
    """Returns whether all layers are run by loops."""
    return bool(layers) and all(layer.scanned for layer in layers)
