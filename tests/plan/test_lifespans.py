"""When values of a flat program are in memory, by the habits of XLA for GPUs and without them."""

import jax
import jax.numpy as jnp

from zero_jax.plan.flat_trace import flatten
from zero_jax.plan.lifespans import spans_of

SIZE = 4 * 8 * 8


def most(fn, of_gpus):
    """Bytes of all that is made and in memory at the worst instant, of matrices."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    flat = flatten(jax.make_jaxpr(fn)(x, x))
    end = len(flat.operations)
    spans = [
        s
        for s in spans_of(flat.operations, set(flat.outputs), end, of_gpus)
        if s.value.bytes == SIZE
    ]
    return max(
        sum(s.value.bytes for s in spans if s.start <= at <= s.stop) for at in range(2 * end + 1)
    )


def test_a_fused_result_is_written_over_what_it_is_made_of_if_nobody_needs_that():
    def once(x, w):
        return jnp.tanh(x @ w) @ w @ w

    def twice(x, w):
        y = x @ w
        return jnp.tanh(y) @ w + y

    assert [most(once, gpus) for gpus in (True, False)] == [2 * SIZE, 3 * SIZE]
    assert [most(twice, gpus) for gpus in (True, False)] == [3 * SIZE, 3 * SIZE]


def test_a_scatter_writes_over_its_operand():
    def scattered(x, w):
        return jnp.exp((x @ w).at[2].add(1.0)) @ w

    assert most(scattered, True) == 2 * SIZE


def test_one_kernel_makes_what_is_made_of_the_same_value():
    """So the first of it waits for the second, beside what both are made of."""

    def attention(x, w):
        scores = x @ w
        values = jnp.exp(scores) @ w @ w
        return (scores * values) @ w

    def alone(x, w):
        values = jnp.exp(x @ w) @ w @ w
        return (x * values) @ w

    assert most(attention, True) == 4 * SIZE
    assert most(alone, True) == 2 * SIZE


def test_nothing_is_fused_through_a_barrier():
    """So a sum in front of one is in memory, and its parts need not be."""

    def summed(x, w):
        total = jax.lax.optimization_barrier(x @ w + w @ x)
        return jnp.sin(total) @ w @ w @ w + total

    def fused(x, w):
        total = x @ w + w @ x
        return jnp.sin(total) @ w @ w @ w + total

    assert most(fused, True) == most(summed, True) + SIZE
