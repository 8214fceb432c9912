"""The forecast of a step's temporaries: scanned networks whose terms are known in closed form."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from networks import (
    AHEAD,
    LONG,
    ON_GPUS,
    WIDE,
    Chunked,
    Embedded,
    N,
    Nested,
    Network,
    OneProduct,
    Twins,
)

from zero_jax.hlo import auditor
from zero_jax.plan.flat_trace import flatten
from zero_jax.plan.forecast import NO_HABITS
from zero_jax.plan.lifespans import spans_of


@functools.cache
def forecast(net, stage, remat="block", k=1, habits=NO_HABITS):
    return net.forecast(stage, remat, k, habits)


def terms(*args, **settings):
    return forecast(*args, **settings).terms


# Each term, at the worst instant: in the backward pass, layer by layer.


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_terms_of_a_step_with_remat(stage, dtype):
    net = dataclasses.replace(LONG, dtype=dtype)
    found = terms(net, stage)
    # The input of every layer, and the output of the last, of which the loss is the mean square.
    assert found["saved"] == net.L * net.carry + net.carry
    if stage == 3:
        assert found["copy"] <= net.width * net.layer
    else:
        assert found["copy"] == (0 if (stage, dtype) == (0, "fp32") else net.width * net.psi)
    # One layer's gradients in the reduce dtype, fp32 by default.
    assert found["buffers"] == (4 * net.layer if stage else 0)
    assert found["loss"] == 0
    if dtype == "fp32":  # beside the gradient that layers hand on, and the loss
        shards = 4 * net.psi // (N if stage else 1)
        assert found["gradients"] - net.carry - shards in (0, 4)


def test_policies_save_products_or_all_that_the_backward_pass_reads():
    for stage in (0, 3):
        assert terms(LONG, stage, "dots")["saved"] == 2 * LONG.L * LONG.carry + LONG.carry
    # Of tanh(h @ w): h, and its value or its derivative, or (jax 0.10) both.
    saved = terms(LONG, 3, "none")["saved"] - LONG.carry
    assert saved in (2 * LONG.L * LONG.carry, 3 * LONG.L * LONG.carry)
    held = [forecast(LONG, 3, policy).bytes for policy in ("block", "dots", "none")]
    assert held == sorted(held) and held[0] < held[-1]


@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_save_half_and_add_up_in_a_second_set_of_gradients(stage):
    whole, halves = terms(LONG, stage), terms(LONG, stage, k=2)
    assert 2 * halves["saved"] == whole["saved"]
    if stage == 1:  # whole gradients, beside those of one micro-batch, and shards of the sum
        sharded = terms(LONG, 2, k=2)["gradients"]
        assert halves["gradients"] - sharded == 4 * (2 * LONG.psi - 2 * LONG.psi // N)
    else:  # less half of a layer's input, which is the other half of the batch
        one, two = (terms(WIDE, stage, k=k)["gradients"] for k in (1, 2))
        second = 4 * WIDE.psi // (N if stage else 1)
        assert two - one + WIDE.carry // 2 - second in range(17), "scalars"


def test_logits_are_the_loss_and_gradients_that_only_wait_to_be_summed_come_last():
    net = Network(L=6, D=64, B=4, T=16, V=1000)
    for stage in (1, 3):  # with the largest of each row and the sum of its exponentials
        assert terms(net, stage)["loss"] == 4 * net.B * net.T * (net.V + 2)
    assert terms(net, 3)["gradients"] == 0, "that of the head"
    assert forecast(net, 3).bytes > 2 * (4 * net.B * net.T * net.V), "logits and their gradient"


# Their sum.


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("net", [LONG, dataclasses.replace(WIDE, V=2048)], ids=["long", "wide"])
def test_terms_are_all_that_is_held(net, stage):
    found = forecast(net, stage)
    assert sum(found.terms.values()) == sum(h.bytes for h in found.held) == found.bytes > 0
    assert [h.bytes for h in found.held] == sorted((h.bytes for h in found.held), reverse=True)
    for held in found.held:
        dtype, dims = re.fullmatch(r"(\w+)\[([\d, ]*)\]", held.what).groups()
        shape = map(int, re.findall(r"\d+", dims))
        assert held.bytes == functools.reduce(int.__mul__, shape, jnp.dtype(dtype).itemsize), held
        assert held.made_by


def test_each_stage_holds_less_than_the_one_before():
    one, two, three = (forecast(WIDE, stage, k=2).bytes for stage in (1, 2, 3))
    assert one > two > three
    gradients = 2 * 4 * WIDE.psi * (1 - 1 / N) - 4 * WIDE.layer  # less the layer under way
    assert one - two == pytest.approx(gradients, rel=0.2)
    assert two - three == 4 * WIDE.psi, "the gathered copy"
    assert forecast(WIDE, 1).bytes == forecast(WIDE, 2).bytes, "with one micro-batch"


@pytest.mark.parametrize(
    ("stage", "remat"), [(0, "block"), (1, "dots"), (2, "block"), (3, "block")]
)
def test_the_forecast_is_near_the_compiled_program(stage, remat):
    """Within 10 % where activations dominate. In WIDE the CPU backend also keeps transposed copies
    of the weights, which is why plans are proven on the GPU's compiler (docs/plan.md)."""
    step, args = LONG.step(stage, remat)
    temp = auditor.audit(step.lower(*args).compile()).temp_bytes
    assert forecast(LONG, stage, remat).bytes == pytest.approx(temp, rel=0.1)


# XLA for GPUs runs into the ends of loops over layers.


def test_while_the_loss_ends_the_last_layer_is_gathered_again():
    """Chunks of a loss begin no collective; of one in one piece the last product hides it."""
    chunked = Chunked(L=3, D=64, B=2, T=4, V=5000)
    without, ahead = (forecast(chunked, 3, habits=habits) for habits in (ON_GPUS, AHEAD))
    assert without.terms["loss"] > 4 * 64 * 5000, "the worst instant is the loss"
    assert ahead.terms["copy"] - without.terms["copy"] == 4 * chunked.layer
    assert ahead.bytes - without.bytes == 4 * chunked.layer
    whole = OneProduct(L=3, D=64, B=2, T=4, V=5000)
    without, ahead = (forecast(whole, 3, habits=habits) for habits in (ON_GPUS, AHEAD))
    assert without.terms["gradients"] + without.terms["work"] >= 4 * 64 * 5000, "that of the head"
    assert ahead.bytes - without.bytes == 4 * whole.layer


def test_at_the_end_of_a_layer_its_gradients_wait_beside_those_of_the_one_before():
    """In the reduce dtype; of the weights only the next layer's are still there."""
    net = Twins(L=4, D=256, B=1, T=4, dtype="bf16")
    ahead, found = terms(net, 3, habits=AHEAD), terms(net, 3, habits=ON_GPUS)
    assert (ahead["copy"], ahead["buffers"]) == (2 * net.layer, 2 * 4 * net.layer)
    assert found["buffers"] == 4 * net.layer, "that loop does not run into the next turn"


@pytest.mark.parametrize(("L", "larger"), [(6, "gradients"), (64, "inputs")])
def test_the_first_layers_gradients_are_under_way_while_the_embeddings_is_cast(L, larger):
    """It is there in bf16 and in fp32 then, and so is the larger of what layers kept and of another
    layer's gradients."""
    net = Embedded(L=L, D=64, B=2, T=2, V=5000, dtype="bf16")
    found = terms(net, 3, habits=AHEAD)
    layer, saved = 4 * net.layer, L * net.carry
    assert (saved > layer) == (larger == "inputs")
    assert found["buffers"] + found["saved"] == layer + max(layer, saved)
    shards = 4 * L * net.layer // N
    assert found["gradients"] == (2 + 4) * net.V * net.D + shards + 4, "and the loss"


def test_both_are_there_while_it_is_sent():
    """Where its copy in bf16 is smaller than either, that is the worst instant."""
    net = Embedded(L=64, D=64, B=2, T=2, V=100, dtype="bf16")
    found = terms(net, 3, habits=AHEAD)
    assert (found["buffers"], found["saved"]) == (2 * 4 * net.layer, net.L * net.carry)
    assert found["gradients"] == 4 * net.V * net.D + 4 * net.psi // N + 4, "and the loss"


def test_a_loop_that_gathers_nothing_runs_its_last_turn_itself():
    """One within a layer, over slices of what the layer gathered."""
    net = Nested(L=4, D=32, B=16, T=64)
    without, ahead = (forecast(net, 3, habits=habits).bytes for habits in (ON_GPUS, AHEAD))
    assert ahead - without == 4 * net.layer
    bucket = dataclasses.replace(AHEAD, bucket_bytes=4 * 16 * 32**2)
    found = forecast(net, 3, habits=bucket).bytes
    assert found - without == 4 * 16 * 32**2, "of more than two buckets one is gathered ahead"


def test_the_next_micro_batch_has_gathered_what_it_reads_first():
    net = Embedded(L=6, D=64, B=2, T=2, V=5000, dtype="bf16")
    one, two = (terms(net, 3, k=k, habits=AHEAD)["copy"] for k in (1, 2))
    assert one == 0, "nothing is left to gather"
    assert two == 2 * net.V * net.D + 2 * net.layer


# When values are in memory, by the habits of XLA for GPUs and without them.


def most(fn, of_gpus):
    """Matrices that are made and in memory at the worst instant."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    flat = flatten(jax.make_jaxpr(fn)(x, x))
    end = len(flat.operations)
    spans = spans_of(flat.operations, set(flat.outputs), end, of_gpus)
    spans = [s for s in spans if s.value.bytes == 4 * 8 * 8]
    return max(sum(s.start <= at <= s.stop for s in spans) for at in range(2 * end + 1))


def read_again(x, w):
    y = x @ w
    return jnp.tanh(y) @ w + y


def attention(x, w):
    scores = x @ w
    values = jnp.exp(scores) @ w @ w
    return (scores * values) @ w


def alone(x, w):
    values = jnp.exp(x @ w) @ w @ w
    return (x * values) @ w


def summed(x, w, barrier=jax.lax.optimization_barrier):
    total = barrier(x @ w + w @ x)
    return jnp.sin(total) @ w @ w @ w + total


@pytest.mark.parametrize(
    ("fn", "on_gpus", "without"),
    [
        # A fused result is written over what it is made of if nobody needs that.
        (lambda x, w: jnp.tanh(x @ w) @ w @ w, 2, 3),
        (read_again, 3, 3),
        (lambda x, w: jnp.exp((x @ w).at[2].add(1.0)) @ w, 2, None),  # a scatter too
        # One kernel makes what is made of the same value: the first of it waits for the second.
        (attention, 4, None),
        (alone, 2, None),
        # Nothing is fused through a barrier: a sum in front is in memory, its parts are not.
        (functools.partial(summed, barrier=lambda x: x), 4, None),
        (summed, 3, None),
    ],
)
def test_matrices_in_memory(fn, on_gpus, without):
    assert most(fn, True) == on_gpus
    assert without is None or most(fn, False) == without
