"""What is elementwise and what is not, told before a state is cut."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from test_partitioned import P, mesh_of, odd_params

from zero_jax.collectives.by_hand import shard
from zero_jax.engine.partitioned import partition_specs, partitioned
from zero_jax.engine.shard_proof import require_elementwise
from zero_jax.sharding.cuts import Splitter


def normalised():
    """A user's own: every gradient over the norm of all."""

    def update(updates, state, params=None):
        norm = optax.tree.norm(updates)
        return jax.tree.map(lambda u: u / norm, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_first_norm():
    """What is not elementwise is where it begins, not what it does."""

    def init(params):
        return optax.tree.norm(params)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def elementwise_but_for_order(u):
    """Moves elements about and back, and loops."""
    u = jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, u.T).T
    return (u.reshape(*u.shape, 1) * 2).reshape(u.shape)


def of_leaves(name, fn):
    """A transformation of each leaf alone, called `name`."""

    def update(updates, params=None):
        return jax.tree.map(fn, updates)

    update.__name__ = name
    return rf"stateless\({name}\)", optax.stateless(update)


def by_name(params):
    return {name: name == "w" for name in params}


WARM = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)
ACCEPTED = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adabelief": optax.adabelief(1e-3),
    "adamax": optax.adamax(1e-3),
    "adagrad": optax.adagrad(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "adadelta": optax.adadelta(1e-3),
    "adan": optax.adan(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "lion": optax.lion(1e-3),
    "nadamw": optax.nadamw(1e-3),
    "radam": optax.radam(1e-3),
    "yogi": optax.yogi(1e-3),
    "ademamix": contrib.ademamix(1e-3),
    "adopt": contrib.adopt(1e-3),
    "schedule_free": contrib.schedule_free_adamw(1e-3),
    "chain": optax.chain(optax.clip(1.0), optax.adamw(WARM)),
    "masked": optax.adamw(1e-3, mask=by_name),
    "ndim": optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=WARM),
    "bf16_moment": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "accumulated": optax.MultiSteps(optax.adam(1e-3), 8).gradient_transformation(),
    "moved": optax.stateless(lambda updates, _: jax.tree.map(elementwise_but_for_order, updates)),
}
CLIP = "clip_by_global_norm"
LONG = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 8)
REFUSED = {
    "global_norm": (CLIP, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))),
    "large_norm": (CLIP, optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1e-2))),
    "masked": (CLIP, optax.chain(optax.masked(optax.clip_by_global_norm(1.0), by_name))),
    "accumulated": (CLIP, LONG.gradient_transformation()),
    "block_rms": ("clip_by_block_rms", optax.clip_by_block_rms(1.0)),
    "agc": ("adaptive_grad_clip", optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1))),
    "lamb": ("scale_by_trust_ratio", optax.lamb(1e-3)),
    "lars": ("scale_by_trust_ratio", optax.lars(1e-3)),
    "fromage": ("scale_by_trust_ratio", optax.fromage(1e-3)),
    "novograd": ("scale_by_novograd", optax.novograd(1e-3)),
    "adafactor": ("scale_by_factored_rms", optax.adafactor(1e-3)),
    "sm3": ("scale_by_sm3", optax.sm3(1e-3)),
    "lbfgs": ("scale_by_lbfgs", optax.lbfgs(1e-3, memory_size=1)),
    "muon": ("scale_by_muon", contrib.muon(1e-3)),
    "galore": ("scale_by_galore", contrib.galore(1e-3)),
    "noisy": ("add_noise", optax.noisy_sgd(1e-3, key=0)),
    "own": ("normalised", optax.chain(optax.sgd(0.1), normalised())),
    "inject": (r"inject_hyperparams\(lamb\)", optax.inject_hyperparams(optax.lamb)(1e-3)),
    "if_finite": ("apply_if_finite", optax.apply_if_finite(optax.sgd(0.1), 3)),
    "size": of_leaves("over_size", lambda u: u / u.size),
    "power": of_leaves("to_the_power_of_a_size", lambda u: u ** u.shape[0]),
    "first": of_leaves("times_the_first", lambda u: u * u.ravel()[0]),
    "sorted": of_leaves("in_order", lambda u: jnp.sort(u, axis=0)),
    "summed": of_leaves("summed_up", lambda u: jnp.cumsum(u, axis=0)),
    "index": of_leaves("by_index", lambda u: u * jnp.arange(len(u))[:, None]),
    "loop": of_leaves("in_a_loop", lambda u: jax.lax.fori_loop(0, 2, lambda _, x: x / x.max(), u)),
    "branch": of_leaves("if_large", lambda u: jax.lax.cond(u.sum() > 0, jnp.sin, jnp.cos, u)),
    "init": ("by_first_norm", by_first_norm()),
}
ONE = {"w": jax.ShapeDtypeStruct((300, 140), "float32")}  # large enough to be factored
LARGE = ONE | {"b": jax.ShapeDtypeStruct((9,), "float32")}


# The first is large enough to be factored; of the last some leaves are padded, some not cut.
TREES = {"one": ONE, "large": LARGE, "odd": jax.eval_shape(odd_params)}


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_what_is_elementwise_is_accepted_and_others_are_refused_by_name(name, tree, n):
    params, cuts = TREES[tree], Splitter(n)(TREES[tree])
    if name in ACCEPTED:
        require_elementwise(ACCEPTED[name], params, cuts)
        return
    culprit, tx = REFUSED[name]
    # Labels that go by rank, and what can't be run on scalars, hide the one that is to blame.
    who = culprit if tree == "one" else r"\w+(\(\w+\))?"
    with pytest.raises(ValueError, match=rf"^{who} .* elementwise.*zero\.optimizer\(tx\)"):
        require_elementwise(tx, params, cuts)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_runs_and_can_be_carried(name):
    """The specs fit, and no state leaf changes its type in a step."""
    tx, n = ACCEPTED[name], 2
    ztx, specs = partitioned(tx), partition_specs(tx, LARGE, n)

    def steps(params):
        def body(state, _):
            return ztx.update(jax.lax.pcast(params, "data", to="varying"), state, params)[::-1]

        return jax.lax.scan(body, tx.init(shard(params)), None, length=2)

    mapped = jax.shard_map(steps, mesh=mesh_of(n), in_specs=P(), out_specs=(specs, P()))
    state, updates = jax.eval_shape(mapped, LARGE)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, rest_state(tx, n))
    assert updates["w"].shape == (2, 300, 140)


def rest_state(tx, n):
    cuts = Splitter(n)(LARGE)
    padded = [jax.ShapeDtypeStruct(c.rest_shape, "float32") for c in cuts]
    return jax.eval_shape(tx.init, jax.tree.unflatten(jax.tree.structure(LARGE), padded))
