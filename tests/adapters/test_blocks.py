"""int8 and nf4: errors within their bounds, the same bits in NumPy and JAX, bytes as stated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.adapters.quantised import BOUNDS, KINDS, NF4, Quantised, quantise
from zero_jax.hlo import prove, targets

SHAPES = [((3, 130, 5), -2), ((64, 8), -2), ((7, 33), -1), ((2, 3, 64, 4), -3), ((1, 1), -2)]


def numbers(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 50


def largest_of_blocks(x, dim):
    """The largest of each element's block."""
    at, rows = dim % x.ndim, x.shape[dim]
    starts = np.arange(0, rows, 64)
    largest = np.maximum.reduceat(abs(x), starts, axis=at)
    return np.repeat(largest, np.diff([*starts, rows]), axis=at)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_each_value_is_within_the_bound_of_its_block(kind, shape, dim):
    x = numbers(shape)
    packed = quantise(x, kind, dim)
    assert packed.shape == shape
    opened = np.asarray(packed.open(jnp.float32))
    assert (abs(opened - x) <= BOUNDS[kind] * largest_of_blocks(x, dim)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_numpy_and_jax_make_the_same_bits(kind, shape, dim):
    x = numbers(shape)
    a, b = quantise(x, kind, dim), jax.jit(lambda x: quantise(x, kind, dim))(jnp.asarray(x))
    for ours, theirs in ((a.codes, b.codes), (a.scales, b.scales)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.25), ("nf4", 4.25)])
def test_bits_of_a_parameter(kind, bits):
    packed = quantise(numbers((256, 96)), kind, -2)
    assert 8 * (packed.codes.nbytes + packed.scales.nbytes) == bits * 256 * 96


def test_what_nf4_holds_exactly_stays_and_blocks_do_not_touch_each_other():
    x = np.concatenate([np.tile(NF4, 4), 8 * np.tile(NF4, 4)])[:, None]
    packed = quantise(x, "nf4", -2)
    np.testing.assert_array_equal(packed.open(jnp.float32), x)
    changed = x.copy()
    changed[64:] *= 3
    again = quantise(changed, "nf4", -2)
    np.testing.assert_array_equal(again.codes[:32], packed.codes[:32])


def test_a_piece_without_rows_has_no_blocks():
    for kind in KINDS:
        packed = quantise(np.zeros((3, 0, 5), np.float32), kind, -2)
        assert packed.shape == (3, 0, 5) and packed.open(jnp.float32).shape == (3, 0, 5)


def test_zeros_stay_zeros():
    for kind in KINDS:
        assert not np.asarray(
            quantise(np.zeros((70, 2), np.float32), kind, -2).open("float32")
        ).any()


def test_nf4_is_the_table_of_qlora():
    # Appendix E of arXiv:2305.14314: 16 values, symmetric ends, an exact zero, 8 above it.
    assert len(NF4) == 16 and NF4[0] == -1 and NF4[-1] == 1 and NF4[7] == 0
    assert (np.diff(NF4) > 0).all()


def test_it_is_a_tree_of_two_leaves():
    packed = quantise(numbers((64, 2)), "int8", -2)
    assert isinstance(jax.tree.map(lambda x: x, packed), Quantised)
    assert len(jax.tree.leaves(packed)) == 2


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # as the arguments of a step are
@pytest.mark.parametrize("kind", KINDS)
def test_programs_for_gpus_round_the_scale_that_codes_are_made_with(kind):
    """XLA for GPUs keeps a number in fp32 where it is cast to bf16 and back."""
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((256, 96), jnp.float32, sharding=sharding)

    def parts(x):
        packed = quantise(x, kind, -2)
        return packed.codes, packed.scales

    program = prove.compile_for(targets.target("h100"), parts, (x,), mesh).program
    kernels = [{i.kind for i in c.instructions.values()} for c in program.computations.values()]
    of_codes = [kinds for kinds in kernels if kinds & {"divide", "compare"}]
    assert of_codes and all("reduce-precision" in kinds for kinds in of_codes)
