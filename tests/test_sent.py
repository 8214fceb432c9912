"""What is sent, how often, along which axis and under which products, known by construction."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from test_hlo import compile_on, compile_on_8, make_mesh, snippet

from zero_jax.hlo import auditor, replica_groups

P = PartitionSpec
M, K, N = 4, 8, 16
FLOPS = 2 * M * K * N  # of `product`
GATHERED = 8 * 6  # elements of what `gather` makes


def product(name):
    return (
        f"%{name} = f32[{M},{N}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={0}"
    )


def gather(name, more=""):
    """A start and its done."""
    return [
        (
            f"%{name}-start = ((bf16[6]{{0}}), bf16[48]{{0}}) all-gather-start(%shard), "
            f"replica_groups={{}}, dimensions={{0}}{more}"
        ),
        f"%{name}-done = bf16[48]{{0}} all-gather-done(%{name}-start){more}",
    ]


def schedule(lines, *computations):
    """A program that runs these lines in this order; %shard, %a and %b are its arguments."""
    arguments = [
        "%shard = bf16[6]{0} parameter(0)",
        f"%a = f32[{M},{K}]{{1,0}} parameter(1)",
        f"%b = f32[{K},{N}]{{1,0}} parameter(2)",
    ]
    return snippet([*arguments, *lines[:-1], f"ROOT {lines[-1]}"], *computations)


def audited(text):
    """The audit of literal text; its sizes are of no interest here."""
    sizes = {
        f"{host}{kind}_size_in_bytes": 0
        for host in ("", "host_")
        for kind in ("argument", "output", "alias", "temp")
    }
    return auditor.of_text(text, types.SimpleNamespace(**sizes), None)


def computation(name, lines, root):
    """A computation of the arguments %a and %b."""
    head = (
        f"%{name} (a: f32[{M},{K}], b: f32[{K},{N}]) -> f32[] {{\n"
        f"  %a = f32[{M},{K}]{{1,0}} parameter(0)\n  %b = f32[{K},{N}]{{1,0}} parameter(1)\n"
    )
    return head + "".join(f"  {line}\n" for line in lines) + f"  ROOT {root}\n}}\n"


# What runs while a collective is under way.


def test_a_product_between_start_and_done_hides_a_gather():
    start, done = gather("g")
    report = audited(schedule([start, product("y"), done]))
    (c,) = report.collectives
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (True, FLOPS, True)
    assert report.hidden() == auditor.Hidden(hidden=2 * GATHERED, exposed=0)
    assert report.hidden().fraction == 1


def test_products_before_the_start_and_after_the_done_hide_nothing():
    start, done = gather("g")
    report = audited(schedule([product("x"), start, done, product("y")]))
    (c,) = report.collectives
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (True, 0, False)
    assert report.hidden() == auditor.Hidden(hidden=0, exposed=2 * GATHERED)
    assert report.hidden().fraction == 0


def test_elementwise_work_hides_nothing():
    start, done = gather("g")
    work = computation("double", [], "%s = f32[4,8]{1,0} add(%a, %a)")
    fusion = "%y = f32[4,8]{1,0} fusion(%a, %b), kind=kLoop, calls=%double"
    (c,) = auditor.collectives(schedule([start, fusion, done], work))
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (True, 0, False)


def test_a_product_inside_a_fusion_hides():
    start, done = gather("g")
    fused = computation("gemm", [], product("y"))
    fusion = f"%y = f32[{M},{N}]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm"
    (c,) = auditor.collectives(schedule([start, fusion, fusion.replace("%y", "%z"), done], fused))
    assert c.overlapped_flops == 2 * FLOPS


def test_each_of_two_collectives_under_way_sees_what_runs_in_its_own_time():
    (one, one_done), (two, two_done) = gather("one"), gather("two")
    lines = [one, product("x"), two, product("y"), one_done, product("z"), two_done]
    found = auditor.collectives(schedule(lines))
    assert [c.name for c in found] == ["one-start", "two-start"]
    assert [c.overlapped_flops for c in found] == [2 * FLOPS, 2 * FLOPS]


def test_a_start_that_blocks_is_exposed_whatever_stands_between():
    start, done = gather("g", ', backend_config={"collective_backend_config":{"is_sync":true}}')
    (c,) = auditor.collectives(schedule([start, product("y"), done]))
    assert (c.asynchronous, c.overlapped_flops, c.hidden) == (False, 0, False)


WRAPPED = (
    "%wrapped (q: f32[32]) -> f32[4] {\n  %q = f32[32]{0} parameter(0)\n"
    "  ROOT %rs = f32[4]{0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, "
    'to_apply=%add\n}, execution_thread="main"\n'
)
ASYNC = "((f32[32]{0}), f32[4]{0}, u32[])"


@pytest.mark.parametrize("calls", [", calls=%wrapped", ""], ids=["0.10", "0.12"])
def test_an_update_between_start_and_done_ends_nothing(calls):
    lines = [
        "%full = f32[32]{0} broadcast(%a), dimensions={}",
        f"%s = {ASYNC} async-start(%full), calls=%wrapped",
        product("x"),
        f"%u = {ASYNC} async-update(%s){calls}",
        product("y"),
        f"%v = {ASYNC} async-update(%u){calls}",
        f"%d = f32[4]{{0}} async-done(%v){calls}",
        product("z"),
    ]
    (c,) = auditor.collectives(schedule(lines, WRAPPED))
    assert (c.kind, c.words, c.overlapped_flops) == ("reduce-scatter", 32, 2 * FLOPS)


def test_wrappers_around_wrappers_are_followed():
    """An asynchronous computation that calls one that fuses one that scatters."""
    outer = WRAPPED.replace("%wrapped", "%outer").replace(
        "reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add",
        "call(%q), to_apply=%middle",
    )
    middle = WRAPPED.replace("%wrapped", "%middle").replace(
        "reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add",
        "fusion(%q), kind=kCustom, calls=%wrapped",
    )
    lines = [
        "%full = f32[32]{0} broadcast(%a), dimensions={}",
        f"%s = {ASYNC} async-start(%full), calls=%outer",
        product("x"),
        "%d = f32[4]{0} async-done(%s), calls=%outer",
    ]
    (c,) = auditor.collectives(schedule(lines, outer, middle, WRAPPED))
    assert (c.kind, c.name, c.elements, c.words) == ("reduce-scatter", "rs", 32, 32)
    assert (c.asynchronous, c.overlapped_flops) == (True, FLOPS)


def test_an_asynchronous_product_hides_once_not_at_its_start_update_and_done():
    gemm = computation("gemm", [], product("y"))
    result = f"((f32[{M},{K}]{{1,0}}, f32[{K},{N}]{{1,0}}), f32[{M},{N}]{{1,0}}, u32[])"
    start, done = gather("g")
    lines = [
        start,
        f"%s = {result} async-start(%a, %b), calls=%gemm",
        f"%u = {result} async-update(%s), calls=%gemm",
        f"%d = f32[{M},{N}]{{1,0}} async-done(%u), calls=%gemm",
        done,
    ]
    (c,) = auditor.collectives(schedule(lines, gemm))
    assert c.overlapped_flops == FLOPS


def loop_of(body_lines, trips, name="w"):
    """A while loop over (counter, shard, a, b), and the computations that it needs."""
    state = f"(s32[], bf16[6]{{0}}, f32[{M},{K}]{{1,0}}, f32[{K},{N}]{{1,0}})"
    body = [
        f"%s = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%s), index=0",
        "%shard = bf16[6]{0} get-tuple-element(%s), index=1",
        f"%a = f32[{M},{K}]{{1,0}} get-tuple-element(%s), index=2",
        f"%b = f32[{K},{N}]{{1,0}} get-tuple-element(%s), index=3",
        *body_lines,
        f"ROOT %t = {state} tuple(%i, %shard, %a, %b)",
    ]
    condition = [f"%s = {state} parameter(0)", "ROOT %go = pred[] constant(true)"]
    texts = [
        f"%{role}_{name} (s: {state}) -> {state} {{\n" + "".join(f"  {x}\n" for x in lines) + "}\n"
        for role, lines in (("body", body), ("condition", condition))
    ]
    loop = [
        "%zero = s32[] constant(0)",
        f"%init = {state} tuple(%zero, %shard, %a, %b)",
        f"%{name} = {state} while(%init), condition=%condition_{name}, body=%body_{name}, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
    ]
    return loop, texts


def test_loops_are_told_from_the_rest_of_the_step():
    """Hidden in a loop of 5, exposed outside it: 5 to 1 in bytes."""
    start, done = gather("g")
    loop, texts = loop_of([start, product("y"), done], trips=5)
    report = audited(schedule([*loop, *gather("h")], *texts))
    assert [(c.runs, c.in_loop, c.hidden) for c in report.collectives] == [
        (5, True, True),
        (1, False, False),
    ]
    assert report.collectives[0].overlapped_flops == FLOPS, "of each run"
    assert report.hidden() == auditor.Hidden(hidden=5 * 2 * GATHERED, exposed=2 * GATHERED)
    assert report.hidden().fraction == pytest.approx(5 / 6)
    assert report.hidden(layers_only=True) == auditor.Hidden(hidden=5 * 2 * GATHERED, exposed=0)


def test_a_loop_without_products_is_none_over_layers():
    """Gathering a stack row by row is no layer's work, but in a loop with products it is."""
    gathering, texts = loop_of(gather("g"), trips=5)
    report = audited(schedule(gathering, *texts))
    assert [(c.runs, c.in_layers) for c in report.collectives] == [(5, False)]
    assert report.hidden(layers_only=True) == auditor.Hidden(0, 0)
    assert report.hidden().exposed == 5 * 2 * GATHERED

    rows, row_texts = loop_of(gather("g"), trips=5, name="rows")
    layers, layer_texts = loop_of([*rows, product("y")], trips=3)
    (c,) = auditor.collectives(schedule(layers, *row_texts, *layer_texts))
    assert (c.runs, c.in_layers) == (3 * 5, True)


def test_the_products_of_a_loop_are_left_to_its_own_collectives():
    start, done = gather("h")
    loop, texts = loop_of([product("y")], trips=5)
    (c,) = auditor.collectives(schedule([start, *loop, done], *texts))
    assert (c.asynchronous, c.overlapped_flops) == (True, 0)


def test_a_step_that_sends_nothing_waits_for_nothing():
    report = audited(schedule([product("y")]))
    assert report.hidden() == auditor.Hidden(0, 0)
    assert report.hidden().fraction == 1


def test_sent_bytes_are_words_in_bytes():
    """An all-reduce sends twice what it holds; mixed dtypes count each at their own width."""
    lines = [
        "%h = f32[5]{0} broadcast(%a), dimensions={}",
        "%sum = f32[5]{0} all-reduce(%h), replica_groups={}, to_apply=%add",
        (
            "%both = (bf16[48]{0}, f32[40]{0}) all-gather(%shard, %h), replica_groups={}, "
            "dimensions={0}"
        ),
        "%alone = f32[5]{0} all-reduce(%h), replica_groups={{0},{1},{2},{3}}, to_apply=%add",
    ]
    total, both, alone = auditor.collectives(schedule(lines))
    assert (total.words, total.sent_bytes) == (2 * 5, 2 * 5 * 4)
    assert (both.dtype, both.words, both.sent_bytes) == ("bf16,f32", 88, 48 * 2 + 40 * 4)
    assert (alone.words, alone.sent_bytes) == (0, 0)


# How often: real programs of eight CPU devices.


def cube():
    return make_mesh((2, 2, 2), ("replica", "data", "model"))


def loops_on_a_cube(outer, middle, inner):
    """Each axis in a loop of its own, three deep."""

    def innermost(c, _):
        return jnp.tanh(c + jax.lax.psum(c, "model")), None

    def between(c, _):
        c, _ = jax.lax.scan(innermost, c, None, length=inner)
        return c + jax.lax.all_gather(c, "data")[0], None

    def outermost(c, _):
        c, _ = jax.lax.scan(between, c, None, length=middle)
        piece = jax.lax.psum_scatter(c, ("replica", "model"), tiled=True)
        return jnp.tile(jnp.sin(piece), 4), None

    def f(x):
        return jax.lax.psum(jax.lax.scan(outermost, x, None, length=outer)[0], ("replica", "data"))

    return compile_on(cube(), f, jnp.ones(12))


def test_three_nested_loops_along_several_axes():
    found = {c.axis: c for c in auditor.collectives(loops_on_a_cube(5, 3, 2), dict(cube().shape))}
    assert {axis: (c.kind, c.runs, c.group_size) for axis, c in found.items()} == {
        "model": ("all-reduce", 5 * 3 * 2, 2),
        "data": ("all-gather", 5 * 3, 2),
        "replica+model": ("reduce-scatter", 5, 4),
        "replica+data": ("all-reduce", 1, 4),
    }
    assert found["model"].words == 5 * 3 * 2 * 2 * 12
    assert found["data"].words == 5 * 3 * 2 * 12
    assert found["replica+model"].words == 5 * 12


def test_a_branch_in_a_loop_counts_as_taken_each_time():
    def body(_, x):
        return jax.lax.cond(x[0] > 0, lambda: jnp.sin(jax.lax.psum(x, "data")), lambda: -x)

    (c,) = auditor.collectives(
        compile_on_8(lambda x: jax.lax.fori_loop(0, 7, body, x), jnp.ones(4))
    )
    assert (c.runs, c.conditional) == (7, True)


@pytest.mark.parametrize("known", ["outer", "inner"])
def test_one_unknown_loop_makes_the_count_unknown(known):
    def unknown(f, x):
        return jax.lax.while_loop(lambda s: jnp.sum(s) < 10, f, x)

    def four_times(f, x):
        return jax.lax.scan(lambda s, _: (f(s), None), x, None, length=4)[0]

    def send(s):
        return jnp.sin(s) + jax.lax.psum(s, "data")

    outer, inner = (four_times, unknown) if known == "outer" else (unknown, four_times)
    program = compile_on_8(lambda x: outer(lambda s: inner(send, s), x), jnp.ones(4))
    (c,) = auditor.collectives(program)
    assert c.runs is None


def test_a_computation_that_is_called_twice_sends_twice():
    called = (
        "%called (s: bf16[6]) -> bf16[48] {\n  %shard = bf16[6]{0} parameter(0)\n"
        "  ROOT %g = bf16[48]{0} all-gather(%shard), replica_groups={}, dimensions={0}\n}\n"
    )
    calls = [f"%{n} = bf16[48]{{0}} call(%shard), to_apply=%called" for n in "xy"]
    found = auditor.collectives(schedule(calls, called))
    assert [(c.kind, c.words) for c in found] == [("all-gather", GATHERED)] * 2


def test_collectives_that_xla_combines_in_a_loop_are_one_with_all_their_words():
    """Nine leaves a layer, in one all-reduce: more than the five after which XLA numbers them."""
    sizes = (2, 3, 5, 7, 11, 13, 17, 19, 23)

    def layer(xs, _):
        return jax.tree.map(lambda x, s: jnp.tanh(x + s), xs, jax.lax.psum(xs, "data")), None

    def f(*xs):
        return jax.lax.scan(layer, xs, None, length=6)[0]

    found = auditor.collectives(compile_on_8(f, *(jnp.ones(n) for n in sizes)))
    assert len(found) < len(sizes), "nothing was combined: the test shows nothing"
    assert {c.runs for c in found} == {6}
    assert sum(c.words for c in found) == 6 * 2 * sum(sizes)


# Along which axis.

CUBE = {"replica": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", "replica"),
        ("{{0,2},{1,3},{4,6},{5,7}}", "data"),
        ("{{6,7},{4,5},{2,3},{0,1}}", "model"),  # in any order
        ("{{0,1,4,5},{2,3,6,7}}", "replica+model"),
        ("{{0,4,1,5},{2,6,3,7}}", "replica+model"),  # gathered in another order
        ("{{0,1,2,3,4,5,6,7}}", "replica+data+model"),
        ("{}", "replica+data+model"),
        ("{{0,3},{1,2},{4,7},{5,6}}", "?"),
        ("{{0,1,2},{3,4,5,6,7}}", "?"),
        ("[4,2]<=[8]", "model"),
        ("[4,2]<=[4,2]T(1,0)", "data"),  # {0,2} {4,6} {1,3} {5,7}
        ("[4,2]<=[2,2,2]T(0,2,1)", "data"),
        ("[2,4]<=[2,2,2]T(1,0,2)", "replica+model"),
        ("mesh['replica'=2,'data'=2,'model'=2] {'model','replica'}", "replica+model"),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", "model"),
        ("mesh['axis_0'=4,'axis_1'=2] device_ids=([2,2,2]T(0,2,1)) {'axis_1'}", "data"),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", "data"),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2}", "replica"),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2,'axis_1'}", "replica+model"),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", "data+model"),
    ],
)
def test_axes_are_found_in_every_spelling_of_groups(text, axis):
    assert replica_groups.parse(text, 8).axis(CUBE) == axis


def test_without_a_mesh_only_the_text_can_say():
    assert replica_groups.parse("{{0,1},{2,3}}", 4).axis(None) == "?"
    assert replica_groups.parse("mesh['gpu'=2] {'gpu'}", 2).axis(None) == "gpu"


def test_axes_of_a_program_that_xla_partitioned_are_those_of_the_mesh():
    """GSPMD names a mesh of its own; the product's sum runs along what was contracted."""
    mesh = cube()
    rows = jax.NamedSharding(mesh, P(("replica", "model"), "data"))
    columns = jax.NamedSharding(mesh, P("data"))
    whole = jax.NamedSharding(mesh, P())
    step = jax.jit(jnp.matmul, in_shardings=(rows, columns), out_shardings=whole)
    compiled = step.lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile()
    found = {c.kind: c.axis for c in auditor.collectives(compiled, dict(mesh.shape))}
    assert found["all-reduce"] == "data"
    assert found["all-gather"] == "replica+model"
