"""Operations of libraries (FFT, linear algebra, sort) on parameters whose shards are padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax

# Three devices do not divide 8: W is sharded along its last dim, with padding.
W = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8)), jnp.float32)
X = jnp.ones((12, 4))


def in_loop(w):
    return jax.lax.scan(
        lambda h, x: (h + jnp.abs(jnp.fft.rfft(x * w)).sum(), None), 0.0, X[:2, :1]
    )[0]


def in_branch(w):
    return jax.lax.cond(w[0, 0] > 9, jnp.sum, lambda w: jnp.abs(jnp.fft.fft(w)).sum(), w)


OPERATIONS = {
    "rfft": lambda w: jnp.abs(jnp.fft.rfft(w)),
    "rfft of the transpose": lambda w: jnp.abs(jnp.fft.rfft(w.T)),
    "fft2": lambda w: jnp.abs(jnp.fft.fft2(w)),
    "convolution": lambda w: jnp.fft.irfft(jnp.fft.rfft(w) * jnp.fft.rfft(jnp.tanh(w))),
    "vmap": lambda w: jnp.abs(jax.vmap(jnp.fft.fft)(w)),
    "remat": jax.checkpoint(lambda w: jnp.abs(jnp.fft.fft(w))),
    "scan": in_loop,
    "cond": in_branch,
    "qr": lambda w: jnp.abs(jnp.linalg.qr(w.T)[1]),
    "svd": lambda w: jnp.linalg.svd(w, compute_uv=False),
    "eigh": lambda w: jnp.linalg.eigh(w.T @ w + jnp.diag(jnp.arange(8.0)))[0],
    "cholesky": lambda w: jnp.linalg.cholesky(w @ w.T + jnp.eye(4)),
    "solve": lambda w: jnp.linalg.solve(w @ w.T + jnp.eye(4), w),
    "sort": lambda w: jnp.sort(w, axis=0) * jnp.arange(4.0)[:, None],
    "top_k": lambda w: jax.lax.top_k(w, 3)[0],
    "conv": lambda w: jnp.convolve(w[0], w[1]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_of_one_device(name):
    def loss(params, x):
        return jnp.mean(OPERATIONS[name](params["w"]) ** 2) * x.mean()

    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:3]), stage=3)
    wanted = jax.value_and_grad(loss)({"w": W}, X)
    value, grads = zero.value_and_grad(loss)(zero.shard({"w": W}), X)
    # Both are fp32 on one device, compiled apart.
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(zero.full(grads)["w"], wanted[1]["w"], rtol=1e-4, atol=1e-5)
