"""stage="auto": which candidates are tried, in which order, and which is chosen; and which mesh."""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from problems import assert_bitwise, out_of_memory

import zero_jax
from zero_jax.commands.case import MLP_CHUNK, choose
from zero_jax.hlo import targets
from zero_jax.models import gpt
from zero_jax.offload.host import CannotStream
from zero_jax.plan import advice
from zero_jax.plan.auto import STATES, Candidate, combinations, limits, of_config, search
from zero_jax.plan.tables import gigabytes
from zero_jax.plan.text_model import TextModel

TX, ignore = optax.adamw(1e-3), [].append


# Devices, rows on each, tokens, what is frozen, and the part of the parameters that is not. With
# few rows parameters, not activations, fill the memory.
@pytest.mark.slow
@pytest.mark.parametrize("case", [(3, 1, 512, None, 1.0), (4, 2, 1, "up", 0.5)])
def test_auto_picks_what_an_exhaustive_search_over_compiled_programs_picks(case):
    """By words, then FLOPs of the compiled program, then the stated order."""
    devices, rows, tokens, frozen, trained = case
    mesh = zero_jax.make_mesh(devices=jax.devices()[:devices])
    batch = jax.ShapeDtypeStruct((rows * devices, tokens, 96), jnp.float32)

    def mlp(params, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    @functools.cache
    def plan(candidate, compile):
        zero = zero_jax.Zero(mesh, frozen=frozen, **candidate.settings)
        make = lambda: {"up": jnp.zeros((6, 96, 384)), "down": jnp.zeros((6, 384, 96))}  # noqa: E731
        return zero.plan(mlp, zero.optimizer(TX), zero.eval_shape(make), batch, compile=compile)

    def cost(c):
        gathers = (3 if c.remat == "block_sqrt" else 2) * c.grad_accum_steps if c.stage == 3 else 1
        words = gathers + trained * (1 if c.stage == 1 else c.grad_accum_steps)
        order = ("none", "dots", "block", "block_sqrt").index(c.remat)
        return words, order, c.grad_accum_steps, -c.stage

    tried, picked, said = combinations(rows), set(), []
    limits = sorted({plan(c, True).total_bytes for c in tried})  # each lets one more in
    for limit in limits:
        choice = search(tried, plan, limit, said.append, trained=trained)
        fitting = [c for c in tried if plan(c, True).total_bytes <= limit]
        assert choice.chosen.candidate == min(fitting, key=cost)
        assert choice.chosen.plan.compiled.total_bytes <= limit
        picked.add(choice.chosen.candidate)
    assert len(limits) >= 8 and len(picked) >= 3, "or this could hardly fail"
    assert "too much" in said[0] and "chosen" in said[0]
    least = min(plan(c, False).total_bytes for c in tried)
    with pytest.raises(ValueError, match="stage 3.*devices") as error:
        search(tried, plan, least / 4, ignore)
    assert gigabytes(least) in str(error.value)


def one_product(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def make():
    return {"w": jnp.sin(jnp.arange(64.0)).reshape(8, 8)}


def auto(limit=1e9, mesh=None, **settings):
    return zero_jax.Zero(mesh or zero_jax.make_mesh(), "auto", memory_limit=limit, **settings)


def test_an_auto_step_trains_as_the_chosen_stage_does_and_says_why(capsys):
    batch = jnp.cos(jnp.arange(64.0)).reshape(8, 8)
    zeros = auto(), zero_jax.Zero(zero_jax.make_mesh(), 2)
    step, plain = (zero.train_step(one_product, zero.optimizer(TX)) for zero in zeros)
    args = [(p := zero.init(make), zero.optimizer(TX).init(p), batch) for zero in zeros]
    assert step.settings.stage == "auto"
    after = step(*args[0])
    said = capsys.readouterr().out
    assert said.startswith("chose stage 2, 1 micro-batches, remat none") and "fits, chosen" in said
    assert step.settings.stage == 2
    assert str(step.trace(*args[1]).jaxpr) == str(plain.trace(*args[1]).jaxpr)
    assert step.lower(*args[1]).as_text() == plain.lower(*args[1]).as_text()
    assert step.first_bad_leaf(*args[1]) is None
    assert_bitwise(after, plain(*args[1]))


def uses_host(candidate):
    return candidate.offload.optimizer or "host" in candidate.remat


def test_which_candidates_and_how_much_memory_a_mesh_and_a_target_have():
    def found(target="h100", initialized=False, mesh=None, **settings):
        zero = auto(mesh=mesh or zero_jax.abstract_mesh(8), **settings)
        return of_config(zero.config, 1, target, initialized)

    def places(**settings):
        mesh = zero_jax.abstract_mesh(4, model=2)
        return {c.remat.partition("@")[2] for c in found(mesh=mesh, **settings)}

    limit = limits(auto(None, zero_jax.abstract_mesh(8)).config, "h100")[0]
    assert limit == int(0.92 * targets.target("h100").memory_bytes)
    tiers = {(c.remat, str(c.offload)) for c in found()}
    assert {("block@host", "optimizer,params"), ("none", "optimizer")} <= tiers
    for target, mesh in (("cpu", None), ("v5p", None), (None, zero_jax.make_mesh())):
        assert not any(uses_host(c) for c in found(target, mesh=mesh)), target
    stored = found(initialized=True)
    assert not any(c.offload.optimizer for c in stored) and any(uses_host(c) for c in stored)
    assert {str(c.offload) for c in found(offload="optimizer")} == {"optimizer"}
    assert places() == {"", "host", "partitioned", "partitioned+host"}
    assert places(sequence_parallel=True) == {"", "host"}


def test_micro_batches_and_remat_are_the_least_that_may_be_chosen_and_costs_the_papers():
    found = combinations(4, grad_accum_steps=2, remat="dots")
    assert {c.grad_accum_steps for c in found} == {2, 4}
    assert {c.remat for c in found} == {"dots", "block", "block_sqrt"}
    assert [c.cost() for c in found] == sorted(c.cost() for c in found)
    words = {(c.stage, c.grad_accum_steps, c.remat): c.cost()[0] for c in combinations(4)}
    assert (1, 1, "none") not in words, "it is stage 2"
    for stage, k in set(itertools.product((1, 2, 3), (1, 2, 4))) - {(1, 1)}:
        for remat, runs in (("none", 3), ("block", 3), ("block_sqrt", 4)):
            assert words[stage, k, remat] == {1: 2, 2: 1 + k, 3: runs * k}[stage]
    # Of a frozen model nothing is summed, so that more micro-batches cost less than remat.
    plain, dots = Candidate(2, 2, "none"), Candidate(2, 1, "dots")
    assert dots.cost() < plain.cost() and plain.cost(trained=0.0) < dots.cost(trained=0.0)


def planner(seconds=None, size=100, host=0, seen=None, least=100):
    """Plans of these seconds and bytes, the same for all or not; `least` bytes are predicted."""

    def plan(candidate, compile):
        (seen if seen is not None else []).append((candidate, compile))
        held, took, total = (x(candidate) if callable(x) else x for x in (host, seconds, size))
        if isinstance(held, Exception):
            raise held
        found = types.SimpleNamespace(host_seconds=0.0, axes={"data": 1})
        found.total_bytes = total if compile or least is None else least
        found.predicted = types.SimpleNamespace(host=held, terms={}, alias_bytes=0)
        found.host_elements_per_param = held / 1000
        found.time = types.SimpleNamespace(seconds=took) if compile and took else None
        return found

    return plan


def chosen(tried, plan, **options):
    return search(tried, plan, 100, ignore, **options).chosen.candidate


# Seconds and bytes of none, dots and block under a limit of 100; in every row one is chosen.
@pytest.mark.parametrize(
    ("seconds", "sizes", "want", "verdicts"),
    [
        ((3, 1, 2), (100,) * 3, "dots", ["slower, 3 s", "chosen, 1 s", "slower, 2 s"]),
        ((1, 2, 0), (100,) * 3, "none", ["chosen, 1 s", "slower, 2 s"]),
        ((3, 2, 1), (200, 100, 100), "block", ["too much", "slower, 2 s", "chosen, 1 s"]),
        ((3, 2, 1), (100, 100, 200), "dots", ["slower, 3 s", "chosen, 2 s", "too much"]),
        ((None,) * 3, (100,) * 3, "none", ["fits, chosen"]),
    ],
)
def test_a_policy_that_recomputes_more_is_taken_if_it_is_quicker(seconds, sizes, want, verdicts):
    tried = [c for c in combinations(1) if c.stage == 2 and c.remat != "block_sqrt"]
    of = lambda row: lambda c: dict(zip(("none", "dots", "block"), row, strict=True))[c.remat]  # noqa: E731
    said = []
    choice = search(tried, planner(of(seconds), of(sizes)), 100, said.append)
    assert choice.chosen.candidate.remat == want and f"remat {want}" in said[-1].split("\n")[0]
    for found, wanted in zip(choice.considered, verdicts, strict=True):
        assert wanted in found.verdict


def test_steps_of_stages_and_of_micro_batches_are_compared_by_seconds_and_then_by_memory():
    for seconds, sizes, want in [
        ((0.170, 0.176), (18, 3), 2),
        ((0.314, 0.316), (6, 3), 3),  # as quick, and smaller
        ((0.314, 0.363), (101, 3), 3),  # stage 2 does not fit
    ]:
        plan = planner(lambda c, s=seconds: s[c.stage - 2], lambda c, s=sizes: s[c.stage - 2])
        assert chosen(combinations(1, remat="block_sqrt"), plan).stage == want
    # One micro-batch fits with recomputation alone; two without it are quicker.
    fits = lambda c: c.stage == 3 and (c.remat == "block" or c.grad_accum_steps > 1)  # noqa: E731
    plan = planner(lambda c: 1.0 if c.remat == "none" else 1.2, lambda c: 100 if fits(c) else 200)
    assert chosen(combinations(2), plan) == Candidate(3, 2, "none")
    # Where all fit, those of the fewest micro-batches of each stage are compiled, and of these as
    # many policies as steps get shorter.
    seen, said, tried = [], [], combinations(4)
    search(tried, planner(1.0, seen=seen), 100, said.append)
    found = [c for c, compile in seen if compile]
    assert {(c.stage, c.grad_accum_steps) for c in found} == {(1, 2), (2, 1), (3, 1)}
    assert {c.remat for c in found} == {"none", "dots"} and len(found) == 6
    assert f"not compiled: {len(tried) - 6} others" in said[-1]


# Host memory: only stage 3 without it fits.
TIERS = combinations(1, remat="block", places=("host",), states=STATES)
only_stage_3 = lambda c: 100 if c.stage == 3 and not uses_host(c) else 200  # noqa: E731
states_in_host = {"none": 0, "optimizer": 800, "optimizer,params": 1200}
in_host = lambda c: states_in_host[str(c.offload)] + 300 * ("host" in c.remat)  # noqa: E731


def test_what_crosses_to_the_host_counts_as_words_that_leave_the_device():
    """0.3 or 0.8 words to the host are dearer than none, and cheaper than the gather of stage 3."""
    choice = search(TIERS, planner(size=only_stage_3, host=in_host, least=None), 100, ignore)
    order = [c.candidate for c in choice.considered]
    costs = [c.candidate.cost(c.plan) for c in choice.considered]
    assert costs == sorted(costs)
    assert [c.remat for c in order[:3]] == ["block", "block_sqrt", "block@host"]
    assert {(c.stage, c.grad_accum_steps, str(c.offload)) for c in order[:3]} == {(2, 1, "none")}
    before = {(c.remat, str(c.offload)) for c in order if c.stage < 3}
    assert {("block@host", "none"), ("block", "optimizer")} <= before
    assert ("block", "optimizer,params") not in before, "1.2 words are more than stage 3's one"
    assert choice.chosen.candidate == Candidate(3, 1, "block")
    chosen(TIERS, planner(host=in_host, seen=(seen := [])))
    first = [c for c, compile in seen if not compile]
    assert first == [Candidate(2, 1, "block")], "none is planned before its turn can come"


def test_more_host_memory_than_there_is_and_optimizers_that_can_not_stream_are_left_out():
    said, only = [], [Candidate(2, 1, "block", STATES[1])]
    with pytest.raises(ValueError, match="100 B"):
        search(only, planner(host=in_host), 100, said.append, host_limit=799)
    assert "800 B in host memory: too much" in said[0] and "799 B" in said[0]
    choice = search(only, planner(host=in_host), 100, ignore, host_limit=800)
    assert choice.chosen.verdict == "compiled 100 B, 800 B in host memory: fits, chosen"
    with pytest.raises(ValueError, match="there is no candidate"):
        search([], planner(), 100, ignore)
    refuse = lambda c: CannotStream("lamb can't") if c.offload.optimizer else 0  # noqa: E731
    plan, said = planner(size=only_stage_3, host=refuse, least=None), []
    assert search(TIERS, plan, 100, said.append).chosen.candidate == Candidate(3, 1, "block")
    assert "skipped stage 2, 1 micro-batches, remat block, optimizer in host memory" in said[0]


def test_a_candidate_whose_compilation_runs_out_of_memory_is_left_out_and_other_errors_are_not():
    def plan(candidate, compile, stage_2=out_of_memory):
        if compile and candidate.stage == 2:
            stage_2()
        return planner()(candidate, compile)

    tried = [Candidate(2, 1, "none"), Candidate(3, 1, "none")]
    choice = search(tried, plan, 100, ignore)
    assert choice.chosen.candidate.stage == 3
    assert choice.considered[0].verdict == "does not compile: out of memory"
    with pytest.raises(jax.errors.JaxRuntimeError, match="other"):
        search(tried, functools.partial(plan, stage_2=other), 100, ignore)


def other():
    raise jax.errors.JaxRuntimeError("INTERNAL: another error than RESOURCE_EXHAUSTED")


# Meshes for 64 devices and 100 bytes: of those that fit, the fastest on a roofline. Far above the
# limit nothing is compiled.
@pytest.mark.parametrize(
    ("sizes", "compiled", "why", "fastest"),
    [
        ((180, 120, 90, 70), [2, 4, 8], ["does not fit, as predicted", "does not fit", "", ""], 3),
        ((200,) * 4, [], ["does not fit, as predicted"] * 4, None),
    ],
)
def test_the_fastest_mesh_of_those_that_fit_is_named(sizes, compiled, why, fastest):
    asked = []

    def plan(mp, compile):
        if mp == 16:
            raise ValueError("12 heads do not divide by 16")
        asked.extend([mp] * compile)
        taken = {1: 1.0, 2: 2.0, 4: 4.0, 8: 3.0}[mp]
        time = types.SimpleNamespace(seconds=taken, exposed_seconds=taken / 4, overlapped=0.5)
        more = {"total_bytes": sizes[mp.bit_length() - 1], "axes": {"data": 64 // mp}}
        more |= {"countable": True, "elements_per_param": 3.0, "time": time if compile else None}
        return types.SimpleNamespace(**more)

    rows = list(advice.compare(advice.splits(64), plan, 100))
    assert asked == compiled
    assert [row.why for row in rows] == [*why, "12 heads do not divide by 16"]
    assert advice.fastest(rows) is (rows[fastest] if fastest else None)
    said = advice.format_meshes(rows)
    if fastest:
        assert "fastest that fits" in said.splitlines()[4]
        assert "25%" in said and said.endswith("use --mesh model=8")
    else:
        assert "none fits" in said


TOKENS = 2 * MLP_CHUNK
TWO = {"whole": (1.0, 30), "chunks": (1.02, 20)}  # seconds and bytes of the best candidates


@pytest.mark.parametrize(
    ("tokens", "results", "want"),
    [
        (TOKENS, TWO, "whole"),
        (TOKENS, TWO | {"chunks": (1.005, 20)}, "chunks"),  # as fast, smaller
        (TOKENS, TWO | {"whole": None}, "chunks"),
        (TOKENS, {"whole": (math.inf, 30), "chunks": (math.inf, 20)}, "whole"),
        (TOKENS - 1, {"whole": (1.0, 30)}, "whole"),
        (TOKENS, {"whole": None, "chunks": None}, None),
    ],
)
def test_mlps_in_chunks_are_chosen_for_long_rows_if_steps_are_not_longer(tokens, results, want):
    model = TextModel(gpt.GPTConfig(layers=1, width=8, heads=1, vocab=8, seq=TOKENS))
    asked = []

    class Zero:
        def choose(self, own, has_aux):
            asked.append("chunks" if own.config.mlp_chunk else "whole")
            if results[asked[-1]] is None:
                raise ValueError(f"nothing fits: {asked[-1]}")
            seconds, size = results[asked[-1]]
            plan = types.SimpleNamespace(total_bytes=size)
            best = types.SimpleNamespace(seconds=seconds, plan=plan)
            return types.SimpleNamespace(chosen=best, zero=asked[-1])

    run = functools.partial(choose, Zero(), model, lambda own: (own,), tokens)
    if want is None:
        with pytest.raises(ValueError, match="nothing fits: chunks"):
            run()
    else:
        zero, own = run()
        assert zero == want == ("chunks" if own.config.mlp_chunk == MLP_CHUNK else "whole")
    assert asked == list(results)
    # MLPs that have chunks, or experts, stay as they are.
    fixed = dataclasses.replace(model, config=dataclasses.replace(model.config, mlp_chunk=16))
    asked.clear()
    results = dict.fromkeys(("chunks",), (1.0, 1))
    assert choose(Zero(), fixed, lambda own: (own,), tokens)[1] is fixed and asked == ["chunks"]
