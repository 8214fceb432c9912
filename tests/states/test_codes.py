"""Floats of 8 bits: what they lose, what they never lose, and which way they are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.states import codes
from zero_jax.states.rounding import noise, to_bfloat16


def spread(shape, octaves, seed=0):
    """Numbers of both signs, evenly over so many octaves."""
    draw = np.random.default_rng(seed)
    size = 2.0 ** -draw.uniform(0, octaves, shape)
    return jnp.asarray(size * draw.choice([-1, 1], shape), jnp.float32)


def closed(x, dim, chance):
    scales = codes.scales_of(x, dim)
    return codes.close(x, scales, dim, chance), scales


def through(x, dim=0, step=0):
    chance = noise(x.shape, (0,) * x.ndim, x.shape, 0, jnp.int32(step))
    return codes.open(*closed(x, dim, chance), dim)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 400])
def test_a_number_is_off_by_less_than_an_eighth(size):
    x = spread((size, 3), octaves=14)
    np.testing.assert_array_less(jnp.abs(through(x) / x - 1), 1 / 8)
    np.testing.assert_array_less(jnp.abs(through(x * x) / (x * x) - 1), 1 / 8)


def test_what_a_code_can_say_comes_back_as_it_was():
    once = through(spread((300, 5), octaves=15))
    assert jnp.array_equal(through(once, step=7), once)


def test_squares_are_never_zero_and_zero_stays():
    x = jnp.where(jnp.arange(256) % 5 == 0, 0.0, spread((256,), octaves=60) ** 2)
    back = through(x)
    assert jnp.array_equal(back == 0, x == 0)
    assert (back >= 0).all()


def test_small_numbers_beside_large_ones_of_both_signs_are_zero():
    x = jnp.array([1.0, -1.0, 2.0**-16, -(2.0**-20)])
    assert jnp.array_equal(through(x), jnp.array([1.0, -1.0, 0.0, 0.0]))


@pytest.mark.parametrize("scale", [1e-36, 1.0, 1e37])
def test_a_scale_changes_nothing_but_the_exponent(scale):
    x = jnp.abs(spread((128,), octaves=3)) * scale
    np.testing.assert_array_less(jnp.abs(through(x) - x), x / 8)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_not_finite_stays_so_alone(bad, sign):
    x = jnp.ones(256).at[7].set(sign).at[3].set(bad)
    assert jnp.array_equal(through(x), x, equal_nan=True)
    kept = to_bfloat16(x, noise(x.shape, (0,), x.shape, 0, jnp.int32(1)))
    assert jnp.array_equal(kept.astype(jnp.float32), x, equal_nan=True)


def test_squares_beside_what_is_not_finite_keep_their_range():
    for bad in (np.nan, np.inf):
        x = (spread((256,), octaves=12) ** 2).at[3].set(bad)
        back = through(x)
        ratio = jnp.delete(back / x, 3)
        assert (jnp.abs(ratio - 1) < 1 / 8).all() and jnp.array_equal(back[3], x[3], equal_nan=True)


def test_what_is_finite_stays_so():
    largest, most = jnp.float32(np.finfo(np.float32).max), jnp.uint32(2**32 - 1)
    x = jnp.array([largest, largest / 2, -largest])
    for signed in (x[:2], x):
        back = codes.open(*closed(signed, 0, jnp.full(signed.shape, most)), 0)
        np.testing.assert_array_less(jnp.abs(back / signed - 1), 1 / 5)
    assert jnp.isfinite(to_bfloat16(x, jnp.full((3,), most))).all()
    quiet = jax.lax.bitcast_convert_type(jnp.uint32(0x7F800001), jnp.float32)
    assert jnp.isnan(to_bfloat16(quiet, most))


@pytest.mark.parametrize("largest", [1e-44, 1e-38, 1e-30, 1.0])
def test_a_square_is_never_zero_near_the_smallest_float_either(largest):
    x = np.float32(largest) * np.float32([1, 1, 0])
    x[1] = 1e-45
    back = np.asarray(through(jnp.asarray(x)))
    assert np.array_equal(back > 0, x > 0) and back[1] <= 2.0**-30


@pytest.mark.parametrize("kind", ["8bit", "bf16"])
def test_what_stands_between_two_numbers_is_right_on_average(kind):
    x = jnp.full((64,), 1.03 if kind == "8bit" else 1.0013)
    total = np.zeros(64)
    for step in range(256):
        chance = noise(x.shape, (0,), x.shape, 0, jnp.int32(step))
        made = codes.open(*closed(x, 0, chance), 0) if kind == "8bit" else to_bfloat16(x, chance)
        total += np.asarray(made, np.float64)
    # An even sequence is off by a few of 256 turns, chance would be by sixteen.
    np.testing.assert_allclose(total / 256, x, rtol=3 / 256 * (1 / 8 if kind == "8bit" else 2**-7))


@pytest.mark.parametrize("decay", [0.95, 0.999])
def test_an_average_of_squares_follows_as_in_fp32(decay):
    """Where rounding to the nearest is off by a half."""
    size, steps = 1024, 3000

    def average(old, g):
        return decay * old + (1 - decay) * g * g

    def step(carry, at):
        exact, kept, nearest, g = *carry, jax.random.normal(jax.random.key(at), (size,))
        chance = noise((size,), (0,), (size,), 0, at)
        half = jnp.full((size,), jnp.uint32(1 << 31))
        kept = codes.open(*closed(average(kept, g), 0, chance), 0)
        nearest = codes.open(*closed(average(nearest, g), 0, half), 0)
        return (average(exact, g), kept, nearest), None

    start = jnp.full((size,), 4.0)
    (exact, kept, nearest), _ = jax.jit(
        lambda: jax.lax.scan(step, (start, start, start), jnp.arange(steps))
    )()
    roots = jnp.sqrt(kept / exact)
    assert abs(roots.mean() - 1) < 0.03 and roots.std() < 0.11
    assert abs(jnp.sqrt(nearest / exact).mean() - 1) > 0.2


@pytest.mark.parametrize("shape", [(4096, 1), (1, 4096), (8, 4096), (16, 4096), (50257, 2)])
def test_blocks_run_along_a_dim_that_is_long_enough(shape):
    """A number takes nine bits at most where a dim has sixteen elements."""
    assert 8 + 16 * np.prod(codes.scales_shape(shape)) / np.prod(shape) <= 9


def test_pieces_have_the_codes_of_the_whole():
    x, dim = spread((5, 300), octaves=10), 1
    whole = closed(x, dim, noise(x.shape, (0, 0), x.shape, 3, jnp.int32(2)))
    for first, last in ((0, 128), (128, 300)):
        piece = x[2:4, first:last]
        chance = noise(piece.shape, (2, first), x.shape, 3, jnp.int32(2))
        made, scales = closed(piece, dim, chance)
        assert jnp.array_equal(made, whole[0][2:4, first:last])
        assert jnp.array_equal(scales, whole[1][2:4, first // 128 : -(-last // 128)])
