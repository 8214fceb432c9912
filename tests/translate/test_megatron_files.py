"""Example scripts of Megatron-LM, judged one by one by its `arguments.py`."""

import numpy as np
from judged import check, keys, made

from zero_jax.translate.account import NOT_NEEDED, TRANSLATED

FP8 = ["--fp8-format", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-param-gather"]
GRPO = "group-size prompts-per-step iterations clamp-eps-lower clamp-eps-upper kl-beta"
DECOUPLED = ["--decoupled-lr", "--decoupled-min-lr"]


def test_gpt3_without_a_distributed_optimizer_is_stage_0():
    found, settings = check(
        "megatron/gpt3_175b.sh",
        stage=0,
        mesh={"data": 1, "model": 8},
        precision="fp16",
        micro_batches=1536,  # 1536 rows, one at a time, on one group of 8
        batch=1536,
        no_equal=["--pipeline-model-parallel-size", "--step-batch-size-schedule"],
    )
    assert (settings.steps, settings.seq, settings.clip) == (500000, 2048, 1.0)
    assert settings.warmup == 430, "a thousandth of --lr-decay-iters"
    precision = made(found)["zero"].precision
    assert (precision.initial_scale, precision.growth_interval) == (2.0**32, 1000)
    lr = made(found)["lr"]
    half = (6e-5 + 6e-6) / 2  # a cosine is half way in the middle of 430 and 430000
    np.testing.assert_allclose(lr((430000 + 430) / 2), half, rtol=1e-4)
    np.testing.assert_allclose(lr(215), 3e-5, rtol=1e-6)


def test_llama_with_a_distributed_optimizer_is_stage_1():
    found, settings = check(
        "megatron/llama3_8b_fp8.sh",
        stage=1,
        mesh={"data": 8},
        precision="bf16",
        reduce="bf16",  # --grad-reduce-in-bf16
        micro_batches=16,
        batch=128,
        no_equal=[*FP8, *DECOUPLED],
    )
    assert settings.steps == 1953125000 // 128 and settings.warmup == 3906252 // 128
    assert "--sequence-parallel" in keys(found, NOT_NEEDED), "Megatron leaves it out at TP 1"
    assert "--context-parallel-size" in keys(found, NOT_NEEDED)
    tokenizer = next(row for row in found.rows if row.key == "--tokenizer-type")
    assert "NullTokenizer, then HuggingFaceTokenizer: the last counts" in tokenizer.why
    assert "--fp8-format hybrid" not in {row.key for row in found.rows}, "a quoted flag is one"


def test_megatron_fsdp_of_everything_is_stage_3():
    found, _ = check(
        "megatron/llama3_8b_fsdp_fp8.sh",
        stage=3,
        mesh={"data": 8},
        precision="bf16",
        reduce="bf16",  # --megatron-fsdp-grad-comm-dtype auto is the model's own
        micro_batches=16,
        batch=128,
        no_equal=[*FP8, *DECOUPLED],
    )
    strategy = next(r for r in found.rows if r.key == "--data-parallel-sharding-strategy")
    assert strategy.given == "optim_grads_params", "the default of a variable"
    commented = "--num-distributed-optimizer-instances"
    assert commented not in {row.key for row in found.rows}


def test_experts_of_mixtral_stay_on_an_axis_of_their_own():
    found, settings = check(
        "megatron/mixtral_8x7b.sh",
        stage=1,
        mesh={"experts": 8, "data": 1},
        precision="bf16",  # and sums in fp32, Megatron's default for bf16
        micro_batches=32,
        batch=256,
        no_equal=["--pipeline-model-parallel-size"],
    )
    assert (settings.optimizer, settings.lr, settings.weight_decay) == ("adamw", 1e-4, 0.1)
    assert {"--num-experts", "--moe-grouped-gemm"} <= keys(found, NOT_NEEDED)


def test_a_variable_of_several_values_is_taken_by_its_first_and_that_is_said():
    found, _ = check(
        "megatron/mamba.sh",
        stage=1,
        mesh={"data": 8},
        precision="bf16",
        batch=32,
    )
    size = next(row for row in found.rows if row.key == "--tensor-model-parallel-size")
    assert size.verdict == TRANSLATED and "is 1 or 4: the first is taken" in size.why


def test_selective_recomputation_has_no_equal():
    found, settings = check(
        "megatron/qwen3_8b.sh",
        devices=8,
        stage=0,
        mesh={"data": 8},
        micro_batches=32,
        batch=256,
        no_equal=[
            *("--recompute-granularity", "--recompute-activations", "--recompute-modules"),
            *("--min-lr", "--lr-warmup-samples"),  # without a total of steps nothing falls
            *("--inference-max-seq-length", "--inference-max-requests", "--langrl-env-config"),
            *(f"--grpo-{name}" for name in GRPO.split()),
        ],
    )
    assert found.asked.tx.call.endswith("weight_decay=0.01, mask=decayed)"), "Megatron's default"
    assert settings.lr == 1e-6
