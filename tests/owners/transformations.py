"""Transformations that need whole matrices, as optax has them and as people write them."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib


def matrices(params):
    """Every matrix of a tree, stacked along all dims but the last two."""
    return jax.tree.map(
        lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if x.ndim > 1 else None,
        params,
    )


def muon(**options):
    return contrib.muon(1e-2, muon_weight_dimension_numbers=matrices, **options)


def without_state(fn):
    """Of a function of gradients."""
    return optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (fn(g), s))


def orthogonal(x, turns=3):
    """Newton and Schulz without a loop of JAX's: the operations are written out."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(turns):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def by_hand(x):
    """Of one leaf."""
    stacked = jax.vmap(orthogonal)(x) if x.ndim == 3 else x
    return -1e-2 * (orthogonal(x) if x.ndim == 2 else stacked)


def root(a):
    values, vectors = jnp.linalg.eigh(a)
    return (vectors * jnp.maximum(values, 1e-4) ** -0.25) @ vectors.T


def shampoo():
    """Of matrices alone: two states for each, of its rows and of its columns."""

    def init(params):
        return jax.tree.map(lambda x: (jnp.eye(x.shape[0]), jnp.eye(x.shape[1])), params)

    def one(x, state):
        rows, columns = state[0] + x @ x.T, state[1] + x.T @ x
        return -1e-2 * root(rows) @ x @ root(columns), (rows, columns)

    def update(grads, state, params=None):
        leaves, treedef = jax.tree.flatten(grads)
        pairs = zip(leaves, treedef.flatten_up_to(state), strict=True)
        made = [one(x, own) for x, own in pairs]
        return tuple(treedef.unflatten(part) for part in zip(*made, strict=True))

    return optax.GradientTransformation(init, update)
