"""The largest set of live temporaries: peaks by hand, XLA's own plan on the CPU, and sources."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from hlo_lines import computation, loop, program
from jax.sharding import PartitionSpec
from networks import LONG, WIDE

import zero_jax
from zero_jax.hlo import auditor, hlo_text, liveness

P = PartitionSpec
U = 1024  # bytes of an array of one unit, f32[256]


def array(units=1, dtype="f32"):
    return f"{dtype}[{256 * units}]{{0}}"


def line(name, opcode, operands, shape=None, more=""):
    given = ", ".join(f"%{operand}" for operand in operands)
    return f"%{name} = {shape or array()} {opcode}({given}){more}"


def make(name, *operands, units=1, shape=None):
    """An instruction that reads its operands and writes another array, never over them."""
    shape = shape or array(units)
    return line(name, "custom-call", operands, shape, ', custom_call_target="f"')


def fusion(name, called, *operands, shape=None, kind="kLoop"):
    return line(name, "fusion", operands, shape, f", kind={kind}, calls=%{called}")


def element(name, of, index, shape=None):
    return line(name, "get-tuple-element", [of], shape, f", index={index}")


PAIR = f"({array()}, {array()})"
X, XK = {"x": array()}, {"x": array(), "k": array(2)}
ADD, SQUARE = "%y = f32[256] add(%x, %x)", "%m = f32[16,16]{1,0} bitcast(%x)"
PLUS_END = ["%h = f32[256] slice(%k), slice={[0:256]}", "%y = f32[256] add(%x, %h)"]
INTO = {"stack": array(8), "x": array(), "at": "s32[]"}
WRITE = [f"%v = {array(8)} bitcast(%stack)", "%y = f32[256] negate(%x)",
         f"%r = {array(8)} dynamic-update-slice(%v, %y, %at)"]  # fmt: skip
# fmt: off
CALLED = [computation(*given) for given in [
    ("add_fused", X, ADD),
    ("with_end", XK, *PLUS_END),
    ("halved", X, "%y = bf16[256] convert(%x)"),
    ("whole", X, "%y = s32[256] convert(%x)"),
    ("as_many_bytes", X, "%h = bf16[256] convert(%x)",
     "%y = bf16[512] concatenate(%h, %h), dimensions={0}"),
    ("transposed", X, SQUARE, "%t = f32[16,16]{1,0} transpose(%m), dimensions={1,0}",
     "%y = f32[256] bitcast(%t)"),
    ("contracted", X, SQUARE, "%d = f32[16,16]{1,0} dot(%m, %m), lhs_contracting_dims={1}, "
     "rhs_contracting_dims={0}", "%y = f32[256] bitcast(%d)"),
    ("also_reordered", X, "%r = f32[256] reverse(%x), dimensions={0}", "%y = f32[256] add(%x, %r)"),
    ("two", XK, *PLUS_END, "%z = f32[256] negate(%x)", f"%r = {PAIR} tuple(%y, %z)"),
    ("two_of_two", X | {"k": array()}, "%y = f32[256] add(%x, %k)",
     "%z = f32[256] subtract(%x, %k)", f"%r = {PAIR} tuple(%y, %z)"),
    ("sorted", X, f"%r = {PAIR} sort(%x, %x), dimensions={{0}}"),
    ("summed", X, SQUARE, "%s = f32[16] reduce(%m, %x), dimensions={1}, to_apply=%add", ADD,
     "%r = (f32[256], f32[16]) tuple(%y, %s)"),
    ("write", INTO, *WRITE),
    ("write_too", INTO, *WRITE, f"%b = ({array(8)}, s32[]) tuple(%r, %at)"),
    ("branch", X, make("y", "x")),
    ("wrapped", {"q": array(8)}, make("r", "q")),
    ("small", X, make("y", "x", units=2)),
    ("large", X, make("t", "x", units=5), make("y", "t", units=2)),
]]
# fmt: on


def peak_of(*lines, computations=(), header=""):
    """Of a program with the argument %p, one unit, whose last line is its result."""
    text = program({"p": array()}, *lines, computations=[*CALLED, *computations], header=header)
    found = liveness.peak(hlo_text.parse(text))
    assert sum(t.bytes for t in found.temporaries) == found.bytes
    return found


def units(*lines, **how):
    """The peak in units; scalars, such as counters, count nothing."""
    return sum(t.bytes for t in peak_of(*lines, **how).temporaries if t.bytes > 64) / U


A, K, OUT_B = make("a", "p"), make("k", "p", units=2), make("out", "b")
VIEWS = [A, make("b", "p"), make("x0", "p"), f"%t = {PAIR} tuple(%a, %b)", element("x", "t", 0),
         "%y = f32[16,16]{1,0} bitcast(%x)", make("c", "y")]  # fmt: skip
TWO = f"({array(3)}, {array(5)})"
TOKEN = [make("both", "p", shape=f"(token[], {TWO})"), element("pair", "both", 1, TWO),
         element("five", "pair", 1, array(5))]  # fmt: skip
TUPLE = [make("t", "p", shape=f"({array()}, s32[])"), element("a", "t", 0)]
BITCAST = [make("m", "p", shape="f32[16,16]{1,0}"), f"%a = {array()} bitcast(%m)"]
TWO_RESULTS = [element("y", "b", 0), element("z", "b", 1), make("out", "y", "z")]
SUMMED, OUT_Y = "(f32[256], f32[16])", [element("y", "b", 0), make("out", "y")]
ALIAS = 'custom-call(%a), custom_call_target="g", output_to_operand_aliasing={{1}: (0, {})}'
GROUPS = "replica_groups={}"
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'
START = f"%s = (({array()}), {array(8)}) all-gather-start(%a), {GROUPS}, dimensions={{0}}"
DONE = f"%d = {array(8)} all-gather-done(%s)"
ASYNC = f"(({array(8)}), {array()}, u32[])"
COPY, COPIED = f"%s = ({array()}, {array()}, u32[]) copy-start(%a)", f"%d = {array()} copy-done(%s)"
REDUCE = f"{GROUPS}, to_apply=%add"
IN_PLACE = ", output_to_operand_aliasing={{1}: (0, {})}"
REDUCED = f"%b = {array()} all-reduce-done(%s)"
ZERO, BRANCHES = "%i = s32[] constant(0)", "branch_computations={%small, %large}"
OF_BRANCH = f"%a = {array()} conditional(%i, %p, %p), branch_computations={{%branch, %branch}}"

# fmt: off
PEAKS = {  # lines after the argument %p, and the peak in units
    # Chains, tuples and views.
    "what is read and what is written": ([A, make("b", "a"), make("c", "b"), make("out", "c")], 2),
    "read again at the end": ([A, make("b", "a"), make("c", "b"), make("out", "a", "c")], 3),
    "the worst instant": (  # 5 + 3 while b is made, 3 + 4 while c is
        [make("a", "p", units=5), make("b", "a", units=3), make("c", "b", units=4),
         make("out", "c")], 5 + 3),
    "arguments and outputs": ([make("out", "p")], 0),
    "outputs in a tuple": ([A, make("b", "p"), f"%out = {PAIR} tuple(%a, %b)"], 0),
    "constants": ([f"%k = {array()} constant({{...}})", make("out", "p", "k")], 0),
    "views read nothing": ([*VIEWS, make("out", "c")], 2),
    "a view prolongs what it shows": ([*VIEWS, make("out", "a", "c")], 2),
    "but not what it leaves out": ([*VIEWS, make("out", "b", "c")], 3),
    "a token": ([*TOKEN, make("x", "five", units=2), make("out", "x")], 3 + 5),
    "a token, later": ([*TOKEN, make("x", "five", units=4), make("out", "x")], 5 + 4),
    "host memory": (
        [make("h", "p", shape="f32[2048]{0:S(5)}"), make("a", "p", "h"), make("o", "a", "h")], 1),
    # What a fusion writes over: an operand that dies and that it reads element by element.
    "elementwise": ([A, fusion("b", "add_fused", "a"), OUT_B], 1),
    "in a gemm": ([A, fusion("b", "add_fused", "a", kind="kCustom"), OUT_B], 1),
    "as wide a dtype": ([A, fusion("b", "whole", "a", shape=array(dtype="s32")), OUT_B], 1),
    "half as wide": ([A, fusion("b", "halved", "a", shape=array(dtype="bf16")), OUT_B], 1.5),
    "as many bytes": ([A, fusion("b", "as_many_bytes", "a", shape="bf16[512]"), OUT_B], 2),
    "transposed": ([A, fusion("b", "transposed", "a"), OUT_B], 2),
    "contracted": ([A, fusion("b", "contracted", "a", kind="kCustom"), OUT_B], 2),
    "also reordered": ([A, fusion("b", "also_reordered", "a"), OUT_B], 2),
    "read again": ([A, K, fusion("b", "with_end", "a", "k"), make("out", "a", "b")], 1 + 2 + 1),
    "not read again": ([A, K, fusion("b", "with_end", "a", "k"), OUT_B], 1 + 2),
    "of a tuple": ([*TUPLE, fusion("b", "add_fused", "a"), OUT_B], 2),
    "of a view": ([*BITCAST, fusion("b", "add_fused", "a"), OUT_B], 2),
    "a plain copy": ([A, f"%b = {array()} copy(%a)", OUT_B], 2),
    "one of two": ([A, K, fusion("b", "two", "a", "k", shape=PAIR), *TWO_RESULTS], 1 + 2 + 1),
    "two of two": ([A, make("k", "p"), fusion("b", "two_of_two", "a", "k", shape=PAIR), OUT_B], 2),
    "a sort of two": ([A, fusion("b", "sorted", "a", shape=PAIR), OUT_B], 1 + 2),
    # The GPU's kernel for reductions reads all before it writes.
    "a reduction": ([A, fusion("b", "summed", "a", shape=SUMMED, kind="kInput"), *OUT_Y], 1),
    "a loop's reduction": ([A, fusion("b", "summed", "a", shape=SUMMED), *OUT_Y], 2),
    "an announced alias": (
        [A, f"%b = (s32[], {array()}) {ALIAS}", element("y", "b", 1), make("out", "y")], 1),
    # Branches and calls.
    "of a branch": ([ZERO, OF_BRANCH, K, fusion("b", "with_end", "a", "k"), OUT_B], 1 + 2 + 1),
    "the larger branch": (
        [A, ZERO, f"%b = {array(2)} conditional(%i, %a, %a), {BRANCHES}", OUT_B], 1 + 5 + 2),
    "an output": ([A, ZERO, f"%o = {array(2)} conditional(%i, %a, %a), {BRANCHES}"], 1 + 5),
    "a call": ([A, f"%b = {array(2)} call(%a), to_apply=%large", OUT_B], 1 + 5 + 2),
    "a call, an output": ([A, f"%out = {array(2)} call(%a), to_apply=%large"], 1 + 5),
    # Collectives, and other work to the side.
    "a gather under way": (
        [A, START, make("x", "p", units=4), DONE, make("out", "d", "x")], 1 + 8 + 4),
    "a gather that is done": (
        [A, START, DONE, make("x", "p", units=4), make("out", "d", "x")], 8 + 4),
    "updates hold nothing more": (
        [make("a", "p", units=8), f"%s = {ASYNC} async-start(%a), calls=%wrapped",
         f"%u = {ASYNC} async-update(%s)", f"%v = {ASYNC} async-update(%u)",
         f"%d = {array()} async-done(%v)", make("out", "d")], 8 + 1),
    "a copy": ([A, COPY, make("x", "p", units=3), COPIED, make("out", "d", "x")], 1 + 1 + 3),
    "a copy that is done": ([A, COPY, COPIED, make("x", "d", units=3), make("o", "d", "x")], 1 + 3),
    "CPUs sum beside": ([A, f"%b = {array()} all-reduce(%a), {REDUCE}", OUT_B], 2),
    "GPUs sum in place": ([A, f"%b = {array()} all-reduce(%a), {REDUCE}, {SYNC}", OUT_B], 1),
    "GPUs 0.10": ([A, f"%s = {array()} all-reduce-start(%a), {REDUCE}", REDUCED, OUT_B], 1),
    "GPUs 0.12": (
        [A, f"%s = (({array()}), {array()}) all-reduce-start(%a), {REDUCE}{IN_PLACE}", REDUCED,
         OUT_B], 1),
}
# fmt: on


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_by_hand(name):
    lines, want = PEAKS[name]
    assert units(*lines) == want


def test_temporaries_are_named_largest_first():
    lines = [make("small", "p"), make("large", "p", units=3), make("out", "small", "large")]
    found = [(t.name, t.bytes, t.shape) for t in peak_of(*lines).temporaries]
    assert found == [("large", 3 * U, "f32[768]"), ("small", U, "f32[256]")]
    copy = [A, COPY, COPIED, make("x", "d", units=3), make("out", "d", "x")]
    assert {t.name for t in peak_of(*copy).temporaries} == {"s", "x"}, "not what it copies"


DONATED = "input_output_alias={ {1}: (0, {}, may-alias) }, num_partitions=8"


def test_a_donated_argument_that_is_only_copied_lends_its_own_memory():
    """The CPU backend copies optimizer state first, and fills what is free then with the rest."""
    lines = [f"%kept = {array()} copy(%p)", make("a", "kept", units=3), make("x", "a")]
    result = f"%out = {PAIR} tuple(%x, %y)"
    assert units(*lines, make("y", "kept"), result, header=DONATED) == 3
    assert units(*lines, make("y", "kept"), result) == 1 + 3, "not donated"
    assert units(*lines, make("y", "kept", "p"), result, header=DONATED) == 1 + 3, "read again"


# Loops.

H, H4, STACK = {"h": array()}, {"h": array(4)}, {"stack": array(8)}
UPDATE = f"%more = {array(8)} dynamic-update-slice(%stack, %x, %i)"
MX, MG = make("x", "h"), make("g", "x")
A4, OUT_H, OUT_STACK = make("a", "p", units=4), make("out", "w_h"), make("out", "w_h", "w_stack")
STACK_VIEW, ZEROS = f"%out = {array(8)} bitcast(%w_stack)", make("zeros", "p", units=8)
BOTH = f"%out = ({array()}, {array(8)}) tuple(%w_h, %w_stack)"
EARLY = ["%k = s32[] constant(0)", make("early", "k", units=3)]
# Weights that every iteration reads are the caller's.
HELD = [make("x", "h", "weights"), make("y", "x", units=3), make("g", "y")]
GIVEN = [A, make("b", "p", units=5)]
FUSED_B = [A, K, fusion("b", "with_end", "a", "k")]


def looped(*body, state=H, init=("a",), results=("g",), before=(), name="w"):
    return loop(name, state, init, body, results, before=before)


def stacking(*update):
    """Layers that each write one unit of a stack of eight."""
    state, init = H | STACK, ("a", "zeros")
    return looped(MX, *update, state=state, init=init, results=("x", "more"))


def within(inner, *body, **how):
    """A loop whose body has another, and its own lines."""
    lines, texts = inner
    outer, more = looped(*(x for part in body for x in (lines if part is ... else [part])), **how)
    return outer, [*texts, *more]


IN_LOOPS = within(looped(make("x", "h", units=2), MG, name="v"),
                  make("y", "h", units=3), make("a", "h"), ..., make("g", "v_h", "y"))  # fmt: skip
STACKS = within(
    looped(make("x", "i"), UPDATE, state=STACK, init=["stack"], results=["more"], name="v"),
    ..., state=STACK, init=["zeros"], results=["v_stack"],
)  # fmt: skip
WEIGHTS = looped(*HELD, state=H | {"weights": array(5)}, init=("a", "b"), results=("g", "weights"))
# fmt: off
LOOPS = {  # lines before, the loop, lines after, the peak
    # The old state until it is read, then the new one: h is in memory beside x or beside y.
    "the state once": ([A4], looped(make("x", "h", units=2), make("y", "x", units=2),
                                    make("g", "y", units=4), state=H4), [OUT_H], 4 + 2),
    "before its parameter is listed": (
        [A4], looped(MX, make("g", "x", units=4), state=H4, before=EARLY), [OUT_H], 4 + 3),
    "old and new state": ([A4], looped(make("g", "h", units=4), state=H4), [OUT_H], 4 + 4),
    # The stack once, beside the layer's input and output.
    "a stack": ([A, ZEROS], stacking(UPDATE), [OUT_STACK], 8 + 1 + 1),
    "a stack, fused": (
        [A, ZEROS], stacking(fusion("more", "write", "stack", "x", "i", shape=array(8))),
        [OUT_STACK], 8 + 1 + 1),
    "a stack, fused, in a tuple": (
        [A, ZEROS], stacking(
            fusion("both", "write_too", "stack", "x", "i", shape=f"({array(8)}, s32[])"),
            element("more", "both", 0, array(8))), [OUT_STACK], 8 + 1 + 1),
    # A stack of gradients that the step returns is never a temporary, nor what it starts from.
    "a stack, an output": ([A, ZEROS], stacking(UPDATE), [BOTH], 0),
    "a stack, the output": ([A, ZEROS], stacking(UPDATE), [STACK_VIEW], 1 + 1),
    "a stack in two loops": ([ZEROS], STACKS, [make("out", "w_stack")], 8 + 1),
    "a stack in two loops, the output": ([ZEROS], STACKS, [STACK_VIEW], 1),
    "what is passed on": (GIVEN, WEIGHTS, [make("out", "w_h", "w_weights")], 5 + 1 + 3),
    "what is passed on, unused": (GIVEN, WEIGHTS, [OUT_H], 5 + 1 + 3),
    "a gather beside": ([A, START.replace("(%a)", "(%p)")], looped(make("x", "h", units=2), MG),
                        [DONE, make("out", "w_h", "d")], 8 + 1 + 2),
    "a loop in a loop": ([A], IN_LOOPS, [OUT_H], 3 + 2 + 1),
    # The last fusion writes to the state: x, y and the new state, while y still waits.
    "not over its operand": (
        [A], looped(MX, make("y", "x", units=3), fusion("g", "add_fused", "x"),
                    make("z", "y", shape="s32[]")), [OUT_H], 1 + 3 + 1),
    "what it starts from": (FUSED_B, looped(MX, MG, init=["b"]), [OUT_H], 1 + 2 + 1),
}
# fmt: on


@pytest.mark.parametrize("name", LOOPS)
def test_peaks_of_loops_by_hand(name):
    before, (lines, computations), after, want = LOOPS[name]
    assert units(*before, *lines, *after, computations=computations) == want


# Against the plan of XLA, on eight CPU devices.

L, B, D = 6, 32, 256


def layer(h, w):
    return jnp.tanh(h @ w), None


def updated(ws, x, layer=layer):
    return ws - 0.1 * jax.grad(lambda ws: jnp.sum(jax.lax.scan(layer, x, ws)[0]))(ws)


@jax.checkpoint
def gathered(h, w):
    return layer(h, jax.lax.all_gather(w, "data", axis=1, tiled=True))


def branched(ws, x):
    w = ws[0]
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(w @ w) @ w, lambda: w))


# fmt: off
PROGRAMS = {
    "kept activations": lambda ws, x: jax.lax.scan(lambda h, w: (layer(h, w)[0], h), x, ws)[1],
    "update": updated,
    "update with remat": functools.partial(updated, layer=jax.checkpoint(layer)),
    "update with a gather": functools.partial(updated, layer=gathered),
    "all-reduce": lambda ws, x: jnp.sum(jnp.sin(jax.lax.psum(ws[0] @ ws[1], "data")) @ ws[2]),
    "branch": branched,
}
# fmt: on


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_what_xla_plans(name):
    """Within 1 %: XLA aligns buffers, and packs these without gaps. Weights are donated where they
    are updated: into the memory of a fresh output XLA puts temporaries."""
    updates, shard = "update" in name, P(None, None, "data") if "gather" in name else P()
    specs = {"in_specs": (shard, P()), "out_specs": shard if updates else P(), "check_vma": False}
    mapped = jax.shard_map(PROGRAMS[name], mesh=zero_jax.make_mesh(), **specs)
    step = jax.jit(mapped, donate_argnums=0 if updates else ())
    report = auditor.audit(step.lower(jnp.ones((L, D, D)), jnp.ones((B, D))).compile())
    assert report.peak.bytes > B * D * 4, "nothing lives: the test shows nothing"
    assert report.fragmentation == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(("net", "stage"), [(LONG, 0), (WIDE, 1), (WIDE, 2), (LONG, 3)])
def test_the_peak_of_a_training_step_is_what_xla_plans(net, stage):
    """Never more, and less only by the gaps that the CPU backend leaves between its buffers."""
    step, args = net.step(stage, "block")
    report = auditor.audit(step.lower(*args).compile())
    assert 0.999 < report.fragmentation < 1.15


# Sources: files with a line of each, and frames as (file, parent).

FILES = {
    "/home/me/zero_jax/models/gpt.py": 120,
    "/lib/python3.12/site-packages/flax/nnx/module.py": 7,
    f"{pathlib.Path(zero_jax.__file__).parent}/engine/grads.py": 9,
    "/home/me/zero_jax/train.py": 33,
    "<frozen runpy>": 88,
}
FRAMES = [(4, 1), (1, 2), (2, 3), (3, 4), (2, 1), (5, 1), (2, 7)]


def numbered(title, lines):
    return f"\n{title}\n" + "".join(f"{at} {line}\n" for at, line in enumerate(lines, 1))


PLACES = [f"{{file_name_id={at} line={n} column=1}}" for at, n in enumerate(FILES.values(), 1)]
HEAD = (
    "HloModule m, is_scheduled=true\n"
    + numbered("FileNames", [f'"{name}"' for name in FILES])
    + numbered("FileLocations", PLACES)
    + numbered("StackFrames", [f"{{file_location_id={f} parent_frame_id={p}}}" for f, p in FRAMES])
)


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ("stack_frame_id=4", "models/gpt.py:120"),  # in a clone, under two lines of libraries
        ("stack_frame_id=2", "models/gpt.py:120"),
        ("stack_frame_id=1", "zero_jax/train.py:33"),
        ("stack_frame_id=5", "nnx/module.py:7"),  # of libraries alone
        ("stack_frame_id=7", "nnx/module.py:7"),  # begun by python -m
        ("", ""),
        ('source_file="/home/me/models/gpt.py" source_line=120', "models/gpt.py:120"),
    ],
)
def test_a_temporary_knows_the_innermost_line_that_is_not_a_librarys(metadata, source):
    made = A + f', metadata={{op_name="jit(f)/mul" {metadata}}}'
    text = HEAD + program({"p": array()}, made, make("out", "a")).partition("\n")[2]
    (found,) = liveness.peak(hlo_text.parse(text)).temporaries
    assert (found.source, found.op_name) == (source, "jit(f)/mul")
