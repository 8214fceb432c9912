"""The audit of programs that the GPU compiler made, each with a known answer; needs no GPU.

Every program is compiled once, in a process of its own: pip install 'zero_jax[prove]'.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from networks import Network
from test_flops import convolve

import zero_jax
from zero_jax.hlo import aot, auditor, targets

pytestmark = pytest.mark.compile
P = PartitionSpec
WHOLE = P()
BF16, F32 = jnp.bfloat16, jnp.float32


def compiled(f, arrays, *, target="h100", out_specs=WHOLE, axes=None):
    """The audit of `f`, which each device runs on its part of `arrays`: (shape, dtype, spec)."""
    axes = axes or {"data": 8}
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arrays
    ]
    specs = tuple(spec for _, _, spec in arrays)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return aot.compile_for(targets.target(target), mapped, args, mesh, donated=0)


# Loops, axes, dtypes.

S, OUTER, INNER = 256, 5, 3


def test_collectives_of_nested_loops_along_every_axis_send_their_closed_form():
    """Loops of 3 in a loop of 5, on a mesh of 2 x 2 x 2; bf16 stays bf16 on the wire."""

    def inner(w, c, _):
        h = c @ jax.lax.all_gather(w, "data", tiled=True)
        return jnp.tanh(h) + jax.lax.psum(c, "replica"), None

    def outer(w, c, layer):
        c, _ = jax.lax.scan(functools.partial(inner, w), c, None, length=INNER)
        return c @ jax.lax.all_gather(layer, "data", tiled=True), None

    def f(x, w, layers):
        c, _ = jax.lax.scan(functools.partial(outer, w), x, layers)
        far = jax.lax.psum(c[:7].astype(F32), ("replica", "model"))
        near = jax.lax.psum(c[:5].astype(F32), ("data", "model"))
        swapped = jax.lax.all_to_all(c[:4], "model", 0, 0, tiled=True)
        ring = jax.lax.ppermute(c[:3], "model", [(0, 1), (1, 0)])
        norm = jax.lax.psum(jnp.sum(c, dtype=F32), ("replica", "data", "model"))
        return jax.lax.psum_scatter(c, "data", tiled=True), far, near, swapped, ring, norm

    arrays = [((S, S), BF16, P()), ((S, S), BF16, P("data"))]
    arrays.append(((OUTER, S, S), BF16, P(None, "data")))
    axes = {"replica": 2, "data": 2, "model": 2}
    loops = compiled(f, arrays, out_specs=(P("data"), *[P()] * 5), axes=axes)
    found = [(c.kind, c.axis, c.group_size, c.elements, c.runs) for c in loops.collectives]
    assert sorted(found) == [
        ("all-gather", "data", 2, S * S, OUTER), ("all-gather", "data", 2, S * S, OUTER * INNER),
        ("all-reduce", "data+model", 4, 5 * S, 1),
        ("all-reduce", "replica", 2, S * S, OUTER * INNER),
        ("all-reduce", "replica+data+model", 8, 1, 1), ("all-reduce", "replica+model", 4, 7 * S, 1),
        ("all-to-all", "model", 2, 4 * S, 1),
        ("collective-permute", "?", 2, 3 * S, 1),  # pairs, of which an axis is not asked
        ("reduce-scatter", "data", 2, S * S, 1)]  # fmt: skip
    for c in loops.collectives:
        wide = c.kind == "all-reduce" and c.axis != "replica"
        assert (c.dtype, c.bytes) == ("f32" if wide else "bf16", c.elements * (4 if wide else 2))
        assert c.in_loop == (c.runs > 1)
    assert loops.flops == 2 * S**3 * (OUTER * INNER + OUTER)
    assert loops.uncounted == ()
    # The sum that no product needs overlaps a matmul, the gather does not.
    (summed,) = (c for c in loops.collectives if c.axis == "replica")
    assert (summed.asynchronous, summed.overlapped_flops) == (True, 2 * S**3)
    assert loops.overlap(layers_only=True) == auditor.Overlap(
        concurrent=OUTER * INNER * 2 * (2 * S * S), exposed=(OUTER * INNER + OUTER) * (2 * S * S)
    )


# Steps, memory and other targets.


@pytest.mark.filterwarnings("ignore:XLA for h100 cannot choose a kernel")
def test_a_product_that_xla_has_no_kernel_for_without_timing_is_compiled_too():
    """A layer of 16 experts with 80 rows each, forward and backward; seen with jax 0.12.0.1."""
    B, E, C, T, D, F = 4, 16, 80, 128, 2048, 768

    def layer(x, gate, up, down, sent, back):
        def loss(x, gate, up, down):
            rows = jax.vmap(lambda x, at: x.at[at].get(mode="fill", fill_value=0))(x, sent)
            hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", rows, gate))
            hidden *= jnp.einsum("becd,edf->becf", rows, up)
            made = jnp.einsum("becf,efd->becd", hidden, down)
            picked = jax.vmap(lambda y, at: y.at[*at].get(mode="fill", fill_value=0))(made, back)
            return jnp.sum(jnp.tanh(picked.sum(2).astype(F32)))

        return jax.grad(jax.checkpoint(loss), (0, 1, 2, 3))(x, gate, up, down)

    shapes = [(B, T, D), (E, D, F), (E, D, F), (E, F, D)]
    arrays = [(shape, BF16, WHOLE) for shape in shapes]
    arrays += [(shape, jnp.int32, WHOLE) for shape in ((B, E, C), (B, 2, T, 8))]
    report = compiled(layer, arrays, out_specs=(WHOLE,) * 4, axes={"data": 1})
    # Three products forward, two each backward; XLA merges what is computed again.
    assert report.flops == 9 * 2 * B * E * C * D * F


def test_a_training_step_sends_and_holds_what_its_schedule_says():
    """Stage 3 gathers each layer forward and backward, in bf16, and scatters its fp32 gradient.

    The last layer, a small one, is gathered once. The first and the last are outside of the loop.
    """
    net = Network(L=6, D=1024, B=8, T=64, dtype="bf16")
    mesh = zero_jax.abstract_mesh(8)
    step, args = net.step(3, "block", mesh=mesh)
    report = aot.compile_for(targets.target("h100"), step.function, args, mesh)
    sent = collections.Counter()
    for c in report.collectives:
        sent[c.kind, c.dtype] += c.elements * c.runs / net.layer
        sent[c.kind, c.dtype, c.in_loop] += c.elements * c.runs / net.layer
    assert sent["all-gather", "bf16"] == 2 * net.L - 1
    assert sent["all-gather", "bf16", True] == 2 * (net.L - 2)
    assert sent["reduce-scatter", "f32"] == net.L
    assert report.elements_per_param(net.psi) == pytest.approx(3 - 1 / net.L, rel=1e-5)
    # The batch has no gradient.
    assert report.flops == (4 * net.L - 1) * 2 * (8 * 64) * net.layer
    assert report.alias_bytes == 12 * net.psi // 8 + 16 + 4, "Adam's count, and the guard"
    assert report.argument_bytes == report.alias_bytes + net.carry
    others = report.output_bytes - report.alias_bytes
    assert report.total_bytes == report.argument_bytes + report.temp_bytes + others
    assert 0.99 < report.fragmentation < 1.1
    saved = 2 * (net.L - 2) * (8 * 64) * net.D
    assert saved in {t.bytes for t in report.peak.temporaries}, "of layers in the loop"
    assert "plan/networks.py" in {t.source.partition(":")[0] for t in report.peak.temporaries}


@pytest.mark.parametrize("target", ["a100", "b200"])
def test_other_gpus_compile_convolutions_and_take_a_random_key_as_its_eight_bytes(target):
    key = jax.eval_shape(lambda: jax.random.key(0))
    image, kernel = (4, 32, 32, 64), (3, 3, 64, 128)
    arrays = [(key.shape, key.dtype, P()), (image, BF16, P()), (kernel, BF16, P())]

    def f(key, x, kernel):
        loss = lambda x, kernel: jnp.sum(convolve(x, kernel).astype(F32) ** 2)  # noqa: E731
        return *jax.grad(loss, (0, 1))(x, kernel), jax.random.normal(key, ())

    report = compiled(f, arrays, target=target, out_specs=(P(),) * 3)
    assert report.flops == 3 * 2 * math.prod(image) * 128 * 3 * 3
    assert report.argument_bytes == 2 * (math.prod(image) + math.prod(kernel)) + 2 * 4
