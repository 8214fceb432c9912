"""The largest set of live temporaries: peaks computed by hand, and XLA's own plan on the CPU."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from test_forecast import LONG, WIDE
from test_hlo import snippet

import zero_jax
from zero_jax.hlo import auditor, hlo_text, liveness

P = PartitionSpec
U = 1024  # bytes of an array of one unit, f32[256]


def array(units=1, dtype="f32"):
    return f"{dtype}[{256 * units}]{{0}}"


def make(name, *operands, units=1, shape=None):
    """An instruction that reads its operands and writes another array, never over them."""
    given = ", ".join(f"%{operand}" for operand in operands)
    return f'%{name} = {shape or array(units)} custom-call({given}), custom_call_target="f"'


def peak_of(*lines, computations=(), header=""):
    """Of a program with the argument %p, one unit, whose last line is its result."""
    body = [f"%p = {array()} parameter(0)", *lines[:-1], f"ROOT {lines[-1]}"]
    text = snippet(body, *computations, header=header)
    found = liveness.peak(hlo_text.parse(text))
    assert sum(t.bytes for t in found.temporaries) == found.bytes
    return found


def units(*lines, **how):
    """The peak in units; scalars, such as counters, count nothing."""
    found = peak_of(*lines, **how)
    return sum(t.bytes for t in found.temporaries if t.bytes > 64) / U


def computation(name, parameters, lines):
    """A computation of these parameters (names and shapes); its last line is its result."""
    given = [f"%{n} = {shape} parameter({at})" for at, (n, shape) in enumerate(parameters.items())]
    body = [*given, *lines[:-1], f"ROOT {lines[-1]}"]
    return f"%{name} (p: f32[]) -> f32[] {{\n" + "".join(f"  {x}\n" for x in body) + "}\n"


# Chains.


def test_a_chain_holds_what_is_read_and_what_is_written():
    assert units(make("a", "p"), make("b", "a"), make("c", "b"), make("out", "c")) == 2


def test_what_is_read_again_at_the_end_lives_all_along():
    lines = [make("a", "p"), make("b", "a"), make("c", "b"), make("out", "a", "c")]
    assert units(*lines) == 3


def test_sizes_add_up_at_the_worst_instant():
    """5 + 3 while b is made, 3 + 4 while c is."""
    lines = [make("a", "p", units=5), make("b", "a", units=3), make("c", "b", units=4)]
    assert units(*lines, make("out", "c")) == 5 + 3


def test_arguments_outputs_and_constants_are_not_temporaries():
    two = f"({array()}, {array()})"
    assert units(make("out", "p")) == 0
    assert units(make("a", "p"), make("b", "p"), f"%out = {two} tuple(%a, %b)") == 0
    assert units(f"%k = {array()} constant({{...}})", make("out", "p", "k")) == 0


def test_tuples_views_and_bitcasts_read_nothing():
    """b is dead before the tuple it goes into, which is only read for a."""
    lines = [
        make("a", "p"),
        make("b", "p"),
        make("x0", "p"),
        f"%t = ({array()}, {array()}) tuple(%a, %b)",
        f"%x = {array()} get-tuple-element(%t), index=0",
        "%y = f32[16,16]{1,0} bitcast(%x)",
        make("c", "y"),
        make("out", "c"),
    ]
    assert units(*lines) == 2
    assert units(*lines[:-1], make("out", "a", "c")) == 2, "a view prolongs what it shows"
    assert units(*lines[:-1], make("out", "b", "c")) == 3, "but not what it leaves out"


def test_a_token_takes_no_place_in_a_tuple():
    shape = f"(token[], ({array(3)}, {array(5)}))"
    lines = [
        make("both", "p", shape=shape),
        f"%pair = ({array(3)}, {array(5)}) get-tuple-element(%both), index=1",
        f"%five = {array(5)} get-tuple-element(%pair), index=1",
        make("x", "five", units=2),
        make("out", "x"),
    ]
    assert units(*lines) == 3 + 5
    assert units(*lines[:-2], make("x", "five", units=4), make("out", "x")) == 5 + 4


def test_arrays_in_host_memory_are_not_on_the_device():
    lines = [
        make("away", "p", shape="f32[2048]{0:S(5)}"),
        make("a", "p", "away"),
        make("out", "a", "away"),
    ]
    assert units(*lines) == 1


# What may be written over.

ADD = ["%y = f32[256]{0} add(%x, %x)"]
FUSIONS = {
    # kind, shape and lines of the result, units while it runs beside an operand that dies
    "elementwise": ("kLoop", array(), ADD, 1),
    "elementwise in a gemm": ("kCustom", array(), ADD, 1),
    "as wide a dtype": ("kLoop", array(dtype="s32"), ["%y = s32[256]{0} convert(%x)"], 1),
    "half as wide": ("kLoop", array(dtype="bf16"), ["%y = bf16[256]{0} convert(%x)"], 1.5),
    "as many bytes": (
        "kLoop",
        "bf16[512]{0}",
        ["%h = bf16[256]{0} convert(%x)", "%y = bf16[512]{0} concatenate(%h, %h), dimensions={0}"],
        2,
    ),
    "transposed": (
        "kLoop",
        array(),
        [
            "%m = f32[16,16]{1,0} bitcast(%x)",
            "%t = f32[16,16]{1,0} transpose(%m), dimensions={1,0}",
            "%y = f32[256]{0} bitcast(%t)",
        ],
        2,
    ),
    "contracted": (
        "kCustom",
        array(),
        [
            "%m = f32[16,16]{1,0} bitcast(%x)",
            "%d = f32[16,16]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "%y = f32[256]{0} bitcast(%d)",
        ],
        2,
    ),
    "also reordered": (
        "kLoop",
        array(),
        ["%r = f32[256]{0} reverse(%x), dimensions={0}", "%y = f32[256]{0} add(%x, %r)"],
        2,
    ),
}


@pytest.mark.parametrize("case", FUSIONS)
def test_a_fusion_overwrites_a_dying_operand_that_it_reads_element_by_element(case):
    kind, shape, lines, want = FUSIONS[case]
    fused = computation("fused", {"x": array()}, lines)
    fusion = f"%b = {shape} fusion(%a), kind={kind}, calls=%fused"
    found = units(make("a", "p"), fusion, make("out", "b"), computations=[fused])
    assert found == want


def add_fusion(result, operand):
    return f"%{result} = {array()} fusion(%{operand}), kind=kLoop, calls=%fused"


FUSED_ADD = computation("fused", {"x": array()}, ADD)


FUSED_WITH_END = computation(
    "fused_too",
    {"x": array(), "k": array(2)},
    ["%h = f32[256]{0} slice(%k), slice={[0:256]}", "%y = f32[256]{0} add(%x, %h)"],
)


def test_what_is_read_again_is_not_overwritten():
    """While b is made, k is still there: 1 + 2 + 1, of which a may be spared."""
    fusion = f"%b = {array()} fusion(%a, %k), kind=kLoop, calls=%fused_too"
    lines = [make("a", "p"), make("k", "p", units=2), fusion]
    texts = [FUSED_WITH_END]
    assert units(*lines, make("out", "a", "b"), computations=texts) == 1 + 2 + 1
    assert units(*lines, make("out", "b"), computations=texts) == 1 + 2


def test_only_a_direct_operand_is_overwritten():
    """XLA looks at what makes the operand, and not through views."""
    tuples = [
        make("t", "p", shape=f"({array()}, s32[])"),
        f"%a = {array()} get-tuple-element(%t), index=0",
    ]
    bitcast = [make("m", "p", shape="f32[16,16]{1,0}"), f"%a = {array()} bitcast(%m)"]
    for lines in (tuples, bitcast):
        lines = [*lines, add_fusion("b", "a"), make("out", "b")]
        assert units(*lines, computations=[FUSED_ADD]) == 2


def test_a_plain_copy_overwrites_nothing():
    assert units(make("a", "p"), f"%b = {array()} copy(%a)", make("out", "b")) == 2


def test_of_two_results_one_takes_the_place_of_an_operand():
    """While both are made, k is still there: 1 + 2, and 1 for the other."""
    pair = f"({array()}, {array()})"
    fused = computation(
        "fused",
        {"x": array(), "k": array(2)},
        [
            "%h = f32[256]{0} slice(%k), slice={[0:256]}",
            "%y = f32[256]{0} add(%x, %h)",
            "%z = f32[256]{0} negate(%x)",
            f"%r = {pair} tuple(%y, %z)",
        ],
    )
    lines = [
        make("a", "p"),
        make("k", "p", units=2),
        f"%b = {pair} fusion(%a, %k), kind=kLoop, calls=%fused",
        f"%y = {array()} get-tuple-element(%b), index=0",
        f"%z = {array()} get-tuple-element(%b), index=1",
        make("out", "y", "z"),
    ]
    assert units(*lines, computations=[fused]) == 1 + 2 + 1


def test_two_results_take_the_places_of_two_operands():
    pair = f"({array()}, {array()})"
    lines = ["%y = f32[256]{0} add(%x, %k)", "%z = f32[256]{0} subtract(%x, %k)"]
    fused = computation(
        "fused", {"x": array(), "k": array()}, [*lines, f"%r = {pair} tuple(%y, %z)"]
    )
    lines = [
        make("a", "p"),
        make("k", "p"),
        f"%b = {pair} fusion(%a, %k), kind=kLoop, calls=%fused",
        make("out", "b"),
    ]
    assert units(*lines, computations=[fused]) == 2


def test_a_reduction_is_read_before_the_rest_is_written():
    """The GPU's kernel for reductions (kInput) only."""
    lines = [
        "%m = f32[16,16]{1,0} bitcast(%x)",
        "%s = f32[16]{0} reduce(%m, %x), dimensions={1}, to_apply=%add",
        *ADD,
        f"%r = ({array()}, f32[16]{{0}}) tuple(%y, %s)",
    ]
    fused = computation("fused", {"x": array()}, lines)
    for kind, want in (("kInput", 1), ("kLoop", 2)):
        program = [
            make("a", "p"),
            f"%b = ({array()}, f32[16]{{0}}) fusion(%a), kind={kind}, calls=%fused",
            f"%y = {array()} get-tuple-element(%b), index=0",
            make("out", "y"),
        ]
        assert units(*program, computations=[fused]) == want


def test_an_announced_alias_is_the_same_memory():
    shape = f"(s32[], {array()})"
    alias = "output_to_operand_aliasing={{1}: (0, {})}"
    lines = [
        make("a", "p"),
        f'%b = {shape} custom-call(%a), custom_call_target="g", {alias}',
        f"%y = {array()} get-tuple-element(%b), index=1",
        make("out", "y"),
    ]
    assert units(*lines) == 1


DONATED = "input_output_alias={ {1}: (0, {}, may-alias) }, num_partitions=8"


def test_a_donated_argument_that_is_only_copied_lends_its_own_memory():
    """The CPU backend copies optimizer state first, and fills what is free then with the rest."""
    lines = [
        f"%kept = {array()} copy(%p)",
        make("a", "kept", units=3),
        make("x", "a"),
        make("y", "kept"),
        f"%out = ({array()}, {array()}) tuple(%x, %y)",
    ]
    assert units(*lines, header=DONATED) == 3
    assert units(*lines) == 1 + 3, "not donated"
    twice = [*lines[:3], make("y", "kept", "p"), lines[4]]
    assert units(*twice, header=DONATED) == 1 + 3, "read again"


# Collectives.

GROUPS = "replica_groups={}"
GPU = 'backend_config={"collective_backend_config":{"is_sync":true}}'


def test_a_gather_under_way_holds_its_shard_and_its_result():
    """1 + 8 + 4 while x is made; without the shard from the done on."""
    start = (
        f"%s = (({array()}), {array(8)}) all-gather-start(%a), {GROUPS}, dimensions={{0}}",
        f"%d = {array(8)} all-gather-done(%s)",
    )
    before = [make("a", "p"), start[0]]
    assert units(*before, make("x", "p", units=4), start[1], make("out", "d", "x")) == 1 + 8 + 4
    assert units(*before, start[1], make("x", "p", units=4), make("out", "d", "x")) == 8 + 4


def test_updates_between_start_and_done_hold_nothing_more():
    shape = f"(({array(8)}), {array()}, u32[])"
    wrapped = computation("wrapped", {"q": array(8)}, [make("r", "q")])
    lines = [
        make("a", "p", units=8),
        f"%s = {shape} async-start(%a), calls=%wrapped",
        f"%u = {shape} async-update(%s)",
        f"%v = {shape} async-update(%u)",
        f"%d = {array()} async-done(%v)",
        make("out", "d"),
    ]
    assert units(*lines, computations=[wrapped]) == 8 + 1


def test_an_asynchronous_copy_is_one_array_more():
    lines = [
        make("a", "p"),
        f"%s = ({array()}, {array()}, u32[]) copy-start(%a)",
        make("x", "p", units=3),
        f"%d = {array()} copy-done(%s)",
        make("out", "d", "x"),
    ]
    assert units(*lines) == 1 + 1 + 3
    later = [*lines[:2], lines[3], make("x", "d", units=3), lines[4]]
    assert {t.name for t in peak_of(*later).temporaries} == {"s", "x"}, (
        "the copy, not what it is of"
    )


REDUCES = {
    "CPU": [f"%b = {array()} all-reduce(%a), {GROUPS}, to_apply=%add"],
    "GPU": [f"%b = {array()} all-reduce(%a), {GROUPS}, to_apply=%add, {GPU}"],
    "GPU 0.10": [
        f"%s = {array()} all-reduce-start(%a), {GROUPS}, to_apply=%add",
        f"%b = {array()} all-reduce-done(%s)",
    ],
    "GPU 0.12": [
        f"%s = (({array()}), {array()}) all-reduce-start(%a), {GROUPS}, to_apply=%add, "
        "output_to_operand_aliasing={{1}: (0, {})}",
        f"%b = {array()} all-reduce-done(%s)",
    ],
}


@pytest.mark.parametrize("backend", REDUCES)
def test_gpus_sum_in_place_and_cpus_do_not(backend):
    found = units(make("a", "p"), *REDUCES[backend], make("out", "b"))
    assert found == (2 if backend == "CPU" else 1)


# Loops and branches.


def loop(name, state, init, body, results, before=()):
    """A while loop of eight trips and its computations.

    Args:
      state: shapes by name; a counter comes first by itself.
      init: what each starts from.
      body: lines that read the names of the state.
      results: what each becomes.
      before: lines that are listed before the body's parameter.
    """
    shape = f"(s32[], {', '.join(state.values())})"
    parts = [
        "%i = s32[] get-tuple-element(%s), index=0",
        *(
            f"%{n} = {x} get-tuple-element(%s), index={at}"
            for at, (n, x) in enumerate(state.items(), 1)
        ),
    ]
    result = f"%t = {shape} tuple(%i, {', '.join(f'%{r}' for r in results)})"
    computations = [
        computation(
            f"body_{name}", {}, [*before, f"%s = {shape} parameter(0)", *parts, *body, result]
        ),
        computation(f"condition_{name}", {"s": shape}, ["%go = pred[] constant(true)"]),
    ]
    lines = [
        f"%zero_{name} = s32[] constant(0)",
        f"%init_{name} = {shape} tuple(%zero_{name}, {', '.join(f'%{i}' for i in init)})",
        f"%{name} = {shape} while(%init_{name}), condition=%condition_{name}, "
        f'body=%body_{name}, backend_config={{"known_trip_count":{{"n":"8"}}}}',
        *(
            f"%{name}_{n} = {x} get-tuple-element(%{name}), index={at}"
            for at, (n, x) in enumerate(state.items(), 1)
        ),
    ]
    return lines, computations


def test_the_state_of_a_loop_counts_once():
    """The old state until it is read, then the new one: h is in memory beside x or beside y."""
    body = [make("x", "h", units=2), make("y", "x", units=2), make("g", "y", units=4)]
    lines, texts = loop("w", {"h": array(4)}, ["a"], body, ["g"])
    found = units(make("a", "p", units=4), *lines, make("out", "w_h"), computations=texts)
    assert found == 4 + 2


def test_the_state_of_a_loop_is_there_before_its_parameter_is_listed():
    lines, texts = loop(
        "w",
        {"h": array(4)},
        ["a"],
        [make("x", "h"), make("g", "x", units=4)],
        ["g"],
        before=["%k = s32[] constant(0)", make("early", "k", units=3)],
    )
    found = units(make("a", "p", units=4), *lines, make("out", "w_h"), computations=texts)
    assert found == 4 + 3


def test_old_and_new_state_count_twice_while_both_are_read():
    body = [make("g", "h", units=4)]
    lines, texts = loop("w", {"h": array(4)}, ["a"], body, ["g"])
    found = units(make("a", "p", units=4), *lines, make("out", "w_h"), computations=texts)
    assert found == 4 + 4


STACK = {"h": array(), "stack": array(8)}


def stacking(update):
    """Layers that each write one unit of a stack of eight."""
    return loop("w", STACK, ["a", "zeros"], [make("x", "h"), *update], ["x", "more"])


UPDATES = {
    "plain": f"%more = {array(8)} dynamic-update-slice(%stack, %x, %i)",
    "fused": f"%more = {array(8)} fusion(%stack, %x, %i), kind=kLoop, calls=%write",
    "fused, in a tuple": (
        f"%both = ({array(8)}, s32[]) fusion(%stack, %x, %i), kind=kLoop, calls=%write_too",
        f"%more = {array(8)} get-tuple-element(%both), index=0",
    ),
}
WRITE = f"%r = {array(8)} dynamic-update-slice(%v, %y, %at)"
INTO = {"stack": array(8), "x": array(), "at": "s32[]"}
LOOKED_THROUGH = [f"%v = {array(8)} bitcast(%stack)", f"%y = {array()} negate(%x)", WRITE]
WRITES = [
    computation("write", INTO, LOOKED_THROUGH),
    computation("write_too", INTO, [*LOOKED_THROUGH, f"%b = ({array(8)}, s32[]) tuple(%r, %at)"]),
]


@pytest.mark.parametrize("update", UPDATES)
def test_a_stack_is_updated_in_place(update):
    """The stack once, beside the layer's input and output."""
    how = UPDATES[update]
    lines, texts = stacking([how] if isinstance(how, str) else how)
    before = [make("a", "p"), make("zeros", "p", units=8)]
    found = units(*before, *lines, make("out", "w_h", "w_stack"), computations=[*texts, *WRITES])
    assert found == 8 + 1 + 1


def test_what_a_loop_passes_on_counts_once():
    """Weights that every iteration reads are the caller's, alive before, during and after."""
    body = [make("x", "h", "weights"), make("y", "x", units=3), make("g", "y")]
    state = {"h": array(), "weights": array(5)}
    lines, texts = loop("w", state, ["a", "b"], body, ["g", "weights"])
    before = [make("a", "p"), make("b", "p", units=5)]
    last = make("out", "w_h", "w_weights")
    assert units(*before, *lines, last, computations=texts) == 5 + 1 + 3
    assert units(*before, *lines, make("out", "w_h"), computations=texts) == 5 + 1 + 3


def test_a_loop_that_overlaps_a_gather_adds_to_it():
    body = [make("x", "h", units=2), make("g", "x")]
    lines, texts = loop("w", {"h": array()}, ["a"], body, ["g"])
    start = f"%s = (({array()}), {array(8)}) all-gather-start(%p), {GROUPS}, dimensions={{0}}"
    done = f"%d = {array(8)} all-gather-done(%s)"
    found = units(make("a", "p"), start, *lines, done, make("out", "w_h", "d"), computations=texts)
    assert found == 8 + 1 + 2


def test_loops_in_loops_add_up():
    """The outer layer's 3, the inner layer's 2, and the state, which is handed through: 1."""
    inner, inner_texts = loop(
        "v", {"h": array()}, ["a"], [make("x", "h", units=2), make("g", "x")], ["g"]
    )
    body = [make("y", "h", units=3), make("a", "h"), *inner, make("g", "v_h", "y")]
    outer, outer_texts = loop("w", {"h": array()}, ["a"], body, ["g"])
    found = units(
        make("a", "p"), *outer, make("out", "w_h"), computations=[*inner_texts, *outer_texts]
    )
    assert found == 3 + 2 + 1


def test_what_a_loop_makes_for_an_output_is_in_that_output():
    """A stack of gradients that the step returns is never a temporary, nor what it starts from."""
    lines, texts = stacking([UPDATES["plain"]])
    before = [make("a", "p"), make("zeros", "p", units=8)]
    result = f"%out = ({array()}, {array(8)}) tuple(%w_h, %w_stack)"
    assert units(*before, *lines, result, computations=texts) == 0
    alone = [*before, *lines, f"%out = {array(8)} bitcast(%w_stack)"]
    assert units(*alone, computations=texts) == 1 + 1


def test_a_loop_in_a_loop_may_make_the_output_too():
    state = {"stack": array(8)}
    inner, inner_texts = loop("v", state, ["stack"], [make("x", "i"), UPDATES["plain"]], ["more"])
    outer, outer_texts = loop("w", state, ["zeros"], inner, ["v_stack"])
    texts = [*inner_texts, *outer_texts]
    before = make("zeros", "p", units=8)
    assert units(before, *outer, f"%out = {array(8)} bitcast(%w_stack)", computations=texts) == 1
    assert units(before, *outer, make("out", "w_stack"), computations=texts) == 8 + 1


def test_the_last_fusion_of_a_loop_writes_to_the_state_and_not_over_its_operand():
    """x, y and the new state, while y still waits to be read."""
    end = make("z", "y", shape="s32[]")
    body = [make("x", "h"), make("y", "x", units=3), add_fusion("g", "x"), end]
    lines, texts = loop("w", {"h": array()}, ["a"], body, ["g"])
    found = units(make("a", "p"), *lines, make("out", "w_h"), computations=[*texts, FUSED_ADD])
    assert found == 1 + 3 + 1


def test_what_a_loop_starts_from_is_its_state_and_takes_no_others_place():
    fusion = f"%b = {array()} fusion(%a, %k), kind=kLoop, calls=%fused_too"
    before = [make("a", "p"), make("k", "p", units=2), fusion]
    lines, texts = loop("w", {"h": array()}, ["b"], [make("x", "h"), make("g", "x")], ["g"])
    texts = [*texts, FUSED_WITH_END]
    assert units(*before, *lines, make("out", "w_h"), computations=texts) == 1 + 2 + 1


def test_the_result_of_a_branch_is_not_overwritten():
    branch = computation("branch", {"x": array()}, [make("y", "x")])
    lines = [
        "%i = s32[] constant(0)",
        f"%a = {array()} conditional(%i, %p, %p), branch_computations={{%branch, %branch}}",
        make("k", "p", units=2),
        f"%b = {array()} fusion(%a, %k), kind=kLoop, calls=%fused_too",
    ]
    found = units(*lines, make("out", "b"), computations=[branch, FUSED_WITH_END])
    assert found == 1 + 2 + 1


@pytest.mark.parametrize("opcode", ["conditional", "call"])
def test_the_larger_branch_counts_with_its_result(opcode):
    small = computation("small", {"x": array()}, [make("y", "x", units=2)])
    large = computation("large", {"x": array()}, [make("t", "x", units=5), make("y", "t", units=2)])
    how = {
        "conditional": "conditional(%k, %a, %a), branch_computations={%small, %large}",
        "call": "call(%a), to_apply=%large",
    }[opcode]
    lines = [make("a", "p"), "%k = s32[] constant(0)", f"%b = {array(2)} {how}"]
    texts = [small, large]
    assert units(*lines, make("out", "b"), computations=texts) == 1 + 5 + 2
    assert units(*lines[:2], f"%out = {array(2)} {how}", computations=texts) == 1 + 5, "an output"


# What they are called.


def test_temporaries_are_named_largest_first():
    lines = [make("small", "p"), make("large", "p", units=3), make("out", "small", "large")]
    found = peak_of(*lines).temporaries
    assert [(t.name, t.bytes, t.shape) for t in found] == [
        ("large", 3 * U, "f32[768]"),
        ("small", U, "f32[256]"),
    ]


HEAD = """HloModule m, is_scheduled=true

FileNames
1 "/home/me/zero_jax/models/gpt.py"
2 "/lib/python3.12/site-packages/flax/nnx/module.py"
3 "{library}"
4 "/home/me/zero_jax/train.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=120 end_line=120 column=1 end_column=9}}
2 {{file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=9}}
3 {{file_name_id=3 function_name_id=1 line=9 end_line=9 column=1 end_column=9}}
4 {{file_name_id=4 function_name_id=1 line=33 end_line=33 column=1 end_column=9}}

StackFrames
1 {{file_location_id=4 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=2}}
3 {{file_location_id=2 parent_frame_id=3}}
4 {{file_location_id=3 parent_frame_id=4}}
5 {{file_location_id=2 parent_frame_id=1}}
"""


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ("stack_frame_id=4", "models/gpt.py:120"),  # in a clone, under two lines of libraries
        ("stack_frame_id=2", "models/gpt.py:120"),
        ("stack_frame_id=1", "zero_jax/train.py:33"),
        ("stack_frame_id=5", "nnx/module.py:7"),  # of no line of one's own
        ("", ""),
        ('source_file="/home/me/models/gpt.py" source_line=120', "models/gpt.py:120"),
    ],
)
def test_a_temporary_knows_the_innermost_line_that_is_not_a_librarys(metadata, source):
    body = [
        f"%p = {array()} parameter(0)",
        make("a", "p") + f', metadata={{op_name="jit(f)/mul" {metadata}}}',
        f"ROOT {make('out', 'a')}",
    ]
    text = (
        HEAD.format(library=f"{pathlib.Path(zero_jax.__file__).parent}/engine/grads.py")
        + snippet(body).partition("\n")[2]
    )
    (found,) = liveness.peak(hlo_text.parse(text)).temporaries
    assert (found.source, found.op_name) == (source, "jit(f)/mul")


# Against the plan of XLA, on eight CPU devices.

L, B, D = 6, 32, 256


def layer(h, w):
    return jnp.tanh(h @ w), None


def loss(ws, x, layer=layer):
    return jnp.sum(jax.lax.scan(layer, x, ws)[0])


def updated(ws, x, **how):
    return ws - 0.1 * jax.grad(functools.partial(loss, **how))(ws, x)


def gathering(ws, x):
    def gathered(h, w):
        return layer(h, jax.lax.all_gather(w, "data", axis=1, tiled=True))

    return updated(ws, x, layer=jax.checkpoint(gathered))


def summed(ws, x):
    return jnp.sum(jnp.sin(jax.lax.psum(ws[0] @ ws[1], "data")) @ ws[2])


def branched(ws, x):
    w = ws[0]
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(w @ w) @ w, lambda: w))


PROGRAMS = {
    "forward": loss,
    "kept activations": lambda ws, x: jax.lax.scan(lambda h, w: (layer(h, w)[0], h), x, ws)[1],
    "gradient": jax.grad(loss),
    "update": updated,
    "update with remat": functools.partial(updated, layer=jax.checkpoint(layer)),
    "gather and scatter": gathering,
    "all-reduce": summed,
    "branch": branched,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_peak_is_what_xla_plans(program):
    """Within 1 %: XLA aligns buffers, and packs these without gaps. Weights are donated where they
    are updated: into the memory of a fresh output XLA puts temporaries."""
    updates = "update" in program or program == "gather and scatter"
    shard = P(None, None, "data") if program == "gather and scatter" else P()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        PROGRAMS[program],
        mesh=mesh,
        in_specs=(shard, P()),
        out_specs=shard if updates else P(),
        check_vma=False,
    )
    step = jax.jit(mapped, donate_argnums=0 if updates else ())
    report = auditor.audit(step.lower(jnp.ones((L, D, D)), jnp.ones((B, D))).compile())
    assert report.peak.bytes > B * D * 4, "nothing lives: the test shows nothing"
    assert report.fragmentation == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("net", [LONG, WIDE], ids=["long", "wide"])
def test_the_peak_of_a_training_step_is_what_xla_plans(net, stage):
    """Never more, and less only by the gaps that the CPU backend leaves between its buffers."""
    step, args = net.step(stage, "block")
    report = auditor.audit(step.lower(*args).compile())
    assert 0.999 < report.fragmentation < 1.15
