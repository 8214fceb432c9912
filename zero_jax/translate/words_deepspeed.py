"""DeepSpeed's settings that no reader has to look at, by what becomes of them here.

Source: DeepSpeed's documentation of its configuration, `runtime/constants.py`,
`runtime/zero/config.py`.
"""

from zero_jax.translate.account import NO_EQUAL, NOT_NEEDED, words

ZERO = "zero_optimization."

DEEPSPEED = words(
    {
        (
            NOT_NEEDED,
            "XLA runs collectives beside computation, by compiler options that Zero sets on GPUs",
        ): """
            zero_optimization.overlap_comm zero_optimization.round_robin_gradients
            zero_optimization.use_multi_rank_bucket_allreduce
        """,
        (
            NOT_NEEDED,
            "one setting, Zero(bucket_bytes=...) in bytes, bounds every collective; 1 GiB "
            "suits most",
        ): """
            zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size
            zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size
        """,
        (
            NOT_NEEDED,
            "at stages 1 to 3 gradients are reduce-scattered and weights gathered, each by one "
            "collective, into arrays that XLA lays out",
        ): """
            zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
            zero_optimization.allgather_partitions disable_allgather
            zero_optimization.stage3_use_all_reduce_for_fetch_params
        """,
        (
            NOT_NEEDED,
            "what is gathered when follows from the trace: a layer is gathered while the one "
            "before it computes, and dropped after it",
        ): """
            zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters
            zero_optimization.stage3_max_reuse_distance zero_optimization.max_reuse_distance
            zero_optimization.stage3_module_granularity_threshold
            zero_optimization.log_trace_cache_warnings zero_optimization.override_module_apply
            zero_optimization.memory_efficient_linear
            zero_optimization.module_granularity_threshold
        """,
        (
            NOT_NEEDED,
            "every parameter is partitioned but those with fewer numbers than devices; small ones "
            "travel together in one collective",
        ): """
            zero_optimization.stage3_param_persistence_threshold
            zero_optimization.param_persistence_threshold
            zero_optimization.stage3_model_persistence_threshold
            zero_optimization.model_persistence_threshold
        """,
        (
            NOT_NEEDED,
            "the update is one compiled program; an offloaded one runs in pieces of 64 MiB "
            "(Offload(piece_bytes=...))",
        ): """
            zero_optimization.sub_group_size
        """,
        (
            NOT_NEEDED,
            "a checkpoint holds whole logical arrays for any number of devices and any stage; "
            "train.py --export writes safetensors",
        ): """
            zero_optimization.stage3_gather_16bit_weights_on_model_save
            zero_optimization.stage3_gather_fp16_weights_on_model_save
            zero_optimization.gather_16bit_weights_on_model_save
            zero_optimization.elastic_checkpoint zero_optimization.load_from_fp32_weights
            zero_optimization.pipeline_loading_checkpoint checkpoint.* checkpoint
        """,
        (
            NOT_NEEDED,
            "a parameter that the loss does not read has a gradient of zeros",
        ): """
            zero_optimization.ignore_unused_parameters
        """,
        (
            NOT_NEEDED,
            "there is one implementation of each stage",
        ): """
            zero_optimization.legacy_stage1
        """,
        (
            NOT_NEEDED,
            "host memory is always pinned, and pieces are streamed two at a time",
        ): """
            zero_optimization.offload_optimizer.pin_memory
            zero_optimization.offload_param.pin_memory
            zero_optimization.offload_optimizer.buffer_count
            zero_optimization.offload_param.buffer_count
            zero_optimization.offload_param.buffer_size
            zero_optimization.offload_optimizer.fast_init
            zero_optimization.offload_optimizer.pipeline_read
            zero_optimization.offload_optimizer.pipeline_write
            zero_optimization.offload_optimizer.pipeline
            zero_optimization.offload_param.max_in_cpu
            zero_optimization.cpu_offload_use_pin_memory
        """,
        (
            NOT_NEEDED,
            "files are memory-mapped, and the system reads and writes them",
        ): """
            aio.* aio
        """,
        (
            NO_EQUAL,
            "gradients are rounded to integers and what was rounded off is not carried to the "
            "next step",
        ): """
            zero_optimization.zeropp_loco_param.* zero_optimization.zeropp_loco_param
        """,
        (
            NO_EQUAL,
            "only a model that is frozen beside adapters rests in int8 or nf4: train.py "
            "--lora 16 --base int8",
        ): """
            zero_optimization.zero_quantized_nontrainable_weights
        """,
        (
            NOT_NEEDED,
            "any optax transformation may be used at any stage",
        ): """
            zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer.legacy_fusion
        """,
        (
            NOT_NEEDED,
            "gradients are summed and divided once by the global weight, in fp32 unless "
            "reduce= says otherwise",
        ): """
            prescale_gradients gradient_predivide_factor
        """,
        (
            NO_EQUAL,
            "gradients of an embedding are sent whole or by rows as the trace says, never as "
            "sparse tensors",
        ): """
            sparse_gradients
        """,
        (
            NOT_NEEDED,
            "metrics come back from every step; train.py writes and shows them",
        ): """
            steps_per_print dump_state monitor_config.* tensorboard.* wandb.* csv_monitor.*
            comet.* comms_logger.*
        """,
        (
            NOT_NEEDED,
            "python -m zero_jax.plan says FLOPs, bytes and words of a step; train.py "
            "--profile writes a trace",
        ): """
            wall_clock_breakdown memory_breakdown flops_profiler.* timers.*
        """,
        (
            NOT_NEEDED,
            'stage="auto" chooses stage, micro-batches and remat for a memory limit',
        ): """
            autotuning.*
        """,
        (
            NOT_NEEDED,
            "everything is compiled by XLA",
        ): """
            compile.* graph_harvesting
        """,
        (
            NOT_NEEDED,
            "the devices that JAX sees are used; set CUDA_VISIBLE_DEVICES yourself",
        ): """
            cuda_visible_devices
        """,
        (
            NOT_NEEDED,
            "the model is a Flax module of yours, and its layers are what you write",
        ): """
            hybrid_engine.* data_parallel_group global_rank use_data_before_expert_parallelism
        """,
        (
            NOT_NEEDED,
            "batches are what you give to the step",
        ): """
            dataloader_drop_last
        """,
        (
            NOT_NEEDED,
            "gradients of micro-batches are always added up in fp32",
        ): """
            data_types.grad_accum_dtype fp16.fp16_master_weights_and_grads
        """,
        (
            NOT_NEEDED,
            "inputs are not cast: Flax promotes, so cast images in the loss",
        ): """
            fp16.auto_cast
        """,
        (
            NOT_NEEDED,
            "bf16 has the range of fp32 and no loss scale; only fp16 has one",
        ): """
            bf16.loss_scale bf16.loss_scale_window bf16.hysteresis bf16.min_loss_scale
            bf16.initial_scale_power bf16.auto_cast
        """,
        (
            NOT_NEEDED,
            "gradients are added to the sum when their layer has run backward, at every stage",
        ): """
            bf16.immediate_grad_update
        """,
        (
            NO_EQUAL,
            "Apex's AMP picks a dtype for each operation; take bf16.enabled's precision",
        ): """
            amp.*
        """,
        (
            NO_EQUAL,
            "the library has no pipeline of stages: layers are partitioned by stage 3",
        ): """
            pipeline.*
        """,
        (
            NO_EQUAL,
            "sequences are split over a model axis alone (sequence_parallel=True), not by "
            "all-to-all or rings",
        ): """
            sequence_parallel_size seq_parallel_communication_data_type
            seq_parallel_comm_data_type
        """,
        (
            NO_EQUAL,
            "sparse attention is the model's: write it in Flax",
        ): """
            sparse_attention.*
        """,
        (
            NO_EQUAL,
            "which layers run is the model's: write it in Flax",
        ): """
            progressive_layer_drop.*
        """,
        (
            NO_EQUAL,
            "training does not quantise or prune a model",
        ): """
            compression_training.* quantize_training.* eigenvalue.* weight_quantization.*
        """,
        (
            NO_EQUAL,
            "which data is seen when, and which tokens a layer skips, is yours to write",
        ): """
            curriculum_learning.* data_efficiency.*
        """,
        (
            NO_EQUAL,
            "a batch keeps its size when the number of devices changes; checkpoints load on "
            "any number of them",
        ): """
            elasticity.*
        """,
        (
            NO_EQUAL,
            "checkpoints are written by zero_jax.Checkpoints to a POSIX file system",
        ): """
            nebula.*
        """,
        (
            NOT_NEEDED,
            "XLA lays out what is kept; python -m zero_jax.plan says how much that is",
        ): """
            activation_checkpointing.contiguous_memory_optimization
            activation_checkpointing.synchronize_checkpoint_boundary
            activation_checkpointing.profile
        """,
        (
            NO_EQUAL,
            "layers are found in the trace and each is one; block_sqrt keeps the input of "
            "each group of about √L",
        ): """
            activation_checkpointing.number_checkpoints
        """,
    },
    alone="""
        sequence_parallel_size
    """,
)
