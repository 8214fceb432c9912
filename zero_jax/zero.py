"""The public class: `Zero` combines layout, gradients and optimizer for one mesh and stage.

A `Zero` has a `Config` and nothing else, no parameters and no state. Several models with several
optimizers can be trained in one program.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.collectives.gather_scatter import BUCKET_BYTES
from zero_jax.collectives.precision import Precision
from zero_jax.engine import grads, parameters
from zero_jax.engine.compiler import CheckedJit, XlaOptions
from zero_jax.engine.config import AUTO, AxisRules, Config, ParamSpecs, Remat, Stage
from zero_jax.engine.optimizer import ZeroTransform, check_made_for
from zero_jax.engine.step import TrainStep
from zero_jax.low_bit.state import OptimizerStateDtype
from zero_jax.names import unknown
from zero_jax.offload import host
from zero_jax.plan import auto, planning
from zero_jax.plan.plans import Plan
from zero_jax.sharding import layout
from zero_jax.sharding.layout import Partition
from zero_jax.sharding.mesh import AnyMesh, check_global, on_gpu
from zero_jax.sharding.paths import Frozen, PyTree


@dataclasses.dataclass(frozen=True, init=False)
class Zero:
    """ZeRO training on one mesh: makes sharded parameters, optimizers and training steps.

    Args:
      mesh: A mesh with a `data` axis, from `make_mesh`. A mesh from `abstract_mesh` only plans.
      stage: 0 partitions nothing, 1 the optimizer state (and fp32 master parameters), 2 also the
        gradients, 3 also the parameters. Stages 1 to 3 store the same sharded arrays. "auto"
        chooses the stage, the gradient-accumulation steps and remat at the first step; `choose`
        also chooses the states to offload. `grad_accum_steps` and `remat` are then lower bounds.
      precision: A `Precision`, or "fp32", "bf16", "fp16" for its `compute_dtype`.
      grad_accum_steps: Number of gradient-accumulation steps, k. Gradients accumulate in fp32.
      remat: Activations saved for the backward pass, and where: a `Remat`, or "none", "dots",
        "block", "block_sqrt", "names:a,b", "block@partitioned+host",
        "names:a@host,b", "names@host:a"; or a policy of `jax.checkpoint_policies`.
      frozen: Leaves that are not trained: a pattern searched in paths like "blocks/attn/kernel",
        or a function of such a path. They have no optimizer state and no gradient. Leaves that
        are not floating point are always frozen.
      param_specs: Pairs or a mapping from path patterns to PartitionSpecs that name `model` for the
        dim that tensor parallelism splits. None uses the names in the model's own variables.
      logical_axis_rules: Logical axis rules of the model, as (name, mesh axis or None) pairs. The
        default is Flax's active rules (`nn.logical_axis_rules`). heads, mlp and vocab are split
        over `model` unless a rule overrides it.
      sequence_parallel: Also split the dim named "seq" over `model`, outside matmuls.
      bucket_bytes: Maximum bytes per collective. Larger leaves are communicated in pieces, smaller
        leaves together.
      memory_limit: Memory per device that "auto" may use, in bytes or as "80GB". The default is the
        size of JAX's memory pool on the device. For an ahead-of-time target it is the device memory
        less 8 %, reserved for the runtime and its libraries.
      offload: States stored in host memory: "optimizer", "optimizer,params", with
        ",activations", ":nvme=DIR" (files) or ":auto" (if the device has host memory); or an
        `Offload`.
      secondary_shards: At stage 3, also shard states over `replica` (hpZ of ZeRO++). A device
        gathers its shard of the parameters over `replica` once a step, in the compute dtype. Layers
        are then gathered over `data` alone. Source: ZeRO++ (arXiv:2306.10209), section 3.2.
      skip_nonfinite: Skip steps with non-finite gradients. If False, the transformation receives
        them unchanged (`optax.zero_nans`, `optax.apply_if_finite`).
      optimizer_state_dtype: Optimizer state dtype of large leaves: "fp32", "bf16" or "8bit"
        (docs/states.md), for any elementwise transformation. The stored bits are the same for every
        N and stage.

    Attributes:
      config: The validated settings.

    Raises:
      ValueError: A stage, mesh, precision, policy or count is not supported.

    >>> import jax.numpy as jnp, zero_jax
    >>> zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    >>> params = zero.init(lambda key: {"w": jax.random.normal(key, (8, 3))}, jax.random.key(0))
    >>> tx = zero.optimizer(optax.adamw(1e-3))
    >>> step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx)
    >>> params, opt_state, metrics = step(params, tx.init(params), jnp.ones((8, 8)))
    >>> int(metrics.skipped)
    0
    """

    config: Config

    def __init__(
        self,
        mesh: AnyMesh,
        stage: Stage = 3,
        precision: Precision | str = Precision(),
        grad_accum_steps: int = 1,
        remat: Remat = "none",
        frozen: Frozen = None,
        param_specs: ParamSpecs = None,
        logical_axis_rules: AxisRules = None,
        sequence_parallel: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        memory_limit: float | str | None = None,
        offload: str | host.Offload | None = None,
        secondary_shards: bool = False,
        skip_nonfinite: bool = True,
        optimizer_state_dtype: OptimizerStateDtype = "fp32",
    ) -> None:
        settings = dict(locals())
        del settings["self"]
        object.__setattr__(self, "config", Config(**settings))

    def replace(self, **settings: Any) -> Self:
        """Returns a `Zero` with some settings replaced; takes the arguments of `Zero`.

        Others stay as `config` has them: activations that `offload` moved to host memory are in
        `remat`, and offload that ":auto" turned off stays off.
        """
        return type(self)(**{**vars(self.config), **settings})

    def at_stage(self, stage: Stage) -> Self:
        """Returns the same `Zero` at another stage, without settings which that stage lacks."""
        return self.replace(**vars(self.config.at_stage(stage)))

    @property
    def mesh(self) -> AnyMesh:
        """The mesh."""
        return self.config.mesh

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that the batch is split over.

        Losses and modules use them to reduce over devices: `jax.lax.pmean(x, zero.batch_axes)`,
        `nn.BatchNorm(axis_name=zero.batch_axes)`.
        """
        return self.config.batch_axes

    def _jit(
        self, fn: Callable[..., PyTree], loss: grads.GlobalLoss, k: int
    ) -> Callable[..., PyTree]:
        def options(params: PyTree, batch: PyTree, *extras: PyTree, **_: PyTree) -> XlaOptions:
            return self.config.compiler_options(loss.read(params, batch, extras, k).layers)

        def check(params: PyTree, batch: PyTree, *extras: PyTree, **named: PyTree) -> None:
            check_global(batch, self.mesh)

        return CheckedJit(fn, options if on_gpu(self.mesh) else None, check)

    def splits(self, params: PyTree) -> list[Partition]:
        """Returns the partition of each leaf of a full tree of arrays or ShapeDtypeStructs."""
        return self.config.resolved.splitter(params)

    def init(self, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Initialises sharded parameters: no device ever holds the full model.

        Args:
          fn: Returns the parameters, as on one device: a linen `model.init`, a function that
            returns `nnx.state(Model(...), nnx.Param)`, or any function of arrays.
          *args: Arguments of `fn`.

        Returns:
          The same tree of fp32 master parameters, sharded over `data`. The values are bitwise the
          same for every N and stage. Leaves with no dim that N divides are padded, as `Padded`.

        Raises:
          ValueError: A leaf is not a numeric array, the mesh is abstract, a device holds the wrong
            shard, or `jax_threefry_partitionable` is off.
        """
        return parameters.init(self.config, fn, *args)

    def eval_shape(self, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Returns the result of `init` as ShapeDtypeStructs with shardings; allocates nothing."""
        return parameters.eval_shape(self.config, fn, *args)

    def shard(self, params: PyTree) -> PyTree:
        """Shards existing full arrays, such as a loaded model, leaf by leaf.

        Args:
          params: A tree of numpy or JAX arrays, equal in every process.

        Returns:
          The sharded tree, as from `init`.

        Raises:
          ValueError: A leaf is not a numeric array.
        """
        return parameters.shard(self.config, params)

    def optimizer(self, tx: optax.GradientTransformation) -> ZeroTransform:
        """Wraps any optax transformation to partition its state; exact at every stage and every N.

        Its `init` returns a sharded state, its `update` takes sharded gradients and parameters.
        Steps with non-finite gradients are skipped, unless `skip_nonfinite` is False.

        Args:
          tx: The optax transformation.

        Returns:
          The partitioned transformation.

        Raises:
          ValueError: `tx` is not an optax transformation.
        """
        return ZeroTransform(tx, self.config.resolved)

    def value_and_grad(
        self, loss_fn: grads.LossFn, *, has_aux: bool = False
    ) -> Callable[..., PyTree]:
        """Returns a function for the global loss and its partitioned gradients.

        Args:
          loss_fn: `loss_fn(params, batch, *extras)`, written for one device. It returns a scalar
            mean, or `Weighted(sum, weight)` if weights differ between devices.
          has_aux: If True, `loss_fn` returns (loss, aux). Aux arrays whose dim 0 is the rows of the
            batch are concatenated over devices; other floats are averaged.

        Returns:
          A function of `(params, batch, *extras, loss_scale=1.0)` that returns (loss, grads), or
          ((loss, aux), grads). Dim 0 of every batch array is split over the devices. Extras (batch
          statistics, dropout keys) are the same on all devices. Typed PRNG keys are folded
          with the device and the micro-batch. Gradients are fp32 and sharded like the parameters;
          those of frozen leaves are scalar zeros. `jax.grad` of the function is correct for every
          argument.

        Raises:
          ValueError: `stage` is "auto". With fp16, the returned function requires `loss_scale`.
        """
        if self.config.stage == AUTO:
            raise ValueError(
                '`stage`="auto" depends on the whole step, with the optimizer. Use '
                "zero.train_step(loss_fn, tx), or zero.choose(loss_fn, tx, params, batch).zero"
            )
        loss = grads.GlobalLoss(self.config.resolved, loss_fn, has_aux)

        def value_and_grad(
            params: PyTree,
            batch: PyTree,
            *extras: PyTree,
            loss_scale: jax.Array | float | None = None,
        ) -> PyTree:
            if loss_scale is None and loss.settings.precision.scaled:
                raise ValueError(
                    "fp16 gradients underflow without a loss scale: pass "
                    "`loss_scale`=opt_state.guard.loss_scale, or use zero.train_step"
                )
            scale = 1.0 if loss_scale is None else loss_scale
            out = loss.gradients(params, batch, extras, scale)
            return ((out.loss, out.aux) if has_aux else out.loss), out.grads

        return self._jit(value_and_grad, loss, loss.settings.grad_accum_steps)

    def evaluate(self, loss_fn: grads.LossFn, *, has_aux: bool = False) -> Callable[..., PyTree]:
        """Returns a function for the global loss without gradients, for held-out data.

        Args:
          loss_fn: See `value_and_grad`.
          has_aux: See `value_and_grad`.

        Returns:
          A jitted function of `(params, batch, *extras)` that returns (loss, weight), or
          ((loss, aux), weight): the global weighted mean and the global weight.
        """
        loss = grads.GlobalLoss(self.config.resolved, loss_fn, has_aux)

        def evaluate(params: PyTree, batch: PyTree, *extras: PyTree) -> PyTree:
            out = loss.value(params, batch, extras)
            return ((out.loss, out.aux) if has_aux else out.loss), out.weight

        return self._jit(evaluate, loss, 1)

    def unshard(self, params: PyTree) -> PyTree:
        """Returns the full arrays, without padding and replicated on every device."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        full = jax.jit(lambda p: layout.unpad(host.to_device(p)), out_shardings=whole)
        return full(params)

    def train_step(
        self,
        loss_fn: grads.LossFn,
        tx: ZeroTransform,
        *,
        has_aux: bool = False,
        max_skips: int = 20,
    ) -> TrainStep:
        """Returns a jitted training step with donated arguments: gradients, update and metrics.

        With stage="auto" the step chooses its settings when it is first used. It does not choose
        offload: parameters and optimizer state have their memory already.

        Args:
          loss_fn: See `value_and_grad`.
          tx: The result of `optimizer`.
          has_aux: See `value_and_grad`.
          max_skips: Number of consecutive skipped steps after which `NonFiniteError` is raised.

        Returns:
          A callable `step(params, opt_state, batch, *extras, **named)` that returns
          (params, opt_state, Metrics) and donates its first two arguments. Extras are passed to the
          loss. Arrays passed by name go to the transformation, together with `value`, the loss.

        Raises:
          ValueError: `tx` is plain or was wrapped with other settings, or `max_skips` is below 1.
        """

        def choose(params: PyTree, batch: PyTree, extras: tuple[PyTree, ...]) -> Config:
            options = {"has_aux": has_aux, "initialized": True}
            return self.choose(loss_fn, tx, params, batch, *extras, **options).zero.config

        args = self.config, loss_fn, tx
        return TrainStep(*args, has_aux=has_aux, max_skips=max_skips, choose=choose)

    def plan(self, loss_fn: grads.LossFn, tx: ZeroTransform, *args: Any, **options: Any) -> Plan:
        """Predicts memory and communication of a step from shapes; optionally compiles it.

        Args:
          loss_fn: See `train_step`.
          tx: See `train_step`.
          *args: Sharded parameters (from `init` or `eval_shape`), the global batch and further
            arguments of the loss; arrays or ShapeDtypeStructs.
          **options: Options of `planning.of`. `compile=True` compiles for the devices of the mesh.
            `target="h100"` compiles ahead of time, without a GPU. `latencies="step.pbtxt"` gives
            XLA's scheduler modelled instruction latencies.

        Returns:
          The plan.

        Raises:
          ValueError: `stage` is "auto", or the step cannot be compiled for the target.
        """
        if self.config.stage == AUTO:
            raise ValueError('`stage`="auto" has a plan for each candidate: use zero.choose(...)')
        check_made_for(tx, self.config)
        return planning.of(self.config, loss_fn, tx.plain, *args, **options)

    def choose(
        self, loss_fn: grads.LossFn, tx: ZeroTransform, *args: Any, **options: Any
    ) -> "ZeroChoice":
        """Chooses the stage, accumulation steps, remat and offload that fit in `memory_limit`.

        Prints the candidates considered, and the reason why each was dropped.

        Args:
          loss_fn: See `train_step`.
          tx: See `train_step`.
          *args: See `plan`.
          **options: `has_aux`, `target`, `topology` and `model_flops` of `planning.of`; `report`,
            called with each line instead of printing it; and `initialized`. If `initialized` is
            True, parameters and optimizer state exist already and stay in their memory. The default
            is True if `params` has arrays.

        Returns:
          The choice: `choice.zero` is this `Zero` with the chosen settings, and
          `choice.considered` has all candidates.

        Raises:
          ValueError: No candidate fits, or the device does not report its memory.
        """
        check_made_for(tx, self.config.resolved)
        choice = auto.decide(self.config, loss_fn, tx.plain, *args, **options)
        return ZeroChoice(**vars(choice), zero=type(self)(**vars(choice.config)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroChoice(auto.Choice):
    """The choice of `Zero.choose`, with the `Zero` that has the chosen settings."""

    zero: Zero


# The configurations of the paper, by name:
#   c1         P_os + CB + MD              stage 1
#   c2         c1 + P_a                    saved activations are sharded over `model` too
#   c3         P_os+g + CB + MD            stage 2
#   c4         c3 + P_a
#   c5         c4 + P_a+cpu                and stored in host memory
#   zero-100b  P_os+g + ZeRO-R             the paper's implementation: c4
# Constant-size buffers (CB) and static memory planning (MD) are always on. P_a needs a `model`
# axis, of 16 devices in the paper. Source: ZeRO (arXiv:1910.02054), section 10.1 and table 3.
_PAPER_CONFIGS: Mapping[str, tuple[Stage, str]] = {
    "c1": (1, "block"),
    "c2": (1, "block@partitioned"),
    "c3": (2, "block"),
    "c4": (2, "block@partitioned"),
    "c5": (2, "block@partitioned+host"),
    "zero-100b": (2, "block@partitioned"),
}


def paper_config(name: str) -> dict[str, Any]:
    """Returns the settings of a configuration of the paper: `Zero(mesh, **paper_config("c4"))`.

    Args:
      name: "c1" to "c5", or "zero-100b". Source: ZeRO (arXiv:1910.02054), section 10.1, table 3.

    Raises:
      ValueError: The name is unknown; the message has the nearest one.

    >>> paper_config("c5")["remat"]
    'block@partitioned+host'
    """
    if name not in _PAPER_CONFIGS:
        raise ValueError(unknown("paper_config", name, _PAPER_CONFIGS))
    stage, remat = _PAPER_CONFIGS[name]
    return {"stage": stage, "remat": remat}
