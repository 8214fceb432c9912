"""Pipelines in closed form, beside a simulator that runs their schedules."""

from fractions import Fraction
from itertools import product

import pytest
from pipeline_orders import gpipe, interleaved, one_f_one_b, woven, zero_bubble
from pipeline_simulator import APART, WHOLE, peak, run, sent, stashed

from zero_jax.plan import pipelines

STAGES = range(1, 9)
GRID = [(p, m) for p in STAGES for m in (p, p + 1, 2 * p, 3 * p + 1)]
FEW = [(p, m) for p in STAGES for m in range(1, p)]
MULTIPLES = [(p, k * p, v) for p in STAGES for k in (1, 2, 4) for v in (1, 2, 3, 4)]


def held(orders):
    return max(map(peak, orders))


@pytest.mark.parametrize(("p", "m"), GRID + FEW)
def test_gpipe_waits_for_p_less_one_passes_and_holds_every_micro_batch(p, m):
    claim, orders = pipelines.gpipe(p, m), gpipe(p, m)
    assert run(orders, WHOLE).idle == claim.idle == 3 * (p - 1)
    assert held(orders) == claim.in_flight == m
    assert claim.idle_share == Fraction(p - 1, m + p - 1)  # GPipe's bubble
    assert claim.idle_of_work == Fraction(p - 1, m)  # the same as Megatron counts it


@pytest.mark.parametrize(("p", "m"), GRID + FEW)
def test_1f1b_waits_as_long_and_holds_p_at_most(p, m):
    claim, orders = pipelines.one_f_one_b(p, m), one_f_one_b(p, m)
    assert run(orders, WHOLE).idle == claim.idle == pipelines.gpipe(p, m).idle
    assert held(orders) == claim.in_flight == min(p, m)


@pytest.mark.parametrize(("p", "m"), GRID)
def test_gpipe_and_1f1b_wait_for_p_less_one_passes_however_long_these_are(p, m):
    recomputed = {"F": 1.0, "B": 3.0}
    for orders in (gpipe(p, m), one_f_one_b(p, m)):
        assert run(orders, recomputed).idle == (p - 1) * 4


@pytest.mark.parametrize(("p", "m", "v"), MULTIPLES)
def test_interleaved_waits_a_vth_and_holds_little_more(p, m, v):
    claim, orders = pipelines.interleaved(p, m, v), interleaved(p, m, v)
    assert run(orders, WHOLE).idle == pytest.approx(float(claim.idle))
    assert claim.idle == Fraction(3 * (p - 1), v)
    assert held(orders) == pytest.approx(float(claim.in_flight))
    if m > p:
        assert claim.in_flight == p * (1 + Fraction(p - 1, p * v))  # arXiv:2205.05198


@pytest.mark.parametrize(("p", "m", "v"), MULTIPLES)
def test_words_between_stages_are_counted(p, m, v):
    claim, orders = pipelines.interleaved(p, m, v), interleaved(p, m, v)
    most = max(sent(i, order, p) for i, order in enumerate(orders))
    assert most == claim.activation_words(values=1)
    if v == 1:
        for other in (gpipe(p, m), one_f_one_b(p, m), zero_bubble(p, m, 1), zero_bubble(p, m, 2)):
            assert most == max(sent(i, order, p) for i, order in enumerate(other))


@pytest.mark.parametrize(("p", "m"), GRID + FEW)
def test_zb_h1_waits_a_third_of_1f1b_and_holds_as_much(p, m):
    claim, orders = pipelines.zb_h1(p, m), zero_bubble(p, m, 1)
    counted = run(orders, APART)
    assert counted.idle == counted.idle_between == claim.idle
    assert held(orders) == claim.in_flight == min(p, m)
    if m >= p:
        assert claim.idle == pipelines.one_f_one_b(p, m).idle / 3


@pytest.mark.parametrize(("p", "m"), [*GRID, *FEW, *((p, 2 * p - 1) for p in STAGES)])
def test_zb_h2_waits_for_nothing_from_2p_less_one_on(p, m):
    claim, orders = pipelines.zb_h2(p, m), zero_bubble(p, m, 2)
    assert run(orders, APART).idle_between == claim.idle
    assert held(orders) == claim.in_flight == min(m, 2 * p - 1)
    assert (claim.idle == 0) == (m >= 2 * p - 1)


@pytest.mark.parametrize("p", STAGES)
def test_before_a_global_norm_zb_h2_waits_as_long_as_zb_h1(p):
    for m in (2 * p - 1, 2 * p, 4 * p):
        assert run(zero_bubble(p, m, 2), APART).idle == pipelines.zb_h1(p, m).idle


@pytest.mark.parametrize("times", [t for t in product((1, 2, 3), repeat=3) if t[2] == min(t)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_table_2_of_zero_bubble_holds_where_nothing_is_shorter_than_w(p, times):
    f, b, w = times
    taken = {"F": f, "B": b, "W": w}
    for m in (2 * p, 4 * p):
        whole = {"F": f, "B": b + w}
        assert run(one_f_one_b(p, m), whole).idle == (p - 1) * (f + b + w)
        assert run(zero_bubble(p, m, 1), taken).idle_between == (p - 1) * (f + b - w)
        assert run(zero_bubble(p, m, 2), taken).idle_between == (p - 1) * (f + b - 2 * w)


def test_it_does_not_hold_where_w_is_longest():
    # Its size would be nothing or less; the handcrafted order still waits for p-1 forward passes.
    taken = {"F": 1, "B": 1, "W": 2}
    assert run(zero_bubble(4, 16, 1), taken).idle_between == 3 > 3 * (1 + 1 - 2)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("m_w", [0.25, 0.5, 1.0])
def test_activations_of_zero_bubble_are_those_of_its_section_2_3(p, m_w):
    orders = {ahead: zero_bubble(p, 4 * p, ahead) for ahead in (1, 2)}
    for i in range(1, p + 1):  # workers count from 1 there
        assert peak(orders[1][i - 1], m_w) == (p - i + 1) + (i - 1) * m_w
        assert peak(orders[2][i - 1], m_w) == (2 * p - 2 * i + 1) + (2 * i - 2) * m_w


@pytest.mark.parametrize("p", STAGES)
def test_pipedream_never_waits_once_it_runs(p):
    orders = one_f_one_b(p, 6 * p)
    counted = run(orders, WHOLE)
    for i, order in enumerate(orders):
        start = counted.starts[i]["B", 0, p]  # the pipe is full
        end = counted.ends[i]["F", 0, 6 * p - 1]
        inside = [x for x in order if start <= counted.starts[i][x] < end]
        assert sum(WHOLE[kind] for kind, _, _ in inside) == end - start
    assert pipelines.pipedream(p, 6 * p).idle == 0


@pytest.mark.parametrize("p", STAGES)
def test_pipedream_keeps_p_less_i_versions_and_is_late_by_one_less(p):
    counted = [stashed(order) for order in one_f_one_b(p, 4 * p)]
    assert counted == [(p - i, p - 1 - i) for i in range(p)]
    claim = pipelines.pipedream(p, 4 * p)
    assert (claim.versions, claim.late) == counted[0]
    assert claim.in_flight == held(one_f_one_b(p, 4 * p))


def test_an_order_that_can_not_run_is_caught():
    p, m, v = 4, 8, 2
    good = interleaved(p, m, v)
    short = [woven(*parts(order), p - 1 - i) for i, order in enumerate(good)]  # 1F1B's warm-up
    with pytest.raises(ValueError, match=r"deadlock: device 0 at \('B', 1, 0\)"):
        run(short, WHOLE)
    early = [[("W", 0, 0), ("F", 0, 0), ("B", 0, 0)]]
    with pytest.raises(ValueError, match=r"device 0 at \('W', 0, 0\)"):
        run(early, APART)
    with pytest.raises(ValueError, match="same passes"):
        run([*gpipe(3, 2), gpipe(3, 2)[0][:-1]], WHOLE)


def parts(order):
    return [x for x in order if x[0] == "F"], [x for x in order if x[0] == "B"]


@pytest.mark.parametrize("p", [3, 4, 8])
def test_w_right_behind_b_is_not_zb_h1(p):
    # A mistake that the counts above would catch: it idles longer than the closed form says.
    orders = [
        [x for kind, c, row in order for x in ([(kind, c, row)] + [("W", c, row)] * (kind == "B"))]
        for order in one_f_one_b(p, 4 * p)
    ]
    assert run(orders, APART).idle > pipelines.zb_h1(p, 4 * p).idle


@pytest.mark.parametrize("p", range(2, 9))
def test_the_fewest_micro_batches_for_a_tenth(p):
    fewest = pipelines.fewest
    assert fewest(lambda m: pipelines.gpipe(p, m)) == 9 * (p - 1)
    assert fewest(lambda m: pipelines.one_f_one_b(p, m)) == 9 * (p - 1)
    assert fewest(lambda m: pipelines.zb_h1(p, m)) == max(3 * (p - 1), p)
    # 9·(2p-1-m) of waiting for 3m of work: a few less than the 2p-1 of which nothing waits
    assert fewest(lambda m: pipelines.zb_h2(p, m)) == -(-9 * (2 * p - 1) // 12)
    assert fewest(lambda m: pipelines.pipedream(p, m)) == 1
    for v in (1, 2, 4):
        groups = -(-9 * (p - 1) // (v * p))
        assert fewest(lambda m, v=v: pipelines.interleaved(p, m, v), step=p) == p * groups


def test_states_and_words_are_those_of_zero_on_a_stage():
    psi, p, n = 8e9, 8, 64
    plain, zero = pipelines.one_f_one_b(p, 32), pipelines.one_f_one_b(p, 32, zero=1)
    stale = pipelines.pipedream(p, 32)
    assert plain.state_bytes(psi, n // p) == 16 * psi / p
    assert zero.state_bytes(psi, n // p) == 4 * psi / p + 12 * psi / n
    assert stale.state_bytes(psi, n // p) == (16 + 2 * 7) * psi / p
    assert plain.parameter_words(psi, 8) == zero.parameter_words(psi, 8) == 2 * psi / p
    assert stale.parameter_words(psi, 8) == 32 * 2 * psi / p
    assert plain.parameter_words(psi, 1) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pipelines.gpipe(0, 4), "stages=0"),
        (lambda: pipelines.one_f_one_b(4, 0), "micro_batches=0"),
        (lambda: pipelines.one_f_one_b(4, 8, zero=2), "zero=2.*take 1"),
        (lambda: pipelines.interleaved(4, 6, 2), "micro_batches=6.*stages=4.*8 say"),
        (lambda: pipelines.interleaved(4, 8, 0), "chunks=0"),
        (lambda: pipelines.fewest(lambda m: pipelines.gpipe(4, m), share=0), "share=0"),
    ],
)
def test_schedules_that_are_none_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
