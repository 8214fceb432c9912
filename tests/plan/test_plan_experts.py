"""Plans of experts that stay: what rests and what travels, beside compiled programs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import zero_jax
from zero_jax.commands import plan as command
from zero_jax.engine import lifetimes
from zero_jax.hlo import targets
from zero_jax.models import decoder, families
from zero_jax.plan import expert_words, flat_program, memory, under_way
from zero_jax.plan.case import Case
from zero_jax.plan.planning import turned_bytes
from zero_jax.sharding import cuts

CONFIG = decoder.DecoderConfig(
    layers=3,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=48,
    vocab=64,
    seq=32,
    loss_chunk=64,
    mixture=decoder.Mixture(4, 2, capacity=1.0),
)
TX = optax.adamw(1e-3)


def make():
    return nnx.state(decoder.Decoder(CONFIG, nnx.Rngs(0)), nnx.Param)


def loss(params, rows):
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(CONFIG, nnx.Rngs(0))))
    pair, routed = decoder.routed_loss(nnx.merge(graph, params), rows)
    return zero_jax.Weighted(*pair), routed


def planned(experts, data, stage):
    devices = jax.devices()[: experts * data]
    zero = zero_jax.Zero(zero_jax.make_mesh(experts=experts, devices=devices), stage, remat="block")
    rows = jax.ShapeDtypeStruct((8, 17), jnp.int32)
    return zero.plan(loss, TX, zero.abstract(make), rows, has_aux=True, compile=True)


# Each stage on one mesh; slow: on all.
MESHES = {0: (2, 2), 1: (4, 1), 2: (4, 2), 3: (2, 2)}


@pytest.mark.parametrize(
    ("stage", "experts", "data"),
    [
        pytest.param(stage, *mesh, marks=[pytest.mark.slow] * (mesh != MESHES[stage]))
        for stage in range(4)
        for mesh in [(2, 2), (4, 1), (4, 2)]
    ],
)
def test_bytes_at_rest_in_closed_form_are_those_of_the_program(experts, data, stage):
    plan = planned(experts, data, stage)
    shapes = jax.eval_shape(make)
    closed = memory.estimate(shapes, shards=experts * data, stage=stage, tx=TX, experts=experts)
    batch = 8 // (experts * data) * 17 * 4
    assert plan.compiled.argument_bytes == closed.at_rest + batch


@pytest.mark.parametrize(("experts", "data"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_words_are_those_of_all_that_travels_and_of_tokens(experts, data):
    plan = planned(experts, data, 3)
    room, D = CONFIG.mixture.room(16), CONFIG.width
    # There and back, forward twice and backward.
    assert plan.token_words == 6 * CONFIG.layers * (8 // (experts * data)) * 4 * room * D
    assert plan.compiled.words["all-to-all"] == plan.token_words
    foretold = plan.token_words / plan.num_params + 3 * plan.travelling
    # Small leaves, which stay whole, count here.
    assert plan.compiled.words_per_param(plan.num_params) == pytest.approx(foretold, rel=0.06)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            [],
            "are gathered; with --experts 8 they stay: shorter on the wire at stage 3 below 10,901",
        ),
        pytest.param(
            ["--experts", "8"],
            "stay in 8 groups: shorter on the wire at stage 3 below 10,901",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--remat", "none", "--experts", "4"],
            "in 4 groups: shorter on the wire at stage 3 below 16,128",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_from_how_many_tokens_on_experts_are_better_gathered_is_said(args, words, capsys):
    given = ["--model", "mixtral-8x7b", "--devices", "64", "--batch-per-device", "4"]
    assert command.main([*given, "--capacity", "1.0", *args]) == 0
    assert (
        f"{words} tokens of a device and micro-batch, of which there are 4,096"
        in capsys.readouterr().out
    )


EXPERTS = 32 * 8 * 3 * 4096 * 14336  # parameters of Mixtral's, 45.1e9


def test_from_there_on_gathering_sends_as_many_words():
    """By hand: three products of 4096 x 14336 each; of what is sent 7 / 8 leave a device."""
    config = families.with_capacity(families.preset("mixtral-8x7b"), 1.0)
    tokens = expert_words.even(config, 8, 8, "block")
    assert 3 * EXPERTS * 7 / 8 == pytest.approx(6 * 32 * tokens * 2 * 4096 * 7 / 8)
    at = functools.partial(expert_words.groups, config, 8, remat="block")
    assert (at(tokens=int(tokens) - 1), at(tokens=int(tokens) + 1)) == (8, 1)
    assert expert_words.groups(families.preset("qwen3-8b"), 64, 1, "block") == 1


def test_between_hosts_a_gather_shares_wires_and_an_all_to_all_has_one():
    """By hand, in seconds: a ring of 64 has eight cards of 50 GB/s a host, and a group a host."""
    config = families.with_capacity(families.preset("mixtral-8x7b"), 1.0)
    h100 = targets.target("h100")
    tokens = expert_words.even(config, 8, 64, "block", h100)
    gathered = 3 * EXPERTS * 63 / 64 / 400e9
    own = 3 * EXPERTS / 8 * 7 / 8 / 450e9
    rows = 6 * 32 * tokens * 2 * 4096 * 7 / 8 / 50e9
    assert gathered == pytest.approx(own + rows)
    at = functools.partial(expert_words.groups, config, 64, remat="block", target=h100)
    assert (at(tokens=int(tokens) - 1), at(tokens=int(tokens) + 1)) == (8, 1)


def test_many_choices_make_tokens_the_smaller_thing():
    """By hand: Qwen3's eight choices of 128 at capacity 1.25, gathered in 8 groups on a host."""
    config = families.with_capacity(families.preset("qwen3-30b-a3b"), 1.25)
    experts = config.layers * 128 * 3 * config.width * config.hidden
    tokens = expert_words.even(config, 8, 8, "block")
    assert 3 * experts == pytest.approx(5 * config.layers * tokens * 8 * config.width)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--experts", "3", "--devices", "6"], "experts=2 or 4 or 8"),
        (["--experts", "3"], "multiple of replica 1 x experts 3"),
        (["--model", "qwen3-4b", "--experts", "2"], "no parameter has a dim that is named"),
        (["--capacity", "0"], "would drop every token"),
    ],
)
def test_what_can_not_be_planned_is_refused(args, words, capsys):
    assert command.main(["--model", "mixtral-8x7b", "--devices", "8", *args]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.parametrize(
    ("experts", "capacity", "remat", "latencies", "most_bytes", "most_seconds"),
    [
        (8, 1.0, "dots", True, 33.8e9, 0.56),
        (8, 1.0, "block", False, 14.2e9, 0.70),
    ],
)
def test_mixtral_on_64(
    experts, capacity, remat, latencies, most_bytes, most_seconds, tmp_path, every_pass
):
    path = tmp_path / "plan.json"
    args = ["--model", "mixtral-8x7b", "--devices", "64", "--batch-per-device", "4"]
    args += ["--experts", str(experts), "--capacity", str(capacity), "--remat", remat]
    args += ["--reduce", "bf16", "--compile", "--json", str(path)]
    args += ["--latencies", str(tmp_path / "step.pbtxt")] if latencies else []
    assert command.main(args) == 0
    known = json.loads(path.read_text())
    assert known["compiled"]["total_bytes"] <= most_bytes
    assert known["step_time"]["seconds"] <= most_seconds
    assert known["words_per_param"] < 0.61
    assert abs(known["predicted"]["total_bytes"] / known["compiled"]["total_bytes"] - 1) < 0.05


@pytest.mark.compile
def test_auto_lets_experts_stay(capsys):
    given = ["--model", "nano-experts", "--devices", "8", "--seq", "64", "--auto"]
    assert command.main(given) == 0
    assert "in 8 groups" in capsys.readouterr().out


def test_what_is_not_cut_along_its_first_dim_is_turned():
    def leaf(shape, n, **more):
        cut = cuts.split(shape, n, first=1, **more)
        return lifetimes.Leaf("x", dataclasses.replace(cut, stacked=True), False, True, "", True)

    first, later = leaf((3, 64, 40), 16), leaf((3, 8, 64, 40), 16)
    alone = leaf((3, 2, 64, 40), 16, experts=-3, expert_shards=2)
    several = leaf((3, 8, 64, 40), 16, experts=-3, expert_shards=2)
    assert turned_bytes([first, alone]) == 0
    assert turned_bytes([first, later]) == 4 * 3 * 8 * 4 * 40
    assert turned_bytes([several]) == 4 * 3 * 4 * 4 * 40


@pytest.mark.parametrize(
    ("name", "whole", "part", "turned"),
    [
        ("reduce_scatter", (8, 64, 40), (8, 4, 40), True),
        ("reduce_scatter", (64, 40), (4, 40), False),
        ("reduce_scatter", (1, 64, 40), (1, 4, 40), False),
        ("all_gather", (8, 4, 40), (8, 64, 40), False),
    ],
)
def test_gradients_that_are_scattered_along_a_later_dim_are_turned(name, whole, part, turned):
    values = [flat_program.Value(shape, "bfloat16", 2) for shape in (whole, part)]
    one = flat_program.Operation(name, values[:1], values[1:], [], [], True, "")
    assert under_way.is_turned(one) == turned


@pytest.mark.compile
@pytest.mark.parametrize("seq", [1024, 4096])
def test_gathered_experts_are_turned(seq):
    config = families.with_capacity(families.preset("mixtral-8x7b", layers=4), 1.0)
    precision = zero_jax.Precision("bf16", reduce="bf16")
    zero = zero_jax.Zero(zero_jax.abstract_mesh(16), 3, precision=precision, remat="block")
    plan = Case(config, zero, "adamw", 64, seq).plan(3, target="h100")
    assert plan.predicted.temporaries["turned"] > 0.06 * plan.total_bytes
    assert abs(plan.error) < 0.05
