"""The table of keys: how each setting of a DeepSpeed JSON and an accelerate YAML is handled.

Sources: constants.py and zero/config.py of DeepSpeed 0.16, accelerate, and TrainingArguments.
"""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Mapping
from typing import Any

TRANSLATED, NOT_NEEDED, UNSUPPORTED, AUTO = "translated", "not needed", "unsupported", "auto"
Kind = str | Mapping[str, Any]
NUMBER, WHOLE, COUNT = "number", "whole number", "whole number of at least 1"
SWITCH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """How a key is handled: its sentence, in which `{name}` is an argument, and its values."""

    why: str
    kind: Kind = ""  # kind of number, or the value of each text that is allowed; "" is any value
    default: Any = None
    trainer: tuple[str, Any] | None = None  # argument of the Trainer for "auto", and its default
    verdict: str = TRANSLATED
    same: str = ""  # value of an unsupported key that asks for what zero_jax does, else off


def shown(value: Any) -> str:
    """Returns a value as a JSON or YAML has it, shortened."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return text if len(text) <= 40 else text[:37] + "..."


def parse(name: str, value: Any, kind: Kind) -> Any:
    """Returns a value as its kind has it; raises `ValueError` if it is of another kind."""
    if isinstance(kind, Mapping):
        if (text := shown(value).removesuffix(".0").lower()) in kind:
            return kind[text]
        raise ValueError(f"`{name}` is {shown(value)}: give one of {', '.join(kind)}")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number) and kind == NUMBER:
        return number
    if math.isfinite(number) and number % 1 == 0 and number >= (kind == COUNT):
        return int(number)
    raise ValueError(f"`{name}` is {shown(value)}: give a {kind}")


_not_needed = functools.partial(Key, verdict=NOT_NEEDED)
_unsupported = functools.partial(Key, verdict=UNSUPPORTED)
# Stage of each strategy of FSDP, and whether every host has a replica. FSDP numbers them too.
STRATEGIES = {"full_shard": (3, False), "shard_grad_op": (2, False), "no_shard": (0, False)}
STRATEGIES |= {"hybrid_shard": (3, True), "hybrid_shard_zero2": (2, True)}
STRATEGIES |= {str(i + 1): strategy for i, strategy in enumerate([*STRATEGIES.values()])}
# Keys of an accelerate YAML, and old ones, by their names in a DeepSpeed JSON.
ALIASES = {
    "zero_optimization": "zero_optimization.stage",
    "bfloat16.enabled": "bf16.enabled",
    "deepspeed_config.zero_stage": "zero_optimization.stage",
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping": "gradient_clipping",
    "deepspeed_config.offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "deepspeed_config.offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "deepspeed_config.offload_param_device": "zero_optimization.offload_param.device",
    "deepspeed_config.offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
_TYPES = "MULTI_GPU MULTI_CPU MULTI_XPU MULTI_NPU MULTI_MLU MULTI_HPU MULTI_SDAA MULTI_MUSA XLA TPU"
_TYPE = {name.lower(): name for name in ("NO", *_TYPES.split(), "DEEPSPEED", "FSDP")}
_TYPE |= {"false": "NO"}  # YAML reads `no` as false
_STAGES = {"0": 0, "1": 1, "2": 2, "3": 3, "false": 0, "true": 1}
_MIXED = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", "false": "fp32"}
_PRECISION = "Precision(compute_dtype={compute_dtype!r}, reduce_dtype={reduce_dtype!r})"
_OFFLOAD = "Zero(offload={offload!r}): the update runs on the device, in pieces"
_ACCUM = "Zero(grad_accum_steps={grad_accum_steps})"
_CALL, _RATE = "in the call of optax", "in the rate lr"

# A name that ends with a colon is the prefix of the names after it; block.* is a whole block.
_TABLE = {
    Key("a batch of {global_batch_size} rows", COUNT, None, ("total batch size", None)): """
        train_batch_size""",
    Key(_ACCUM, COUNT, None, ("per_device_train_batch_size", 8)): "train_micro_batch_size_per_gpu",
    Key(_ACCUM, COUNT, None, ("gradient_accumulation_steps", 1)): "gradient_accumulation_steps",
    Key("clip_by_global_norm({max_grad_norm})", NUMBER, 0.0, ("max_grad_norm", 1.0)): """
        gradient_clipping""",
    Key("Precision(reduce_dtype={reduce_dtype!r})"): "communication_data_type",
    Key(_PRECISION, SWITCH, False, ("fp16 or bf16", False)): "fp16 fp16.enabled bf16.enabled",
    Key(_PRECISION, _MIXED, "fp32"): "mixed_precision",
    Key("Precision(initial_scale={initial_scale})", NUMBER, 16.0): "fp16.initial_scale_power",
    Key("Precision(growth_interval={growth_interval})", COUNT, 1000): "fp16.loss_scale_window",
    _unsupported("the loss scale is dynamic: use initial_scale=", NUMBER, 0.0): "fp16.loss_scale",
    Key("Zero(stage={stage})", _STAGES, 0): "zero_optimization.stage",
    Key(_OFFLOAD, {name: name for name in ("none", "cpu", "nvme")}): """
        zero_optimization.: offload_optimizer.device offload_param.device""",
    Key(_OFFLOAD, SWITCH): """fsdp_config.fsdp_offload_params
        zero_optimization.: cpu_offload cpu_offload_param cpu_offload_params""",
    Key("Zero(offload={offload!r})"): "zero_optimization.offload_optimizer.nvme_path",
    Key("Precision(param_comm_dtype={param_comm_dtype!r})", SWITCH): """
        zero_optimization.zero_quantized_weights""",
    Key("Precision(grad_comm_dtype={grad_comm_dtype!r})", SWITCH): """
        zero_optimization.zero_quantized_gradients""",
    Key("make_mesh(replica={replica}), Zero(secondary_shards={secondary_shards})", COUNT, 1): """
        zero_optimization.: zero_hpz_partition_size
        parallelism_config.: parallelism_config_dp_replicate_size""",
    Key("make_mesh(replica={replica})", NUMBER, -1): "zero_optimization.mics_shard_size",
    Key('Zero(remat={remat!r}) of all layers, "none" if yours has none', SWITCH, False): """
        activation_checkpointing.: partition_activations cpu_checkpointing""",
    Key("make_mesh(model={model}); the model names its dims, or param_specs= does", COUNT, 1): """
        tensor_parallel.autotp_size parallelism_config.: parallelism_config_tp_size""",
    Key(_CALL): "optimizer.type",
    Key(_RATE, NUMBER, 1e-3, ("learning_rate", 5e-5)): """
        optimizer.params.: lr scheduler.params.: warmup_max_lr""",
    Key(_CALL, trainer=("adam_beta1 and adam_beta2", (0.9, 0.999))): "optimizer.params.betas",
    Key(_CALL, NUMBER, trainer=("adam_epsilon", 1e-8)): "optimizer.params.eps",
    Key(_CALL, NUMBER, trainer=("weight_decay", 0.0)): "optimizer.params.weight_decay",
    Key(_CALL, NUMBER, 0.0): "optimizer.params.momentum",
    Key(_CALL, SWITCH, False): "optimizer.params.nesterov",
    Key("it is optax.adamw if true", SWITCH, True): "optimizer.params.adam_w_mode",
    _not_needed("XLA compiles the update", SWITCH): "optimizer.params.torch_adam",
    Key("the rate lr; DeepSpeed uses its values one step later"): "scheduler.type",
    Key(_RATE, "", "log"): "scheduler.params.warmup_type",
    Key(_RATE, NUMBER, 0.0, ("rate of step 0", 0.0)): """
        scheduler.params.: warmup_min_lr warmup_min_ratio""",
    Key(_RATE, NUMBER, 1e-4): "scheduler.params.cos_min_ratio",
    Key(_RATE, WHOLE, 1000, ("warmup_steps", 0)): "scheduler.params.warmup_num_steps",
    Key(_RATE, COUNT, trainer=("max_steps", None)): "scheduler.params.total_num_steps",
    Key("Zero(stage={stage})", _TYPE, "NO"): "distributed_type",
    Key("a mesh of {devices} devices", NUMBER, -1): "num_processes",
    Key("a mesh of {devices} devices", COUNT, 1): "num_machines",
    Key("it selects the key of the stage", {"1": 1, "2": 2}, 1): "fsdp_config.fsdp_version",
    Key("Zero(stage={stage}), make_mesh(replica={replica})"): """
        fsdp_config.: fsdp_sharding_strategy fsdp_reshard_after_forward""",
    Key("Zero(remat={remat!r})", SWITCH): "fsdp_config.fsdp_activation_checkpointing",
    Key("that file is translated as well"): "deepspeed_config.deepspeed_config_file",
    _not_needed("XLA schedules collectives and lays out their buffers"): """disable_allgather
        zero_optimization.: overlap_comm round_robin_gradients reduce_scatter contiguous_gradients
        use_multi_rank_bucket_allreduce allgather_partitions mics_hierarchical_params_gather
        stage3_use_all_reduce_for_fetch_params""",
    _not_needed("Zero(bucket_bytes=), 1 GiB by default, bounds every collective"): """
        zero_optimization.: reduce_bucket_size allgather_bucket_size prefetch_bucket_size
        stage3_prefetch_bucket_size""",
    _not_needed("the trace shows the layers; each is gathered while the one before computes"): """
        zero_optimization.: stage3_max_live_parameters max_live_parameters max_reuse_distance
        stage3_max_reuse_distance log_trace_cache_warnings memory_efficient_linear
        stage3_module_granularity_threshold module_granularity_threshold override_module_apply
        deepspeed_config.: deepspeed_moe_layer_cls_names transformer_moe_cls_names
        fsdp_config.fsdp_: auto_wrap_policy transformer_layer_cls_to_wrap min_num_params
        backward_prefetch backward_prefetch_policy forward_prefetch limit_all_gathers""",
    _not_needed("all but tiny parameters are sharded; small ones share a collective"): """
        zero_optimization.: stage3_param_persistence_threshold param_persistence_threshold
        stage3_model_persistence_threshold model_persistence_threshold""",
    _not_needed("zero.init creates sharded parameters, checkpoints of any mesh and stage fit"): """
        checkpoint.* zero_optimization.: stage3_gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save
        elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint
        scheduler.params.: last_batch_iteration
        deepspeed_config.: zero3_save_16bit_model zero3_init_flag fsdp_config.:
        fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_sync_module_states""",
    _not_needed("host memory is pinned, pieces are streamed, files are memory-mapped"): """aio.*
        zero_optimization.: cpu_offload_use_pin_memory sub_group_size offload_param.nvme_path
        zero_optimization.offload_optimizer.: pin_memory buffer_count fast_init pipeline
        pipeline_read pipeline_write
        zero_optimization.offload_param.: pin_memory buffer_count buffer_size max_in_cpu""",
    _not_needed("Zero takes any model, loss, optax optimizer and batch"): """optimizer.legacy_fusion
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last
        hybrid_engine.* data_parallel_group global_rank use_data_before_expert_parallelism
        fsdp_config.: fsdp_use_orig_params
        zero_optimization.: ignore_unused_parameters legacy_stage1""",
    _not_needed("gradients accumulate in fp32 and are divided once"): """prescale_gradients
        gradient_predivide_factor data_types.grad_accum_dtype fp16.fp16_master_weights_and_grads
        bf16.immediate_grad_update""",
    _not_needed("every step returns metrics; train.py shows them, --profile writes a trace"): """
        debug steps_per_print dump_state monitor_config.* tensorboard.* wandb.* csv_monitor.*
        comet.* comms_logger.* wall_clock_breakdown memory_breakdown flops_profiler.* timers.*""",
    _not_needed('stage="auto" chooses stage, micro-batches and remat'): "autotuning.*",
    _not_needed("XLA compiles everything"): """compile.* graph_harvesting dynamo_config.*
        dynamo_backend optimizer.params.: fused foreach activation_checkpointing.: profile
        contiguous_memory_optimization synchronize_checkpoint_boundary""",
    _not_needed("bf16 has no loss scale; cast inputs in the loss"): """fp16.auto_cast bf16.:
        auto_cast loss_scale loss_scale_window hysteresis min_loss_scale initial_scale_power""",
    _not_needed("every overflow halves the loss scale"): "fp16.consecutive_hysteresis",
    _not_needed("SLURM, mpirun or zero_jax.initialize starts processes (docs/multi-node.md)"): """
        machine_rank main_process_ip main_process_port rdzv_backend same_network mpirun_config.*
        main_training_function compute_environment ec2_instance_type iam_role_name image_uri profile
        region base_job_name pytorch_version transformers_version py_version sagemaker_inputs_file
        sagemaker_metrics_file additional_args deepspeed_config.deepspeed_: multinode_launcher
        hostfile exclusion_filter inclusion_filter""",
    _not_needed("JAX uses all devices that JAX_PLATFORMS and CUDA_VISIBLE_DEVICES show"): """
        use_cpu gpu_ids tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env commands
        command_file downcast_bf16 cuda_visible_devices""",
    _not_needed("the axes of the mesh decide it"): """deepspeed_config.:
        seq_parallel_communication_data_type parallelism_config.parallelism_config_: dp_shard_size
        cp_comm_strategy cp_backend sp_backend sp_seq_length sp_seq_length_is_variable
        sp_attn_implementation""",
    _not_needed("only distributed_type MEGATRON_LM reads it"): "megatron_lm_config.*",
    _unsupported("every overflow halves the loss scale, down to 1: use 1", same="1"): """
        fp16.hysteresis fp16.min_loss_scale""",
    _unsupported("all optimizer state is offloaded: use 1", same="1"): """
        zero_optimization.offload_optimizer.ratio""",
    _unsupported("train.py --lora-rank 16 --lora-base-dtype int8 quantizes a frozen model"): """
        zero_optimization.zero_quantized_nontrainable_weights""",
    _unsupported("gradients of embeddings are dense: leave it out"): "sparse_gradients",
    _unsupported('use Precision("bf16")'): "amp.* fp8_config.*",
    _unsupported("use stage 3 instead of a pipeline"): "pipeline.*",
    _unsupported("use Zero(sequence_parallel=True) and make_mesh(model=)", same="1"): """
        sequence_parallel_size seq_parallel_communication_data_type seq_parallel_comm_data_type
        parallelism_config.: parallelism_config_cp_size parallelism_config_sp_size""",
    _unsupported("write it in the model or in the loss"): """sparse_attention.* eigenvalue.*
        progressive_layer_drop.* compression_training.* quantize_training.*
        weight_quantization.*""",
    _unsupported("choose rows in the data pipeline"): "curriculum_learning.* data_efficiency.*",
    _unsupported("a run has one batch size; resume it on any number of devices"): "elasticity.*",
    _unsupported("zero_jax.Checkpoints writes to a POSIX file system"): "nebula.*",
    _unsupported('use Zero(remat="block_sqrt")'): "activation_checkpointing.number_checkpoints",
    _unsupported("optax corrects the bias and bounds no ratio: write your own", same="true"): """
        optimizer.params.: bias_correction max_coeff min_coeff""",
    _unsupported("use optax.amsgrad"): "optimizer.params.amsgrad",
    _unsupported('use Precision(grad_comm_dtype="int4"), which feeds no error back'): """
        optimizer.params.: freeze_step var_freeze_step var_update_scaler local_step_scaler
        local_step_clipper cuda_aware comm_backend_name coeff_beta factor_max factor_min
        factor_threshold
        zero_optimization.: zeropp_loco_param.*""",
    _unsupported("use the launcher, for example srun --cpu-bind"): "enable_cpu_affinity",
    _unsupported("use frozen= to train others only"): "fsdp_config.fsdp_ignored_modules",
}

KEYS: dict[str, Key] = {}
for _key, _names in _TABLE.items():
    _prefix = ""
    for _name in _names.split():
        if _name.endswith(":"):
            _prefix = _name[:-1]
        else:
            KEYS[_prefix + _name] = _key
