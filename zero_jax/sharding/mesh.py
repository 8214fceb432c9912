"""Device meshes and global batches: mesh axes, and the part of the data that a process loads.

Axes, outermost first: optional `replica` (parameters are replicated over it, gradients are summed
over it too), optional `experts` (expert parallelism; other parameters are partitioned over it as
over `data`), `data` (parameters are partitioned over it), optional `context` (context parallelism:
the tokens of a row are split over it, parameters as over `data`), and optional `model` (tensor
parallelism). Rows of the batch are split over all axes but `context` and `model`.
"""

import collections
import math
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from zero_jax.sharding.paths import PyTree

DATA = "data"
REPLICA = "replica"
EXPERTS = "experts"
CONTEXT = "context"
MODEL = "model"
AnyMesh: TypeAlias = Mesh | AbstractMesh
Axis: TypeAlias = str | tuple[str, ...]  # one, or several as one


def make_mesh(
    data: int | None = None,
    *,
    replica: int = 1,
    experts: int = 1,
    context: int = 1,
    model: int = 1,
    devices: list[jax.Device] | None = None,
    data_axis: str = DATA,
) -> Mesh:
    """Returns a mesh with a `data` axis, and the other axes if above 1.

    Args:
      data: Size of the axis that parameters are partitioned over; by default the remaining devices.
      replica: Number of copies of the partitioned state (the outermost axis: assign nodes to it).
      experts: Number of expert-parallel groups. The devices of a group share its experts, and
        tokens are sent between groups. All other parameters are partitioned over `experts` and
        `data` together.
      context: Number of devices that share the tokens of a row. Parameters are partitioned over
        `data` and `context` together.
      model: Size of the tensor-parallel axis (the innermost: assign NVLink neighbours to it).
      devices: Devices of the mesh; by default all of `jax.devices()`.
      data_axis: Another name for `data`, for a model that hard-codes one.

    Raises:
      ValueError: The product of the sizes is not the number of devices.

    >>> make_mesh(devices=jax.devices()[:1]).shape["data"]
    1
    """
    devices = list(jax.devices() if devices is None else devices)
    others = replica * experts * context * model or 1  # abstract_mesh refuses 0
    if data is None:
        data = max(len(devices) // others, 1)
    if data * others != len(devices):
        raise ValueError(
            f"`replica`={replica} x `experts`={experts} x `data`={data} x `context`={context} x "
            f"`model`={model} is {data * others}, but there are {len(devices)} devices: make the "
            "product equal, or pass `devices`"
        )
    sizes = {REPLICA: replica, EXPERTS: experts, CONTEXT: context, MODEL: model}
    mesh = abstract_mesh(data, **sizes, data_axis=data_axis)
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, devices=devices)


def abstract_mesh(
    data: int,
    *,
    replica: int = 1,
    experts: int = 1,
    context: int = 1,
    model: int = 1,
    data_axis: str = DATA,
) -> AbstractMesh:
    """Returns a mesh without devices, for planning and ahead-of-time compilation.

    The arguments are those of `make_mesh`.

    Raises:
      ValueError: A size is below 1, or `context` is combined with `experts` or `model`.

    >>> dict(abstract_mesh(8, replica=2).shape)
    {'replica': 2, 'data': 8}
    """
    axes = {REPLICA: replica, EXPERTS: experts, data_axis: data, CONTEXT: context, MODEL: model}
    if min(axes.values()) < 1:
        given = ", ".join(f"`{axis}`={size}" for axis, size in axes.items())
        raise ValueError(f"{given}: each must be at least 1")
    if context > 1 and experts * model > 1:
        others = " and ".join(
            f"`{axis}`={axes[axis]}" for axis in (EXPERTS, MODEL) if axes[axis] > 1
        )
        raise ValueError(
            f"`context`={context} with {others}: context parallelism excludes tensor and expert "
            "parallelism. Leave out `context`, or the others"
        )
    sizes = {axis: size for axis, size in axes.items() if axis == data_axis or size > 1}
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def abstract_of(mesh: AnyMesh) -> AbstractMesh:
    """Returns the same mesh without its devices."""
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def check_mesh(mesh: AnyMesh) -> None:
    """Checks that `Zero` supports a mesh.

    Raises:
      ValueError: It is not a mesh, has a device twice, wrong axes, or explicit axis types.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"`mesh`={mesh!r}: pass a jax.sharding.Mesh, for example zero_jax.make_mesh()"
        )
    if isinstance(mesh, Mesh):
        (device, times), *_ = collections.Counter(mesh.devices.flat).most_common(1)
        if times > 1:
            raise ValueError(
                f"`mesh` has {device} {times} times: each position needs another device"
            )
    data_axis(mesh)
    if any(t != AxisType.Auto for t in mesh.axis_types):
        raise ValueError(
            f"`mesh` has axis types {mesh.axis_types}, but Zero needs Auto axes (jax.make_mesh "
            "makes Explicit ones by default): use zero_jax.make_mesh()"
        )


def data_axis(mesh: AnyMesh) -> Axis:
    """Returns the axis that parameters are partitioned over; with `experts` or `context`, both.

    It is `data`, or the only axis with another name than those of the other kinds.

    Raises:
      ValueError: There is no such axis, or another one of more than one device.

    >>> data_axis(abstract_mesh(8)), data_axis(abstract_mesh(2, experts=4))
    ('data', ('experts', 'data'))
    >>> data_axis(abstract_mesh(2, context=4))
    ('data', 'context')
    """
    others = [axis for axis in mesh.axis_names if axis not in (REPLICA, EXPERTS, CONTEXT, MODEL)]
    if DATA in others:
        others = [DATA, *(axis for axis in others if axis != DATA and mesh.shape[axis] > 1)]
    if len(others) != 1:
        raise ValueError(
            f"`mesh` has axes {dict(mesh.shape)}: Zero partitions parameters over 'data', or over "
            "the only axis that is not 'replica', 'experts', 'context' or 'model'; others must "
            "have size 1. Use zero_jax.make_mesh()"
        )
    axes = (EXPERTS, others[0], CONTEXT)
    both = tuple(axis for axis in axes if axis == others[0] or mesh.shape.get(axis, 1) > 1)
    return both if len(both) > 1 else others[0]


def names(axis: Axis) -> tuple[str, ...]:
    """Returns the names of an axis."""
    return (axis,) if isinstance(axis, str) else axis


def axis_size(mesh: AnyMesh, axis: Axis) -> int:
    """Returns the number of devices along an axis."""
    return math.prod(mesh.shape[name] for name in names(axis))


def experts_size(mesh: AnyMesh) -> int:
    """Returns the size of the `experts` axis; 1 without one."""
    return mesh.shape.get(EXPERTS, 1)


def context_size(mesh: AnyMesh) -> int:
    """Returns the number of devices that share the tokens of a row; 1 without that axis."""
    return mesh.shape.get(CONTEXT, 1)


def batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the mesh axes that the batch is split over, in the order of the mesh.

    So the devices of a process hold consecutive rows, whatever the order.
    """
    return tuple(a for a in mesh.axis_names if a in (REPLICA, *names(data_axis(mesh))))


def row_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns those that rows are split over; the devices of `context` share rows."""
    return tuple(axis for axis in batch_axes(mesh) if axis != CONTEXT)


def on_gpu(mesh: AnyMesh) -> bool:
    """Returns whether the mesh has devices, and they are GPUs."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")


def check_there(mesh: AnyMesh) -> None:
    """Raises ValueError for a mesh without devices, which cannot hold arrays."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"`mesh` is an AbstractMesh, {dict(mesh.shape)}, which has no devices: plan with the "
            "shapes of zero.eval_shape(...), or use zero_jax.make_mesh()"
        )


def model_size(mesh: AnyMesh) -> int:
    """Returns MP, the size of the `model` axis; 1 without one."""
    return mesh.shape.get(MODEL, 1)


def batch_shards(mesh: AnyMesh) -> int:
    """Returns the number of parts that the rows of the batch are split into."""
    return axis_size(mesh, row_axes(mesh))


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding of a batch: dim 0 over `row_axes`."""
    return NamedSharding(mesh, PartitionSpec(row_axes(mesh)))


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """Returns the part of the global batch that this process loads, as (index, count).

    Processes that load the same rows, because a `context` or `model` axis spans them, get the same
    index.

    Raises:
      ValueError: This process's devices do not hold one even part of the batch.

    >>> batch_share(make_mesh())
    (0, 1)
    """
    shards, own = batch_shards(mesh), set(mesh.local_devices)
    rows = batch_sharding(mesh).devices_indices_map((shards,))
    held = {index[0].indices(shards)[0] for device, index in rows.items() if device in own}
    first, count = min(held, default=0), max(len(held), 1)
    if held != set(range(first, first + count)) or first % count or shards % count:
        raise ValueError(
            f"`mesh`: process {jax.process_index()} holds rows {sorted(held)} of {shards} parts "
            "of the batch, which is not one even share. Order the devices of the mesh by process"
        )
    return first // count, shards // count


def check_global(batch: PyTree, mesh: AnyMesh) -> None:
    """Checks that a batch has global arrays if the run has several processes.

    JAX treats NumPy arrays as values that are equal in all processes, and would train on other
    numbers in each of them.

    Raises:
      ValueError: A leaf is not a global array; the message names it.
    """
    if isinstance(mesh, AbstractMesh) or len(mesh.local_devices) == mesh.size:
        return
    for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        abstract = isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
        if not abstract and not (isinstance(x, jax.Array) and not x.is_fully_addressable):
            raise ValueError(
                f"`batch`: {jax.tree_util.keystr(path) or 'array'} is a {type(x).__name__} of "
                "this process alone, but the run has several processes. Make global arrays with "
                "zero_jax.global_batch(mesh, rows)"
            )


def global_batch(mesh: Mesh, local: PyTree) -> PyTree:
    """Makes global arrays from each process's part of the batch.

    Args:
      mesh: The mesh.
      local: A pytree of numpy arrays, this process's rows (see `batch_share`): (B / count, ...).

    Returns:
      The same tree of global arrays (B, ...), dim 0 split over the devices.

    Raises:
      ValueError: This process's devices do not divide its rows, or hold no even part of the batch.
    """
    parts, sharding = batch_shards(mesh) // batch_share(mesh)[1], batch_sharding(mesh)

    def one(path: tuple[object, ...], rows: np.ndarray) -> jax.Array:
        x = np.asarray(rows)
        if x.ndim == 0 or x.shape[0] % parts:
            raise ValueError(
                f"`local`{jax.tree_util.keystr(path)} has shape {x.shape}, but {parts} parts of "
                f"the batch in this process must divide dim 0: use a multiple of {parts} rows"
            )
        return jax.make_array_from_process_local_data(sharding, x)

    return jax.tree_util.tree_map_with_path(one, local)
