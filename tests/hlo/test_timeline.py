"""One wire for all collectives: what products cover when several are under way, in loops and in
branches; seconds against formulas written here."""

import pytest
from test_roofline import PEAK, SLOW, computation, estimate, square

WIRE = 8 * SLOW
PRODUCTS, FLOPS, _ = square(4096)
PRODUCT = FLOPS / PEAK
GROUPS = "replica_groups=[1,64]<=[64], dimensions={0}"


def seconds_of(numbers):
    return 2 * numbers * 63 / 64 / WIRE


def numbers_for(seconds):
    """Of bf16 numbers that take about so long, a multiple of 64."""
    return round(seconds * WIRE / 2 / 64) * 64


def started(name, numbers, of="%g"):
    part, full = f"bf16[{numbers // 64}]{{0}}", f"bf16[{numbers}]{{0}}"
    return f"%{name} = ({part}, {full}) all-gather-start({of}), {GROUPS}"


def done(name, numbers):
    return f"%{name}d = bf16[{numbers}]{{0}} all-gather-done(%{name})"


def given(numbers, name="g", at=2):
    return f"%{name} = bf16[{numbers // 64}]{{0}} parameter({at})"


X, W, DOT = PRODUCTS


def test_two_gathers_behind_one_product_wait_for_each_other():
    numbers = numbers_for(0.8 * PRODUCT)
    once = seconds_of(numbers)
    lines = [given(numbers), X, W, started("a", numbers), started("b", numbers), DOT]
    t = estimate([*lines, done("a", numbers), done("b", numbers)])
    assert once < PRODUCT < 2 * once, "one or both fit: the test shows nothing"
    assert t.wire_seconds == pytest.approx(2 * once)
    assert t.exposed_seconds == pytest.approx(2 * once - PRODUCT)
    assert t.covered == pytest.approx(PRODUCT / (2 * once))


def test_a_blocking_sum_waits_for_the_gather_before_it():
    numbers = numbers_for(2 * PRODUCT)
    summed = f"%s = bf16[{numbers // 64}]{{0}} all-reduce(%g), replica_groups={{}}, to_apply=%sum"
    lines = [given(numbers), X, W, started("a", numbers), DOT, summed, done("a", numbers)]
    t = estimate(lines)
    assert t.exposed_seconds == pytest.approx(t.wire_seconds - PRODUCT)
    assert t.seconds == pytest.approx(t.wire_seconds)


def test_what_the_device_waits_for_goes_on_for_those_behind_it():
    """While it waits for the first, the wire is not at rest: the second begins right after."""
    numbers = numbers_for(3 * PRODUCT)
    once = seconds_of(numbers)
    second = DOT.replace("%dot =", "%dot2 =").replace("(%x,", "(%dot,")
    lines = [given(numbers), X, W, started("a", numbers), started("b", numbers), DOT]
    t = estimate([*lines, done("a", numbers), second, done("b", numbers)])
    assert t.seconds == pytest.approx(2 * once)
    assert t.exposed_seconds == pytest.approx(2 * once - 2 * PRODUCT)


def looped(trips, *lines):
    """A loop of a square product and these lines."""
    shape = "bf16[4096,4096]{1,0}"
    state = f"(s32[], {shape}, {shape})"
    body = computation(
        "body",
        f"%s = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%s), index=0",
        f"%x = {shape} get-tuple-element(%s), index=1",
        f"%w = {shape} get-tuple-element(%s), index=2",
        *lines,
        f"ROOT %t = {state} tuple(%i, %x, %w)",
    )
    condition = computation(
        "condition", f"%s = {state} parameter(0)", "ROOT %go = pred[] constant(true)"
    )
    config = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
    loop = f"%l = {state} while(%t), condition=%condition, body=%body, backend_config={config}"
    entry = [X, W, "%zero = s32[] constant(0)", f"%t = {state} tuple(%zero, %x, %w)"]
    return entry, loop, body, condition


@pytest.mark.parametrize("share", [0.7, 1.5])
def test_every_turn_of_a_loop_waits_alike(share):
    numbers, trips = numbers_for(share * PRODUCT), 1000
    inside = [given(numbers).replace("parameter(2)", "constant(0)"), started("a", numbers)]
    entry, loop, body, condition = looped(trips, *inside, DOT, done("a", numbers))
    t = estimate([*entry, loop], body, condition)
    once = seconds_of(numbers)
    assert t.wire_seconds == pytest.approx(trips * once)
    assert t.exposed_seconds == pytest.approx(trips * max(0, once - PRODUCT), abs=1e-12)


def test_a_gather_around_a_loop_holds_up_those_inside():
    """The first turns wait for it, later ones do not: they are not all like the first."""
    small, trips = numbers_for(0.5 * PRODUCT), 100
    large = numbers_for(10 * PRODUCT)
    inside = [given(small).replace("parameter(2)", "constant(0)"), started("a", small)]
    entry, loop, body, condition = looped(trips, *inside, DOT, done("a", small))
    lines = [*entry, given(large, "big", 3), started("b", large, "%big"), loop, done("b", large)]
    t = estimate(lines, body, condition)
    assert t.wire_seconds == pytest.approx(seconds_of(large) + trips * seconds_of(small))
    # Only the first turn meets the large one, and waits for it and for its own.
    waited = seconds_of(large) + seconds_of(small) - PRODUCT
    assert t.exposed_seconds == pytest.approx(waited)


def test_of_a_conditional_the_branch_that_takes_longest_runs():
    numbers = numbers_for(PRODUCT)
    part, full = f"bf16[{numbers // 64}]{{0}}", f"bf16[{numbers}]{{0}}"
    gathers = computation(
        "gathers", f"%p = {part} parameter(0)", f"%a = {full} all-gather(%p), {GROUPS}"
    )
    nothing = computation("nothing", f"%p = {part} parameter(0)")
    lines = [
        given(numbers, "p", 0),
        "%which = pred[] parameter(1)",
        f"%c = {full} conditional(%which, %p, %p), branch_computations={{%nothing, %gathers}}",
    ]
    t = estimate(lines, gathers, nothing)
    assert t.seconds == t.exposed_seconds == pytest.approx(seconds_of(numbers))


def test_a_wrapped_collective_is_under_way_until_its_done():
    numbers = numbers_for(0.5 * PRODUCT)
    part, full = f"bf16[{numbers // 64}]{{0}}", f"bf16[{numbers}]{{0}}"
    wrapped = computation(
        "wrapped", f"%p = {full} parameter(0)",
        f"ROOT %r = {part} reduce-scatter(%p), {GROUPS}, to_apply=%sum",
    )  # fmt: skip
    lines = [
        *(X, W, f"%g = {full} parameter(2)"),
        f"%s = (({full}), {part}) async-start(%g), calls=%wrapped",
        DOT,
        f"%d = {part} async-done(%s), calls=%wrapped",
    ]
    t = estimate(lines, wrapped)
    assert t.wire_seconds == pytest.approx(seconds_of(numbers))
    assert (t.exposed_seconds, t.covered) == (0, 1)
