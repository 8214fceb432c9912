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
BF16, F32 = jnp.bfloat16, jnp.float32
HERE = f"hlo/{pathlib.Path(__file__).name}"  # as sources are named, by their folder


def line_of(text):
    """The first line of this file with that text."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    return 1 + next(at for at, line in enumerate(lines) if text in line)


WHOLE = P()


def compiled(f, arrays, *, target="h100", out_specs=WHOLE, axes=None, donated=0):
    """The audit of `f`, which each device runs on its part of `arrays`: (shape, dtype, spec)."""
    axes = axes or {"data": 8}
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arrays
    ]
    specs = tuple(spec for _, _, spec in arrays)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return prove.compile_for(targets.target(target), mapped, args, mesh, donated=donated)


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


def test_trip_counts_of_nested_loops_multiply(loops):
    found = [(c.runs, c.elements, c.kind) for c in loops.collectives if c.in_loop]
    assert sorted(found) == [
        (OUTER, S * S, "all-gather"),
        (OUTER * INNER, S * S, "all-gather"),
        (OUTER * INNER, S * S, "all-reduce"),
    ]


def test_products_in_loops_are_counted_each_time(loops):
    assert loops.flops == 2 * S**3 * (OUTER * INNER + OUTER)
    assert loops.uncounted == ()


def test_axes_are_named_as_in_the_mesh_though_0_10_prints_ids(loops):
    found = {(c.kind, c.axis): (c.group_size, c.elements) for c in loops.collectives}
    assert found == {
        ("all-gather", "data"): (2, S * S),
        ("all-reduce", "replica"): (2, S * S),
        ("all-reduce", "replica+model"): (4, 7 * S),
        ("all-reduce", "data+model"): (4, 5 * S),
        ("all-reduce", "replica+data+model"): (8, 1),
        ("reduce-scatter", "data"): (2, S * S),
        ("all-to-all", "model"): (2, 4 * S),
        ("collective-permute", "?"): (2, 3 * S),  # pairs, of which an axis is not asked
    }


def test_bf16_stays_bf16_on_the_wire(loops):
    bf16 = {"all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
    for c in loops.collectives:
        if c.kind in bf16 or c.axis == "replica":
            assert (c.dtype, c.bytes) == ("bf16", 2 * c.elements), c
        else:
            assert (c.dtype, c.bytes) == ("f32", 4 * c.elements), c


def test_the_words_are_those_of_the_closed_form(loops):
    assert loops.words == {
        "all-gather": (OUTER * INNER + OUTER) * S * S,
        "all-reduce": 2 * (OUTER * INNER * S * S + 7 * S + 5 * S + 1),
        "reduce-scatter": S * S,
        "all-to-all": 4 * S,
        "collective-permute": 3 * S,
    }


def test_in_a_loop_the_sum_that_no_product_needs_is_hidden_and_the_gather_is_not(loops):
    (total,) = (c for c in loops.collectives if c.axis == "replica")
    assert (total.asynchronous, total.overlapped_flops) == (True, 2 * S**3)
    assert loops.hidden(layers_only=True) == auditor.Hidden(
        hidden=OUTER * INNER * 2 * (2 * S * S), exposed=(OUTER * INNER + OUTER) * (2 * S * S)
    )


# Overlap and combination.

M, K, N = 2048, 1024, 2048


@pytest.fixture(scope="module")
def overlap():
    """One product before the gathered weight is needed, and none after the scatter began."""

    def f(x, w, shard):
        full = jax.lax.all_gather(shard, "data", tiled=True)
        return jax.lax.psum_scatter((x @ w) @ full, "data", tiled=True)

    arrays = [((8 * M, K), BF16, P("data")), ((K, N), BF16, P()), ((N, N), BF16, P("data"))]
    return compiled(f, arrays, out_specs=P("data"))


def test_a_gather_is_hidden_by_the_product_that_does_not_need_it(overlap):
    (gather,) = (c for c in overlap.collectives if c.kind == "all-gather")
    assert (gather.asynchronous, gather.hidden) == (True, True)
    assert gather.overlapped_flops == 2 * M * K * N, "the other product waits for it"


def test_a_scatter_at_the_end_is_exposed(overlap):
    (scatter,) = (c for c in overlap.collectives if c.kind == "reduce-scatter")
    assert (scatter.hidden, scatter.overlapped_flops) == (False, 0)
    assert overlap.hidden() == auditor.Hidden(hidden=2 * N * N, exposed=2 * M * N)
    assert overlap.hidden(layers_only=True) == auditor.Hidden(0, 0)


@pytest.fixture(scope="module")
def combined():
    """Nine small leaves that are gathered at once, then reduce-scattered at once."""

    def f(*shards):
        full = [jax.lax.all_gather(s, "data", tiled=True) for s in shards]
        return [jax.lax.psum_scatter(jnp.sin(x), "data", tiled=True) for x in full]

    arrays = [((8 * n,), BF16, P("data")) for n in LEAVES]
    return compiled(f, arrays, out_specs=[P("data")] * len(LEAVES))


LEAVES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


def test_combined_collectives_are_one_with_all_their_elements(combined):
    found = {c.kind: c for c in combined.collectives}
    assert len(combined.collectives) == len(found) == 2, "nothing was combined"
    for c in found.values():
        assert (c.elements, c.dtype, c.words) == (8 * sum(LEAVES), "bf16", 8 * sum(LEAVES))


# Memory.

D = 1024


@pytest.fixture(scope="module")
def chain():
    """Three products that all live until they are multiplied and summed."""

    def f(x, w1, w2, w3):
        a = x @ w1
        b = a @ w2
        c = b @ w3  # the third product
        return total(a * b.T * c)

    return compiled(f, [((D, D), BF16, P())] * 4)


def test_the_live_set_is_the_products_that_are_still_needed(chain):
    row_sums = 4 * D
    assert chain.peak.bytes == 3 * 2 * D * D + row_sums
    assert [t.bytes for t in chain.peak.temporaries] == [2 * D * D] * 3 + [row_sums]
    assert chain.fragmentation == pytest.approx(1, abs=0.01)


def test_large_temporaries_are_traced_to_their_lines(chain):
    sources = {t.source for t in chain.peak.temporaries[:3]}
    assert f"{HERE}:{line_of('# the third product')}" in sources
    assert sources <= {f"{HERE}:{line_of('# the third product') - back}" for back in range(3)}


LAYERS, ROWS = 6, 256


@pytest.fixture(scope="module")
def trained():
    """A scan of rematerialised layers with their weights updated in place."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    def f(ws, x):
        def loss(ws):
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, ws)[0], dtype=F32)

        return ws - 0.1 * jax.grad(loss)(ws)

    arrays = [((LAYERS, D, D), BF16, P()), ((ROWS, D), BF16, P())]
    return compiled(f, arrays, donated=1)


def test_donated_weights_are_updated_in_place(trained):
    weights, rows = 2 * LAYERS * D * D, 2 * ROWS * D
    assert trained.alias_bytes == trained.output_bytes == weights
    assert trained.argument_bytes == weights + rows
    assert trained.total_bytes == weights + rows + trained.temp_bytes


def test_stacks_of_gradients_and_of_saved_inputs_are_temporaries(trained):
    sizes = [t.bytes for t in trained.peak.temporaries]
    assert sizes.count(2 * LAYERS * D * D) == 1, "gradients"
    assert sizes.count(2 * LAYERS * ROWS * D) == 1, "inputs of the layers"
    assert 0.99 < trained.fragmentation < 1.1


def test_rematerialised_layers_run_forward_twice(trained):
    assert trained.flops == 4 * LAYERS * 2 * ROWS * D * D


@pytest.fixture(scope="module")
def offloaded():
    """Inputs of layers kept in host memory from forward to backward."""

    def forward(h, w):
        return jnp.tanh(h @ w), jax.device_put(h, jax.memory.Space.Host)

    def backward(h, given):
        w, kept = given
        return (h + jax.device_put(kept, jax.memory.Space.Device)) @ w, None

    def f(x, ws):
        h, kept = jax.lax.scan(forward, x, ws)
        return total(jax.lax.scan(backward, h, (ws, kept), reverse=True)[0])

    return compiled(f, [((D, D), BF16, P()), ((LAYERS, D, D), BF16, P())])


def test_what_is_offloaded_is_in_host_memory_only(offloaded):
    assert offloaded.host_bytes == 2 * LAYERS * D * D
    assert max(t.bytes for t in offloaded.peak.temporaries) == 2 * D * D
    assert 0.99 < offloaded.fragmentation < 1.1
    assert offloaded.uncounted == (), "room in host memory is no library call"


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
