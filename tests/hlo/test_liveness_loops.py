"""What lives at once across collectives, loops and branches: peaks computed by hand."""

import pytest
from test_liveness import (
    FUSED_ADD,
    FUSED_WITH_END,
    add_fusion,
    array,
    computation,
    make,
    peak_of,
    units,
)

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


# Collectives, and other work to the side.

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
