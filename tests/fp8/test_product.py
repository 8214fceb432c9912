"""Products in fp8 of traced functions, and their gradients, against their definition in fp64."""

import conftest  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.fp8 import rewrite
from zero_jax.fp8.formats import E4M3, E5M2, quantise
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import read_inputs

rng = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def traced(fun, *args):
    return jaxprs.written_out(jax.make_jaxpr(fun)(*args))


def in_fp8(fun, w, x, *, by_row=False):
    """Returns a function of one matrix and activations with its product in fp8."""
    closed = traced(fun, w, x)
    found = rewrite.multiplied(closed, 1, jnp.float32, traced)
    assert [*found] == [0]
    how = {"dtype": jnp.float32, "by_row": by_row}
    new = rewrite.in_fp8(closed, 1, found, traced, **how)

    def run(w, x):
        codes = quantise(jax.lax.stop_gradient(w), E4M3, rewrite.shared(found[0], by_row=by_row))
        return jaxprs.as_function(new)(w, *codes, x)[0]

    return run


def rounded(x, dtype, dims):
    codes, scale = quantise(jnp.asarray(x, jnp.float32), dtype, dims)
    return np.asarray(codes, np.float64) * np.asarray(scale, np.float64)


# Function of a matrix and activations; its einsum with letters of the matrix, the activations and
# the result; shapes.
FORMS = [
    (lambda w, x: x @ w, "kn,btk->btn", (24, 40), (2, 5, 24)),
    (lambda w, x: x @ w.T, "nk,btk->btn", (40, 24), (2, 5, 24)),
    (lambda w, x: jnp.einsum("kn,kt->nt", w, x), "kn,kt->nt", (24, 40), (24, 7)),
    (lambda w, x: jnp.einsum("edf,ecd->ecf", w, x), "edf,ecd->ecf", (3, 24, 40), (3, 5, 24)),
    (lambda w, x: jnp.einsum("btd,dhk->bthk", x, w), "dhk,btd->bthk", (24, 4, 8), (2, 5, 24)),
    (lambda w, x: jnp.einsum("bthk,hkd->btd", x, w), "hkd,bthk->btd", (4, 8, 24), (2, 5, 4, 8)),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("by_row", [False, True])
def test_product_and_gradients_are_those_of_the_rounded_operands(form, by_row):
    fun, letters, w_shape, x_shape = FORMS[form]
    w, x = array(*w_shape) * 3e-3, array(*x_shape) * 50
    of_w, rest = letters.split(",")
    of_x, out = rest.split("->")
    y, back = jax.vjp(in_fp8(fun, w, x, by_row=by_row), w, x)
    g = array(*y.shape) * 1e-4
    dw, dx = back(g)
    summed = {c for c in of_w if c not in out}
    batch = {c for c in of_w if c in of_x and c in out}

    def dims(letters, those):
        return [i for i, c in enumerate(letters) if c in those]

    # Experts have a scale each; so do rows.
    w8 = rounded(w, E4M3, dims(of_w, summed if by_row else {*of_w} - batch))
    x8 = rounded(x, E4M3, dims(of_x, summed if by_row else {*of_x}))
    np.testing.assert_allclose(
        y, np.einsum(letters, w8, x8), rtol=1e-5, atol=1e-6 * np.abs(y).max()
    )
    free_w, free_x = {*of_w} - batch - summed, {*of_x} - batch - summed
    for found, wanted, other, shared in ((dx, of_x, of_w, free_w), (dw, of_w, of_x, free_x)):
        operand = w8 if other == of_w else x8
        # By rows the scale of the other operand multiplies g before it is rounded: a power of two.
        g8 = rounded_with(g, out, other, w if other == of_w else x, shared, summed, by_row)
        expected = np.einsum(f"{out},{other}->{wanted}", g8, operand)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def rounded_with(g, out, other, operand, shared, summed, by_row):
    if not by_row:
        return rounded(g, E5M2, range(g.ndim))
    scale = np.asarray(
        quantise(operand, E4M3, [i for i, c in enumerate(other) if c in summed])[1], np.float64
    )
    factor = np.einsum(f"{other}->{''.join(c for c in out if c in other)}", scale)
    shape = [g.shape[i] if c in other else 1 for i, c in enumerate(out)]
    factor = factor.reshape(shape)
    dims = [i for i, c in enumerate(out) if c in shared]
    return rounded(g * factor, E5M2, dims) / factor


@pytest.mark.parametrize("by_row", [False, True])
def test_error_is_within_the_bound_of_the_formats(by_row):
    w, x = array(64, 48), array(32, 64)
    fun = lambda w, x: x @ w  # noqa: E731
    y, back = jax.vjp(in_fp8(fun, w, x, by_row=by_row), w, x)
    g = array(*y.shape)
    dw, dx = back(g)
    # Two factors are rounded to 2^-4, or one to 2^-4 and one to 2^-3.
    forward, backward = (1 + 2**-4) ** 2 - 1, (1 + 2**-4) * (1 + 2**-3) - 1
    for found, exact, most, bound in (
        (y, x @ w, np.abs(x) @ np.abs(w), forward),
        (dx, g @ w.T, np.abs(g) @ np.abs(w).T, backward),
        (dw, x.T @ g, np.abs(x).T @ np.abs(g), backward),
    ):
        error = np.abs(np.asarray(found - exact))
        assert (error <= bound * most * 1.001).all()
        assert np.linalg.norm(error) < bound / 4 * np.linalg.norm(most)


def test_products_are_found_and_others_are_left():
    names = "twice turned looped stack cast summed whiled precise square vector".split()
    shapes = {"vector": (32,), "stack": (3, 32, 32)}
    leaves = [array(*shapes.get(name, (32, 32))) for name in names]

    def loss(*args):
        p, x = dict(zip(names, args[:-1], strict=True)), args[-1]
        x = x @ p["twice"] @ p["twice"] + (p["turned"].T @ x.T).T
        x = jax.lax.fori_loop(0, 3, lambda _, y: y @ p["looped"], x)
        x = jax.lax.scan(lambda x, w: (x @ w, None), x + p["vector"], p["stack"])[0]
        # From here on products with these stay as they are.
        x += (x.astype(jnp.bfloat16) @ p["cast"].astype(jnp.bfloat16)).astype(jnp.float32)
        x = x @ p["summed"] + jnp.sum(p["summed"])
        x = jax.lax.while_loop(lambda y: y[0, 0] > 0, lambda y: y @ p["whiled"], x)
        x = jnp.matmul(x, p["precise"], precision="highest")
        return (x @ (p["square"] @ p["square"])).sum()

    closed = traced(loss, *leaves, array(4, 32))
    found = rewrite.multiplied(closed, len(names), jnp.float32, traced)
    assert [names[at] for at in found] == ["twice", "turned", "looped", "stack"]


def test_product_with_a_result_in_fp32_is_left():
    """A router's: its precision matters."""
    w, x = (array(16, 16).astype(jnp.bfloat16) for _ in range(2))
    for dtype, found in ((None, [0]), (jnp.float32, [])):
        closed = traced(lambda w, x: jnp.matmul(x, w, preferred_element_type=dtype), w, x)  # noqa: B023
        assert [*rewrite.multiplied(closed, 1, jnp.bfloat16, traced)] == found
    # XLA multiplies bf16 in one way, whatever the setting for fp32.
    closed = traced(lambda w, x: jnp.matmul(x, w, precision="highest"), w, x)
    assert [*rewrite.multiplied(closed, 1, jnp.bfloat16, traced)] == [0]


def test_activations_that_several_loops_read_are_quantised_in_each():
    """Codes made in the body of a loop do not exist outside of it."""
    w, e, x = array(3, 16, 16), array(8, 16), array(8, 16)

    def loss(w, e, x):
        x, _ = jax.lax.scan(lambda x, own: (x + e @ own, None), x, w)
        x, _ = jax.lax.scan(lambda x, own: (x + e @ own, None), x, w)
        return x + e @ w[0]

    closed = traced(loss, w, e, x)
    found = rewrite.multiplied(closed, 1, jnp.float32, traced)
    new = rewrite.in_fp8(closed, 1, found, traced, dtype=jnp.float32, by_row=False)
    codes = quantise(w, E4M3, rewrite.shared(found[0], by_row=False))
    out = jaxprs.as_function(new)(w, *codes, e, x)[0]
    w8 = np.asarray(codes[0], np.float64) * np.asarray(codes[1])
    expected = x + rounded(e, E4M3, range(2)) @ (2 * w8.sum(0) + w8[0])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_activations_without_rows_have_a_product():
    w, x = array(16, 16), jnp.zeros((0, 16))
    assert in_fp8(lambda w, x: x @ w, w, x)(w, x).shape == (0, 16)


def test_function_with_its_own_gradient_reads_all_of_its_inputs_before_it_is_differentiated():
    """The stand-in of a matrix is not read forward, but its gradient is."""
    w, x = array(16, 16), array(4, 16)
    closed = traced(lambda w, x: x @ w, w, x)
    found = rewrite.multiplied(closed, 1, jnp.float32, traced)
    new = rewrite.in_fp8(closed, 1, found, traced, dtype=jnp.float32, by_row=False)
    assert read_inputs(new.jaxpr) == [False, True, True, True]
    assert read_inputs(new.jaxpr, differentiated=False) == [True] * 4


def test_second_derivative_is_an_error():
    w, x = array(16, 16), array(4, 16)
    run = in_fp8(lambda w, x: jnp.tanh(x @ w), w, x)
    gradient = jax.grad(lambda x: run(w, x).sum())
    jax.grad(lambda x: jnp.sum(x) + 0 * jax.lax.stop_gradient(gradient(x)).sum())(x)
    with pytest.raises(ValueError, match="matmul_dtype"):
        jax.grad(lambda x: gradient(x).sum())(x)
