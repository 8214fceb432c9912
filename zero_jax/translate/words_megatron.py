"""Megatron-LM's flags that no reader has to look at, by what becomes of them here.

Source: Megatron-LM's `training/arguments.py`, `training/config/training_config.py`, and the
fields of `core/distributed/distributed_data_parallel_config.py` and
`core/optimizer/optimizer_config.py`. The flags of a model's shape and of its data are many; those
that its examples have are here.
"""

from zero_jax.translate.account import NO_EQUAL, NOT_NEEDED, words

MEGATRON = words(
    {
        (
            NOT_NEEDED,
            "the model is a Flax module of yours, or a preset: train.py --model or --hf",
        ): """
            num-layers hidden-size ffn-hidden-size num-attention-heads max-position-embeddings
            attention-backend attention-dropout hidden-dropout normalization norm-epsilon
            position-embedding-type rotary-base rotary-percent use-rotary-position-embeddings
            no-position-embedding swiglu group-query-attention num-query-groups kv-channels
            qk-layernorm init-method-std untie-embeddings-and-output-weights disable-bias-linear
            apply-layernorm-1p use-mcore-models transformer-impl spec hybrid-layer-pattern
            hybrid-override-pattern vocab-size make-vocab-size-divisible-by use-flash-attn
            attention-softmax-in-fp32 num-experts moe-router-topk moe-router-load-balancing-type
            moe-aux-loss-coeff moe-z-loss-coeff moe-ffn-hidden-size
            moe-shared-expert-intermediate-size moe-layer-freq mamba-state-dim mamba-head-dim
            mamba-num-groups use-cpu-initialization init-model-with-meta-device
        """,
        (
            NOT_NEEDED,
            "experts are products in the trace, which XLA compiles; their rows travel as the "
            "trace says",
        ): """
            moe-grouped-gemm moe-token-dispatcher-type moe-permute-fusion moe-router-fusion
        """,
        (
            NOT_NEEDED,
            "data are yours to give: train.py --data and --tokenizer",
        ): """
            data-path data-cache-path mock-data split tokenizer-type tokenizer-model vocab-file
            merge-file tiktoken-pattern num-workers no-create-attention-mask-in-dataloader
            no-mmap-bin-files num-dataset-builder-threads dataloader-type reset-position-ids
            reset-attention-mask eod-mask-loss
        """,
        (
            NOT_NEEDED,
            "zero_jax.Checkpoints holds whole logical arrays for any number of devices and "
            "any stage; the same train.py command goes on from the last one in --out",
        ): """
            save load no-load-optim no-load-rng no-save-optim no-save-rng ckpt-format async-save
            dist-ckpt-strictness auto-detect-ckpt-format use-dist-ckpt finetune
            pretrained-checkpoint override-opt_param-scheduler
            use-checkpoint-opt_param-scheduler use-checkpoint-args no-ckpt-fully-parallel-save
            ckpt-fully-parallel-load ckpt-assume-constant-structure
        """,
        (
            NOT_NEEDED,
            "metrics come back from every step; train.py writes them to --out",
        ): """
            log-interval log-throughput logging-level tensorboard-dir wandb-project
            wandb-exp-name wandb-save-dir log-timers-to-tensorboard log-memory-to-tensorboard
            log-params-norm log-num-zeros-in-grad log-progress log-validation-ppl-to-tensorboard
            timing-log-level tensorboard-log-interval
        """,
        (
            NOT_NEEDED,
            "train.py --profile writes a trace of three steps",
        ): """
            profile profile-step-start profile-step-end profile-ranks record-memory-history
            memory-snapshot-path use-pytorch-profiler sample cpuctxsw trace capture-range
            capture-range-end cuda-graph-trace cuda-memory-usage
        """,
        (
            NOT_NEEDED,
            "one process for each host or GPU is started by SLURM, mpirun or "
            "zero_jax.initialize(coordinator, num_processes, process_id) (docs/launchers.md)",
        ): """
            nproc_per_node nproc-per-node nnodes node_rank node-rank master_addr master-addr
            master_port master-port distributed-backend rdzv_id rdzv_backend rdzv_endpoint
            distributed-timeout-minutes local-rank use-tp-pp-dp-mapping
        """,
        (
            NOT_NEEDED,
            "XLA runs collectives beside computation, by compiler options that Zero sets on GPUs",
        ): """
            overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step
            no-overlap-p2p-communication tp-comm-overlap create-all-gather-group
            align-param-gather delay-wgrad-compute
        """,
        (
            NOT_NEEDED,
            "Zero(bucket_bytes=...) bounds every collective; 1 GiB suits most",
        ): """
            ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw
            suggested-communication-unit-size
        """,
        (
            NOT_NEEDED,
            "buffers of collectives are XLA's own, and so is what it fuses",
        ): """
            use-nccl-ub fsdp-double-buffer fsdp-manual-registration ddp-average-in-collective
            fsdp-db-use-persist-buf-on-alloc-fail no-gradient-reduce-div-fusion
            no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl
            no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-rope-fusion
            no-bias-swiglu-fusion megatron-fsdp-max-pool-double-buffer
            disable-symmetric-registration enable-cuda-graph cuda-graph-impl cuda-graph-scope
            nccl-communicator-config-path keep-fp8-transpose-cache
        """,
        (
            NOT_NEEDED,
            "no memory is collected by hand: a step is one compiled program",
        ): """
            manual-gc manual-gc-interval empty-unused-memory-level
        """,
        (
            NOT_NEEDED,
            "gradients are always added up in fp32, and masters rest in fp32",
        ): """
            accumulate-allreduce-grads-in-fp32 main-grads-dtype main-params-dtype
            megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype
             reduce-scatter-with-fp32-accumulation
        """,
        (
            NOT_NEEDED,
            "zero_jax.Weighted(sum, weight) weighs each token alike, which train.py's loss does",
        ): """
            calculate-per-token-loss
        """,
        (
            NOT_NEEDED,
            "a step whose gradients are not finite is skipped; Zero(guard=False) leaves that out",
        ): """
            no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad
            check-for-large-grads
        """,
        (
            NOT_NEEDED,
            "train.py --max-hours saves and ends",
        ): """
            exit-duration-in-mins exit-interval
        """,
        (
            NO_EQUAL,
            "Precision has fp32, bf16 and fp16; bf16 stands here",
        ): """
            fp8-format fp8-recipe fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather
            fp8-margin fp8-interval fp4-format fp4-param-gather
        """,
        (
            NO_EQUAL,
            "a batch keeps its size for the whole run",
        ): """
            rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed
        """,
        (
            NO_EQUAL,
            "one rate is for all leaves; give optax.partition another for some",
        ): """
            decoupled-lr decoupled-min-lr
        """,
        (
            NO_EQUAL,
            "the decay is one number; give optax a function of the step for it",
        ): """
            start-weight-decay end-weight-decay weight-decay-incr-style
        """,
        (
            NO_EQUAL,
            "the library has no pipeline: those devices are on data here; take stage=3, "
            "which partitions the layers over them",
        ): """
            pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage
            virtual-pipeline-model-parallel-size decoder-first-pipeline-num-layers
            decoder-last-pipeline-num-layers pipeline-model-parallel-layout
        """,
        (
            NO_EQUAL,
            "sequences are split over a model axis alone (sequence_parallel=True), not by "
            "rings; those devices are on data here, and need rows of their own",
        ): """
            context-parallel-size cp-comm-type hierarchical-context-parallel-sizes
        """,
        (
            NO_EQUAL,
            "matrices of experts are not split over a model axis by themselves",
        ): """
            expert-tensor-parallel-size
        """,
        (
            NO_EQUAL,
            "weights are fp32 masters and their state; bits of one are not kept in the other",
        ): """
            use-precision-aware-optimizer
        """,
        (
            NO_EQUAL,
            'what a layer keeps goes to host memory as remat="block@host" says, of all layers',
        ): """
            cpu-offloading cpu-offloading-num-layers
        """,
        (
            NO_EQUAL,
            "train on rows of your own: reinforcement learning is not part of the library",
        ): """
            grpo-group-size grpo-prompts-per-step grpo-iterations grpo-clamp-eps-lower
            grpo-clamp-eps-upper grpo-kl-beta langrl-env-config inference-max-seq-length
            inference-max-requests
        """,
    },
    alone="""
        pipeline-model-parallel-size context-parallel-size expert-tensor-parallel-size
        virtual-pipeline-model-parallel-size
    """,
)

# Flags that have no value.
SWITCHES = frozenset(
    (
        "use-distributed-optimizer",
        "use-torch-fsdp2",
        "torch-fsdp2-no-reshard-after-forward",
        "use-megatron-fsdp",
        "use-custom-fsdp",
        "sequence-parallel",
        "fp16",
        "bf16",
        "grad-reduce-in-bf16",
        "recompute-activations",
        "distribute-saved-activations",
        "optimizer-cpu-offload",
        "no-decoupled-weight-decay",
        "use-torch-optimizer-for-cpu-offload",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "overlap-cpu-optimizer-d2h-h2d",
        "swiglu",
        "disable-bias-linear",
        "use-flash-attn",
    )
)
