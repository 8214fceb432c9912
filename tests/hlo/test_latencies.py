"""What XLA's scheduler is told that instructions take: seconds against formulas written here."""

import pytest
from test_roofline import H100, MEMORY, PEAK, SLOW, STACKED, loop, module, square

from zero_jax.hlo import latencies, roofline

WIDTH = 4096
PRODUCTS, FLOPS, _ = square(WIDTH)
PRODUCT = FLOPS / PEAK
WIRE = 8 * SLOW
X, W, DOT = PRODUCTS
AT_ONCE = 3


def numbers_for(seconds):
    """Of bf16 numbers that take about so long among 64 devices, and how long they take."""
    numbers = round(seconds * WIRE / 2 / 64) * 64
    return numbers, 2 * numbers * 63 / 64 / WIRE


def sum_of(name, numbers, of):
    """A reduce-scatter that is started; XLA for GPUs writes it as an asynchronous call."""
    part, full = f"bf16[{numbers // 64}]{{0}}", f"bf16[{numbers}]{{0}}"
    how = "replica_groups=[1,64]<=[64], dimensions={0}, to_apply=%sum"
    return f"%{name} = (({full}), {part}) reduce-scatter-start(%{of}), {how}"


def done(name, numbers):
    return f"%{name}.done = bf16[{numbers // 64}]{{0}} reduce-scatter-done(%{name})"


def told(body, *computations):
    return latencies.of(*module(body, *computations), H100, AT_ONCE)


def test_kernels_take_the_longer_of_their_two_times():
    found = told([*PRODUCTS, f"%c = bf16[{WIDTH},{WIDTH}]{{0,1}} copy(%dot)"])
    assert found == {
        "dot": pytest.approx(PRODUCT),
        "c": pytest.approx(2 * 2 * WIDTH**2 / MEMORY),
    }


def test_kernels_of_loops_are_told_and_what_is_fused_is_not():
    entry, body, condition = loop("%f = bf16[1,64,4096]{2,1,0} fusion")
    assert set(told(entry, STACKED, body, condition)) == {"f", "next", "go"}


def test_a_gather_is_told_as_many_times_longer_as_may_be_under_way():
    numbers, wire = numbers_for(PRODUCT / 2)
    part, full = f"bf16[{numbers // 64}]{{0}}", f"bf16[{numbers}]{{0}}"
    how = "replica_groups=[1,64]<=[64], dimensions={0}"
    found = told(
        [
            f"%g = {part} parameter(2)",
            X,
            W,
            DOT,
            f"%a = ({part}, {full}) all-gather-start(%g), {how}",
            f"%d = {full} all-gather-done(%a)",
        ]
    )
    assert found["a"] == pytest.approx(AT_ONCE * wire), "not longer, early though it could begin"


SECOND = DOT.replace("%dot =", "%dot2 =").replace("dot(%x, %w)", "dot(%dot, %w)")


@pytest.mark.parametrize(
    ("share", "longer"), [(0.5, lambda wire: PRODUCT), (0.1, lambda wire: AT_ONCE * wire)]
)
def test_a_sum_is_told_longer_by_what_it_could_have_begun_earlier(share, longer):
    """At most twice as long."""
    numbers, wire = numbers_for(share * PRODUCT)
    of = f"%g = bf16[{numbers}]{{0}} convert(%given)"
    given = f"%given = f32[{numbers}]{{0}} parameter(2)"
    late = [X, W, given, DOT, of, sum_of("s", numbers, "g"), done("s", numbers)]
    assert told(late)["s"] == pytest.approx(AT_ONCE * wire + longer(wire))
    early = [X, W, given, of, sum_of("s", numbers, "g"), DOT, done("s", numbers)]
    assert told(early)["s"] == pytest.approx(AT_ONCE * wire)


def test_a_sum_that_a_product_waits_for_is_told_as_it_is():
    numbers, wire = numbers_for(0.5 * PRODUCT)
    given = f"%g = bf16[{numbers}]{{0}} parameter(2)"
    after = f"%y = bf16[{WIDTH},{WIDTH}]{{1,0}} fusion(%s.done, %dot), kind=kLoop, calls=%sum"
    last = DOT.replace("%dot =", "%dot2 =").replace("dot(%x", "dot(%y")
    body = [X, W, given, DOT, sum_of("s", numbers, "g"), done("s", numbers), after, last]
    assert told(body)["s"] == pytest.approx(AT_ONCE * wire)


def test_what_is_sent_could_begin_when_products_have_made_it():
    numbers, wire = numbers_for(0.1 * PRODUCT)
    made = f"%g = bf16[{numbers}]{{0}} slice(%dot), slice={{[0:{numbers}]}}"
    body = [X, W, DOT, made, SECOND, sum_of("s", numbers, "g"), done("s", numbers)]
    run = roofline.play(*module(body), H100).runs["s"]
    assert run.could == pytest.approx(PRODUCT)
    assert run.began == pytest.approx(2 * PRODUCT)
    assert run.took == pytest.approx(wire)


def test_the_file_has_names_and_microseconds():
    lines = latencies.text({"dot.1": 2e-3, "all-gather-start": 4.5e-7}).splitlines()
    assert lines == [
        'costs { name: "dot.1" cost_us: 2000.000 }',
        'costs { name: "all-gather-start" cost_us: 0.450 }',
    ]
