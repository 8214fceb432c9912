"""The one noun: `Zero` ties layout, gradients and optimizer to a mesh and a stage.

A Zero is a value: settings only, no parameters and no state, so two models with two optimizers
in one program just work.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.collectives.precision import cast
from zero_jax.engine import grads, offload_check, optimizer
from zero_jax.engine.compiler import Program
from zero_jax.engine.file_step import NvmeStep
from zero_jax.engine.settings import AUTO, Settings
from zero_jax.engine.step import TrainStep
from zero_jax.names import unknown
from zero_jax.offload import tiers
from zero_jax.plan import auto, planning
from zero_jax.plan.plans import Plan
from zero_jax.sharding import layout, paths
from zero_jax.sharding.cuts import Split
from zero_jax.sharding.mesh import check_global, check_there, on_gpu

PyTree = Any
Tx: TypeAlias = optax.GradientTransformation


@dataclasses.dataclass(frozen=True)
class Zero(Settings):
    """ZeRO at one stage on one mesh.

    Args:
      mesh: a mesh with a `data` axis, from `make_mesh`; from `abstract_mesh` to plan only.
      stage: 0 nothing is partitioned, 1 optimizer state (and masters), 2 and gradients,
        3 and parameters. Stages 1 to 3 share the same arrays at rest. "auto" chooses stage,
        micro-batches and remat at the first step, with `choose` also what rests in host memory;
        micro_batches and remat are then the least it may choose.
      precision: a `Precision`, or "fp32", "bf16", "fp16" for its `compute`.
      micro_batches: k; the batch is worked off in k parts, gradients accumulate in fp32.
      remat: what the backward pass keeps of layers, and where: "none", "dots", "block",
        "block_sqrt", "names:a,b", "block@host", "block@partitioned"; see `policies`.
      frozen: leaves that are not trained: a pattern searched in paths like "blocks/attn/kernel",
        or a function of such a path. They have no optimizer state and no gradient. Leaves that
        are not floating point are always frozen.
      model_specs: pairs or a mapping from patterns of paths to PartitionSpecs that name `model` for
        the dim that tensor parallelism splits; None for what the model's own variables name.
      axis_rules: what the names of dims in the model mean: (name, mesh axis or None) pairs, by
        default Flax's rules in force (`nn.logical_axis_rules`); heads, mlp and vocab are split over
        `model` unless a rule says otherwise.
      sequence_parallel: splits the dim that a model names "seq" over `model` too, outside matmuls.
      bucket_bytes: the most that a collective moves at once; a larger leaf travels in pieces,
        smaller ones together.
      offload: what rests in host memory: "optimizer" or "optimizer,params"; or an `Offload`.
      hierarchical: at stage 3, states are cut over `replica` too: a device joins its shard of the
        parameters once a step, in the compute dtype, and layers are gathered over `data` alone.
      guard: whether a step whose gradients are not finite is skipped; if not, a transformation sees
        them as they are (`optax.zero_nans`, `optax.apply_if_finite`).
      states: how the large leaves of the optimizer's state rest: "fp32", "bf16" or "8bit"
        (docs/states.md), of any elementwise transformation; the same bits for every N and stage.
      memory_limit: bytes of a device that "auto" may use; by default JAX's pool of the device's
        memory, of a target that is not there all of it less 8 % for what no plan shows.

    Raises:
      ValueError: for a stage, mesh, precision, policy or count that can't be used.

    >>> import zero_jax
    >>> zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    >>> params = zero.init(lambda key: {"w": jax.random.normal(key, (8, 3))}, jax.random.key(0))
    >>> tx = zero.optimizer(optax.adamw(1e-3))
    >>> step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx)
    >>> params, opt_state, metrics = step(params, tx.init(params), jnp.ones((8, 8)))
    >>> int(metrics.skipped)
    0
    """

    @property
    def settings(self) -> Settings:
        """The same settings, as the gradient code takes them; "auto" rests as stage 3 does."""
        return dataclasses.replace(self, stage=3) if self.stage == AUTO else self

    def _jit(self, fn: Callable[..., Any], loss: grads.GlobalLoss, k: int) -> Any:
        def options(params: PyTree, batch: PyTree, *extras: Any, **_: Any) -> dict[str, Any]:
            return self.compiler_options(loss.read(params, batch, extras, k).layers)

        def check(params: PyTree, batch: PyTree, *extras: Any, **named: Any) -> None:
            check_global(batch, self.mesh)

        return Program(fn, options if on_gpu(self.mesh) else None, check)

    def splits(self, params: PyTree) -> list[Split]:
        """How each leaf of a logical tree (arrays or ShapeDtypeStructs) is cut."""
        return self.settings.splitter(params)

    def _born(
        self, user_fn: Callable[..., PyTree], args: tuple[Any, ...]
    ) -> tuple[Any, PyTree, Any]:
        """A function that makes parameters at rest, what it makes, and where that goes."""

        def fn(*args: Any) -> PyTree:
            # Variables that name their dims would be placed by Flax as soon as they are made.
            with nnx.use_eager_sharding(False):
                made = user_fn(*args)
            layout.check_arrays(made)
            return made

        full = jax.eval_shape(fn, *args)
        frozen = paths.frozen_leaves(full, self.frozen if jax.tree.leaves(full) else None)
        layout.check_leaves(full, self.mesh.size, frozen)
        cuts = self.splits(full)

        def born(*args: Any) -> PyTree:
            leaves, treedef = jax.tree.flatten(fn(*args))
            masters = [
                x if f else cast(x, jnp.promote_types(x.dtype, jnp.float32))
                for x, f in zip(leaves, frozen, strict=True)
            ]
            return layout.at_rest(jax.tree.unflatten(treedef, masters), cuts)

        abstract = jax.eval_shape(born, *args)
        placed = layout.shardings(abstract, cuts, self.mesh)
        return born, abstract, tiers.place(placed, abstract, self.settings.offload)

    def init(self, fn: Callable[..., PyTree], *args: Any) -> PyTree:
        """Makes parameters that are born partitioned: no device ever holds the whole.

        Args:
          fn: returns the parameters, as on one device: a linen `model.init`, a function that
            returns `nnx.state(Model(...), nnx.Param)`, or any function of arrays.
          *args: its arguments.

        Returns:
          The same tree of fp32 masters, split over `data`; bitwise the same values for every N
          and stage. Leaves that N does not divide are wrapped as `Padded`.

        Raises:
          ValueError: a leaf is no numeric array, or a device is not there or holds another shard.
        """
        check_there(self.mesh)
        if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
            raise ValueError(
                "jax_threefry_partitionable is off, so initial values would depend on the mesh: "
                "remove the setting"
            )
        born, abstract, placed = self._born(fn, args)
        params = jax.jit(born, out_shardings=placed)(*args)
        layout.check_bytes(params, self.splits(jax.eval_shape(layout.logical, abstract)))
        return params

    def abstract(self, fn: Callable[..., PyTree], *args: Any) -> PyTree:
        """What `init` would return, as ShapeDtypeStructs with shardings; allocates nothing."""
        _, abstract, placed = self._born(fn, args)
        return layout.with_shardings(abstract, placed)

    def shard(self, params: PyTree) -> PyTree:
        """Partitions logical arrays that exist already (a loaded model), leaf by leaf.

        Args:
          params: a tree of numpy or JAX arrays, equal in every process.

        Returns:
          The tree at rest, as from `init`.
        """
        for name, leaf in paths.named_leaves(params):
            if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
                raise ValueError(
                    f"parameter {name!r} is a {type(leaf).__name__}: parameters are arrays, for "
                    "example jnp.asarray(...)"
                )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        _, abstract, placed = self._born(lambda tree: tree, (shapes,))

        def place(x: Any, like: Any, sharding: NamedSharding) -> jax.Array:
            host = np.zeros(like.shape, like.dtype)
            host[tuple(map(slice, np.shape(x)))] = np.asarray(x)
            return jax.make_array_from_callback(like.shape, sharding, lambda index: host[index])

        leaves = zip(*map(jax.tree.leaves, (params, abstract, placed)), strict=True)
        return jax.tree.unflatten(jax.tree.structure(abstract), [place(*leaf) for leaf in leaves])

    def optimizer(self, tx: optax.GradientTransformation) -> optimizer.ZeroTransform:
        """Wraps any optax transformation; exact at every stage and every N.

        Its `init` gives a state that is born partitioned, its `update` takes gradients and
        parameters as they rest. A step whose gradients are not finite is skipped.
        """
        offload_check.ensure(self.settings)
        return optimizer.partition(
            tx,
            self.mesh,
            self.settings.splitter,
            precision=self.precision,
            frozen=self.frozen,
            offload=self.settings.offload,
            guard=self.guard,
            states=self.states,
        )

    def value_and_grad(self, loss_fn: grads.LossFn, *, has_aux: bool = False) -> Callable[..., Any]:
        """The global loss and its partitioned gradients.

        Args:
          loss_fn: `loss_fn(params, batch, *extras)`, written for one device. It returns a scalar
            mean, or `Weighted(sum, weight)` where weights differ between devices.
          has_aux: whether it returns (loss, aux). Rows come back as rows, floats as means.

        Returns:
          A function of `(params, batch, *extras, loss_scale=1.0)` that returns (loss, grads), or
          ((loss, aux), grads). Dim 0 of every batch array is split over the devices; extras
          (batch statistics, dropout keys) are the same on all, except that typed PRNG keys are
          folded with the device and the micro-batch. Gradients rest like the parameters, fp32;
          those of frozen leaves are scalar zeros. `jax.grad` of it is right for every argument.
        """
        if self.stage == AUTO:
            raise ValueError(
                'stage="auto" is decided by the whole step, optimizer included: use '
                "zero.train_step(loss_fn, tx), or zero = zero.choose(loss_fn, tx, params, batch)"
            )
        loss = grads.GlobalLoss(self.settings, loss_fn, has_aux)

        def value_and_grad(
            params: PyTree, batch: PyTree, *extras: Any, loss_scale: Any = None
        ) -> Any:
            if loss_scale is None and loss.settings.precision.scaled:
                raise ValueError(
                    "fp16 gradients underflow without a loss scale: pass "
                    "loss_scale=opt_state.guard.loss_scale, or use zero.train_step"
                )
            scale = 1.0 if loss_scale is None else loss_scale
            out = loss.gradients(params, batch, extras, scale)
            return ((out.loss, out.aux) if has_aux else out.loss), out.grads

        return self._jit(value_and_grad, loss, loss.settings.micro_batches)

    def evaluate(self, loss_fn: grads.LossFn, *, has_aux: bool = False) -> Callable[..., Any]:
        """The global loss without gradients, for held-out data.

        Returns:
          A jitted function of `(params, batch, *extras)` that returns (loss, weight), or
          ((loss, aux), weight): the global weighted mean and the global weight.
        """
        loss = grads.GlobalLoss(self.settings, loss_fn, has_aux)

        def evaluate(params: PyTree, batch: PyTree, *extras: Any) -> Any:
            out = loss.value(params, batch, extras)
            return ((out.loss, out.aux) if has_aux else out.loss), out.weight

        return self._jit(evaluate, loss, 1)

    def full(self, params: PyTree) -> PyTree:
        """Logical arrays, whole on every device: for a sample, an export, a look."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        full = jax.jit(lambda p: layout.logical(tiers.to_device(p)), out_shardings=whole)
        return full(params)

    def train_step(
        self,
        loss_fn: grads.LossFn,
        tx: optax.GradientTransformation,
        *,
        has_aux: bool = False,
        max_skips: int = 20,
    ) -> TrainStep | auto.AutoStep:
        """The packaged step: gradients, guard, update, metrics; jitted and donated.

        Args:
          loss_fn: as for `value_and_grad`.
          tx: the result of `optimizer`, or a plain optax transformation.
          has_aux: as for `value_and_grad`.
          max_skips: how many steps in a row may be skipped before `NonFiniteError` is raised.

        Returns:
          A callable `step(params, opt_state, batch, *extras, **named)` that returns
          (params, opt_state, Metrics) and consumes its first two arguments. Extras go to the loss;
          arrays that are passed by name go to the transformation, beside `value`, the loss.
        """
        own = self.optimizer(optax.identity())
        if not isinstance(tx, optimizer.ZeroTransform):
            tx = self.optimizer(tx)
        elif tx.made_for != own.made_for:
            raise ValueError(
                f"the optimizer was wrapped for {tx.made_for}, but this Zero has {own.made_for}: "
                "wrap it with the same Zero, or pass the plain optax transformation"
            )
        if self.stage == AUTO:

            def made_for(params: PyTree, _: PyTree, batch: PyTree, *extras: Any) -> TrainStep:
                zero = self.choose(loss_fn, tx, params, batch, *extras, has_aux=has_aux, born=True)
                step = zero.train_step(loss_fn, tx, has_aux=has_aux, max_skips=max_skips)
                assert isinstance(step, TrainStep)
                return step

            return auto.AutoStep(made_for)
        kind = NvmeStep if self.settings.offload.in_files else TrainStep
        return kind(self.settings, loss_fn, tx, has_aux=has_aux, max_skips=max_skips)

    def plan(self, loss_fn: grads.LossFn, tx: Tx, *args: Any, **options: Any) -> Plan:
        """What a step will hold and send: predicted from its shapes, proven by compiling it.

        Args:
          loss_fn: as for `train_step`.
          tx: as for `train_step`.
          *args: parameters at rest (from `init` or `abstract`), the global batch and further
            arguments of the loss; arrays or ShapeDtypeStructs.
          **options: of `planning.of`: `compile=True` for the devices of the mesh, `target="h100"`
            for devices that need not be there, `latencies="step.pbtxt"` to tell XLA's scheduler
            how long instructions take there.
        """
        if self.stage == AUTO:
            raise ValueError('stage="auto" has many plans: see zero.choice(...)')
        return planning.of(self, loss_fn, tx, *args, **options)

    def choice(self, loss_fn: grads.LossFn, tx: Tx, *args: Any, **options: Any) -> auto.Choice:
        """Which stage, micro-batches, remat and host tiers fit in `memory_limit` at least cost.

        Arguments as for `plan`, and `born`, whether parameters and optimizer state are there
        already and stay where they are: by default, whether params are arrays. What was
        considered, and why it was dropped, is printed.
        """
        return auto.decide(self, loss_fn, tx, *args, **options)

    def choose(self, loss_fn: grads.LossFn, tx: Tx, *args: Any, **options: Any) -> "Zero":
        """This Zero with all of that chosen; arguments as for `choice`."""
        chosen = self.choice(loss_fn, tx, *args, **options).chosen.candidate
        return dataclasses.replace(self, **chosen.settings)


# The configurations of the paper, by name:
#   c1         P_os + CB + MD              stage 1
#   c2         c1 + P_a                    saved activations are sharded over `model` too
#   c3         P_os+g + CB + MD            stage 2
#   c4         c3 + P_a
#   c5         c4 + P_a+cpu                and stored in host memory
#   zero-100b  P_os+g + ZeRO-R             the paper's implementation: c4
# Constant-size buffers (CB) and static memory planning (MD) are always on. P_a needs a `model`
# axis, of 16 devices in the paper. Source: ZeRO (arXiv:1910.02054), section 10.1 and table 3.
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "c1": {"stage": 1, "remat": "block"},
        "c2": {"stage": 1, "remat": "block@partitioned"},
        "c3": {"stage": 2, "remat": "block"},
        "c4": {"stage": 2, "remat": "block@partitioned"},
        "c5": {"stage": 2, "remat": "block@partitioned+host"},
        "zero-100b": {"stage": 2, "remat": "block@partitioned"},
    }
)


def configuration(name: str) -> Mapping[str, Any]:
    """Returns the settings of a configuration of the paper: `Zero(mesh, **configuration("c4"))`.

    Raises:
      ValueError: for an unknown name; the message has the nearest one.

    >>> configuration("c5")["remat"]
    'block@partitioned+host'
    """
    if name not in CONFIGURATIONS:
        raise ValueError(unknown("configuration", name, CONFIGURATIONS))
    return CONFIGURATIONS[name]
