"""Codes and scales of 8-bit floats."""

import conftest  # noqa: F401
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.fp8.formats import E4M3, E5M2, quantise, scale_for

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Relative error of normal numbers; absolute error of others, relative to the largest number.
BOUNDS = {E4M3: (2.0**-4, 2.0**-17), E5M2: (2.0**-3, 2.0**-31)}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scale_is_the_smallest_power_of_two_with_which_the_largest_number_fits(dtype):
    exponents = np.arange(-100, 100, 7)
    for factor in (1.0, 1.1, 1.75, np.nextafter(np.float32(1.75), np.float32(2)), 1.99):
        largest = np.float32(factor) * np.exp2(exponents.astype(np.float32))
        scales = np.asarray(scale_for(jnp.asarray(largest), dtype))
        assert (np.log2(scales) % 1 == 0).all()
        assert (largest / scales <= LARGEST[dtype]).all()
        assert (largest / (scales / 2) > LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_error_is_within_the_bound_of_the_format(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 500)) * np.exp2(rng.integers(-30, 30, (64, 1)))
    x = x.astype(np.float32) * np.exp2(rng.integers(-12, 12, (64, 500))).astype(np.float32)
    codes, scale = quantise(jnp.asarray(x), dtype, [1])
    assert codes.dtype == dtype and scale.shape == (64, 1)
    error = np.abs(np.asarray(codes, np.float32) * np.asarray(scale) - x)
    relative, absolute = BOUNDS[dtype]
    most = absolute * np.abs(x).max(1, keepdims=True)
    assert (error <= np.maximum(relative * np.abs(x), most)).all()
    assert (error > 0.9 * relative * np.abs(x)).any(), "the bound is reached"


def test_codes_of_a_number_do_not_depend_on_the_others():
    x = jnp.asarray(np.random.default_rng(0).uniform(0.1, 1.0, 300), jnp.float32)
    alone, own = quantise(x, E4M3, [0])
    beside, other = quantise(jnp.append(x, 700.0), E4M3, [0])
    assert other[0] == 2**9 * own[0]
    np.testing.assert_array_equal(
        alone.astype(jnp.float32) * own, beside[:-1].astype(jnp.float32) * other
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_that_are_not_finite_are_not_hidden(dtype):
    for wrong in (np.nan, np.inf, -np.inf):
        codes, scale = quantise(jnp.asarray([1.0, wrong]), dtype, [0])
        assert not np.isfinite(np.asarray(codes, np.float32) * np.asarray(scale)).any()
    for x in (np.zeros(3), np.full(3, 1e-42), np.full(3, 3e38)):
        codes, scale = quantise(jnp.asarray(x, jnp.float32), dtype, [0])
        found = np.asarray(codes, np.float32) * np.asarray(scale)
        np.testing.assert_allclose(found, np.float32(x), rtol=BOUNDS[dtype][0], atol=1e-41)
