"""A training step, library calls, other GPUs and keys, as compilers for GPUs make of them."""

import collections

import jax
import jax.numpy as jnp
import pytest
from networks import Network
from test_flops import convolve
from test_prove import BF16, F32, P, compiled, total

import zero_jax
from zero_jax.hlo import prove, targets

pytestmark = pytest.mark.compile


def test_a_training_step_sends_and_holds_what_its_schedule_says():
    """Stage 3 gathers each layer forward and backward, in bf16, and scatters its fp32 gradient.

    XLA moves one of each out of its loop, to start it early or to end it late.
    """
    net = Network(L=6, D=1024, B=8, T=64, dtype="bf16")
    mesh = zero_jax.abstract_mesh(8)
    step, args = net.step(3, "block", mesh=mesh)
    report = prove.compile_for(targets.target("h100"), step.function, args, mesh)
    runs = collections.Counter()
    for c in (c for c in report.collectives if c.elements == net.layer):
        runs[c.kind, c.dtype, c.in_loop] += c.runs
    assert runs["all-gather", "bf16", True] + runs["all-gather", "bf16", False] == 2 * net.L
    assert runs["reduce-scatter", "f32", True] + runs["reduce-scatter", "f32", False] == net.L
    assert runs["all-gather", "bf16", True] >= 2 * (net.L - 1)
    assert report.words_per_param(net.psi) == pytest.approx(3, rel=1e-5)
    assert report.flops == 4 * net.L * 2 * (8 * 64) * net.layer
    assert report.alias_bytes == 12 * net.psi // 8 + 16 + 4, "Adam's count, and the guard"
    assert report.argument_bytes == report.alias_bytes + net.carry
    others = report.output_bytes - report.alias_bytes
    assert report.total_bytes == report.argument_bytes + report.temp_bytes + others
    assert 0.99 < report.fragmentation < 1.1
    assert 2 * net.L * (8 * 64) * net.D in {t.bytes for t in report.peak.temporaries}, "saved"


def test_a_convolution_and_its_gradients_cost_three_times_its_closed_form():
    images, side, c_in, c_out, k = 4, 32, 64, 128, 3

    def f(x, kernel):
        def loss(x, kernel):
            return jnp.sum(convolve(x, kernel).astype(F32) ** 2)

        return jax.grad(loss, (0, 1))(x, kernel)

    arrays = [
        ((8 * images, side, side, c_in), BF16, P("data")),
        ((k, k, c_in, c_out), BF16, P()),
    ]
    report = compiled(f, arrays, target="h200", out_specs=(P("data"), P()))
    assert report.flops == 3 * 2 * images * side * side * c_out * c_in * k * k


@pytest.mark.parametrize("target", ["a100", "b200"])
def test_other_gpus_compile_a_product_and_take_a_random_key_as_its_eight_bytes(target):
    key = jax.eval_shape(lambda: jax.random.key(0))
    arrays = [(key.shape, key.dtype, P()), *[((128, 128), BF16, P())] * 2]

    def f(key, x, w):
        return total(x @ w) + jax.random.normal(key, ())

    report = compiled(f, arrays, target=target)
    assert report.flops == 2 * 128**3
    assert report.argument_bytes == 2 * 2 * 128 * 128 + 2 * 4
