"""The files of `accelerate config` that accelerate and trl have as examples, judged one by one.

What they mean stands in accelerate's guides to FSDP, DeepSpeed, parallelism, and its dataclasses.
"""

from judged import check, keys

from zero_jax.translate.account import NOT_NEEDED, TRANSLATED

BF16 = {"precision": "bf16", "reduce": "bf16"}  # FSDP and DeepSpeed send gradients in it
CP = "parallelism_config.parallelism_config_cp_size"
SP = "parallelism_config.parallelism_config_sp_size"


def test_ddp_is_stage_0_and_sums_in_fp32():
    check("accelerate/trl_multi_gpu.yaml", stage=0, mesh={"data": 8}, precision="bf16")


def test_several_machines_are_devices_of_one_mesh():
    found, _ = check("accelerate/accelerate_multi_node.yaml", stage=0, mesh={"data": 8})
    assert {"machine_rank", "main_process_ip", "main_process_port"} <= keys(found, NOT_NEEDED)


def test_deepspeed_stage_1():
    check("accelerate/trl_deepspeed_zero1.yaml", stage=1, mesh={"data": 8}, **BF16)


def test_deepspeed_stage_2_offloads_nothing():
    found, _ = check("accelerate/trl_deepspeed_zero2.yaml", stage=2, mesh={"data": 8}, **BF16)
    assert "deepspeed_config.offload_optimizer_device" in keys(found, NOT_NEEDED)


def test_deepspeed_stage_3_saves_what_any_stage_loads():
    found, _ = check("accelerate/trl_deepspeed_zero3.yaml", stage=3, mesh={"data": 8}, **BF16)
    names = {"deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model"}
    assert names <= keys(found, NOT_NEEDED)


def test_full_shard_is_stage_3():
    found, _ = check("accelerate/accelerate_fsdp.yaml", stage=3, mesh={"data": 2}, **BF16)
    names = ("auto_wrap_policy", "backward_prefetch", "state_dict_type", "use_orig_params")
    assert {f"fsdp_config.fsdp_{name}" for name in names} <= keys(found, NOT_NEEDED)


def test_fsdp1_may_write_its_strategy_as_reshard_after_forward():
    check("accelerate/trl_fsdp1.yaml", stage=3, mesh={"data": 8}, **BF16)


def test_fsdp2_that_reshards_is_stage_3():
    check("accelerate/trl_fsdp2.yaml", stage=3, mesh={"data": 8}, **BF16)


def test_replicas_and_tensor_parallelism_are_axes_of_the_mesh():
    found, _ = check(
        "accelerate/accelerate_tp_hsdp.yaml",
        stage=3,
        mesh={"replica": 2, "data": 2, "model": 2},
        **BF16,
    )
    assert CP in keys(found, NOT_NEEDED), "a size of 1 splits nothing"


def test_context_parallelism_has_no_equal():
    check(
        "accelerate/trl_context_parallel_2gpu.yaml",
        stage=3,
        mesh={"data": 2},
        remat="block",
        no_equal=[CP],
        **BF16,
    )


def test_ulysses_has_no_equal():
    check("accelerate/trl_alst_ulysses_4gpu.yaml", stage=3, mesh={"data": 4}, no_equal=[SP], **BF16)


def test_a_deepspeed_file_that_is_named_is_read_too():
    ds = "sp-alst.ds-config.json: "
    found, _ = check(
        "accelerate/sp-alst.accelerate-config.yml",
        stage=3,
        mesh={"data": 4},
        batch=4 * 8,
        no_equal=[ds + "seq_parallel_communication_data_type"],
        **BF16,
    )
    assert ds + "zero_optimization.stage" in keys(found, TRANSLATED)


def test_the_deepspeed_file_by_itself_needs_the_devices():
    check(
        "accelerate/sp-alst.ds-config.json",
        devices=4,
        stage=3,
        mesh={"data": 4},
        batch=32,
        no_equal=["seq_parallel_communication_data_type"],
        **BF16,
    )


def test_fp8_has_no_equal_and_bf16_stands_there():
    check(
        "accelerate/accelerate_fp8.yaml",
        stage=0,
        mesh={"data": 2},
        precision="bf16",
        no_equal=["mixed_precision", "fp8_config.*"],
    )


def test_keys_that_accelerate_does_not_know_either_are_unknown():
    check(
        "accelerate/accelerate_invalid_keys.yaml",
        stage=0,
        mesh={"data": 1},
        unknown=["invalid_key", "another_invalid_key"],
    )
