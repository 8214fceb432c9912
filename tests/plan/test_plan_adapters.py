"""Plans of presets and of adapters beside a frozen base: bytes by hand, and programs for H100."""

import json

import jax
import pytest

from zero_jax.adapters.lora import Lora
from zero_jax.commands import plan as command
from zero_jax.interchange import folder_config
from zero_jax.models import decoder_config, families, hf
from zero_jax.plan.text_model import TextModel

NF4, BF16 = 4.25 / 8, 2.0  # bytes a parameter
RANK = 16


def planned(tmp_path, *args):
    path = tmp_path / "plan.json"
    assert command.main([*args, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def sizes(name):
    """Parameters in matrices of layers, in the rest, and in adapters of rank 16."""
    config = families.preset(name)
    layer = decoder_config.layer_shapes(config)
    pairs = [shape for shape in layer.values() if len(shape) == 2]
    matrices = config.layers * sum(a * b for a, b in pairs)
    adapters = config.layers * RANK * sum(a + b for a, b in pairs)
    return matrices, families.num_params(config) - matrices, adapters


@pytest.mark.parametrize(
    ("base", "bytes_a_matrix"),
    [
        ("nf4", NF4),
        pytest.param("int8", 8.25 / 8, marks=pytest.mark.slow),
        pytest.param("bf16", BF16, marks=pytest.mark.slow),
    ],
)
def test_what_rests_of_70b_on_8_devices(base, bytes_a_matrix, tmp_path):
    args = ["--model", "llama-3.1-70b", "--devices", "8", "--lora", str(RANK), "--base", base]
    known = planned(tmp_path, *args)
    matrices, rest, adapters = sizes("llama-3.1-70b")
    wanted = (bytes_a_matrix * matrices + BF16 * rest) / 8
    assert wanted < {"nf4": 5.2e9, "int8": 9.4e9, "bf16": 17.7e9}[base]
    found = known["predicted"]["argument_bytes"]
    # Adam's two moments and the master; the vectors that are too small to be cut are whole.
    assert found == pytest.approx(wanted + 12 * adapters / 8, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-1b", "mistral-7b"])
def test_presets_can_be_planned(name, tmp_path):
    known = planned(tmp_path, "--model", name, "--devices", "8", "--seq", "512")
    psi = families.num_params(families.preset(name))
    assert known["predicted"]["argument_bytes"] == pytest.approx(12 * psi / 8, rel=1e-2)


def test_a_folder_is_planned_by_its_config(tmp_path):
    config = families.preset("qwen3-0.6b", layers=2, width=64, hidden=96, vocab=256)
    (tmp_path / "config.json").write_text(json.dumps(hf.json_of(config, "bfloat16")))
    assert folder_config.config(tmp_path) == config
    known = planned(tmp_path, "--hf", str(tmp_path), "--devices", "4", "--seq", "64")
    psi = families.num_params(config)
    assert known["predicted"]["argument_bytes"] == pytest.approx(12 * psi / 4, rel=5e-2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--base", "nf4"], "--base nf4: only a model that is not trained"),
        (["--model", "llama-3.1-8"], "nearest is 'llama-3.1-8b'"),
        (["--model", "qwen3-8b", "--seq", "50000"], "at most 40960 tokens"),
        (["--hf", "nowhere"], "nowhere/config.json"),
        (["--lora", "16", "--lora-targets", "attn/qq"], "attn/qq"),
        (["--lora", "16", "--lora-targets", "attn/q,"], "an empty pattern"),
        (["--seq", "0"], "--seq 0"),
    ],
)
def test_what_can_not_be_planned_is_refused(args, message, capsys):
    assert command.main([*args, "--devices", "8"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.compile
def test_qlora_of_70b_on_8_h100_is_foretold_to_the_byte_and_holds_no_matrix_whole(tmp_path):
    args = ["--model", "llama-3.1-70b", "--devices", "8", "--lora", str(RANK), "--base", "nf4"]
    known = planned(tmp_path, *args, "--compile")
    compiled, predicted = known["compiled"], known["predicted"]
    assert compiled["argument_bytes"] == predicted["argument_bytes"]
    assert compiled["alias_bytes"] == predicted["alias_bytes"]
    assert compiled["total_bytes"] < 13e9
    matrices, _, adapters = sizes("llama-3.1-70b")
    by_kind = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for one in known["collectives"]:
        if one["kind"] in by_kind:
            by_kind[one["kind"]] += one["bytes"] * one["runs"]
    # Twice what layers multiply with, once the head, which nothing is learned of; of the embedding
    # rows are looked up; of gradients the adapters' alone, in fp32.
    assert by_kind["reduce-scatter"] == pytest.approx(4 * adapters, rel=1e-3)
    config = families.preset("llama-3.1-70b")
    ends = BF16 * (families.num_params(config) - matrices - config.vocab * config.width)
    wanted = 2 * (NF4 * matrices + BF16 * adapters) + ends
    assert by_kind["all-gather"] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.compile
def test_qlora_of_8b_fits_a_card_of_24_gb(tmp_path):
    args = ["--model", "llama-3.1-8b", "--devices", "1", "--lora", str(RANK), "--base", "nf4"]
    known = planned(tmp_path, *args, "--compile")
    assert known["compiled"]["total_bytes"] < 0.92 * 24e9


def test_model_flops_leave_out_the_gradients_of_frozen_matrices():
    config = families.preset("qwen3-0.6b")
    matrices, _, adapters = sizes("qwen3-0.6b")
    whole, adapted = TextModel(config), TextModel(config, Lora())
    head = config.vocab * config.width
    less = whole.flops_per_token(1024) - adapted.flops_per_token(1024)
    assert less == 2 * (matrices + head) - 6 * adapters
    assert jax.eval_shape(adapted.make)["lora"].keys() == set(adapted.adapted.targets)
