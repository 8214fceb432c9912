"""The same step without zero_jax: arrays that are split over devices, and XLA finds the rest.

What an expert writes by hand: masters and Adam's state split over `data` along the dims that
zero_jax splits (what N does not divide stays whole: `jit` takes nothing else), parameters cast
before they are gathered, layers rematerialised, and activations held to the batch dim, so that
XLA gathers weights and not activations. `held=False` is the same without that hold, as one writes
it first; `split=False` is plain data parallelism, every array whole on every device. `chunks` is
in how many parts of each row the loss is computed, and again in the backward pass: fewer logits at
a time, but the embedding's gradient is summed over devices once for each. Where activations are
held, attention is in a `shard_map` over the batch dim, so that a compile check has cuDNN's kernel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax
from zero_jax.collectives.precision import cast
from zero_jax.commands.case import Case
from zero_jax.engine import execute
from zero_jax.engine.lazy_param import LazyParam, full
from zero_jax.engine.lifetimes import Positions
from zero_jax.plan.text_model import TextModel
from zero_jax.remat.policies import parse
from zero_jax.sharding.mesh import DATA, abstract_of
from zero_jax.tracing.forms import Form
from zero_jax.tracing.jaxpr import written_out
from zero_jax.tracing.layer_detection import runs_of, scans_of

PyTree = Any


def step_of(
    case: Case, policy: str, *, split: bool = True, held: bool = True, chunks: int = 1
) -> tuple[Callable[..., Any], tuple[PyTree, ...]]:
    """The step, to be jitted with two donated arguments, and shapes of its arguments."""
    mesh = case.zero.mesh
    shapes = jax.eval_shape(case.make)
    cuts = case.zero.splits(shapes)
    leaves, treedef = jax.tree.flatten(shapes)
    whole = PartitionSpec()
    specs = [cut.spec if split and not cut.padded else whole for cut in cuts]
    placed = [_like(x, mesh, spec) for x, spec in zip(leaves, specs, strict=True)]
    params = jax.tree.unflatten(treedef, placed)
    tx = case.tx
    state = optax.tree_utils.tree_map_params(
        tx,
        lambda own, param: jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=param.sharding),
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: _like(x, mesh, whole),
    )
    rules = (("batch", DATA),) if held else ()
    model = case.model
    if held:
        model = dataclasses.replace(model, attention_fn=functools.partial(_by_rows, mesh))
    saving = _saving(_mean_loss(model, chunks), policy)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        compute = jax.tree.map(lambda x: cast(x, case.zero.config.precision.compute), params)
        with jax.sharding.use_abstract_mesh(abstract_of(mesh)), nn.logical_axis_rules(rules):
            return saving(compute, batch)

    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, state, _like(case.batch, mesh, PartitionSpec(DATA)))


def _saving(fun: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """A function of full parameters whose backward pass follows a remat policy of zero_jax."""

    def wrapped(params: PyTree, *args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(params, *args)
        closed, leaves = written_out(closed), jax.tree.leaves(params)
        held = [LazyParam(full(x), Form(at, x.ndim, None)) for at, x in enumerate(leaves)]
        forms = {v: x.form for v, x in zip(closed.jaxpr.invars, held, strict=False)}
        runs, scans = runs_of(closed.jaxpr, forms), scans_of(closed.jaxpr, forms)
        positions = Positions(runs, max([-1, *scans, *(run[0][0] for run in runs)]))
        how = execute.How(execute.evaluate, parse(policy))
        outs = execute.run(closed, [*held, *jax.tree.leaves(args)], how, positions)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return wrapped


def _by_rows(mesh: Any, *qkv: jax.Array, segment_ids: None = None, **how: Any) -> jax.Array:
    """Runs `zero_jax.attention` on each device's rows."""
    own = functools.partial(zero_jax.attention, **how)
    rows = PartitionSpec(DATA)
    return jax.shard_map(own, mesh=abstract_of(mesh), in_specs=rows, out_specs=rows)(*qkv)


def _mean_loss(text: TextModel, chunks: int) -> Callable[[PyTree, jax.Array], jax.Array]:
    def mean_loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        model = text.model(params)

        def total(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            hidden, labels = part
            hidden = nn.with_logical_constraint(hidden, ("batch", None, None))
            logits = nn.with_logical_constraint(model.logits(hidden), ("batch", None, None))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.sum(losses)

        parts = model.hidden(tokens[:, :-1]), tokens[:, 1:]
        if chunks == 1:
            return total(parts) / parts[1].size
        # Along rows: chunks of all tokens would be chunks of all devices' tokens, and be gathered.
        split = [jnp.moveaxis(x.reshape(len(x), chunks, -1, *x.shape[2:]), 1, 0) for x in parts]
        return jnp.sum(jax.lax.map(jax.checkpoint(total), tuple(split))) / parts[1].size

    return mean_loss


def _like(x: Any, mesh: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
