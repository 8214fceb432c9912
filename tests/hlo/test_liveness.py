"""The largest set of live temporaries: peaks computed by hand."""

import pytest
from hlo_programs import snippet

from zero_jax.hlo import hlo_text, liveness

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


def test_a_fusion_may_end_in_one_operation_of_two_results():
    """A sort of keys and values, as of `top_k`; it overwrites neither."""
    pair = f"({array()}, {array()})"
    fused = computation("fused", {"x": array()}, [f"%r = {pair} sort(%x, %x), dimensions={{0}}"])
    fusion = f"%b = {pair} fusion(%a), kind=kLoop, calls=%fused"
    assert units(make("a", "p"), fusion, make("out", "b"), computations=[fused]) == 1 + 2


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
