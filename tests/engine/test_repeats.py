"""Where the layers are of a model that does not scan over them."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax.engine import repeats, weights
from zero_jax.jaxpr import equations
from zero_jax.plan import flat_trace

WIDTH, ROWS = 16, 24
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


# Layers that are not scanned.


def norm_and_product(params, x):
    """Two pre-norm layers and a head."""
    for scale, w in params["layers"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x + jnp.tanh((centred * scale) @ w)
    return jnp.sum(x @ params["head"])


def traced_layers(loss, params, x):
    jaxpr = equations.written_out(jax.make_jaxpr(loss)(params, x)).jaxpr
    leaves = enumerate(zip(jaxpr.invars, jax.tree.leaves(params), strict=False))
    forms = {var: weights.Form(at, leaf.ndim, None) for at, (var, leaf) in leaves}
    return jaxpr, repeats.runs_of(jaxpr, forms)


def test_a_layer_starts_where_least_is_alive():
    """Before the norm, of which the first half comes before its first parameter is used."""
    pair = (jnp.ones(WIDTH), jnp.ones((WIDTH, WIDTH)))
    params = {"layers": [pair, pair], "head": jnp.ones((WIDTH, 3))}
    jaxpr, ((first, second),) = traced_layers(norm_and_product, params, X)
    names = [[jaxpr.eqns[at].primitive.name for at in layer] for layer in (first, second)]
    assert names[0] == names[1]
    assert names[1][0] == "reduce_sum" and names[1][-1] == "add"
    assert first[0] == 0 and first[-1] < second[0]


def product(x, w):
    return jnp.tanh(x @ w)


def block(x, pair):
    return x + product(product(x, pair[0]), pair[1])


def towers(params, x):
    for tower in params:
        for pair in tower:
            x = block(x, pair)
        x = x / jnp.sqrt(1.0 + jnp.mean(x**2))
    return jnp.sum(x)


SQUARE = jnp.ones((WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("loss", "params", "counts"),
    [
        (lambda p, x: jnp.sum(product(product(x, p[0]), p[1])), [SQUARE, SQUARE], [2]),
        (lambda p, x: jnp.sum(functools.reduce(block, p, x)), [(SQUARE, SQUARE)] * 3, [3]),
        (towers, [[(SQUARE, SQUARE)] * 3] * 2, [3, 3]),
        (
            lambda p, x: jnp.sum(product(x, p["q"]) * jnp.cos(x @ p["k"])),
            {"q": SQUARE, "k": SQUARE},
            [],
        ),
        (lambda p, x: jnp.sum(product(product(x, p), p)), SQUARE, []),
        (lambda p, x: jnp.sum(x * p[0] * p[1] * p[2]), [jnp.ones(WIDTH)] * 3, []),
    ],
    ids=["products", "blocks", "towers", "unlike", "one weight again", "vectors"],
)
def test_layers_are_what_repeats_on_other_matrices(loss, params, counts):
    _, runs = traced_layers(loss, params, X)
    assert [len(run) for run in runs] == counts


@pytest.mark.parametrize("remat", ["none", "dots", "block", "block_sqrt"])
def test_layers_that_the_model_wraps_itself_stay_as_they_are(remat):
    """sin(cos(x)): forward both once, backward cos(x) again, and cos and sin for the derivative.
    The policy around is in force all the same: groups of two layers run the first one again."""

    def loss(params, x):
        for w in params:
            x = x + jax.checkpoint(lambda x, w: jnp.sin(jnp.cos(x @ w)))(x, w)
        return jnp.mean(x**2)

    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), remat=remat)
    params = zero.abstract(lambda: [jnp.zeros((WIDTH, WIDTH))] * 4)
    tx = optax.sgd(1e-1)
    args = (params, zero.optimizer(tx).init(params), jax.ShapeDtypeStruct(X.shape, X.dtype))
    part = flat_trace.device_part(zero.train_step(loss, tx).trace(*args).jaxpr)
    names = [operation.name for operation in flat_trace.flatten(part).operations]
    again = 2 if remat == "block_sqrt" else 0
    assert (names.count("sin"), names.count("cos")) == (2 * 4 + again, 3 * 4 + again)
