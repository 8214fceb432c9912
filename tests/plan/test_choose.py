"""stage="auto": what it picks is what a search over all compiled candidates picks."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from problems import gpt_problem, zoo_problem

import zero_jax
from zero_jax.models import gpt
from zero_jax.offload.piecewise import CannotStream
from zero_jax.plan import candidates
from zero_jax.plan.auto import search
from zero_jax.plan.tables import gigabytes

TX = optax.adamw(1e-3)


def gpt_case():
    config = gpt.GPTConfig(layers=4, width=64, heads=4, vocab=256, seq=64, loss_chunk=64)

    def model():
        return gpt.GPT(config, rngs=nnx.Rngs(0))

    graphdef, _ = nnx.split(nnx.eval_shape(model))

    def loss(params, rows):
        return zero_jax.Weighted(*gpt.loss(nnx.merge(graphdef, params), rows))

    return (
        lambda: nnx.state(model(), nnx.Param),
        loss,
        lambda rows: (rows, config.seq + 1),
        jnp.int32,
    )


def mlp_case():
    """Wide layers and few rows: parameters, not activations, fill the memory."""

    def loss(params, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def make():
        return {"up": jnp.zeros((6, 96, 384)), "down": jnp.zeros((6, 384, 96))}

    return make, loss, lambda rows: (rows, 96), jnp.float32


# Devices, and rows on each.
CASES = {
    "gpt on 8": (gpt_case, 8, 1),
    "gpt on 3": (gpt_case, 3, 1),
    "mlp on 4": (mlp_case, 4, 2),
}


@functools.cache
def compiled(name):
    """The case as a planner that compiles each candidate once, and all of its candidates."""
    case, devices, rows = CASES[name]
    make, loss, shape, dtype = case()
    mesh = zero_jax.make_mesh(devices=jax.devices()[:devices])
    batch = jax.ShapeDtypeStruct(shape(rows * devices), dtype)

    @functools.cache
    def plan(candidate, compile):
        zero = zero_jax.Zero(
            mesh, candidate.stage, micro_batches=candidate.micro_batches, remat=candidate.remat
        )
        return zero.plan(loss, TX, zero.abstract(make), batch, compile=compile)

    return plan, candidates.combinations(rows)


def cheapest_that_fits(plan, tried, limit):
    """The exhaustive search: words, then FLOPs of the compiled program, then the stated order."""
    fitting = [c for c in tried if plan(c, True).total_bytes <= limit]
    order = {"none": 0, "dots": 1, "block": 2, "block_sqrt": 3}
    gathers = {"none": 3, "dots": 3, "block": 3, "block_sqrt": 4}
    return min(
        fitting,
        key=lambda c: (
            {1: 2, 2: 1 + c.micro_batches, 3: gathers[c.remat] * c.micro_batches}[c.stage],
            order[c.remat],
            c.micro_batches,
            -c.stage,
        ),
        default=None,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_auto_picks_what_an_exhaustive_search_over_compiled_programs_picks(name):
    plan, tried = compiled(name)
    limits = sorted({plan(c, True).total_bytes for c in tried})  # each lets one more in
    picked = []
    for limit in limits:
        choice = search(tried, plan, limit, report=lambda _: None)
        assert choice.chosen.candidate == cheapest_that_fits(plan, tried, limit)
        assert choice.chosen.plan.compiled.total_bytes <= limit
        picked.append(choice.chosen.candidate)
    assert len(limits) >= 8 and len(set(picked)) >= 3, "or this could hardly fail"


@pytest.mark.heavy
def test_a_limit_that_nothing_fits_under_names_the_smallest_and_what_would_help():
    plan, tried = compiled("mlp on 4")
    least = min(plan(c, False).total_bytes for c in tried)
    with pytest.raises(ValueError, match="nothing fits in .* smallest is stage 3") as error:
        search(tried, plan, least / 4, report=lambda _: None)
    assert "devices" in str(error.value)
    assert gigabytes(least) in str(error.value)


def auto(limit, **settings):
    return zero_jax.Zero(zero_jax.make_mesh(), "auto", memory_limit=limit, **settings)


def test_an_auto_step_trains_as_the_chosen_stage_does_and_says_why(capsys):
    problem = gpt_problem()
    zero = auto(1e9)
    params = zero.init(problem.make)
    opt_state = zero.optimizer(TX).init(params)
    step = zero.train_step(problem.loss, TX)
    with pytest.raises(AttributeError, match="nothing is chosen"):
        step.settings  # noqa: B018
    after = step(params, opt_state, problem.batch)
    said = capsys.readouterr().out
    assert said.startswith("chose stage 2, 1 micro-batches, remat none")
    assert "fits, taken" in said
    assert step.settings.stage == 2

    plain = zero_jax.Zero(zero_jax.make_mesh(), 2)
    params = plain.init(problem.make)
    want = plain.train_step(problem.loss, TX)(
        params, plain.optimizer(TX).init(params), problem.batch
    )
    for mine, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(want), strict=True):
        assert jnp.array_equal(mine, theirs)


@pytest.mark.heavy
def test_what_was_dropped_is_printed_with_its_bytes(capsys):
    problem = gpt_problem()
    params = auto(None).abstract(problem.make)
    roomy = auto(1e9).choice(problem.loss, TX, params, problem.batch)
    tight = auto(0.9 * roomy.chosen.plan.total_bytes)
    capsys.readouterr()
    chosen = tight.choose(problem.loss, TX, params, problem.batch)
    said = capsys.readouterr().out
    assert "too much" in said and "taken" in said
    assert chosen.stage in (1, 2, 3) and chosen != tight


def test_the_topology_is_only_asked_of_what_is_compiled(monkeypatch):
    """A prediction has no topology; the compile for the target gets the caller's."""
    seen = []
    monkeypatch.setattr(
        "zero_jax.plan.auto.search", lambda tried, plan, *_: seen.append(plan(tried[0], False))
    )
    problem = gpt_problem()
    zero = zero_jax.Zero(zero_jax.abstract_mesh(8), "auto", memory_limit=1e9)
    params = zero.abstract(problem.make)
    zero.choice(problem.loss, TX, params, problem.batch, target="h100", topology="2x1x4")
    assert seen[0].compiled is None


def test_micro_batches_and_remat_are_the_least_that_may_be_chosen():
    found = candidates.combinations(4, micro_batches=2, remat="dots")
    assert {c.micro_batches for c in found} == {2, 4}
    assert {c.remat for c in found} == {"dots", "block", "block_sqrt"}
    assert [c.cost() for c in found] == sorted(c.cost() for c in found)


def test_a_device_that_does_not_say_what_it_has_needs_a_limit():
    problem = zoo_problem()
    zero = auto(None)
    with pytest.raises(ValueError, match="memory_limit="):
        zero.choose(problem.loss, TX, zero.abstract(problem.make), problem.batch)


def test_auto_decides_for_a_step_not_for_gradients_alone():
    with pytest.raises(ValueError, match="zero.choose"):
        auto(1e9).value_and_grad(lambda p, x: 0.0)
    with pytest.raises(ValueError, match="zero.choice"):
        auto(1e9).plan(lambda p, x: 0.0, TX, {}, jnp.ones(8))


@pytest.mark.parametrize("limit", [0, -1.0, "60e9", float("inf"), True, 0.5])
def test_a_limit_must_be_positive(limit):
    with pytest.raises(ValueError, match="memory_limit"):
        auto(limit)


def test_costs_follow_the_words_of_the_paper():
    """Which gathers twice a micro-batch at stage 3; layers in groups are gathered once more."""
    words = {(c.stage, c.micro_batches, c.remat): c.cost()[0] for c in candidates.combinations(4)}
    for stage, k in itertools.product((1, 2, 3), (1, 2, 4)):
        for remat, runs in (("none", 3), ("block", 3), ("block_sqrt", 4)):
            assert words[stage, k, remat] == {1: 2, 2: 1 + k, 3: runs * k}[stage]


# Host memory.

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
            total_bytes=size, predicted=predicted, host_words_per_param=words, axes={"data": 1}
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
    assert [str(c) for c in order[:5:2]] == [
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
