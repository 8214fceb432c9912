"""What is gathered when: collectives of the compiled step, counted where loops run."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.plan import plans
from zero_jax.sharding.cuts import split

N, ROWS, D = 4, 16, 16
X = jax.random.normal(jax.random.key(1), (ROWS, D))


def compiled(make, loss, batch=X, n=N, **settings):
    mesh = zero_jax.make_mesh(n, devices=jax.devices()[:n])
    zero = zero_jax.Zero(mesh, **settings)
    return zero.plan(loss, optax.sgd(0.1), zero.abstract(make), batch, compile=True)


def words(plan):
    return {kind: n / plan.num_params for kind, n in plan.compiled.words.items()}


def square():
    return {"w": jax.random.normal(jax.random.key(0), (D, D)) / 4}


def turns(x, step, count=5):
    return jax.lax.scan(lambda c, _: (step(c), None), x, None, length=count)[0]


SHARED = {
    "scan": lambda p, x: jnp.mean(turns(x, lambda c: jnp.tanh(c @ p["w"]))),
    "fori": lambda p, x: jnp.mean(jax.lax.fori_loop(0, 5, lambda _, c: jnp.tanh(c @ p["w"]), x)),
    "cond": lambda p, x: jnp.mean(
        jax.lax.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: jnp.tanh(x @ p["w"] * 2), x)
    ),
}


@pytest.mark.parametrize("remat", ["none", "block"])
@pytest.mark.parametrize("form", SHARED)
def test_weights_that_all_turns_share_are_sent_once_forward_and_once_backward(form, remat):
    """In the traced step: XLA for CPUs takes the barrier out and merges the two gathers."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), 3, remat=remat)
    grad_fn = zero.value_and_grad(SHARED[form])
    text = str(grad_fn.trace(zero.abstract(square), X).jaxpr)
    assert (text.count("all_gather["), text.count("reduce_scatter[")) == (2, 1)
    sent = words(compiled(square, SHARED[form], stage=3, remat=remat))
    assert sent["all-gather"] <= 2 and sent["reduce-scatter"] == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_a_branch_that_differs_between_devices_neither_hangs_nor_errs(stage):
    def loss(p, x):
        return jnp.mean(jax.lax.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: x, x) ** 2)

    x = jnp.where(jnp.arange(ROWS)[:, None] < ROWS // 2, jnp.abs(X), -jnp.abs(X))
    zero = zero_jax.Zero(zero_jax.make_mesh(N, devices=jax.devices()[:N]), stage)
    value, grads = zero.value_and_grad(loss)(zero.shard(square()), x)

    def mean(p):
        return sum(loss(p, part) for part in jnp.split(x, N)) / N

    want, wanted = jax.value_and_grad(mean)(square())
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(zero.full(grads)["w"], wanted["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_attention_of_rank_three_is_no_stack_of_layers(stage):
    """As many collectives as leaves, never as rows: its kernels are (width, heads, depth)."""
    model = nn.MultiHeadDotProductAttention(num_heads=4)
    x = jax.random.normal(jax.random.key(1), (ROWS, 3, 128))
    plan = compiled(
        lambda: model.init(jax.random.key(0), x[:1]),
        lambda p, x: jnp.mean(model.apply(p, x) ** 2),
        x,
        stage=stage,
    )
    leaves = 8
    for kind in ("all-gather", "reduce-scatter"):
        runs = [c.runs for c in plan.compiled.collectives if c.kind == kind]
        assert 0 < sum(runs) <= leaves, (kind, runs)


def test_a_stack_that_is_cut_along_its_layers_is_gathered_before_its_loop():
    """Leaves of 2 x 2 over 8 devices: cut along 64 layers, else three quarters are padding."""

    def make():
        return {"w": jax.random.normal(jax.random.key(0), (64, 2, 2)) / 4}

    def loss(p, x):
        return jnp.mean(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x[:, :2], p["w"])[0])

    assert split((64, 2, 2), 8).dim == -3
    plan = compiled(make, loss, n=8, stage=3, remat="block")
    gathers = [c for c in plan.compiled.collectives if c.kind == "all-gather"]
    assert {c.runs for c in gathers} == {1}
    assert sum(c.elements for c in gathers) <= 2 * 64 * 4


def test_a_plan_says_which_layers_it_found_and_under_which_policy():
    def make():
        return {
            "loop": jnp.ones((6, D, D)),
            "list": [jnp.ones((D, D))] * 4,
            "last": jnp.ones((D, D)),
        }

    def loss(p, x):
        x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["loop"])[0]
        for w in p["list"]:
            x = x + jnp.sin(x @ w)
        again = jax.checkpoint(
            lambda x, w: jnp.cos(x @ w), policy=jax.checkpoint_policies.dots_saveable
        )
        return jnp.mean(again(x, p["last"]))

    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), 3, remat="block")
    plan = zero.plan(loss, optax.sgd(0.1), zero.abstract(make), X)
    found = {(x.count, x.words, x.scanned, x.policy) for x in plan.layers}
    assert (6, D * D, True, "block") in found
    assert (4, D * D, False, "block") in found
    assert any(count == 1 and "dots" in policy.lower() for count, _, _, policy in found)
    text = plans.format_layers(plan)
    assert "6 scanned of 256 parameters, remat block" in text
    assert "4 unrolled of 256 parameters, remat block" in text


def test_gather_inside_a_loss_changes_nothing():
    zero = zero_jax.Zero(zero_jax.make_mesh(N, devices=jax.devices()[:N]))
    params = zero.shard(square())
    one = zero.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]))(params, X)
    two = zero.value_and_grad(lambda p, x: jnp.mean(x @ zero_jax.gather(p)["w"]))(params, X)
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1]["w"], two[1]["w"])
