"""Translations of real configurations, beside expectations by hand.

These come from DeepSpeed's documentation and `engine.py`, accelerate's guides, and for "auto" the
defaults of transformers' `TrainingArguments`. The printed lines make a `Zero` on eight simulated
devices, and train.py parses its printed line.
"""

import fnmatch
import json
import pathlib
import re
import shlex

import jax.numpy as jnp
import optax
import pytest
import yaml

import zero_jax
from training import config, optimizers
from zero_jax.translate import command

DATA = pathlib.Path(__file__).parent / "data"
BF16 = {"precision": "bf16", "reduce": "bf16"}  # FSDP and DeepSpeed reduce gradients in it
HYSTERESIS = "fp16.hysteresis"  # DeepSpeed waits for two overflows
FP16 = {"precision": "fp16", "unsupported": [HYSTERESIS]}
CP, SP = (f"parallelism_config.parallelism_config_{name}_size" for name in ("cp", "sp"))
SEQUENCE = "seq_parallel_communication_data_type"

# fmt: off
EXPECTED = {  # stage, devices (of --devices for a JSON), and all else; DDP sums in fp32
    "accelerate/trl_multi_gpu.yaml": (0, 8, {"precision": "bf16"}),
    "accelerate/accelerate_multi_node.yaml": (0, 8, {}),
    "accelerate/trl_deepspeed_zero1.yaml": (1, 8, BF16),
    "accelerate/trl_deepspeed_zero2.yaml": (2, 8, BF16),
    "accelerate/trl_deepspeed_zero3.yaml": (3, 8, BF16),
    "accelerate/accelerate_fsdp.yaml": (3, 2, BF16),
    "accelerate/trl_fsdp1.yaml": (3, 8, BF16),
    "accelerate/trl_fsdp2.yaml": (3, 8, BF16),
    "accelerate/accelerate_tp_hsdp.yaml": (
        3, 8, {**BF16, "mesh": {"replica": 2, "data": 2, "model": 2}}),
    "accelerate/trl_context_parallel_2gpu.yaml": (
        3, 2, {**BF16, "remat": "block", "unsupported": [CP]}),
    "accelerate/trl_alst_ulysses_4gpu.yaml": (3, 4, {**BF16, "unsupported": [SP]}),
    "accelerate/sp-alst.accelerate-config.yml": (
        3, 4, {**BF16, "batch": 4 * 8, "unsupported": [f"sp-alst.ds-config.json: {SEQUENCE}"]}),
    "accelerate/sp-alst.ds-config.json": (3, 4, {**BF16, "batch": 32, "unsupported": [SEQUENCE]}),
    "accelerate/accelerate_fp8.yaml": (
        0, 2, {"precision": "bf16", "unsupported": ["mixed_precision", "fp8_config.*"]}),
    "accelerate/accelerate_invalid_keys.yaml": (
        0, 1, {"unknown": ["invalid_key", "another_invalid_key"]}),
    # 8 rows a device, 5e-5, no decay and a norm of 1 are the Trainer's.
    "deepspeed/accelerate_zero1.json": (1, 8, {
        **FP16, "batch": 64, "scale": (2.0**16, 1000),
        "train": {"optimizer": "adamw", "lr": 5e-5, "clip": 1.0}}),
    "deepspeed/accelerate_zero3_offload.json": (
        3, 8, {**FP16, "batch": 64, "offload": "optimizer,params"}),
    "deepspeed/accelerate_tests_zero2.json": (
        2, 8, {"batch": 64, "offload": "optimizer", "train": {"weight_decay": 0.0}}),
    "deepspeed/transformers_zero2.json": (
        2, 4, {"batch": 32, "offload": "optimizer", "train": {"optimizer": "adamw", "lr": 5e-5}}),
    "deepspeed/transformers_zero3.json": (3, 8, {"batch": 64, "offload": "optimizer,params"}),
    "deepspeed/transformers_zero3_2021.json": (3, 8, {  # without gradient_clipping there is none
        **FP16, "offload": "optimizer,params",
        "train": {"clip": 0, "lr": 3e-5, "weight_decay": 3e-7}}),
    "deepspeed/axolotl_zero1_torch_compile.json": (1, 8, {"batch": 64}),
    "deepspeed/axolotl_zero2.json": (2, 8, {"batch": 64, "offload": "optimizer"}),
    # DeepSpeed moves the 2Ψ/N of bf16; the 12Ψ/N of fp32 stay on the device there, as here.
    "deepspeed/axolotl_zero3_bf16_cpuoffload_params.json": (3, 8, {**BF16, "batch": 64}),
    # Activations are sharded over a model axis, which the file does not have.
    "deepspeed/deepspeed_gpt2_zero2_gas3.json": (2, 8, {
        "precision": "fp16", "micro_batches": 3, "batch": 8 * 3 * 8, "remat": "block",
        "unsupported": [HYSTERESIS, "activation_checkpointing.partition_activations"]}),
    "deepspeed/deepspeed_gpt2_zero2_offload.json": (
        2, 4, {**FP16, "batch": 4, "offload": "optimizer"}),
    "deepspeed/deepspeed_torch_compile_z3.json": (
        3, 8, {**BF16, "batch": 8, "train": {"optimizer": "adamw", "lr": 1e-3, "clip": 1.0}}),
    "deepspeed/examples_bert_lamb.json": (0, 64, {
        "precision": "fp16", "micro_batches": 65536 // 64 // 64, "batch": 65536,
        "unsupported": ["sparse_attention.*", *(
            f"optimizer.params.{name}" for name in ("bias_correction", "max_coeff", "min_coeff"))],
        "train": {"optimizer": "lamb", "lr": 0.011, "weight_decay": 0.01}}),
    "deepspeed/examples_bert_01adam.json": (0, 64, {
        "precision": "fp16", "micro_batches": 4, "batch": 4096, "unsupported": ["optimizer.type", *(
            f"optimizer.params.{name}" for name in (
                "bias_correction", "var_freeze_step", "local_step_scaler", "comm_backend_name"))]}),
    "deepspeed/examples_imagenet_z1.json": (
        1, 8, {"precision": "fp16", "batch": 256, "train": {"clip": 0}}),
    "deepspeed/examples_gpt2_w8a8.json": (
        0, 2, {"precision": "fp16", "batch": 8, "unsupported": ["compression_training.*"]}),
}
# fmt: on


def run(made):
    """Executes the printed lines; returns their names."""
    names = {"loss_fn": lambda params, x: jnp.mean((x @ params["w"] - 1.0).astype("float32") ** 2)}
    exec(command.python(made), names)
    assert isinstance(names["zero"], zero_jax.Zero)
    assert isinstance(names["tx"], optax.GradientTransformation)
    return names


def train(made):
    """Returns the settings that train.py reads from its printed command line."""
    words = shlex.split(command.train(made))
    assert words[:2] == ["python", "train.py"]
    return config.resolve(config.parse(words[2:]), optimizers.RATES)


def translated(name):
    devices = EXPECTED[name][1] if name.endswith(".json") else None
    return command.translate((DATA / name).read_text(), str(DATA / name), devices)


def dotted(tree, prefix=""):
    """Yields the names of all values, of lists too."""
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        yield from dotted(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]


def test_every_file_is_judged_and_has_a_source_and_a_licence():
    files = {str(path.relative_to(DATA)) for path in DATA.glob("*/*")}
    rows = re.findall(r"^\| `(\S+)` \|.*\| (\S+) \|$", (DATA / "SOURCES.md").read_text(), re.M)
    assert {name for name, _ in rows} == files == set(EXPECTED)
    assert {licence for _, licence in rows} <= {"Apache-2.0", "MIT"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_becomes_what_is_expected_and_each_key_is_listed_once(name):
    stage, devices, more = EXPECTED[name]
    mesh, (made, rows) = more.get("mesh", {"data": devices}), translated(name)
    zero, settings = run(made)["zero"], train(made)
    assert zero.stage == settings.stage == stage
    assert config.mesh_sizes(settings.mesh) == mesh
    axes = {axis: size for axis, size in zero.mesh.shape.items() if axis != "data"}
    assert axes == {axis: size for axis, size in mesh.items() if axis != "data"}
    precision, reduce = more.get("precision", "fp32"), more.get("reduce", "fp32")
    expected = zero_jax.Precision(precision, reduce)
    assert (zero.precision.compute, zero.precision.reduce) == (expected.compute, expected.reduce)
    if "scale" in more:
        assert (zero.precision.initial_scale, zero.precision.growth_interval) == more["scale"]
    assert (settings.compute, settings.reduce) == (precision, reduce)
    assert zero.micro_batches == settings.micro_batches == more.get("micro_batches", 1)
    assert zero.remat == settings.remat == more.get("remat", "none")
    offload = more.get("offload")
    assert settings.offload == offload and str(zero.offload) == (offload or "none")
    assert made["batch"] == more.get("batch")
    assert settings.batch == more.get("batch", config.Config().batch)
    for flag, value in more.get("train", {}).items():
        assert getattr(settings, flag) == value, flag
    for verdict in ("unsupported", "unknown"):
        found = {key for key, _, of, _ in rows if of == verdict}
        patterns = more.get(verdict, [])
        assert all(fnmatch.filter(found, pattern) for pattern in patterns), verdict
        assert found == {k for pattern in patterns for k in fnmatch.filter(found, pattern)}, verdict
    # The account has every key of the file once.
    parse = json.loads if name.endswith(".json") else yaml.safe_load
    keys = [*dotted(parse((DATA / name).read_text()))]
    if name.endswith("sp-alst.accelerate-config.yml"):
        beside = json.loads((DATA / "accelerate/sp-alst.ds-config.json").read_text())
        keys += [f"sp-alst.ds-config.json: {key}" for key in dotted(beside)]
    assert sorted(row[0] for row in rows) == sorted(keys)
    text = " ".join(command.account(rows).replace("\n#", " ").split())
    assert all(f"{row[0]} {' '.join(row[1].split())}" in text and row[3] in text for row in rows)


def test_the_printed_lines_train():
    names = run(translated("deepspeed/deepspeed_torch_compile_z3.json")[0])
    params = names["zero"].init(lambda: {"w": jnp.ones((8, 8))})
    state = names["zero"].optimizer(names["tx"]).init(params)
    losses = []
    for _ in range(40):
        params, state, metrics = names["step"](params, state, jnp.ones((8, 8)))
        losses.append(float(metrics.loss))
    assert losses[0] == 49.0 and losses[-1] < losses[0]
