"""Plans of presets and of adapters beside a frozen base: bytes by hand, and programs for H100."""

import collections
import json

import jax
import pytest
from test_plan import case

from zero_jax.adapters.lora import Lora
from zero_jax.commands import plan as command
from zero_jax.interchange import folder_config
from zero_jax.models import decoder_config, families, hf
from zero_jax.plan.text_model import TextModel

BITS = {"nf4": 4.25, "int8": 8.25, "bf16": 16}  # a parameter of a matrix
BF16 = 2.0  # bytes
RANK = 16
SLOW = pytest.mark.slow


def sizes(config):
    """Parameters in matrices of layers, in the rest, and in adapters of rank 16."""
    layer = decoder_config.layer_shapes(config)
    pairs = [shape for shape in layer.values() if len(shape) == 2]
    matrices = config.layers * sum(a * b for a, b in pairs)
    adapters = config.layers * RANK * sum(a + b for a, b in pairs)
    return matrices, families.num_params(config) - matrices, adapters


def stored(config, base, devices):
    """Bytes of a frozen base, and of adapters with Adam's two moments, on one device."""
    matrices, rest, adapters = sizes(config)
    return (BITS[base] / 8 * matrices + BF16 * rest + 12 * adapters) / devices


@SLOW
@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-1b", "mistral-7b"])
def test_presets_can_be_planned(name):
    plan = case("--model", name, "--devices", 8, "--seq", 512).plan(3)
    psi = families.num_params(families.preset(name))
    assert plan.predicted.argument_bytes == pytest.approx(12 * psi / 8, rel=1e-2)


@pytest.mark.parametrize(
    "base", ["nf4", pytest.param("int8", marks=SLOW), pytest.param(None, marks=SLOW)]
)
def test_a_folder_is_planned_by_its_config(base, tmp_path):
    config = families.preset("qwen3-0.6b", layers=2, width=64, hidden=128, vocab=256)
    (tmp_path / "config.json").write_text(json.dumps(hf.json_of(config, "bfloat16")))
    assert folder_config.config(tmp_path) == config
    lora = ["--lora", RANK, "--base", base] if base else []
    plan = case("--hf", tmp_path, "--devices", 4, "--seq", 64, *lora).plan(3)
    wanted = stored(config, base, 4) if base else 12 * families.num_params(config) / 4
    batch = 65 * 4
    assert plan.predicted.argument_bytes - batch == pytest.approx(wanted, rel=3e-2)


def test_model_flops_leave_out_the_gradients_of_frozen_matrices():
    config = families.preset("qwen3-0.6b")
    matrices, _, adapters = sizes(config)
    whole, adapted = TextModel(config), TextModel(config, Lora())
    head = config.vocab * config.width
    less = whole.flops_per_token(1024) - adapted.flops_per_token(1024)
    assert less == 2 * (matrices + head) - 6 * adapters
    assert jax.eval_shape(adapted.make)["lora"].keys() == set(adapted.adapted.targets)


@pytest.mark.compile
def test_qlora_of_70b_on_8_h100_holds_no_matrix_whole():
    lora = ["--lora", RANK, "--base", "nf4"]
    plan = case("--model", "llama-3.1-70b", "--devices", 8, *lora).plan(3, target="h100")
    compiled, predicted = plan.compiled, plan.predicted
    assert compiled.argument_bytes == predicted.argument_bytes
    assert compiled.alias_bytes == predicted.alias_bytes
    assert compiled.total_bytes < 13e9
    config = families.preset("llama-3.1-70b")
    # Vectors that are too small to be partitioned are replicated.
    assert compiled.argument_bytes == pytest.approx(stored(config, "nf4", 8), rel=1e-3)
    matrices, rest, adapters = sizes(config)
    sent = collections.Counter()
    for one in compiled.collectives:
        sent[one.kind] += one.bytes * one.runs
    # Twice what layers multiply with, once the head, which nothing is learned of; of the embedding
    # rows are looked up; of gradients the adapters' alone, in fp32.
    assert sent["reduce-scatter"] == pytest.approx(4 * adapters, rel=1e-3)
    ends = BF16 * (rest - config.vocab * config.width)
    wanted = 2 * (BITS["nf4"] / 8 * matrices + BF16 * adapters) + ends
    assert sent["all-gather"] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.compile
def test_qlora_of_8b_fits_a_card_of_24_gb(tmp_path):
    path = tmp_path / "plan.json"
    args = ["--model", "llama-3.1-8b", "--devices", "1", "--lora", str(RANK), "--base", "nf4"]
    assert command.main([*args, "--compile", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["compiled"]["total_bytes"] < 0.92 * 24e9
