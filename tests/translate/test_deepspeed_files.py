"""DeepSpeed's own examples, and those of who uses it: what each is here, judged one by one.

What they mean stands in DeepSpeed's documentation of its configuration and in `engine.py`; what
"auto" is, in transformers' `trainer_config_process` and the defaults of its TrainingArguments.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from judged import check, keys, made, translated

from zero_jax.translate import printed
from zero_jax.translate.account import NOT_NEEDED, TRANSLATED

HYSTERESIS = "fp16.hysteresis"  # DeepSpeed waits for two overflows


def scale(found):
    precision = made(found)["zero"].precision
    return precision.initial_scale, precision.growth_interval


def test_zero1_of_accelerate_is_fp16_with_the_trainers_rate():
    found, settings = check(
        "deepspeed/accelerate_zero1.json",
        devices=8,
        stage=1,
        mesh={"data": 8},
        precision="fp16",
        batch=64,  # 8 rows a device are the Trainer's
        no_equal=[HYSTERESIS],
    )
    assert scale(found) == (2.0**16, 1000)
    assert (settings.optimizer, settings.lr, settings.clip) == ("adamw", 5e-5, 1.0)
    assert "scheduler.params.total_num_steps" in keys(found, TRANSLATED)
    assert "overlap_comm" in " ".join(keys(found, NOT_NEEDED))


def test_zero3_with_both_offloads_has_states_and_masters_in_host_memory():
    found, _ = check(
        "deepspeed/accelerate_zero3_offload.json",
        devices=8,
        stage=3,
        mesh={"data": 8},
        precision="fp16",
        batch=64,
        offload="optimizer,params",
        no_equal=[HYSTERESIS],
    )
    assert "zero_optimization.stage3_max_live_parameters" in keys(found, NOT_NEEDED)


def test_zero2_of_accelerates_tests_leaves_precision_to_the_trainer():
    found, settings = check(
        "deepspeed/accelerate_tests_zero2.json",
        devices=8,
        stage=2,
        mesh={"data": 8},
        batch=64,
        offload="optimizer",
    )
    assert HYSTERESIS in keys(found, NOT_NEEDED), "without fp16 there is no loss scale"
    assert settings.weight_decay == 0.0, "the Trainer's, not torch's 0.01"


def test_zero2_of_transformers_offloads_the_optimizer():
    _, settings = check(
        "deepspeed/transformers_zero2.json",
        devices=4,
        stage=2,
        mesh={"data": 4},
        batch=32,
        offload="optimizer",
    )
    assert (settings.optimizer, settings.lr, settings.clip) == ("adamw", 5e-5, 1.0)


def test_zero3_of_transformers_offloads_everything():
    check(
        "deepspeed/transformers_zero3.json",
        devices=8,
        stage=3,
        mesh={"data": 8},
        batch=64,
        offload="optimizer,params",
    )


def test_zero3_of_transformers_in_2021_names_its_numbers():
    found, settings = check(
        "deepspeed/transformers_zero3_2021.json",
        devices=8,
        stage=3,
        mesh={"data": 8},
        precision="fp16",
        offload="optimizer,params",
        no_equal=[HYSTERESIS],
    )
    assert settings.clip == 0, "gradient_clipping is missing, and DeepSpeed's default is 0"
    assert (settings.lr, settings.weight_decay) == (3e-5, 3e-7)
    lr = made(found)["lr"]
    for step in (0, 7, 499, 5000):  # WarmupLR, logarithmic
        there = 3e-5 * min(1.0, math.log(step + 1) / math.log(500))
        np.testing.assert_allclose(lr(jnp.int32(step)), there, rtol=1e-6)


def test_zero1_of_axolotl_compiles_by_itself_here():
    found, _ = check(
        "deepspeed/axolotl_zero1_torch_compile.json", devices=8, stage=1, mesh={"data": 8}, batch=64
    )
    assert "compile.*" in keys(found, NOT_NEEDED)


def test_zero2_of_axolotl_offloads_the_optimizer():
    check(
        "deepspeed/axolotl_zero2.json",
        devices=8,
        stage=2,
        mesh={"data": 8},
        batch=64,
        offload="optimizer",
    )


def test_offloaded_parameters_alone_have_nothing_to_move_here():
    """DeepSpeed moves the 2Ψ/N of bf16; the 12Ψ/N of fp32 stay on the device there, as here."""
    found, _ = check(
        "deepspeed/axolotl_zero3_bf16_cpuoffload_params.json",
        devices=8,
        stage=3,
        mesh={"data": 8},
        precision="bf16",
        reduce="bf16",
        batch=64,
    )
    assert "zero_optimization.offload_param.device" in keys(found, NOT_NEEDED)


def test_three_micro_batches_of_eight_rows_are_24_a_device():
    check(
        "deepspeed/deepspeed_gpt2_zero2_gas3.json",
        devices=8,
        stage=2,
        mesh={"data": 8},
        precision="fp16",
        micro_batches=3,
        batch=8 * 3 * 8,
        remat="block",
        # Activations are split over a model axis, which the file does not have.
        no_equal=[HYSTERESIS, "activation_checkpointing.partition_activations"],
    )
    assert translated("deepspeed/deepspeed_gpt2_zero2_gas3.json").asked.global_batch() == "24 * D"


def test_cpu_offload_of_old_is_offload_optimizer():
    check(
        "deepspeed/deepspeed_gpt2_zero2_offload.json",
        devices=4,
        stage=2,
        mesh={"data": 4},
        precision="fp16",
        batch=4,
        offload="optimizer",
        no_equal=[HYSTERESIS],
    )


def test_adam_is_adamw_and_bf16_sums_in_bf16():
    found, settings = check(
        "deepspeed/deepspeed_torch_compile_z3.json",
        devices=8,
        stage=3,
        mesh={"data": 8},
        precision="bf16",
        reduce="bf16",
        batch=8,
    )
    assert (settings.optimizer, settings.lr, settings.clip) == ("adamw", 1e-3, 1.0)
    assert "bf16.loss_scale" in keys(found, NOT_NEEDED)
    assert "optax.adamw(lr, b1=0.8, b2=0.999, eps=1e-08, weight_decay=3e-07)" in found.asked.tx.call


def test_lamb_of_bert_is_stage_0_in_many_micro_batches():
    _, settings = check(
        "deepspeed/examples_bert_lamb.json",
        devices=64,
        stage=0,
        mesh={"data": 64},
        precision="fp16",
        micro_batches=65536 // 64 // 64,
        batch=65536,
        no_equal=[
            "optimizer.params.bias_correction",
            "optimizer.params.max_coeff",
            "optimizer.params.min_coeff",
            "sparse_attention.*",
        ],
    )
    assert (settings.optimizer, settings.lr, settings.weight_decay) == ("lamb", 0.011, 0.01)
    alone = translated("deepspeed/examples_bert_lamb.json")
    assert alone.asked.micro_batches() == "1024 // D"
    assert made(alone)["zero"].micro_batches == 1024 // 8, "in terms of the devices there are"


def test_01_adam_is_plain_adam_and_its_1_bit_gradients_have_no_equal():
    names = ("bias_correction", "var_freeze_step", "local_step_scaler", "cuda_aware")
    check(
        "deepspeed/examples_bert_01adam.json",
        devices=64,
        stage=0,
        mesh={"data": 64},
        precision="fp16",
        micro_batches=4,
        batch=4096,
        no_equal=[
            "optimizer.type",
            *(f"optimizer.params.{name}" for name in (*names, "comm_backend_name")),
        ],
    )


def test_a_clipping_of_0_never_clips():
    _, settings = check(
        "deepspeed/examples_imagenet_z1.json",
        devices=8,
        stage=1,
        mesh={"data": 8},
        precision="fp16",
        batch=256,
    )
    assert settings.clip == 0


def test_a_model_that_is_quantised_in_training_has_no_equal():
    check(
        "deepspeed/examples_gpt2_w8a8.json",
        devices=2,
        stage=0,
        mesh={"data": 2},
        precision="fp16",
        batch=8,
        no_equal=["compression_training.*"],
    )
    with pytest.raises(ValueError, match="a batch of 8 is not made of 4 rows on each of 8 devices"):
        translated("deepspeed/examples_gpt2_w8a8.json", devices=8)


def test_the_printed_lines_train():
    found = translated("deepspeed/deepspeed_torch_compile_z3.json")
    names = {
        "loss_fn": lambda params, x: jnp.mean((x @ params["w"] - 1.0).astype(jnp.float32) ** 2)
    }
    exec(printed.python(found.asked), names)
    zero, step = names["zero"], names["step"]
    params = zero.init(lambda: {"w": jnp.ones((8, 8))})
    state = zero.optimizer(names["tx"]).init(params)
    losses = []
    for _ in range(40):
        params, state, metrics = step(params, state, jnp.ones((8, 8)))
        losses.append(float(metrics.loss))
    assert losses[0] == 49.0 and losses[-1] < losses[0]
