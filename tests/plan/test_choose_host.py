"""stage="auto" with host memory: which tiers are tried, in which order, and what they cost."""

import types

import pytest
from problems import gpt_problem
from test_choose import TX, auto

import zero_jax
from zero_jax.offload.piecewise import CannotStream
from zero_jax.plan import candidates
from zero_jax.plan.auto import search

HOST = ("host",)


def planner(host, total=100, seen=None):
    """Plans that hold `total` bytes on the device and host(candidate) bytes in host memory."""

    def plan(candidate, compile):
        if seen is not None and not compile:
            seen.append(candidate)
        held = host(candidate)
        if isinstance(held, Exception):
            raise held
        size = total(candidate) if callable(total) else total
        words = held / 1000
        predicted = types.SimpleNamespace(host=held, terms={}, alias_bytes=0)
        return types.SimpleNamespace(
            total_bytes=size,
            predicted=predicted,
            host_words_per_param=words,
            axes={"data": 1},
            time=None,
        )

    return plan


def host_tiers(rows=1):
    return candidates.combinations(rows, remat="block", places=HOST, states=candidates.STATES)


def bytes_in_host(candidate):
    states = {"none": 0, "optimizer": 800, "optimizer,params": 1200}[str(candidate.offload)]
    return states + (300 if "host" in candidate.remat else 0)


def test_what_crosses_to_the_host_counts_as_words_that_leave_the_device():
    """0.3 or 0.8 words to the host are dearer than none, and cheaper than the gather of stage 3."""
    choice = None
    fits = lambda c: 100 if c.stage == 3 and not c.uses_host else 200  # noqa: E731
    choice = search(host_tiers(), planner(bytes_in_host, fits), 100, report=lambda _: None)
    order = [c.candidate for c in choice.considered]
    costs = [c.candidate.cost(c.plan) for c in choice.considered]
    assert costs == sorted(costs)
    assert [str(c) for c in order[:3]] == [
        "stage 2, 1 micro-batches, remat block",
        "stage 2, 1 micro-batches, remat block_sqrt",
        "stage 2, 1 micro-batches, remat block@host",
    ]
    before = {(c.remat, str(c.offload)) for c in order if c.stage < 3}
    assert ("block@host", "none") in before and ("block", "optimizer") in before
    assert ("block", "optimizer,params") not in before, "1.2 words are more than stage 3's one"
    assert choice.chosen.candidate == candidates.Candidate(3, 1, "block")


def test_candidates_are_planned_no_earlier_than_their_turn_can_come():
    seen = []
    search(host_tiers(), planner(bytes_in_host, seen=seen), 100, report=lambda _: None)
    assert [str(c) for c in seen] == ["stage 2, 1 micro-batches, remat block"]


def test_more_host_memory_than_there_is_is_too_much():
    said = []
    only = [candidates.Candidate(2, 1, "block", candidates.STATES[1])]
    with pytest.raises(ValueError, match="nothing fits"):
        search(only, planner(bytes_in_host), 100, report=said.append, host_limit=799)
    assert "predicted 800 B in host memory: too much, a device's part is 799 B" in said[0]
    choice = search(only, planner(bytes_in_host), 100, said.append, host_limit=800)
    assert choice.chosen.verdict == "compiled 100 B, 800 B in host memory: fits, taken"


def test_an_optimizer_that_can_not_stream_leaves_its_tiers_out():
    said = []
    refuse = lambda c: CannotStream("lamb can't") if c.offload.states else 0  # noqa: E731
    fits = lambda c: 100 if c.stage == 3 else 200  # noqa: E731
    choice = search(host_tiers(), planner(refuse, fits), 100, report=said.append)
    assert choice.chosen.candidate == candidates.Candidate(3, 1, "block")
    assert "left out stage 2, 1 micro-batches, remat block, optimizer in host memory" in said[0]


def zero_of(mesh, **settings):
    return zero_jax.Zero(mesh, "auto", memory_limit=1e9, **settings)


def test_host_memory_is_used_where_a_device_has_some_beside_its_own():
    abstract = zero_of(zero_jax.abstract_mesh(8))
    tiers = {(c.remat, str(c.offload)) for c in candidates.of_zero(abstract, 1, "h100", born=False)}
    assert ("block@host", "optimizer,params") in tiers and ("none", "optimizer") in tiers
    for target, zero in (("cpu", abstract), ("v5p", abstract), (None, auto(1e9))):
        assert not any(c.uses_host for c in candidates.of_zero(zero, 1, target, born=False))


def test_states_that_are_born_or_placed_by_the_caller_stay():
    zero = zero_of(zero_jax.abstract_mesh(8))
    born = candidates.of_zero(zero, 1, "h100", born=True)
    assert not any(c.offload.states for c in born) and any(c.uses_host for c in born)
    placed = zero_of(zero_jax.abstract_mesh(8), offload="optimizer")
    assert {str(c.offload) for c in candidates.of_zero(placed, 1, "h100", born=False)} == {
        "optimizer"
    }


def test_what_is_kept_may_be_split_over_a_model_axis_unless_it_is_already():
    mesh = zero_jax.abstract_mesh(4, model=2)
    places = {
        c.remat.partition("@")[2] for c in candidates.of_zero(zero_of(mesh), 1, "h100", born=False)
    }
    assert places == {"", "host", "partitioned", "partitioned+host"}
    by_sequence = candidates.of_zero(zero_of(mesh, sequence_parallel=True), 1, "h100", born=False)
    assert {c.remat.partition("@")[2] for c in by_sequence} == {"", "host"}


def test_parameters_that_are_arrays_are_born(monkeypatch):
    asked = []
    monkeypatch.setattr(candidates, "of_zero", lambda *args: asked.append(args[-1]) or [])
    problem = gpt_problem()
    zero = auto(1e9)
    for params in (zero.abstract(problem.make), zero.init(problem.make)):
        with pytest.raises(ValueError, match="no candidate"):
            zero.choice(problem.loss, TX, params, problem.batch, report=lambda _: None)
    assert asked == [False, True]
