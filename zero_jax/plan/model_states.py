"""Model-state memory of each stage in closed form, from abstract shapes alone.

Ψ is the number of parameters, N the size of the `data` axis. c and g are the bytes per element of
the compute dtype and of a gradient (4 if micro-batches accumulate, c otherwise). Per device (with
tensor parallelism of degree MP, Ψ stands for Ψ/MP of the leaves that are split over it):

  stage   stored            gathered copy   gradients
  0       4Ψ + state        cΨ (c < 4)      gΨ
  1       (4Ψ + state)/N    cΨ              gΨ + 4Ψ/N; as stage 2 for one micro-batch
  2       (4Ψ + state)/N    cΨ              window + 4Ψ/N
  3       (4Ψ + state)/N    window          window + 4Ψ/N

The state of Adam is 8Ψ, so stages 1 to 3 store 12Ψ/N. With `optimizer_state_dtype="8bit"` it is
about 2Ψ, and they store 6Ψ/N.
The window is one layer. Padding and unsharded leaves are counted exactly. Activations, logits and
buffers are not included.
Source: ZeRO (arXiv:1910.02054), sections 3.1, 5 and table 1. There the fp16 parameters (2Ψ) are
stored beside the fp32 master parameters (part of K = 12); here they are the gathered copy.
"""

import dataclasses
import math

import jax
import numpy as np
import optax

from zero_jax.collectives.precision import Precision
from zero_jax.engine.config import Config, Stage
from zero_jax.engine.lifetimes import STEP, lifetime
from zero_jax.engine.loss_scale import Guard, init_guard
from zero_jax.engine.param_plan import shared
from zero_jax.engine.transformations import without_frozen
from zero_jax.low_bit.state import initial, splits_of
from zero_jax.remat import policies
from zero_jax.sharding import layout, paths
from zero_jax.sharding.layout import Partition, partition
from zero_jax.sharding.paths import PyTree

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes per device of a stage, in closed form.

    Attributes:
      parameters: Stored parameters, padding included: fp32 master parameters, and frozen leaves in
        their own dtype.
      state: Stored optimizer state, including the 16 bytes of the guard.
      copy: Peak of gathered parameters in the compute dtype.
      gradients: Peak of full gradients, and their fp32 shards.
    """

    parameters: int
    state: int
    copy: int
    gradients: int

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term."""
        return dataclasses.asdict(self)

    @property
    def at_rest(self) -> int:
        """Bytes between steps: the arguments of the compiled step, without the batch."""
        return self.parameters + self.state

    @property
    def in_flight(self) -> int:
        """Bytes of model state that exist only during a step."""
        return self.copy + self.gradients

    @property
    def total(self) -> int:
        """Bytes between steps plus bytes during a step."""
        return self.at_rest + self.in_flight


def estimate(
    params: PyTree,
    config: Config,
    tx: optax.GradientTransformation | None = None,
    *,
    shards: int | None = None,
    window: int | None = None,
) -> Estimate:
    """Returns the model-state bytes per device of a stage, in closed form.

    Args:
      params: The full parameters, arrays or ShapeDtypeStructs.
      config: The mesh and settings, `zero.config` or `zero.at_stage(stage).config`.
      tx: The optax transformation; None counts no state.
      shards: Another N than that of the mesh: the size of `data` times the size of `experts`.
      window: Elements gathered at once: the largest `Layers.elements` of a trace, or largest leaf
        outside layers. The default is the largest leaf.

    >>> from zero_jax.sharding.mesh import abstract_mesh
    >>> shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    >>> config, adam = Config(abstract_mesh(4), stage=3), optax.adam(1e-3)
    >>> estimate(shapes, config, adam).at_rest == 12 * 2**20 // 4 + 20
    True
    >>> narrow = dataclasses.replace(config, optimizer_state_dtype="8bit")
    >>> estimate(shapes, narrow, adam).state * 4 / 2**20  # bytes, of 8
    2.03134...
    """
    config = config.resolved
    stage, splitter, compute = config.stage, config.splitter, config.precision.compute
    if shards is not None and stage > 0:
        experts = math.gcd(shards, splitter.experts)
        splitter = dataclasses.replace(splitter, shards=shards, experts=experts)
    cuts, word = splitter(params), compute.itemsize
    flags = paths.frozen_leaves(params, config.frozen)
    leaves = zip(jax.tree.leaves(params), flags, strict=True)
    rests = [leaf if is_frozen else _master(leaf) for leaf, is_frozen in leaves]
    trained_cuts = [cut for cut, is_frozen in zip(cuts, flags, strict=True) if not is_frozen]
    gathered = word * (max(map(_elements, cuts), default=0) if window is None else window)
    # Floats are gathered in the compute dtype. At stage 0 those stored in it are their own copy,
    # and so are other leaves.
    widths = [word if _is_float(x) else x.dtype.itemsize for x in rests]
    if stage == 0:
        widths = [word if _is_float(x) and x.dtype != compute else 0 for x in rests]
    copy = sum(n * width for n, width in zip(map(_elements, cuts), widths, strict=True))
    if stage == 3:
        copy = gathered + (word * sum(map(_in_step, cuts)) if config.parts > 1 else 0)
    full_grads = sum(map(_elements, trained_cuts))
    shard_grads = 4 * sum(map(_in_step, trained_cuts))
    whole = (word if config.grad_accum_steps == 1 else 4) * full_grads
    # A micro-batch's full gradients wait for those of the others, or are reduce-scattered at once.
    waits = lifetime(stage, config.grad_accum_steps).gradient == STEP
    gradients = (whole if waits else gathered) + shard_grads if stage else whole
    return Estimate(
        parameters=layout.bytes_per_device(cuts, rests),
        state=_state_bytes(params, cuts, tx, config),
        copy=copy,
        gradients=gradients,
    )


def elements_per_param(
    stage: int, grad_accum_steps: int, remat: str | policies.Remat = "none", trained: float = 1.0
) -> float:
    """Returns the elements each device sends a step over Ψ: 2, 2, 1 + k, 3k for stages 0 to 3.

    Stage 0 all-reduces gradients, twice their elements. Stages 1 and 2 all-gather parameters once.
    Stage 3 gathers them twice per micro-batch, or three times with block_sqrt, whose layers run
    forward twice more. Stages 2 and 3 reduce-scatter gradients once per micro-batch, stage 1 once.
    A plan counts less if a layer or a head stays gathered between the passes.

    Args:
      stage: ZeRO stage, 0 to 3.
      grad_accum_steps: k, the number of gradient-accumulation steps.
      remat: Remat policy.
      trained: Fraction of Ψ that is not frozen; frozen parameters are gathered and not reduced.

    >>> [elements_per_param(stage, 4) for stage in range(4)]
    [2.0, 2.0, 5.0, 12.0]
    >>> [elements_per_param(stage, 1, trained=0.0) for stage in range(4)]
    [0.0, 1.0, 1.0, 2.0]
    """
    gathers = 3 if policies.parse(remat).kind == "block_sqrt" else 2
    sums = grad_accum_steps * trained
    return (2 * trained, 1 + trained, 1 + sums, gathers * grad_accum_steps + sums)[stage]


def _elements(cut: Partition) -> int:
    """Elements of a gathered leaf on one device."""
    return math.prod(cut.shape) // shared(cut)


def _in_step(cut: Partition) -> int:
    """Elements of a device's shard during a step, whose parts are joined."""
    return math.prod(cut.device_shape) * (1 if cut.dim is None else cut.parts)


def _is_float(leaf: jax.ShapeDtypeStruct) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, np.floating))


def _master(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a trained leaf as it is stored: floats narrower than fp32 are widened."""
    wide = jax.numpy.promote_types(leaf.dtype, np.float32) if _is_float(leaf) else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, wide)


def _state_bytes(
    params: PyTree, cuts: list[Partition], tx: optax.GradientTransformation | None, config: Config
) -> int:
    if tx is None:
        return 0
    masters = jax.tree.map(_master, params)
    plain, kind = without_frozen(tx, config.frozen), config.optimizer_state_dtype
    state = jax.eval_shape(lambda params: initial(plain, params, kind), masters)
    guard: Guard = jax.eval_shape(lambda: init_guard(Precision()))
    leaves = [*jax.tree.leaves(state), *guard]
    splits = splits_of(state, params, cuts) + [partition((), 1)] * len(guard)
    return layout.bytes_per_device(splits, leaves)
