"""Traced losses: sums over the rows of a batch, and statistics over them."""

import jax
import jax.numpy as jnp

from zero_jax.engine.over_rows import facts_of

R, D = 4, 8
W, X = jnp.ones((D, D)), jnp.ones((R, D))
errors = lambda w, x: (jnp.tanh(x @ w) - 1.0) ** 2  # noqa: E731
shares = lambda w, x: jax.nn.sigmoid(x @ w) / jnp.sum(jax.nn.sigmoid(x @ w))  # noqa: E731
normalised = lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6)  # noqa: E731


def picked(w, x):
    labels = jnp.argmax(x, axis=1)[:, None]
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels, 1)[:, 0]


def scanned(w, x, before=lambda x: x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(before(x) @ w), None), x, None, length=2)[0]


def read(loss):
    return facts_of(jax.make_jaxpr(loss)(W, X), [True, False], [False, True])


SUMS = {
    "all": lambda w, x: jnp.sum(errors(w, x)),
    "of means over features": lambda w, x: jnp.sum(jnp.mean(errors(w, x), 1)),
    "beside a mean": lambda w, x: jnp.mean(errors(w, x)) + jnp.sum(errors(w, x)),
    "cross entropy": lambda w, x: jnp.sum(picked(w, x)),
    "of masked": lambda w, x: jnp.sum(picked(w, x) * (jnp.argmax(x, 1) > 0)),
    "product": lambda w, x: jnp.vdot(x @ w, x @ w),
    "rematerialised": lambda w, x: jnp.sum(jax.checkpoint(errors)(w, x)),
    "scanned": lambda w, x: jnp.sum(scanned(w, x)),
    "mapped": lambda w, x: jnp.sum(jax.vmap(errors, (None, 0))(w, x)),
    "looped": lambda w, x: jnp.sum(jax.lax.map(lambda row: jnp.sum(errors(w, row)), x)),
    "flattened": lambda w, x: jnp.sum(errors(w, x).reshape(-1)),
}
MEANS = {
    "mean": lambda w, x: jnp.mean(errors(w, x)),
    "scaled": lambda w, x: 1e20 * jnp.mean(errors(w, x)),
    "scaled before": lambda w, x: 2.0 * jnp.sum(errors(w, x)) / R,
    "of sums over features": lambda w, x: jnp.mean(jnp.sum(errors(w, x), 1)),
    "of pairs": lambda w, x: jnp.mean(jnp.sum(errors(w, x).reshape(2, 2, D), 1)),
    "masked": lambda w, x: jnp.sum(picked(w, x) * (x[:, 0] > 0)) / jnp.sum(x[:, 0] > 0),
    "where": lambda w, x: jnp.mean(errors(w, x), where=x > 0),
    "one row": lambda w, x: jnp.sum(errors(w, x)[0]),
    "in bf16": lambda w, x: jnp.mean(errors(w, x).astype(jnp.bfloat16)),
    "weights": lambda w, x: jnp.sum(w**2),
    "by a matrix": lambda w, x: jnp.full(R, 1 / R) @ errors(w, x)[:, 0],
    "dropout": lambda w, x: jnp.sum(errors(w, x) * (x / x.sum(0))),
    "by shares": lambda w, x: jnp.sum(jax.nn.softmax(x @ w, 0) * errors(w, x)),
    "by weights over their sum": lambda w, x: jnp.vdot(shares(w, x), errors(w, x)),
    "by an inverse sum": lambda w, x: jnp.sum(errors(w, x)) * jnp.reciprocal(jnp.sum(w @ x.T)),
    "over the norm": lambda w, x: jnp.sum(errors(w, x) / jnp.linalg.norm(errors(w, x))),
    "of two halves": lambda w, x: jnp.sum(errors(w, x).reshape(2, -1).mean(1)),
    "unbiased": lambda w, x: jnp.sum(errors(w, x)) / (R - 1),
    "covariance": lambda w, x: jnp.sum((x @ w).T @ (x @ w) / (R - 1)),
}
DOUBT = {"weights that may be normalised": lambda w, x: jnp.sum(errors(w, x) * x)}


def test_sums_over_rows():
    for losses, sure in ((SUMS, True), (DOUBT, False)):
        found = {name: read(loss)[0] for name, loss in losses.items()}
        assert not [name for name, x in found.items() if not x.is_sum or x.sure != sure]
    means = {name: read(loss)[0] for name, loss in MEANS.items()}
    assert not [name for name, x in means.items() if x.is_sum and x.sure]


MIXED = {"normalised": lambda w, x: jnp.mean(errors(w, normalised(x))),
         "centred": lambda w, x: jnp.mean(jnp.tanh(x @ w) - jnp.mean(jnp.tanh(x @ w))),
         "softmax": lambda w, x: jnp.mean(jax.nn.softmax(x @ w, axis=0) ** 2),
         "contrastive": lambda w, x: jnp.mean(jax.nn.log_softmax((x @ w) @ x.T)),
         "in a scan": lambda w, x: jnp.mean(scanned(w, x, normalised))}  # fmt: skip
APART = {"of one row": lambda w, x: jnp.mean(x @ w - jnp.mean(x @ w, 1, keepdims=True)),
         "of a mean": lambda w, x: jnp.mean(errors(w, x)) / (1 + jnp.mean(x)),
         "attention": lambda w, x: jnp.mean(jnp.einsum("btd,bsd->bts", *[x[:, :, None] * w] * 2)),
         "softmax of features": lambda w, x: jnp.mean(jax.nn.softmax(x @ w))}  # fmt: skip


def test_statistics_over_rows_are_found():
    assert {name for name, loss in (MIXED | APART).items() if read(loss)[1]} == set(MIXED)
