"""accelerate's settings that no reader has to look at, by what becomes of them here.

Source: accelerate's `commands/config/config_args.py` and the dataclasses of its plugins.
"""

from zero_jax.translate.account import NO_EQUAL, NOT_NEEDED, words

ACCELERATE = words(
    {
        (
            NOT_NEEDED,
            "one process for each host or GPU is started by SLURM, mpirun or "
            "zero_jax.initialize(coordinator, num_processes, process_id) (docs/launchers.md)",
        ): """
            machine_rank main_process_ip main_process_port rdzv_backend same_network
            mpirun_config.* mpirun_config main_training_function compute_environment
            deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile
            deepspeed_config.deepspeed_exclusion_filter
            deepspeed_config.deepspeed_inclusion_filter ec2_instance_type iam_role_name
            image_uri profile region base_job_name pytorch_version transformers_version
            py_version sagemaker_inputs_file sagemaker_metrics_file additional_args
        """,
        (
            NOT_NEEDED,
            "the devices that JAX sees are used; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES say",
        ): """
            use_cpu gpu_ids tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env
            commands command_file downcast_bf16
        """,
        (
            NOT_NEEDED,
            "python -m zero_jax.doctor says what is there, and errors name the leaf",
        ): """
            debug
        """,
        (
            NO_EQUAL,
            "bind processes to cores by your launcher, srun --cpu-bind say",
        ): """
            enable_cpu_affinity
        """,
        (
            NOT_NEEDED,
            "everything is compiled by XLA",
        ): """
            dynamo_config.* dynamo_config dynamo_backend
        """,
        (
            NO_EQUAL,
            "fp8 is not a dtype of Precision: it has fp32, bf16 and fp16",
        ): """
            fp8_config.* fp8_config
        """,
        (
            NOT_NEEDED,
            "layers are found in the trace of the loss, whatever their class is called",
        ): """
            fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_transformer_layer_cls_to_wrap
            fsdp_config.fsdp_min_num_params deepspeed_config.deepspeed_moe_layer_cls_names
            deepspeed_config.transformer_moe_cls_names
        """,
        (
            NOT_NEEDED,
            "a layer is gathered while the one before it computes, forward and backward",
        ): """
            fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_backward_prefetch_policy
            fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_limit_all_gathers
        """,
        (
            NOT_NEEDED,
            "a checkpoint holds whole logical arrays for any number of devices and any stage; "
            "train.py --export writes safetensors",
        ): """
            fsdp_config.fsdp_state_dict_type deepspeed_config.zero3_save_16bit_model
        """,
        (
            NOT_NEEDED,
            "zero.init makes parameters that are born partitioned, and a loaded model is read "
            "shard by shard",
        ): """
            fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_sync_module_states
            deepspeed_config.zero3_init_flag
        """,
        (
            NOT_NEEDED,
            "parameters keep their names and shapes, and frozen= may pick any of them",
        ): """
            fsdp_config.fsdp_use_orig_params
        """,
        (
            NO_EQUAL,
            "every parameter is partitioned; frozen= only keeps some from being trained",
        ): """
            fsdp_config.fsdp_ignored_modules
        """,
        (
            NO_EQUAL,
            "sequences are split over a model axis alone (sequence_parallel=True), not by "
            "rings or all-to-all; those devices are on data here, and need rows of their own",
        ): """
            parallelism_config.parallelism_config_cp_size
            parallelism_config.parallelism_config_sp_size
        """,
        (
            NOT_NEEDED,
            "it says how sequences are split, which is not done here",
        ): """
            parallelism_config.parallelism_config_cp_comm_strategy
            parallelism_config.parallelism_config_cp_backend
            parallelism_config.parallelism_config_sp_backend
            parallelism_config.parallelism_config_sp_seq_length
            parallelism_config.parallelism_config_sp_seq_length_is_variable
            parallelism_config.parallelism_config_sp_attn_implementation
            deepspeed_config.seq_parallel_communication_data_type
        """,
        (
            NO_EQUAL,
            "the library has no pipeline of stages: layers are partitioned by stage 3",
        ): """
            megatron_lm_config.megatron_lm_pp_degree
        """,
    },
    alone="""
        megatron_lm_config.megatron_lm_pp_degree parallelism_config.parallelism_config_cp_size
        parallelism_config.parallelism_config_sp_size
    """,
)
