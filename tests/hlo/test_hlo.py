"""The audit of compiled programs: real ones from CPU, and GPU spellings as literal text."""

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import compile_on, compile_on_8, make_mesh, nested_scans, snippet, the_only
from jax.sharding import PartitionSpec

from zero_jax.hlo import auditor

P = PartitionSpec

# Counted exactly, on real programs.


def test_psum_sends_two_words_per_element():
    c = the_only(compile_on_8(lambda x: jax.lax.psum(x, "data"), jnp.ones((6, 4))))
    assert (c.kind, c.dtype, c.elements, c.bytes) == ("all-reduce", "f32", 24, 4 * 24)
    assert (c.group_size, c.runs, c.words) == (8, 1, 2 * 24)
    assert not c.scalar and not c.conditional and not c.asynchronous
    assert c.op_name.endswith("psum")


def test_all_gather_sends_one_word_per_gathered_element():
    def gather(x):
        return jax.lax.all_gather(x, "data", tiled=True)

    c = the_only(compile_on_8(gather, jnp.ones((32, 3)), in_specs=P("data")))
    assert (c.kind, c.elements, c.group_size, c.words) == ("all-gather", 32 * 3, 8, 32 * 3)


def test_psum_scatter_sends_one_word_per_full_element():
    def scatter(x):
        return jax.lax.psum_scatter(x, "data", tiled=True)

    c = the_only(compile_on_8(scatter, jnp.ones((32, 3)), out_specs=P("data")))
    assert (c.kind, c.elements, c.group_size, c.words) == ("reduce-scatter", 32 * 3, 8, 32 * 3)


def test_all_to_all_and_permute_send_each_element_once():
    def exchange(x):
        swapped = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
        ring = [(i, (i + 1) % 8) for i in range(8)]
        return swapped, jax.lax.ppermute(jnp.sin(x), "data", ring)

    program = compile_on_8(exchange, jnp.ones((16, 3)))
    words = {c.kind: c.words for c in auditor.collectives(program)}
    assert words == {"all-to-all": 16 * 3, "collective-permute": 16 * 3}


def test_loss_is_a_scalar():
    c = the_only(compile_on_8(lambda x: jax.lax.psum(x[0, 0], "data"), jnp.ones((6, 4))))
    assert c.scalar and c.words == 2


def test_combined_psums_are_summed():
    arrays = [jnp.ones(n) for n in (3, 5, 7, 11, 13, 17, 19)]  # more than five: /*index=5*/
    found = auditor.collectives(compile_on_8(lambda *xs: jax.lax.psum(xs, "data"), *arrays))
    total = 3 + 5 + 7 + 11 + 13 + 17 + 19
    assert sum(c.elements for c in found) == total
    assert sum(c.words for c in found) == 2 * total
    assert len(found) < len(arrays), "nothing was combined: the test shows nothing"


def test_mesh_axes_are_told_apart_by_group_size():
    def reduce(x):
        both = jax.lax.psum(jnp.cos(x[:3]), ("node", "gpu"))
        return jax.lax.psum(x, "node"), jax.lax.psum(jnp.sin(x[:5]), "gpu"), both

    program = compile_on(make_mesh((4, 2), ("node", "gpu")), reduce, jnp.ones(9))
    sizes = {c.group_size: c.elements for c in auditor.collectives(program)}
    assert sizes == {4: 9, 2: 5, 8: 3}


def test_groups_of_one_send_nothing():
    def reduce(x):
        y = jax.lax.all_gather(jax.lax.psum(x, "model"), "model", tiled=True)
        return jax.lax.ppermute(y, "model", [(0, 0)])

    program = compile_on(make_mesh((8, 1), ("data", "model")), reduce, jnp.ones(9))
    assert sum(c.words for c in auditor.collectives(program)) == 0
    assert auditor.collectives(program), "XLA dropped them: the test shows nothing"


def test_parse_keeps_the_schedule():
    program = auditor.parse(nested_scans(outer=2, inner=2).as_text())
    entry = program.computations[program.entry]
    names = list(entry.instructions)
    for position, name in enumerate(names):
        used = [o for o in entry.instructions[name].operands if o in entry.instructions]
        assert all(names.index(o) < position for o in used)


# Spellings of the GPU compiler.

IS_SYNC = 'backend_config={"collective_backend_config":{"is_sync":true,"is_pipelined":false}}'


@pytest.mark.parametrize(
    "result", ["(bf16[4,2]{1,0}, bf16[32,2]{1,0})", "((bf16[4,2]{1,0}), bf16[32,2]{1,0})"]
)
def test_start_and_done_count_once(result):
    c = the_only(
        snippet(
            [
                "%p = bf16[4,2]{1,0} parameter(0)",
                (
                    f"%ag-start = {result} all-gather-start(%p), channel_id=1, "
                    "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, "
                    "metadata={op_name=\"jit(f)/w['a, b']/all_gather\" stack_frame_id=37}"
                ),
                "ROOT %ag-done = bf16[32,2]{1,0} all-gather-done(%ag-start)",
            ]
        )
    )
    assert (c.kind, c.dtype, c.elements, c.bytes) == ("all-gather", "bf16", 64, 128)
    assert (c.group_size, c.asynchronous) == (8, True)
    assert c.op_name == "jit(f)/w['a, b']/all_gather"


def test_a_start_that_blocks_is_not_asynchronous():
    c = the_only(
        snippet(
            [
                "%p = f32[] parameter(0)",
                (
                    "%s = f32[] all-reduce-start(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, "
                    f"to_apply=%add, {IS_SYNC}"
                ),
                "ROOT %d = f32[] all-reduce-done(%s)",
            ]
        )
    )
    assert (c.group_size, c.asynchronous, c.scalar, c.words) == (2, False, True, 2)


def test_async_start_runs_the_computation_it_wraps():
    wrapped = (
        "%wrapped (q: f32[32]) -> f32[4] {\n  %q = f32[32]{0} parameter(0)\n"
        "  ROOT %rs = f32[4]{0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, "
        'to_apply=%add\n}, execution_thread="main"\n'
    )
    c = the_only(
        snippet(
            [
                "%p = f32[32]{0} parameter(0)",
                (
                    "%start = ((f32[32]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped, "
                    "control-predecessors={%p}"
                ),
                "%go = ((f32[32]{0}), f32[4]{0}, u32[]) async-update(%start), calls=%wrapped",
                "ROOT %done = f32[4]{0} async-done(%go), calls=%wrapped",
            ],
            wrapped,
        )
    )
    assert (c.kind, c.elements, c.words, c.asynchronous) == ("reduce-scatter", 32, 32, True)


def test_combined_tuples_with_index_comments():
    sizes = (2, 3, 5, 7, 11, 13)
    parameters = [f"%p{n} = bf16[{n},4]{{1,0:T(8,128)(2,1)}} parameter(0)" for n in sizes[:-1]]
    last = "%p13 = f32[13,4]{1,0} parameter(5)"
    operands = "%p2, %p3, %p5, %p7, %p11, /*index=5*/%p13"
    results = ", ".join(f"bf16[{8 * n},4]{{1,0}}" for n in sizes[:-1])
    c = the_only(
        snippet(
            [
                *parameters,
                last,
                (
                    f"ROOT %ag = ({results}, /*index=5*/f32[104,4]{{1,0}}) all-gather({operands}), "
                    "replica_groups={}, dimensions={0}"
                ),
            ]
        )
    )
    assert c.dtype == "bf16,f32"
    assert c.elements == 8 * 4 * sum(sizes)
    assert c.bytes == 8 * 4 * (2 * sum(sizes[:-1]) + 4 * 13)


def test_unreadable_text_is_an_error():
    unknown = ["%p = f32[6]{0} parameter(0)", "%r = f32[6]{0} all-reduce(%p), replica_groups=new"]
    with pytest.raises(ValueError, match="replica groups of r: new"):
        auditor.collectives(snippet(unknown))
    with pytest.raises(ValueError, match="cannot read this line"):
        auditor.collectives(snippet(["something new"]))
    with pytest.raises(ValueError, match="ENTRY"):
        auditor.collectives("")


def test_sends_to_other_devices_count_and_sends_to_the_host_do_not():
    lines = [
        "%p = f32[6]{0} parameter(0)",
        "%token = token[] after-all()",
        (
            "%s = (f32[6]{0}, u32[], token[]) send(%p, %token), channel_id=1, "
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
        ),
        "%h = (f32[6]{0}, u32[], token[]) send(%p, %token), channel_id=2, is_host_transfer=true",
    ]
    c = the_only(snippet(lines))
    assert (c.kind, c.elements, c.words) == ("send", 6, 6)
