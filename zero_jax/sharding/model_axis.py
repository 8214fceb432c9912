"""The `model` axis inside the step: names of activations, and collectives on pieces of a leaf.

There `model` stays an automatic axis of `shard_map`: XLA splits the matmuls of an unmodified model
by the names of its weights (named_dims.py) and activations.

Note [pieces over model]: XLA does not split a collective over a manual axis along an automatic
one; it gathers the operand over `model` first. So collectives over `data` run in a nested
`shard_map` in which `model` is manual too: each device sends its own 1/MP of the leaf.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from flax import linen as nn
from flax import nnx
from flax.core import spmd
from jax.sharding import AbstractMesh, PartitionSpec

from zero_jax.sharding.mesh import MODEL

# JAX keeps traces of loop bodies, and does not know that Flax's rules are in them.
_RULES_OF_TRACE = jax.make_user_context(())
_Function = Callable[[jax.Array], jax.Array]


@contextlib.contextmanager
def named_activations(rules: Sequence[tuple[str, str | None]]) -> Iterator[None]:
    """Makes `nn.with_logical_constraint` split activations by these rules, during a trace."""
    with (
        _RULES_OF_TRACE(rules),
        spmd.logical_axis_rules(rules),
        nnx.use_eager_sharding(False),
        nn.intercept_methods(_kernels_without_names),
    ):
        yield


def _kernels_without_names(
    call: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    context: nn.module.InterceptorContext,
) -> object:
    """Hides the mesh from linen's `DenseGeneral`, which attention consists of.

    It makes a flat kernel and constrains it by the names of all its dims, which are more.
    """
    if not isinstance(context.module, nn.DenseGeneral):
        return call(*args, **kwargs)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*args, **kwargs)


def on_pieces(fn: _Function, x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """Runs a collective on each device's own piece of a value; see [pieces over model].

    Args:
      fn: A function of one array that keeps its rank.
      x: A value inside the step.
      dim: The dim of `x` that is split over `model`, counted from the end, or None.
      size: MP.
    """
    if size == 1:
        return fn(x)
    spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * (dim % x.ndim), MODEL)
    return over_model(fn, [x], [spec], spec)


def over_model(
    fn: Callable[..., jax.Array],
    args: Sequence[jax.Array | None],
    specs: Sequence[PartitionSpec],
    out_spec: PartitionSpec,
) -> jax.Array:
    """Runs `fn` with `model` as a manual axis: it gets and returns pieces by these specs."""
    if MODEL in jax.sharding.get_abstract_mesh().manual_axes:
        return fn(*args)
    mapped = jax.shard_map(
        fn, in_specs=tuple(specs), out_specs=out_spec, axis_names={MODEL}, check_vma=False
    )
    return mapped(*args)
