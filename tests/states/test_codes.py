"""Floats of 8 bits and bf16 with stochastic rounding: error, range, and sharding-independence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.states import codes
from zero_jax.states.rounding import noise, to_bfloat16

SIZE = 400  # three blocks of 128 and a part of one


def spread(shape, octaves):
    """Numbers of both signs, evenly over so many octaves."""
    draw = np.random.default_rng(0)
    size = 2.0 ** -draw.uniform(0, octaves, shape)
    return jnp.asarray(size * draw.choice([-1, 1], shape), jnp.float32)


@jax.jit
def rounded(x, uniform):
    scales = codes.scales_of(x, 0)
    return codes.open(codes.close(x, scales, 0, uniform), scales, 0)


def round_trip(x, step=0):
    return rounded(x, noise(x.shape, (0,) * x.ndim, x.shape, 0, jnp.int32(step)))


@jax.jit
def in_bf16(x, step=0):
    return to_bfloat16(x, noise(x.shape, (0,), x.shape, 0, jnp.int32(step))).astype(jnp.float32)


def test_error_range_sign_and_zeros():
    for size in (1, 129, SIZE):
        x = spread((size, 3), octaves=14)
        np.testing.assert_array_less(jnp.abs(round_trip(x) / x - 1), 1 / 8)
        np.testing.assert_array_less(jnp.abs(round_trip(x * x) / (x * x) - 1), 1 / 8)
    squares = jnp.where(jnp.arange(SIZE) % 5 == 0, 0.0, spread((SIZE,), octaves=60) ** 2)
    back = round_trip(squares)
    assert jnp.array_equal(back == 0, squares == 0), "a square is never rounded to zero"
    assert (back >= 0).all()
    mixed = jnp.zeros(SIZE).at[:4].set(jnp.array([1.0, -1.0, 2.0**-16, -(2.0**-20)]))
    assert jnp.array_equal(round_trip(mixed), mixed.at[2:].set(0.0)), "below the range of signs"
    once = round_trip(spread((SIZE,), octaves=15))
    assert jnp.array_equal(round_trip(once, 7), once), "a representable number is not rounded"
    for scale in (1e-36, 1e37):
        x = jnp.abs(spread((SIZE,), octaves=3)) * scale
        np.testing.assert_array_less(jnp.abs(round_trip(x) - x), x / 8)
    for largest in (1e-44, 1e-38, 1e-30, 1.0):
        x = np.float32(largest) * np.eye(1, SIZE, dtype=np.float32)[0]
        x[1] = 1e-45
        back = np.asarray(round_trip(jnp.asarray(x)))
        assert np.array_equal(back > 0, x > 0) and back[1] <= 2.0**-30


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_keep_their_kind_and_leave_the_block_alone(bad):
    for sign in (1, -1):
        x = jnp.ones(SIZE).at[7].set(sign).at[3].set(bad)
        assert jnp.array_equal(round_trip(x), x, equal_nan=True)
        assert jnp.array_equal(in_bf16(x), x, equal_nan=True)
    if not bad < 0:
        x = (spread((SIZE,), octaves=12) ** 2).at[3].set(bad)
        back = round_trip(x)
        np.testing.assert_array_less(jnp.abs(back / x - 1).at[3].set(0.0), 1 / 8)
        assert jnp.array_equal(back[3], x[3], equal_nan=True)


def test_the_largest_floats_stay_finite():
    largest, most = jnp.float32(np.finfo(np.float32).max), jnp.uint32(2**32 - 1)
    x = jnp.array([largest, largest / 2, -largest])
    for values in (x[:2], x):
        back = rounded(values, jnp.full(values.shape, most))
        np.testing.assert_array_less(jnp.abs(back / values - 1), 1 / 5)
    assert jnp.isfinite(to_bfloat16(x, jnp.full((3,), most))).all()
    signalling = jax.lax.bitcast_convert_type(jnp.uint32(0x7F800001), jnp.float32)
    assert jnp.isnan(to_bfloat16(signalling, most))


@pytest.mark.parametrize(
    ("fun", "value", "spacing"), [(round_trip, 1.03, 1 / 8), (in_bf16, 1.0013, 2**-7)]
)
def test_rounding_is_unbiased_over_steps(fun, value, spacing):
    x = jnp.full((64,), value)
    mean = jax.jit(jax.vmap(fun, (None, 0)))(x, jnp.arange(256)).mean(0)
    # A low-discrepancy sequence is off by a few of 256 steps; random bits would be by sixteen.
    np.testing.assert_allclose(mean, x, rtol=3 / 256 * spacing)


def test_codes_of_a_piece_are_those_of_the_full_leaf_in_at_most_nine_bits():
    for shape in [(4096, 1), (1, 4096), (8, 4096), (16, 4096), (50257, 2)]:
        assert 8 + 16 * np.prod(codes.scales_shape(shape)) / np.prod(shape) <= 9
    x = spread((5, 300), octaves=10)

    @functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
    def piece(top, bottom, first, last):
        part = x[top:bottom, first:last]
        scales = codes.scales_of(part, 1)
        uniform = noise(part.shape, (top, first), x.shape, 3, jnp.int32(2))
        return codes.close(part, scales, 1, uniform), scales

    full, full_scales = piece(0, 5, 0, 300)
    for first, last in ((0, 128), (128, 300)):
        made, scales = piece(2, 4, first, last)
        assert jnp.array_equal(made, full[2:4, first:last])
        assert jnp.array_equal(scales, full_scales[2:4, first // 128 : -(-last // 128)])
