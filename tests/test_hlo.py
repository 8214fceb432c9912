"""The audit of compiled programs: real ones from CPU, and GPU spellings as literal text."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zero_jax.hlo import auditor

P = PartitionSpec
WHOLE = P()


def make_mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def compile_on(mesh, f, *arrays, in_specs=WHOLE, out_specs=WHOLE):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile()


def compile_on_8(f, *arrays, **specs):
    return compile_on(make_mesh((8,), ("data",)), f, *arrays, **specs)


def the_only(compiled):
    found = auditor.collectives(compiled)
    assert len(found) == 1, found
    return found[0]


def snippet(body, *computations, header="num_partitions=8"):
    """An HLO module whose entry computation holds `body`."""
    reduction = (
        "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  %b = f32[] parameter(1)\n  ROOT %sum = f32[] add(%a, %b)\n}\n"
    )
    entry = "ENTRY %main (p: f32[]) -> f32[] {\n  " + "\n  ".join(body) + "\n}\n"
    return f"HloModule m, is_scheduled=true, {header}\n\n{reduction}\n" + "\n".join(
        [*computations, entry]
    )


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


# Loops and branches.


def nested_scans(outer, inner):
    def step(c, _):
        return jnp.tanh(c + jax.lax.psum(c, "data")), None

    def layer(c, _):
        c, _ = jax.lax.scan(step, c, None, length=inner)
        return c + jax.lax.all_gather(c, "data")[0], None

    return compile_on_8(lambda x: jax.lax.scan(layer, x, None, length=outer)[0], jnp.ones(4))


def test_nested_scans_multiply():
    found = {c.kind: c for c in auditor.collectives(nested_scans(outer=5, inner=3))}
    assert found["all-reduce"].runs == 5 * 3
    assert found["all-reduce"].words == 5 * 3 * 2 * 4
    assert found["all-gather"].runs == 5
    assert found["all-gather"].words == 5 * 8 * 4


def test_trip_counts_are_derived_where_xla_wrote_none():
    text = nested_scans(outer=5, inner=3).as_text()
    bare = re.sub(r", backend_config=\{.*", "", text)
    assert "known_trip_count" in text and "known_trip_count" not in bare
    assert [c.runs for c in auditor.collectives(bare)] == [
        c.runs for c in auditor.collectives(text)
    ]


def data_dependent_loop():
    def loop(x):
        return jax.lax.while_loop(
            lambda s: jnp.sum(s) < 10, lambda s: s + jax.lax.psum(s, "data"), x
        )

    return compile_on_8(loop, jnp.ones(4))


def test_an_unknown_trip_count_does_not_pass_silently():
    program = data_dependent_loop()
    c = the_only(program)
    assert c.runs is None
    with pytest.raises(ValueError, match="trip count"):
        _ = c.words
    with pytest.raises(ValueError, match="trip count"):
        _ = auditor.audit(program).words
    with pytest.raises(AssertionError, match="trip count"):
        auditor.assert_communication(program, 2, num_params=4)
    assert "?" in auditor.format_table(auditor.audit(program))


def test_a_loop_condition_runs_once_more_than_its_body():
    def loop(x):
        def unfinished(state):
            return (state[0] < 6) & (jax.lax.psum(jnp.sum(state[1]), "data") > -1.0)

        return jax.lax.while_loop(unfinished, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))

    text = compile_on_8(loop, jnp.ones(4)).as_text()
    assert the_only(text).runs is None, "a condition on data"
    known = re.sub(
        r"( while\(.*)", r'\1, backend_config={"known_trip_count":{"n":"6"}}', text, count=1
    )
    assert the_only(known).runs == 6 + 1


def test_every_branch_counts_and_is_marked():
    def choose(x):
        return jax.lax.cond(
            x[0] > 0, lambda: jax.lax.psum(x, "data"), lambda: jax.lax.pmax(x, "data") * 2
        )

    program = compile_on_8(choose, jnp.ones(4))
    assert [(c.runs, c.conditional) for c in auditor.collectives(program)] == [(1, True)] * 2
    assert auditor.audit(program).words == {"all-reduce": 2 * 2 * 4}
    assert "<=1" in auditor.format_table(auditor.audit(program))


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


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", 1),
        ("{}", 8),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['node'=16,'gpu'=8] {'gpu'}", 8),
        ("mesh['node'=16,'gpu'=8] {'node','gpu'}", 128),
        ("mesh['data'=8,'model'=1] {'model'}", 1),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", 2),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}", 2),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_0','axis_1'}", 8),
    ],
)
def test_replica_groups(groups, size):
    lines = [
        "%p = f32[6]{0} parameter(0)",
        (
            f"ROOT %r = f32[6]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
            "use_global_device_ids=true, to_apply=%add"
        ),
    ]
    c = the_only(snippet(lines))
    assert c.group_size == size
    assert c.words == (0 if size == 1 else 2 * 6)
    if "device_ids" not in groups:
        assert c.replica_groups == groups


def test_unreadable_text_is_an_error():
    unknown = ["%p = f32[6]{0} parameter(0)", "%r = f32[6]{0} all-reduce(%p), replica_groups=new"]
    with pytest.raises(ValueError, match="replica groups of r: new"):
        auditor.collectives(snippet(unknown))
    with pytest.raises(ValueError, match="cannot read this line"):
        auditor.collectives(snippet(["something new"]))
    with pytest.raises(ValueError, match="ENTRY"):
        auditor.collectives("")


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        (', backend_config={"dynamic_variables":[],"known_trip_count":{"n":"36"}}', 36),
        (r', backend_config="{\"known_trip_count\":{\"n\":\"36\"}}"', 36),
        (", backend_config={known_trip_count={n=36}}", 36),
        ("", 4),  # from 9 down to 1 in steps of 2
    ],
)
def test_trip_count_spellings(config, runs):
    body = (
        "%body (s: (s32[], f32[6])) -> (s32[], f32[6]) {\n"
        "  %s = (s32[], f32[6]{0}) parameter(0)\n  %two = s32[] constant(2)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        "  %x = f32[6]{0} get-tuple-element(%s), index=1\n"
        "  %less = s32[] subtract(%i, %two)\n"
        "  %r = f32[6]{0} all-reduce(%x), replica_groups={}, to_apply=%add\n"
        "  ROOT %t = (s32[], f32[6]{0}) tuple(%less, %r)\n}\n"
    )
    condition = (
        "%cond (s: (s32[], f32[6])) -> pred[] {\n"
        "  %s = (s32[], f32[6]{0}) parameter(0)\n  %one = s32[] constant(1)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        "  ROOT %go = pred[] compare(%one, %i), direction=LT\n}\n"
    )
    lines = [
        "%p = f32[6]{0} parameter(0)",
        "%nine = s32[] constant(9)",
        "%init = (s32[], f32[6]{0}) tuple(%nine, %p)",
        "ROOT %w = (s32[], f32[6]{0}) while(%init), condition=%cond, body=%body" + config,
    ]
    assert the_only(snippet(lines, body, condition)).runs == runs


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


# The summary and the assertion.


def test_audit_holds_the_bytes_of_the_arrays():
    mesh = make_mesh((8,), ("data",))
    x = jax.device_put(jnp.ones((64, 3)), NamedSharding(mesh, P("data")))
    y = jnp.ones(5, jnp.bfloat16)

    def f(x, y):
        return x * 2 + y[0], y

    jitted = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())),
        donate_argnums=0,
    )
    report = auditor.audit(jitted.lower(x, y).compile())
    assert report.argument_bytes == x.nbytes // 8 + y.nbytes
    assert report.alias_bytes == x.nbytes // 8
    held = report.argument_bytes + report.output_bytes + report.temp_bytes
    assert report.total_bytes == held - report.alias_bytes
    assert report.collectives == () and report.words == {}


def stage_3_step(num_layers, width, doubled=False):
    """Gather in forward and backward, reduce-scatter of the gradient, one psum of the loss."""

    def layer(h, w):
        return jnp.tanh(h @ jax.lax.all_gather(w, "data", tiled=True))

    def loss(w, h):
        h, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), h, w)
        return jnp.sum(h**2)

    def step(w, h):
        value, gradient = jax.value_and_grad(loss)(w, h)
        if doubled:
            gradient = gradient + jax.lax.psum(jnp.sin(w), "data")
        return jax.lax.psum(value, "data"), gradient

    shard = P(None, "data")
    weights = jnp.ones((num_layers, width, width))
    args = (weights, jnp.ones((8, width)))
    return compile_on_8(step, *args, in_specs=(shard, P("data")), out_specs=(P(), shard))


def test_stage3_gathers_twice_and_scatters_once():
    num_params = 3 * 16 * 16
    program = stage_3_step(num_layers=3, width=16)
    auditor.assert_communication(program, 3, num_params=num_params)
    auditor.assert_communication(
        program, {"all-gather": 2, "reduce-scatter": 1}, num_params=num_params
    )
    report = auditor.audit(program)
    assert report.words == {
        "all-gather": 2 * num_params,
        "reduce-scatter": num_params,
        "all-reduce": 2,  # the loss
    }
    assert report.words_per_param(num_params) == pytest.approx(3 + 2 / num_params)


def test_assert_communication_fails_on_another_mix_of_the_same_total():
    program = stage_3_step(num_layers=3, width=16)
    with pytest.raises(AssertionError, match="reduce-scatter"):
        auditor.assert_communication(
            program, {"all-gather": 1, "reduce-scatter": 2}, num_params=768
        )
    with pytest.raises(AssertionError, match="all-gather"):
        auditor.assert_communication(program, {"all-reduce": 3}, num_params=768)


def test_assert_communication_fails_on_a_doubled_psum_and_shows_the_table():
    def once(x):
        return jax.lax.psum(x, "data")

    def twice(x):
        return jax.lax.psum(x, "data") + jax.lax.psum(jnp.sin(x), "data") * x

    x = jnp.ones(100)
    auditor.assert_communication(compile_on_8(once, x), 2, num_params=x.size)
    with pytest.raises(AssertionError, match=r"expected .*2(.|\n)*kind .*(.|\n)*all-reduce"):
        auditor.assert_communication(compile_on_8(twice, x), 2, num_params=x.size)


def test_assert_communication_fails_on_a_stray_psum_in_a_step():
    program = stage_3_step(num_layers=3, width=16, doubled=True)
    with pytest.raises(AssertionError, match="all-reduce"):
        auditor.assert_communication(
            program, {"all-gather": 2, "reduce-scatter": 1}, num_params=768
        )


def test_the_table_starts_with_the_most_words():
    table = auditor.format_table(auditor.audit(nested_scans(outer=5, inner=3))).splitlines()
    words = [int(line.split()[5]) for line in table[1:]]
    assert words == [5 * 8 * 4, 5 * 3 * 2 * 4]


def test_parse_keeps_the_schedule():
    program = auditor.parse(nested_scans(outer=2, inner=2).as_text())
    entry = program.computations[program.entry]
    names = list(entry.instructions)
    for position, name in enumerate(names):
        used = [o for o in entry.instructions[name].operands if o in entry.instructions]
        assert all(names.index(o) < position for o in used)
