"""int8 and nf4: errors within their bounds, the same bits in NumPy and JAX, bytes as stated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.adapters.quantised import BOUNDS, KINDS, NF4, Quantised, quantise
from zero_jax.hlo import prove, targets

SHAPES = [((3, 130, 5), -2), ((7, 33), -1), ((2, 3, 64, 4), -3)]


def numbers(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) / 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values_are_within_their_bounds_and_numpy_and_jax_make_the_same_bits(kind, shape, dim):
    x = numbers(shape)
    packed, compiled = quantise(x, kind, dim), jax.jit(lambda x: quantise(x, kind, dim))(x)
    for ours, theirs in zip(jax.tree.leaves(packed), jax.tree.leaves(compiled), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert packed.shape == shape
    rows, at = shape[dim], dim % x.ndim
    starts = np.arange(0, rows, 64)
    largest = np.repeat(np.maximum.reduceat(abs(x), starts, at), np.diff([*starts, rows]), at)
    assert (abs(np.asarray(packed.open(jnp.float32)) - x) <= BOUNDS[kind] * largest).all()


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.25), ("nf4", 4.25)])
def test_bits_of_a_parameter_zeros_and_no_rows(kind, bits):
    packed = quantise(numbers((256, 96)), kind, -2)
    assert 8 * (packed.codes.nbytes + packed.scales.nbytes) == bits * 256 * 96
    assert isinstance(jax.tree.map(lambda x: x, packed), Quantised)
    assert not np.asarray(quantise(np.zeros((70, 2), np.float32), kind, -2).open("float32")).any()
    empty = quantise(np.zeros((3, 0, 5), np.float32), kind, -2)
    assert empty.shape == (3, 0, 5) and empty.open(jnp.float32).shape == (3, 0, 5)


def test_nf4_is_the_table_of_qlora_and_holds_its_values_exactly():
    # Appendix E of arXiv:2305.14314: 16 values, symmetric ends, an exact zero, 8 above it.
    assert len(NF4) == 16 and NF4[0] == -1 and NF4[-1] == 1 and NF4[7] == 0
    assert (np.diff(NF4) > 0).all()
    x = np.concatenate([np.tile(NF4, 4), 8 * np.tile(NF4, 4)])[:, None]
    packed = quantise(x, "nf4", -2)
    np.testing.assert_array_equal(packed.open(jnp.float32), x)
    # Rows 0 to 31 of a block are the low halves of its bytes, which another block does not change.
    np.testing.assert_array_equal(packed.codes[:32, 0] & 15, np.tile(np.arange(16), 2))
    x[64:] *= 3
    np.testing.assert_array_equal(quantise(x, "nf4", -2).codes[:32], packed.codes[:32])


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
