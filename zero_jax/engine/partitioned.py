"""ZeRO stages 1 and 2 inside a user's `shard_map`, as an optax transformation.

Parameters are replicated; the optimizer state is partitioned, K/N bytes per parameter and device
(K = 8 for Adam's two moments). A step reduce-scatters Ψ elements and gathers Ψ, as many as the
all-reduce of plain data parallelism. Inside `shard_map` a transformation receives shards only, so
`init` raises for those that are not elementwise (elementwise_check.py). Source: ZeRO
(arXiv:1910.02054), sections 5.1, 5.2 and 7.2.1.
"""

from collections.abc import Callable

import jax
import optax
from jax.sharding import PartitionSpec

from zero_jax.collectives.gather_scatter import Wire, reduce_scatter
from zero_jax.collectives.manual import shard
from zero_jax.engine.elementwise_check import at_rest_and_shard, require_elementwise
from zero_jax.sharding import layout, paths
from zero_jax.sharding.layout import Partition, Partitioner
from zero_jax.sharding.paths import PyTree


class Partitioned(optax.GradientTransformationExtraArgs):
    """The transformation of `partitioned`: `init` and `update` as in optax."""


def partitioned(
    tx: optax.GradientTransformation, axis_name: str = "data", stage: int = 2
) -> Partitioned:
    """Partitions an elementwise transformation's state and work over a mesh axis.

    `init` and `update` run inside `jax.shard_map`, manual over `axis_name`, with parameters
    replicated on every device. `update(grads, state, params)` takes the gradients of this device's
    own loss from `jax.grad`, *not* summed over devices. It returns full updates, equal on every
    device. The update uses the mean gradient over devices: sum / N. So the differentiated loss is
    the mean over this device's part of the batch. Weight batches of unequal size in the loss.

    Gradients must not be summed before. With `check_vma=True` (the default of `jax.shard_map`),
    `jax.grad` with respect to a replicated value sums over devices. Differentiate with respect to
    `jax.lax.pcast(params, axis_name, to="varying")` instead; summed gradients raise `ValueError`.
    With `check_vma=True`, a loss averaged by `jax.lax.pmean` inside the differentiated function
    gives gradients that are N times too small: average it outside.

    With `check_vma=False` nothing is summed implicitly, and sums are not detected. Gradients from
    `jax.lax.psum` would be N times too large, those from `jax.lax.pmean` are right.

    The state and the updates have the dtype of the parameters; gradients are summed in fp32.
    Further keyword arguments of `update` are passed to `tx`, and must be equal on every device.

    Args:
      tx: An elementwise transformation, or a chain of them, without traced values. A learning rate
        that is an argument of the step requires `optax.inject_hyperparams`.
      axis_name: The mesh axis to partition over.
      stage: 1 keeps every full gradient until the backward pass has ended. 2 reduce-scatters and
        frees each as soon as it is computed.

    Returns:
      An `optax.GradientTransformationExtraArgs`. `partition_specs` has the specs of its state for
      `in_specs` and `out_specs` of `shard_map`.

    Raises:
      ValueError: The stage is not 1 or 2. Raised by `init` if the transformation is not
        elementwise, by `update` if gradients are summed already, and by both outside `shard_map`.

    Source: ZeRO (arXiv:1910.02054), sections 5.1 and 5.2.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> tx, params = optax.adam(1e-3), {"w": jax.numpy.ones((4, 2))}
    >>> ztx, specs = partitioned(tx), partition_specs(tx, params, num_shards=1)
    >>> init = jax.shard_map(ztx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    >>> init(params)[0].mu["w"].shape
    (4, 2)
    """
    if stage not in (1, 2):
        raise ValueError(
            f"`stage`={stage!r}: `partitioned` requires 1 or 2, because parameters are "
            "replicated. Use zero_jax.Zero(mesh, stage=3) for stages 0 and 3"
        )
    tx = _plain(tx)

    def init(params: PyTree) -> PyTree:
        # On one device too, so that a program for one device also runs on several.
        require_elementwise(tx, params, Partitioner(max(_axis_size(axis_name), 2))(params))
        return tx.init(shard(params, axis_name=axis_name))

    def update(
        grads: PyTree, state: PyTree, params: PyTree | None = None, **extra: PyTree
    ) -> tuple[PyTree, PyTree]:
        shards = _axis_size(axis_name)
        _refuse_summed(grads, axis_name)
        like = grads if params is None else params
        cuts = Partitioner(shards, axis=axis_name)(like)
        if stage == 1:
            grads = jax.lax.optimization_barrier(grads)
        own = None if params is None else shard(params, axis_name=axis_name)
        means = _map(_mean, grads, cuts, like)
        pieces, state = optax.with_extra_args_support(tx).update(means, state, own, **extra)
        return _map(_gathered, pieces, cuts, like), state

    return Partitioned(init, update)


def _mean(full: jax.Array, cut: Partition, like: jax.Array) -> jax.Array:
    """Returns this device's shard of the mean over devices."""
    return (reduce_scatter(full, cut, Wire()) / cut.shards).astype(like.dtype)


def _gathered(piece: jax.Array, cut: Partition, like: jax.Array) -> jax.Array:
    """Returns the full leaf, marked as equal on every device, unlike `collectives.gather`."""
    if cut.dim is None:
        return piece.astype(like.dtype)
    at = cut.dim % piece.ndim
    full = jax.lax.all_gather(piece, cut.axis, axis=at, tiled=True, to="invarying")
    full = layout.strip_dim(full, cut.dim, cut.size) if cut.padded else full
    return full.astype(like.dtype)


def _plain(tx: optax.GradientTransformation | optax.MultiSteps) -> optax.GradientTransformation:
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


def partition_specs(
    tx: optax.GradientTransformation, params: PyTree, num_shards: int, axis_name: str = "data"
) -> PyTree:
    """Returns the PartitionSpecs of the state of `partitioned(tx)`, for `shard_map`.

    A state leaf that is smaller on a shard than on full parameters is partitioned along that dim.
    All others (counters, the moments of leaves too small to split) are equal on every device.
    Outside `shard_map`, a partitioned leaf is padded with zeros along that dim to a multiple of
    `num_shards`: (10, 7) over 4 devices is stored as (10, 8).

    Args:
      tx: The transformation given to `partitioned`.
      params: Full parameters, arrays or ShapeDtypeStructs.
      num_shards: N, the size of the mesh axis.
      axis_name: The mesh axis that the state is partitioned over.

    Returns:
      A tree of PartitionSpecs with the structure of the state, for `in_specs` and `out_specs`.

    Raises:
      ValueError: `tx` is the result of `partitioned`.

    >>> params = {"w": jax.ShapeDtypeStruct((10, 7), "float32")}
    >>> partition_specs(optax.sgd(0.1, momentum=0.9), params, 4)[0].trace
    {'w': P(None, 'data')}
    """
    if isinstance(tx, Partitioned):
        raise ValueError(
            "`tx` is the result of `partitioned`, but the transformation before it is required: "
            "partition_specs(optax.adam(1e-3), params, num_shards)"
        )
    tx = _plain(tx)

    def spec(full: jax.ShapeDtypeStruct, own: jax.ShapeDtypeStruct) -> PartitionSpec:
        sizes = zip(full.shape, own.shape, strict=True)
        dim = next((d for d, (a, b) in enumerate(sizes) if a != b), None)
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axis_name)

    trees = at_rest_and_shard(params, Partitioner(num_shards)(params))
    return jax.tree.map(spec, *(jax.eval_shape(tx.init, tree) for tree in trees))


def _map(fn: Callable[..., jax.Array], tree: PyTree, cuts: list[Partition], like: PyTree) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    parts = zip(leaves, cuts, jax.tree.leaves(like), strict=True)
    return jax.tree.unflatten(treedef, [fn(*part) for part in parts])


def _axis_size(axis: str) -> int:
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"`axis_name`={axis!r}: `partitioned` runs inside jax.shard_map over a mesh with an "
            f"axis {axis!r}, and there is none here. Use zero.optimizer(tx) outside shard_map"
        ) from None


def _varies(x: jax.Array, axis: str) -> bool:
    return axis in jax.typeof(x).manual_axis_type.varying


def _refuse_summed(grads: PyTree, axis: str) -> None:
    if not _varies(jax.lax.axis_index(axis), axis):
        return  # check_vma=False: nothing is known, and nothing was summed by jax.grad
    for name, leaf in paths.named_leaves(grads):
        if not _varies(leaf, axis):
            raise ValueError(
                f"the gradient of {name} is already summed over {axis!r}, because jax.grad of a "
                "replicated value sums inside shard_map. `partitioned` needs the gradient of each "
                f"device: differentiate with respect to jax.lax.pcast(params, {axis!r}, "
                'to="varying"), or pass check_vma=False to shard_map'
            )
