"""Plans of folders, of adapters beside a frozen base, and of partitioned experts."""

import functools
import json

import jax
import pytest
from test_plan import BLOCK, case

import zero_jax
from zero_jax.adapters.lora import Lora
from zero_jax.commands import plan as command
from zero_jax.commands.case import Case
from zero_jax.hlo import targets
from zero_jax.interchange import folder_config
from zero_jax.models import decoder, decoder_config, families, hf
from zero_jax.plan import expert_elements, model_states
from zero_jax.plan.plans import Plan, Predicted
from zero_jax.plan.text_model import TextModel


@pytest.mark.slow
def test_a_folder_is_planned_by_its_config_and_model_flops_leave_out_frozen_gradients(tmp_path):
    config = families.preset("qwen3-0.6b", layers=2, width=64, hidden=128, vocab=256)
    (tmp_path / "config.json").write_text(json.dumps(hf.json_of(config, "bfloat16")))
    assert folder_config.config(tmp_path) == config
    # Adapters of rank 16 beside a base in nf4, of 4.25 bits a parameter of a matrix, the rest in
    # bf16; Adam's two moments of adapters alone.
    pairs = [shape for shape in decoder_config.layer_shapes(config).values() if len(shape) == 2]
    matrices = config.layers * sum(a * b for a, b in pairs)
    adapters = config.layers * 16 * sum(a + b for a, b in pairs)
    stored = 4.25 / 8 * matrices + 2 * (families.num_params(config) - matrices) + 12 * adapters
    args = ["--init-from", tmp_path, "--devices", 4, "--global-batch-size", 4, "--seq-len", 64]
    of = case("memory", *args, *BLOCK, "--lora-rank", 16, "--lora-base-dtype", "nf4")
    batch = 65 * 4
    assert of.plan(3).predicted.argument_bytes - batch == pytest.approx(stored / 4, rel=3e-2)
    whole, adapted = TextModel(config), TextModel(config, Lora())
    less = whole.flops_per_token(64) - adapted.flops_per_token(64)
    assert less == 2 * (matrices + config.vocab * config.width) - 6 * adapters


# Partitioned experts.
SMALL = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}
SMALL |= {"vocab": 64, "seq": 32, "loss_chunk": 64}
CONFIG = decoder.DecoderConfig(**SMALL, mixture=decoder.Mixture(4, 2, capacity=1.0))


@pytest.mark.slow
def test_bytes_and_words_are_those_of_the_program():
    """Two groups of two devices at stage 3."""
    mesh = zero_jax.make_mesh(experts=2, devices=jax.devices()[:4])
    of = Case(CONFIG, zero_jax.Zero(mesh, 3, remat="block"), "adamw", 8, 16)
    plan, shapes = of.plan(3, compile=True), jax.eval_shape(of.make)
    closed = model_states.estimate(shapes, of.zero.config, of.tx)
    assert plan.compiled.argument_bytes == closed.at_rest + 8 // 4 * 17 * 4
    # Tokens go there and back, forward twice and backward.
    room, D = CONFIG.mixture.room(16), CONFIG.width
    tokens = plan.sent["all-to-all"].elements
    assert tokens == 6 * CONFIG.layers * (8 // 4) * 4 * room * D
    assert plan.compiled.sent_elements["all-to-all"] == tokens
    sums = plan.sent["reduce-scatter"].elements
    assert plan.compiled.sent_elements["reduce-scatter"] == pytest.approx(sums, rel=0.01)
    # XLA for CPUs merges the two gathers of a layer that no loop runs: of all but the last.
    gathers = plan.compiled.sent_elements["all-gather"] / plan.sent["all-gather"].elements
    assert gathers == pytest.approx(3 / 5, abs=0.1), "embedding and head are gathered too"


def test_the_command_says_from_how_many_tokens_on_experts_are_better_gathered(capsys, monkeypatch):
    held, below = Predicted(4, 8, 0, {}), "less communication time at stage 3 below"
    plan = lambda self, stage, **_: Plan(stage, 1, "block", {"data": 64}, 1, (), 0, held)  # noqa: E731
    monkeypatch.setattr(Case, "plan", plan)
    mixtral = ["--model", "mixtral-8x7b", "--devices", "64", "--expert-capacity-factor", "1.0"]
    for args, how, tokens in [
        (BLOCK, "are gathered; --mesh experts=8 makes them parallel", "10,901"),
        ([*BLOCK, "--mesh", "experts=8"], "are parallel in 8 groups", "10,901"),
        (["--remat", "none", "--mesh", "experts=4"], "in 4 groups", "16,128"),
    ]:
        assert command.main(["memory", *mixtral, "--global-batch-size", "256", *args]) == 0
        said = capsys.readouterr().out
        assert f"{how}. " in said and f" {below} {tokens} " in said and "has 4,096\n" in said
    nano = case("auto", "--model", "nano-experts", "--devices", 8, "--seq-len", 64)
    assert nano.zero.mesh.shape["experts"] == 8, "auto chooses the groups"
    few, many = (case("auto", *mixtral, "--global-batch-size", 64 * each) for each in (10, 11))
    assert few.zero.mesh.shape["experts"] == 8, "10,240 tokens are fewer than 10,901"
    assert "experts" not in many.zero.mesh.shape


def test_a_context_axis_is_planned_with_inputs_and_labels_and_its_tokens_per_device(
    capsys, monkeypatch
):
    args = ["--model", "nano", "--context-parallel", 4, "--mesh", "data=2"]
    args += ["--global-batch-size", 4, "--seq-len", 64]
    of, same = case("memory", *args), case("memory", *args[:2], "--mesh", "context=4", *args[6:])
    assert dict(of.zero.mesh.shape) == {"data": 2, "context": 4}
    assert dict(same.zero.mesh.shape) == {"data": 1, "context": 4}
    assert {name: x.shape for name, x in of.batch.items()} == {"inputs": (4, 64), "labels": (4, 64)}
    held = Predicted(4, 8, 0, {})
    plan = lambda self, stage, **_: Plan(stage, 1, "none", {"data": 2}, 1, (), 0, held)  # noqa: E731
    monkeypatch.setattr(Case, "plan", plan)
    assert command.main(["memory", *map(str, args)]) == 0
    # Two rows of 64 tokens for four devices.
    assert "global batch 4 x 64 tokens (32 tokens per device)" in capsys.readouterr().out


def test_from_there_on_gathering_sends_as_many_words():
    """By hand: three products of 4096 x 14336 each; of what is sent 7 / 8 leave a device."""
    mixtral = families.with_capacity(families.preset("mixtral-8x7b"), 1.0)
    parameters = 32 * 8 * 3 * 4096 * 14336  # of experts, 45.1e9
    tokens = expert_elements.even(mixtral, 8, 8, "block")
    assert 3 * parameters * 7 / 8 == pytest.approx(6 * 32 * tokens * 2 * 4096 * 7 / 8)
    assert expert_elements.groups(families.preset("qwen3-8b"), 64, 1, "block") == 1
    # Qwen3's eight choices of 128 at capacity 1.25: tokens are gathered in 8 groups on a host.
    config = families.with_capacity(families.preset("qwen3-30b-a3b"), 1.25)
    experts = config.layers * 128 * 3 * config.width * config.hidden
    tokens = expert_elements.even(config, 8, 8, "block")
    assert 3 * experts == pytest.approx(5 * config.layers * tokens * 8 * config.width)
    # Between hosts, in seconds: a ring of 64 has eight cards of 50 GB/s a host, and a group a host.
    h100 = targets.target("h100")
    tokens = expert_elements.even(mixtral, 8, 64, "block", h100)
    own, rows = 3 * parameters / 8 * 7 / 8 / 450e9, 6 * 32 * tokens * 2 * 4096 * 7 / 8 / 50e9
    assert 3 * parameters * 63 / 64 / 400e9 == pytest.approx(own + rows)
    at = functools.partial(expert_elements.groups, mixtral, 64, remat="block", target=h100)
    assert (at(tokens=int(tokens) - 1), at(tokens=int(tokens) + 1)) == (8, 1)


def test_what_is_not_partitioned_along_its_first_dim_is_transposed():
    """Experts of a layer (4, 32, 48) along their width over 16 devices; XLA for GPUs."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(16), 3, remat="block")
    found = Case(CONFIG, zero, "adamw", 16, 16).plan(3).predicted
    assert found.temporaries["transposed"] == 4 * CONFIG.layers * 3 * (4 * 32 * 48) // 16
