"""The public class: `Zero` combines layout, gradients and optimizer for one mesh and stage.

A `Zero` is its settings and nothing else, no parameters and no state. Several models with several
optimizers can be trained in one program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.engine import grads, parameters
from zero_jax.engine.compiler import CheckedJit, XlaOptions
from zero_jax.engine.config import AUTO, Config
from zero_jax.engine.optimizer import ZeroTransform, check_made_for
from zero_jax.engine.step import TrainStep
from zero_jax.names import unknown
from zero_jax.offload import host
from zero_jax.plan import auto, planning
from zero_jax.plan.plans import Plan
from zero_jax.sharding import layout
from zero_jax.sharding.layout import Partition
from zero_jax.sharding.mesh import check_global, on_gpu
from zero_jax.sharding.paths import PyTree


class Zero(Config):
    """ZeRO training on one mesh: makes sharded parameters, optimizers and training steps.

    Args:
      mesh: A mesh with a `data` axis, from `make_mesh`. A mesh from `abstract_mesh` only plans.
      stage: 0 partitions nothing, 1 the optimizer state, 2 also the gradients, 3 also the
        parameters. Stages 1 to 3 store the same sharded fp32 master parameters. "auto" chooses the
        stage, the gradient-accumulation steps and remat at the first step; `choose` also chooses
        the states to offload. `grad_accum_steps` and `remat` are then lower bounds.
      precision: A `Precision`, or "fp32", "bf16", "fp16" for its `compute_dtype`.
      grad_accum_steps: Number of gradient-accumulation steps, k. Gradients accumulate in fp32.
      remat: Saved activations: "none" (all), "dots", "block", "block_sqrt", "names:a,b", with @host
        or @partitioned. Examples: "block@partitioned+host", "names:a@host,b", "names@host:a". Or a
        `Remat`, or a policy of `jax.checkpoint_policies`.
      frozen: Leaves that are not trained: a pattern searched in paths like "blocks/attn/kernel",
        or a function of such a path. They have no optimizer state and no gradient. Leaves that
        are not floating point are always frozen.
      param_specs: Pairs or a mapping from path patterns to PartitionSpecs that name `model` for the
        dim that tensor parallelism splits. None uses the names in the model's own variables.
      logical_axis_rules: Logical axis rules of the model, as (name, mesh axis or None) pairs. The
        default is Flax's active rules (`nn.logical_axis_rules`). heads, mlp and vocab are split
        over `model` unless a rule overrides it.
      sequence_parallel: Split "seq" dims over `model` too, outside matmuls.
      bucket_bytes: Maximum bytes per collective. Larger leaves are communicated in pieces, smaller
        leaves together.
      memory_limit: Memory per device, in bytes or as "80GB" (default: the device's). It limits
        "auto". A device's memory is JAX's memory pool. For an ahead-of-time target it is the memory
        less 8 %, reserved for the runtime and its libraries.
      offload: States in host memory: optimizer[,params][,activations][:nvme=DIR|:auto]. With `nvme`
        they are in files, with `auto` in host memory if the device has it. Or an `Offload`.
      secondary_shards: Shard states over `replica` too, at stage 3 (hpZ). A device gathers its
        shard of the parameters over `replica` once a step, in the compute dtype. Layers are then
        gathered over `data` alone. Source: ZeRO++ (arXiv:2306.10209), section 3.2.
      context_exchange: Attention over `context`: "all_gather", "all_to_all" (default: auto).
        The first gathers keys and values, the second exchanges heads for tokens. By default
        `zero_jax.attention` takes the second if a cuDNN kernel supports its arguments, else the one
        that sends fewer elements.
      skip_nonfinite: Skip steps with non-finite gradients. If False, the transformation receives
        them unchanged (`optax.zero_nans`, `optax.apply_if_finite`).
      optimizer_state_dtype: Optimizer state dtype of large leaves. "bf16" and "8bit" require an
        elementwise transformation (docs/states.md). The stored bits are the same for every N and
        stage.

    Each is an attribute too, in its validated form: `zero.remat`.

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

    @property
    def config(self) -> Config:
        """The validated settings, this `Zero` itself."""
        return self

    def replace(self, **settings: Any) -> Self:
        """Returns a `Zero` with some settings replaced; takes the arguments of `Zero`.

        Others stay as they are: activations that `offload` moved to host memory are in `remat`, and
        offload that ":auto" turned off stays off.
        """
        return dataclasses.replace(self, **settings)

    def _jit(
        self, fn: Callable[..., PyTree], loss: grads.GlobalLoss, k: int
    ) -> Callable[..., PyTree]:
        def options(params: PyTree, batch: PyTree, *extras: PyTree, **_: PyTree) -> XlaOptions:
            return self.compiler_options(loss.read(params, batch, extras, k).layers)

        def check(params: PyTree, batch: PyTree, *extras: PyTree, **named: PyTree) -> None:
            check_global(batch, self.mesh)

        return CheckedJit(fn, options if on_gpu(self.mesh) else None, check)

    def splits(self, params: PyTree) -> list[Partition]:
        """Returns the partition of each leaf of a full tree of arrays or ShapeDtypeStructs."""
        return self.resolved.splitter(params)

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
        return parameters.init(self, fn, *args)

    def eval_shape(self, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Returns the result of `init` as ShapeDtypeStructs with shardings; allocates nothing."""
        return parameters.eval_shape(self, fn, *args)

    def shard(self, params: PyTree) -> PyTree:
        """Shards existing full arrays, such as a loaded model, leaf by leaf.

        Args:
          params: A tree of numpy or JAX arrays, equal in every process.

        Returns:
          The sharded tree, as from `init`.

        Raises:
          ValueError: A leaf is not a numeric array.
        """
        return parameters.shard(self, params)

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
        return ZeroTransform(tx, self.resolved)

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
        if self.stage == AUTO:
            raise ValueError(
                '`stage`="auto" depends on the optimizer: use zero.train_step(loss_fn, tx), or '
                "zero.choose(loss_fn, tx, params, batch).zero"
            )
        loss = grads.GlobalLoss(self.resolved, loss_fn, has_aux)

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

        Products are in the compute dtype: a `matmul_dtype` is for training alone.

        Args:
          loss_fn: See `value_and_grad`.
          has_aux: See `value_and_grad`.

        Returns:
          A jitted function of `(params, batch, *extras)` that returns (loss, weight), or
          ((loss, aux), weight): the global weighted mean and the global weight.
        """
        loss = grads.GlobalLoss(self.resolved.without_fp8(), loss_fn, has_aux)

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
            return self.choose(loss_fn, tx, params, batch, *extras, **options).zero

        return TrainStep(self, loss_fn, tx, has_aux=has_aux, max_skips=max_skips, choose=choose)

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
        if self.stage == AUTO:
            raise ValueError('`stage`="auto" has a plan for each candidate: use zero.choose(...)')
        check_made_for(tx, self)
        return planning.of(self, loss_fn, tx.plain, *args, **options)

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
        check_made_for(tx, self.resolved)
        choice = auto.decide(self, loss_fn, tx.plain, *args, **options)
        return ZeroChoice(**vars(choice), zero=self.replace(**choice.chosen.candidate.settings))


# A decorator would do the same, but mypy would take the attributes for the arguments.
dataclasses.dataclass(frozen=True)(Zero)


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
_PAPER_CONFIGS = {
    "c1": {"stage": 1, "remat": "block"},
    "c2": {"stage": 1, "remat": "block@partitioned"},
    "c3": {"stage": 2, "remat": "block"},
    "c4": {"stage": 2, "remat": "block@partitioned"},
    "c5": {"stage": 2, "remat": "block@partitioned+host"},
    "zero-100b": {"stage": 2, "remat": "block@partitioned"},
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
    return dict(_PAPER_CONFIGS[name])
