"""The largest set of live temporaries: peaks by hand, XLA's own plan on the CPU, and sources."""

import pathlib

import pytest
from hlo_lines import computation, loop, program
from networks import LONG, WIDE

import zero_jax
from zero_jax.hlo import auditor, hlo_text, liveness

U = 1024  # bytes of an array of one unit, f32[256]


def array(units=1):
    return f"f32[{256 * units}]{{0}}"


def line(name, opcode, operands, shape, more):
    given = ", ".join(f"%{operand}" for operand in operands)
    return f"%{name} = {shape} {opcode}({given}){more}"


def make(name, *operands, units=1):
    """An instruction that reads its operands and writes another array, never over them."""
    return line(name, "custom-call", operands, array(units), ', custom_call_target="f"')


def fusion(name, called, *operands, shape=None, kind="kLoop"):
    return line(name, "fusion", operands, shape or array(), f", kind={kind}, calls=%{called}")


def element(name, of, index):
    return line(name, "get-tuple-element", [of], array(), f", index={index}")


PAIR = f"({array()}, {array()})"
X = {"x": array()}
ADD, SQUARE = "%y = f32[256] add(%x, %x)", "%m = f32[16,16]{1,0} bitcast(%x)"
CALLED = [computation(*given) for given in [
    ("add_fused", X, ADD),
    ("with_end", X | {"k": array(2)}, "%h = f32[256] slice(%k), slice={[0:256]}",
     "%y = f32[256] add(%x, %h)"),
    ("summed", X, SQUARE, "%s = f32[16] reduce(%m, %x), dimensions={1}, to_apply=%add", ADD,
     "%r = (f32[256], f32[16]) tuple(%y, %s)"),
    ("write", {"stack": array(8), "x": array(), "at": "s32[]"}, f"%v = {array(8)} bitcast(%stack)",
     "%y = f32[256] negate(%x)", f"%r = {array(8)} dynamic-update-slice(%v, %y, %at)"),
    ("small", X, make("y", "x", units=2)),
    ("large", X, make("t", "x", units=5), make("y", "t", units=2))]]  # fmt: skip


def units(*lines, computations=()):
    """The peak, in units and without scalars, of a program with the argument %p of one unit."""
    text = program({"p": array()}, *lines, computations=[*CALLED, *computations])
    found = liveness.peak(hlo_text.parse(text))
    assert sum(t.bytes for t in found.temporaries) == found.bytes
    return sum(t.bytes for t in found.temporaries if t.bytes > 64) / U


A, K, OUT_B = make("a", "p"), make("k", "p", units=2), make("out", "b")
VIEWS = [A, make("b", "p"), make("x0", "p"), f"%t = {PAIR} tuple(%a, %b)", element("x", "t", 0),
         "%y = f32[16,16]{1,0} bitcast(%x)", make("c", "y")]  # fmt: skip
SUMMED, OUT_Y = "(f32[256], f32[16])", [element("y", "b", 0), make("out", "y")]
ALIAS = 'custom-call(%a), custom_call_target="g", output_to_operand_aliasing={{1}: (0, {})}'
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'
START = f"%s = (({array()}), {array(8)}) all-gather-start(%a), replica_groups={{}}"
START += ", dimensions={0}"
DONE = f"%d = {array(8)} all-gather-done(%s)"
COPY, COPIED = f"%s = ({array()}, {array()}, u32[]) copy-start(%a)", f"%d = {array()} copy-done(%s)"
REDUCE = "replica_groups={}, to_apply=%add"
ZERO, BRANCHES = "%i = s32[] constant(0)", "branch_computations={%small, %large}"
# fmt: off
PEAKS = {  # lines after the argument %p, and the peak in units
    "the worst instant": (  # 5 + 3 while b is made, 3 + 4 while c is
        [make("a", "p", units=5), make("b", "a", units=3), make("c", "b", units=4),
         make("out", "c")], 5 + 3),
    "a view prolongs what it shows": ([*VIEWS, make("out", "a", "c")], 2),
    # What a fusion writes over: an operand that dies and that it reads element by element.
    "elementwise": ([A, fusion("b", "add_fused", "a"), OUT_B], 1),
    "read again": ([A, K, fusion("b", "with_end", "a", "k"), make("out", "a", "b")], 1 + 2 + 1),
    # The GPU's kernel for reductions reads all before it writes.
    "a reduction": ([A, fusion("b", "summed", "a", shape=SUMMED, kind="kInput"), *OUT_Y], 1),
    "an announced alias": (
        [A, f"%b = (s32[], {array()}) {ALIAS}", element("y", "b", 1), make("out", "y")], 1),
    "the larger branch": (
        [A, ZERO, f"%b = {array(2)} conditional(%i, %a, %a), {BRANCHES}", OUT_B], 1 + 5 + 2),
    # Collectives, and other work to the side.
    "a gather under way": (
        [A, START, make("x", "p", units=4), DONE, make("out", "d", "x")], 1 + 8 + 4),
    "a copy": ([A, COPY, make("x", "p", units=3), COPIED, make("out", "d", "x")], 1 + 1 + 3),
    "CPUs sum beside": ([A, f"%b = {array()} all-reduce(%a), {REDUCE}", OUT_B], 2),
    "GPUs sum in place": ([A, f"%b = {array()} all-reduce(%a), {REDUCE}, {SYNC}", OUT_B], 1),
}

H, H4, STACK = {"h": array()}, {"h": array(4)}, {"stack": array(8)}
MX, MG, OUT_H = make("x", "h"), make("g", "x"), make("out", "w_h")
ZEROS = make("zeros", "p", units=8)
BOTH = f"%out = ({array()}, {array(8)}) tuple(%w_h, %w_stack)"


def looped(*body, state=H, init=("a",), results=("g",), name="w"):
    return loop(name, state, init, body, results)


# Layers that each write one unit of a stack of eight.
UPDATE = fusion("more", "write", "stack", "x", "i", shape=array(8))
STACKING = looped(MX, UPDATE, state=H | STACK, init=("a", "zeros"), results=("x", "more"))
INNER, TEXTS = looped(make("x", "h", units=2), MG, name="v")
OUTER, MORE = looped(make("y", "h", units=3), make("a", "h"), *INNER, make("g", "v_h", "y"))
LOOPS = {  # lines before, the loop, lines after, the peak
    # The old state until it is read, then the new one: h is in memory beside x or beside y.
    "the state once": (
        [make("a", "p", units=4)], looped(make("x", "h", units=2), make("y", "x", units=2),
                                          make("g", "y", units=4), state=H4), [OUT_H], 4 + 2),
    # The stack once, beside the layer's input and output.
    "a stack": ([A, ZEROS], STACKING, [make("out", "w_h", "w_stack")], 8 + 1 + 1),
    # A stack of gradients that the step returns is never a temporary, nor what it starts from.
    "a stack, an output": ([A, ZEROS], STACKING, [BOTH], 0),
    "a gather beside": ([A, START.replace("(%a)", "(%p)")], looped(make("x", "h", units=2), MG),
                        [DONE, make("out", "w_h", "d")], 8 + 1 + 2),
    "a loop in a loop": ([A], (OUTER, [*TEXTS, *MORE]), [OUT_H], 3 + 2 + 1),
}
# fmt: on


@pytest.mark.parametrize("name", [*PEAKS, *LOOPS])
def test_peaks_by_hand(name):
    if name in PEAKS:
        lines, want = PEAKS[name]
        assert units(*lines) == want
    else:
        before, (lines, computations), after, want = LOOPS[name]
        assert units(*before, *lines, *after, computations=computations) == want


@pytest.mark.parametrize(("net", "stage"), [(LONG, 0), (WIDE, 1), (WIDE, 2), (LONG, 3)])
def test_the_peak_of_a_training_step_is_what_xla_plans(net, stage):
    """Never more, and less only by the gaps that the CPU backend leaves between its buffers."""
    step, args = net.step(stage, "block")
    report = auditor.audit(step.lower(*args).compile())
    assert 0.999 < report.fragmentation < 1.15
    held = report.argument_bytes + report.output_bytes + report.temp_bytes
    assert report.total_bytes == held - report.alias_bytes


# Sources: files with a line of each, and frames as (file, parent).

FILES = {
    "/home/me/zero_jax/models/gpt.py": 120, "/lib/python3.12/site-packages/flax/nnx/module.py": 7,
    f"{pathlib.Path(zero_jax.__file__).parent}/engine/grads.py": 9,
    "/home/me/zero_jax/train.py": 33, "<frozen runpy>": 88}  # fmt: skip
FRAMES = [(4, 1), (1, 2), (2, 3), (3, 4), (2, 1), (5, 1), (2, 7)]
SOURCES = {"stack_frame_id=4": "models/gpt.py:120",  # in a clone, under two lines of libraries
           "stack_frame_id=1": "zero_jax/train.py:33",
           "stack_frame_id=5": "nnx/module.py:7",  # of libraries alone
           "stack_frame_id=7": "nnx/module.py:7",  # begun by python -m
           "": ""}  # fmt: skip


def test_a_temporary_knows_the_innermost_line_that_is_not_a_librarys():
    def numbered(title, lines):
        return f"\n{title}\n" + "".join(f"{at} {line}\n" for at, line in enumerate(lines, 1))

    places = [f"{{file_name_id={at} line={n} column=1}}" for at, n in enumerate(FILES.values(), 1)]
    frames = [f"{{file_location_id={f} parent_frame_id={p}}}" for f, p in FRAMES]
    head = "HloModule m, is_scheduled=true\n" + numbered("FileNames", [f'"{x}"' for x in FILES])
    head += numbered("FileLocations", places) + numbered("StackFrames", frames)
    for metadata, source in SOURCES.items():
        made = A + f', metadata={{op_name="jit(f)/mul" {metadata}}}'
        text = head + program({"p": array()}, made, make("out", "a")).partition("\n")[2]
        (found,) = liveness.peak(hlo_text.parse(text)).temporaries
        assert (found.source, found.op_name) == (source, "jit(f)/mul"), metadata
