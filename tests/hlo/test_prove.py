"""The audit of programs that the GPU compiler made, each with a known answer; needs no GPU.

Every program is compiled once, in a process of its own: pip install 'zero_jax[prove]'.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zero_jax.hlo import auditor, prove, targets

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
    return prove.compile_for(targets.target(target), mapped, args, mesh, donated=0)


def total(x):
    """A scalar output, into whose memory nothing else fits."""
    return jax.lax.psum(jnp.sum(x, dtype=F32), "data")


# Loops, axes, dtypes.

S, OUTER, INNER = 256, 5, 3


@pytest.fixture(scope="module")
def loops():
    """Products and collectives in a loop of 3 in a loop of 5, on a mesh of 2 x 2 x 2."""

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

    arrays = [
        ((S, S), BF16, P()),
        ((S, S), BF16, P("data")),
        ((OUTER, S, S), BF16, P(None, "data")),
    ]
    axes = {"replica": 2, "data": 2, "model": 2}
    return compiled(f, arrays, out_specs=(P("data"), *[P()] * 5), axes=axes)


def test_collectives_of_nested_loops_along_every_axis_send_their_closed_form(loops):
    """Axes are named as in the mesh, though 0.10 prints ids; bf16 stays bf16 on the wire."""
    found = [(c.kind, c.axis, c.group_size, c.elements, c.runs) for c in loops.collectives]
    assert sorted(found) == [
        ("all-gather", "data", 2, S * S, OUTER),
        ("all-gather", "data", 2, S * S, OUTER * INNER),
        ("all-reduce", "data+model", 4, 5 * S, 1),
        ("all-reduce", "replica", 2, S * S, OUTER * INNER),
        ("all-reduce", "replica+data+model", 8, 1, 1),
        ("all-reduce", "replica+model", 4, 7 * S, 1),
        ("all-to-all", "model", 2, 4 * S, 1),
        ("collective-permute", "?", 2, 3 * S, 1),  # pairs, of which an axis is not asked
        ("reduce-scatter", "data", 2, S * S, 1),
    ]
    for c in loops.collectives:
        wide = c.kind == "all-reduce" and c.axis != "replica"
        assert (c.dtype, c.bytes) == ("f32" if wide else "bf16", c.elements * (4 if wide else 2))
        assert c.in_loop == (c.runs > 1)
    assert loops.words == {
        "all-gather": (OUTER * INNER + OUTER) * S * S,
        "all-reduce": 2 * (OUTER * INNER * S * S + 7 * S + 5 * S + 1),
        "reduce-scatter": S * S,
        "all-to-all": 4 * S,
        "collective-permute": 3 * S,
    }
    assert loops.flops == 2 * S**3 * (OUTER * INNER + OUTER)
    assert loops.uncounted == ()


def test_in_a_loop_the_sum_that_no_product_needs_is_hidden_and_the_gather_is_not(loops):
    (summed,) = (c for c in loops.collectives if c.axis == "replica")
    assert (summed.asynchronous, summed.overlapped_flops) == (True, 2 * S**3)
    assert loops.hidden(layers_only=True) == auditor.Hidden(
        hidden=OUTER * INNER * 2 * (2 * S * S), exposed=(OUTER * INNER + OUTER) * (2 * S * S)
    )


# Overlap and combination.

M, K, N = 2048, 1024, 2048


def test_a_product_hides_the_gather_that_it_does_not_need_and_no_scatter_at_the_end():
    def f(x, w, shard):
        full = jax.lax.all_gather(shard, "data", tiled=True)
        return jax.lax.psum_scatter((x @ w) @ full, "data", tiled=True)

    arrays = [((8 * M, K), BF16, P("data")), ((K, N), BF16, P()), ((N, N), BF16, P("data"))]
    report = compiled(f, arrays, out_specs=P("data"))
    found = {c.kind: (c.hidden, c.overlapped_flops) for c in report.collectives}
    assert found == {"all-gather": (True, 2 * M * K * N), "reduce-scatter": (False, 0)}
    assert report.hidden() == auditor.Hidden(hidden=2 * N * N, exposed=2 * M * N)
    assert report.hidden(layers_only=True) == auditor.Hidden(0, 0)


def test_combined_collectives_are_one_with_all_their_elements():
    """Nine small leaves that are gathered at once, then reduce-scattered at once."""
    leaves = (2, 3, 5, 7, 11, 13, 17, 19, 23)

    def f(*shards):
        full = [jax.lax.all_gather(s, "data", tiled=True) for s in shards]
        return [jax.lax.psum_scatter(jnp.sin(x), "data", tiled=True) for x in full]

    arrays = [((8 * n,), BF16, P("data")) for n in leaves]
    found = compiled(f, arrays, out_specs=[P("data")] * len(leaves)).collectives
    assert sorted(c.kind for c in found) == ["all-gather", "reduce-scatter"]
    for c in found:
        assert (c.elements, c.dtype, c.words) == (8 * sum(leaves), "bf16", 8 * sum(leaves))


# Memory.

D, LAYERS = 1024, 6


def test_the_live_set_is_the_products_that_are_still_needed():
    """Three products live until they are multiplied and summed, and know their lines."""

    def f(x, w1, w2, w3):
        a = x @ w1
        b = a @ w2
        c = b @ w3
        return total(a * b.T * c)

    report = compiled(f, [((D, D), BF16, P())] * 4)
    row_sums, file = 4 * D, pathlib.Path(__file__)
    assert [t.bytes for t in report.peak.temporaries] == [2 * D * D] * 3 + [row_sums]
    assert report.peak.bytes == 3 * 2 * D * D + row_sums
    assert report.fragmentation == pytest.approx(1, abs=0.01)
    first = f.__code__.co_firstlineno
    sources = {t.source for t in report.peak.temporaries[:3]}
    assert f"hlo/{file.name}:{first + 3}" in sources
    assert sources <= {f"hlo/{file.name}:{first + at}" for at in (1, 2, 3)}


def test_what_is_offloaded_is_in_host_memory_only():
    """Inputs of layers, from forward to backward."""

    def forward(h, w):
        return jnp.tanh(h @ w), jax.device_put(h, jax.memory.Space.Host)

    def backward(h, given):
        w, kept = given
        return (h + jax.device_put(kept, jax.memory.Space.Device)) @ w, None

    def f(x, ws):
        h, kept = jax.lax.scan(forward, x, ws)
        return total(jax.lax.scan(backward, h, (ws, kept), reverse=True)[0])

    report = compiled(f, [((D, D), BF16, P()), ((LAYERS, D, D), BF16, P())])
    assert report.host_bytes == 2 * LAYERS * D * D
    assert max(t.bytes for t in report.peak.temporaries) == 2 * D * D
    assert 0.99 < report.fragmentation < 1.1
    assert report.uncounted == (), "room in host memory is no library call"


@pytest.mark.filterwarnings("ignore:XLA for h100 finds no kernel")
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

    arrays = [((B, T, D), BF16), *[((E, D, F), BF16)] * 2, ((E, F, D), BF16)]
    arrays += [((B, E, C), jnp.int32), ((B, 2, T, 8), jnp.int32)]
    given = [(*array, WHOLE) for array in arrays]
    report = compiled(layer, given, out_specs=(WHOLE,) * 4, axes={"data": 1})
    # Three products forward, two each backward; XLA merges what is computed again.
    assert report.flops == 9 * 2 * B * E * C * D * F
