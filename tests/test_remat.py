"""What each remat policy keeps, where, and that no policy changes a value.

fp32 tolerance of gradients: 64 ulps of a leaf's largest element after three steps of SGD. The
recomputed forward pass runs the same operations in the same order, but XLA fuses them differently.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from problems import Problem, gpt_problem, train_plain, train_zero, ulps

import zero_jax
from zero_jax import hlo, layers, policies, traced

TX = optax.sgd(1e-1)
ULPS = 64
WIDTH, ROWS, DEPTH = 16, 24, 5
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
POLICIES = ["none", "dots", "block", "block_sqrt", "names:h"]
HOST = ["block@host", "block_sqrt@host", "names@host:h@host"]


class Block(nn.Module):
    """A pre-norm layer, whose input is not what its first parameter is used with."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.tanh(checkpoint_name(h, "h")))


class Unrolled(nn.Module):
    depth: int = DEPTH

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = Block()(x)
        return nn.Dense(3)(nn.LayerNorm()(x))


def linen_problem():
    model = Unrolled()
    return Problem(
        lambda: model.init(jax.random.key(0), X[:1]),
        lambda params, x: jnp.mean(model.apply(params, x) ** 2),
        X,
    )


def plain_problem():
    """A list of layers, opened all at once before the first is used."""

    def make():
        keys = jax.random.split(jax.random.key(0), DEPTH)
        return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4, "b": jnp.ones(WIDTH)} for k in keys]

    def loss(params, x):
        for p in zero_jax.gather(params):
            x = x + jnp.tanh(checkpoint_name(x @ p["w"] + p["b"], "h"))
        return jnp.mean(x**2)

    return Problem(make, loss, X)


def scanned_problem():
    """Six scanned layers, each with a key of its own, and a count in the carry."""

    def make():
        w = jax.random.normal(jax.random.key(0), (6, WIDTH, WIDTH)) / 4
        return {"w": w, "b": jnp.ones((6, WIDTH))}

    def loss(params, x):
        def layer(carry, given):
            (x, count), (p, key) = carry, given
            p = zero_jax.gather(p)
            h = checkpoint_name(x @ p["w"] + p["b"], "h")
            noise = jax.random.normal(key, (WIDTH,))
            return (x + jnp.tanh(h + 0.1 * noise), count + 1), jnp.mean(x**2)

        keys = jax.random.split(jax.random.key(3), 6)
        (x, count), sizes = jax.lax.scan(layer, (x, 0), (params, keys))
        return jnp.mean(x**2) / count + 1e-3 * jnp.mean(sizes)

    return Problem(make, loss, X)


PROBLEMS = {
    "linen": linen_problem,
    "plain": plain_problem,
    "scanned": scanned_problem,
    "gpt": gpt_problem,
}


@functools.cache
def problem(name):
    return PROBLEMS[name]()


@functools.cache
def plain(name):
    return train_plain(problem(name), TX, 3)


def assert_same(name, stage, remat):
    losses, params, _ = train_zero(problem(name), TX, 3, 4, stage=stage, remat=remat)
    want = plain(name)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS
    assert want[0][-1] < want[0][0]


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["linen", "plain", "scanned"])
def test_no_policy_changes_a_value(name, stage, remat):
    assert_same(name, stage, remat)


@pytest.mark.parametrize("remat", HOST)
@pytest.mark.parametrize("name", ["linen", "plain", "scanned"])
def test_no_place_changes_a_value(name, remat):
    assert_same(name, 3, remat)


@pytest.mark.parametrize("remat", ["block_sqrt", "block@host"])
@pytest.mark.parametrize("stage", [2, 3])
def test_no_policy_changes_a_gpt(stage, remat):
    assert_same("gpt", stage, remat)


# What is kept.


def step_of(name, remat, stage=3, **mesh):
    """A traced step of four devices, and its count of parameters."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4, **mesh), stage, remat=remat)
    p = problem(name)
    params = zero.abstract(p.make)
    batch = jax.ShapeDtypeStruct(p.batch.shape, p.batch.dtype)
    args = (params, zero.optimizer(TX).init(params), batch)
    return zero.train_step(p.loss, TX).trace(*args)


def stacks(jaxpr):
    """Shapes of what forward loops over layers hand to the backward pass, with their places."""
    part = traced.device_part(jaxpr)
    found = []
    for eqn in part.eqns:
        if eqn.primitive.name == "scan" and "transpose(" not in str(eqn.source_info.name_stack):
            # Of rank 3 or more: not the loss and the sizes that the loop returns.
            found += [v.aval for v in eqn.outvars if v.aval.ndim > 2]
    return found


SHARE = (6, ROWS // 4, WIDTH)  # what each of six layers keeps of a value, on one of four devices


@pytest.mark.parametrize(
    ("remat", "shapes"),
    [
        ("block", [SHARE]),
        ("names:h", [SHARE, SHARE]),
        ("dots", [SHARE, SHARE]),
        ("block_sqrt", [(3, *SHARE[1:])]),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_scanned_layers_keep_what_the_policy_says(remat, shapes, stage):
    assert [v.shape for v in stacks(step_of("scanned", remat, stage).jaxpr)] == shapes


@pytest.mark.parametrize(
    ("remat", "where"),
    [
        ("block@host", [True]),
        ("names:h@host", [False, True]),
        ("names@host:h", [True, False]),
        ("block_sqrt@host", [True]),
    ],
)
def test_kept_values_are_where_the_policy_says(remat, where):
    found = stacks(step_of("scanned", remat).jaxpr)
    assert [v.memory_space == jax.memory.Space.Host for v in found] == where


def test_a_product_that_the_backward_pass_does_not_read_is_not_kept():
    """The second product of an MLP is only added to its input."""

    def loss(params, x):
        def layer(x, w):
            up, down = zero_jax.gather(w)
            return x + jnp.tanh(x @ up) @ down, None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), remat="dots")
    params = zero.abstract(lambda: (jnp.zeros((6, WIDTH, 40)), jnp.zeros((6, 40, WIDTH))))
    args = (params, zero.optimizer(TX).init(params), jax.ShapeDtypeStruct(X.shape, X.dtype))
    found = stacks(zero.train_step(loss, TX).trace(*args).jaxpr)
    assert [v.shape for v in found] == [SHARE, (6, ROWS // 4, 40)]


# Layers that are not scanned.


def norm_and_product(params, x):
    """Two pre-norm layers and a head."""
    for scale, w in params["layers"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x + jnp.tanh((centred * scale) @ w)
    return jnp.sum(x @ params["head"])


def traced_layers(loss, params, x):
    closed = jax.make_jaxpr(loss)(params, x)
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    shapes = [(jax.tree_util.keystr(p, simple=True, separator="/"), v.shape) for p, v in paths]
    numbers = [layers.OTHER if n is None else n for n in layers.number_layers(shapes)]
    owner = dict(zip(closed.jaxpr.invars, numbers, strict=False))
    return closed.jaxpr, layers.segments(closed.jaxpr, owner, ())


def test_a_layer_starts_where_least_is_alive():
    """Before the norm, of which the first half comes before its first parameter is used."""
    pair = (jnp.ones(WIDTH), jnp.ones((WIDTH, WIDTH)))
    params = {"layers": [pair, pair], "head": jnp.ones((WIDTH, 3))}
    jaxpr, (first, second) = traced_layers(norm_and_product, params, X)
    assert [e.primitive.name for e in jaxpr.eqns[second.start : second.stop]] == [
        e.primitive.name for e in jaxpr.eqns[first.start : first.stop]
    ]
    assert jaxpr.eqns[second.start].primitive.name == "reduce_sum"
    assert jaxpr.eqns[second.stop - 1].primitive.name == "add"
    assert first.start == 0 and first.stop == second.start


@pytest.mark.parametrize(
    ("leaves", "numbers"),
    [
        ({"b_0/w": (4, 4), "b_1/w": (4, 4), "b_2/w": (4, 5)}, [0, 1, None]),
        ({f"b_{i}/d_{j}/w": (4, 4) for i in range(3) for j in range(2)}, [0, 0, 1, 1, 2, 2]),
        ({f"t_{i}/b_{j}/w": (4, 4) for i in range(2) for j in range(3)}, [0, 1, 2, 3, 4, 5]),
        ({"q/w": (4, 4), "k/w": (4, 4), "bias1": (4,), "bias2": (4,)}, [None] * 4),
    ],
    ids=["alike", "blocks of two products", "towers of three blocks", "none"],
)
def test_layers_are_numbered_siblings_of_the_same_shapes(leaves, numbers):
    assert layers.number_layers(list(leaves.items())) == numbers


def kept_between(name, remat, stage=3):
    """Bytes of activations alive between the last layer forward and the first backward."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), stage, remat=remat)
    p = problem(name)
    return zero.plan(p.loss, TX, zero.abstract(p.make), p.batch).predicted.terms["saved"]


@functools.cache
def compiled(name, remat, stage=3):
    zero = zero_jax.Zero(zero_jax.make_mesh(4, devices=jax.devices()[:4]), stage, remat=remat)
    p = problem(name)
    plan = zero.plan(p.loss, TX, zero.abstract(p.make), p.batch, compile=True)
    return plan.compiled


def block_flops(first_of_two):
    """Of one forward pass of the layers of `linen_problem`: the first product, or both."""
    return 2 * (ROWS // 4) * DEPTH * (2 * WIDTH * WIDTH) * (1 if first_of_two else 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unrolled_layers_run_forward_once_more(stage):
    """Less the last product of each, whose result nothing in the layer reads."""
    more = compiled("linen", "block", stage).flops - compiled("linen", "none", stage).flops
    assert more == block_flops(first_of_two=True)


def test_grouped_layers_run_forward_twice_more():
    """Once in groups of two, two and one, less the last layer of each, and once one by one."""
    more = compiled("linen", "block_sqrt").flops - compiled("linen", "none").flops
    in_groups = block_flops(first_of_two=False) * 2 // DEPTH
    assert more == in_groups + block_flops(first_of_two=True)


def test_marked_products_do_not_run_again():
    assert compiled("linen", "names:h").flops == compiled("linen", "none").flops
