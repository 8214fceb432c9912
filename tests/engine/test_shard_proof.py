"""Elementwise transformations are accepted inside `shard_map`, others are an error."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from optax import contrib
from test_partitioned import P, mesh_of, odd_params

from zero_jax.collectives.by_hand import shard
from zero_jax.engine.partitioned import partition_specs, partitioned
from zero_jax.engine.shard_proof import require_elementwise
from zero_jax.sharding.cuts import Splitter


def normalised():
    """Every gradient over the norm of all."""

    def update(updates, state, params=None):
        norm = optax.tree.norm(updates)
        return jax.tree.map(lambda u: u / norm, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_first_norm():
    """Not elementwise in `init` alone."""
    return optax.GradientTransformation(
        optax.tree.norm, lambda grads, state, _=None: (grads, state)
    )


def elementwise_but_for_order(u):
    u = lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, u.T).T
    return (u.reshape(*u.shape, 1) * 2).reshape(u.shape)


def of_leaves(fn, name="of_leaf"):
    """A transformation of each leaf alone."""

    def update(updates, params=None):
        return jax.tree.map(fn, updates)

    update.__name__ = name
    return optax.stateless(update)


def by_name(params):
    return {name: name == "w" for name in params}


# fmt: off
WARM = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)
NAMES = "adam adamw adabelief adamax adagrad rmsprop adadelta adan amsgrad lion nadamw radam yogi"
ACCEPTED = [*(getattr(optax, name)(1e-3) for name in NAMES.split()), contrib.ademamix(1e-3),
    contrib.adopt(1e-3), contrib.schedule_free_adamw(1e-3), of_leaves(elementwise_but_for_order),
    optax.sgd(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True), optax.adamw(1e-3, mask=by_name),
    optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    optax.chain(optax.clip(1.0), optax.adamw(WARM)), optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    optax.inject_hyperparams(optax.adamw)(learning_rate=WARM),
    optax.MultiSteps(optax.adam(1e-3), 8).gradient_transformation(),
]
CLIP = optax.clip_by_global_norm(1.0)
LONG = optax.MultiSteps(optax.chain(CLIP, optax.sgd(0.1)), 8).gradient_transformation()
# The transformation that is to blame, and the one that it is in.
UNSUPPORTED = [
    ("clip_by_global_norm", optax.chain(CLIP, optax.adam(1e-3))),
    ("clip_by_global_norm", optax.chain(optax.adam(1e-3), CLIP)),
    ("clip_by_global_norm", optax.masked(CLIP, by_name)),
    ("clip_by_global_norm", LONG),
    ("clip_by_block_rms", optax.clip_by_block_rms(1.0)),
    ("adaptive_grad_clip", optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1))),
    ("scale_by_trust_ratio", optax.lamb(1e-3)),
    ("scale_by_novograd", optax.novograd(1e-3)),
    ("scale_by_factored_rms", optax.adafactor(1e-3)),
    ("scale_by_sm3", optax.sm3(1e-3)),
    ("scale_by_lbfgs", optax.lbfgs(1e-3, memory_size=1)),
    ("scale_by_muon", contrib.muon(1e-3)),
    ("scale_by_galore", contrib.galore(1e-3)),
    ("add_noise", optax.noisy_sgd(1e-3, key=0)),
    ("normalised", optax.chain(optax.sgd(0.1), normalised())),
    ("inject_hyperparams(lamb)", optax.inject_hyperparams(optax.lamb)(1e-3)),
    ("apply_if_finite", optax.apply_if_finite(optax.sgd(0.1), 3)),
    ("by_first_norm", by_first_norm()),
    ("by_size", of_leaves(lambda u: u / u.size, "by_size")),
    ("by_power", of_leaves(lambda u: u ** u.shape[0], "by_power")),
    ("by_first", of_leaves(lambda u: u * u.ravel()[0], "by_first")),
    ("by_sort", of_leaves(lambda u: jnp.sort(u, axis=0), "by_sort")),
    ("by_cumsum", of_leaves(lambda u: jnp.cumsum(u, axis=0), "by_cumsum")),
    ("by_index", of_leaves(lambda u: u * jnp.arange(len(u))[:, None], "by_index")),
    ("by_loop", of_leaves(lambda u: lax.fori_loop(0, 2, lambda _, x: x / x.max(), u), "by_loop")),
    ("by_branch", of_leaves(lambda u: lax.cond(u.sum() > 0, jnp.sin, jnp.cos, u), "by_branch")),
]
# fmt: on
ONE = {"w": jax.ShapeDtypeStruct((300, 140), "float32")}  # large enough to be factored
LARGE = ONE | {"b": jax.ShapeDtypeStruct((9,), "float32")}
ODD = jax.eval_shape(odd_params)  # some leaves are padded, some not split


@pytest.mark.parametrize(("culprit", "tx"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_an_error_names_the_transformation_that_is_not_elementwise(culprit, tx):
    with pytest.raises(ValueError, match=r"zero\.optimizer") as caught:
        require_elementwise(tx, ONE, Splitter(2)(ONE))
    assert culprit in str(caught.value)
    # Labels that depend on the rank, and scalars that it can't run on, hide the culprit.
    for tree, shards in ((LARGE, 2), (ODD, 8)):
        with pytest.raises(ValueError, match=r"zero\.optimizer"):
            require_elementwise(tx, tree, Splitter(shards)(tree))


@pytest.mark.parametrize("tx", ACCEPTED)
def test_an_elementwise_transformation_runs_on_shards(tx, n=2):
    """The specs fit, and no state leaf changes its type in a step."""
    for tree, shards in ((ONE, 8), (LARGE, n), (ODD, 8)):
        require_elementwise(tx, tree, Splitter(shards)(tree))
    ztx, specs = partitioned(tx), partition_specs(tx, LARGE, n)

    def steps(params):
        def body(state, _):
            return ztx.update(lax.pcast(params, "data", to="varying"), state, params)[::-1]

        return lax.scan(body, tx.init(shard(params)), None, length=2)

    mapped = jax.shard_map(steps, mesh=mesh_of(n), in_specs=P(), out_specs=(specs, P()))
    state, updates = jax.eval_shape(mapped, LARGE)
    padded = [jax.ShapeDtypeStruct(c.rest_shape, "float32") for c in Splitter(n)(LARGE)]
    rest = jax.eval_shape(tx.init, jax.tree.unflatten(jax.tree.structure(LARGE), padded))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, rest)
    assert updates["w"].shape == (2, 300, 140)
