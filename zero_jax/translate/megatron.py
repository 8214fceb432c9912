"""Megatron-LM's command line, read into an `Asked`: ZeRO, parallelism, precision, the update.

Its distributed optimizer is stage 1; Megatron-FSDP's strategies no_shard, optim, optim_grads and
optim_grads_params are stages 0 to 3, torch's FSDP2 is 3. Adam is AdamW, and gradients of bf16 are
summed in fp32 unless --grad-reduce-in-bf16 or Megatron-FSDP, which sums them in the model's
dtype.
"""

import dataclasses
from typing import Any

from zero_jax.translate import optax_lines
from zero_jax.translate.account import Account
from zero_jax.translate.asked import Asked, Rate
from zero_jax.translate.script import Script
from zero_jax.translate.words_megatron import MEGATRON
from zero_jax.translate.words_megatron import SWITCHES as SWITCHES

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_TRAIN = {
    "seq-length": "--seq",
    "seed": "--seed",
    "save-interval": "--checkpoint-every",
    "eval-interval": "--eval-every",
    "eval-iters": "--eval-batches",
}


def read(script: Script, devices: int | None = None) -> tuple[Asked, Account]:
    """What a command line asks for, and the account of it.

    >>> from zero_jax.translate import script
    >>> read(script.read("pretrain_gpt.py --use-distributed-optimizer", SWITCHES))[0].stage
    1
    """
    account = Account(script.flags, MEGATRON, "--{}")
    for name, values in script.twice.items():
        account.note(name, f"given as {', then '.join(values)}: the last counts")
    asked = Asked(devices=_devices(account) if devices is None else devices)
    for part in (_stage, _mesh, _precision, _remat, _offload, _batch, _optimizer, _train):
        asked = part(account, asked)
    for name, values in script.several.items():
        for key, value in script.flags.items():
            if value == values[0] and key.replace("-", "_") == name.lower():
                account.note(key, f"${name} is {' or '.join(values)}: the first is taken")
    return asked, account


def _devices(account: Account) -> int | None:
    """N, where a script says it for torchrun."""
    sizes: list[int] = []
    for name in ("nproc_per_node", "nnodes"):
        given = account.get(name, account.get(name.replace("_", "-"), 1 if sizes else None))
        first = (str(given).split() or [""])[0]
        if not first.isdigit():
            return None
        sizes.append(int(first))
    keys = "nproc_per_node nnodes nproc-per-node"
    account.translated(keys, f"a mesh of so many devices, {sizes[0] * sizes[1]}")
    return sizes[0] * sizes[1]


def _on(account: Account, name: str) -> bool:
    return account.get(name) is True


def _stage(account: Account, asked: Asked) -> Asked:
    stage, why = 0, ""
    if _on(account, "use-distributed-optimizer"):
        stage, why = 1, "stage=1: the state of the optimizer is partitioned"
    if _on(account, "use-torch-fsdp2"):
        stage = 2 if _on(account, "torch-fsdp2-no-reshard-after-forward") else 3
        account.translated("use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward", f"stage={stage}")
    fsdp = _on(account, "use-megatron-fsdp") or _on(account, "use-custom-fsdp")
    strategy = str(account.get("data-parallel-sharding-strategy", "optim_grads_params"))
    if fsdp:
        if strategy not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise ValueError(f"--data-parallel-sharding-strategy {strategy}: it is one of {known}")
        stage, why = _STRATEGIES[strategy], "its strategy says the stage"
        account.translated("data-parallel-sharding-strategy", f"stage={stage}")
        if "data-parallel-sharding-strategy" not in account:
            flag = "use-megatron-fsdp" if _on(account, "use-megatron-fsdp") else "use-custom-fsdp"
            account.note(flag, f"no strategy is given, {strategy} is that of 2026")
        account.translated("use-megatron-fsdp use-custom-fsdp", f"stage={stage}, by its strategy")
    account.translated("use-distributed-optimizer", why)
    account.not_needed("data-parallel-sharding-strategy", "only --use-megatron-fsdp reads it")
    account.not_needed("megatron-fsdp-version", "there is one implementation of each stage")
    copies = account.count("num-distributed-optimizer-instances", 1) or 1
    outer = account.get("outer-dp-sharding-strategy", "no_shard")
    hierarchical = copies > 1 and outer == "optim" and stage == 3
    account.translated("num-distributed-optimizer-instances", f"make_mesh(replica={copies})")
    account.translated("outer-dp-sharding-strategy", f"hierarchical={hierarchical}")
    return dataclasses.replace(asked, stage=stage, replica=copies, hierarchical=hierarchical)


def _mesh(account: Account, asked: Asked) -> Asked:
    model = account.count("tensor-model-parallel-size", 1) or 1
    experts = account.count("expert-model-parallel-size", 1) or 1
    split = _on(account, "sequence-parallel") and model > 1
    account.translated("tensor-model-parallel-size", f"make_mesh(model={model})")
    account.translated(
        "expert-model-parallel-size", f"make_mesh(experts={experts}): they stay, and tokens travel"
    )
    why = (
        "sequence_parallel=True"
        if split
        else "there is no model axis, and Megatron leaves it out too"
    )
    account.say("sequence-parallel", "translated" if split else "not needed", why)
    return dataclasses.replace(asked, model=model, experts=experts, sequence_parallel=split)


def _precision(account: Account, asked: Asked) -> Asked:
    compute = next((name for name in ("fp16", "bf16") if _on(account, name)), "fp32")
    if _on(account, "fp16") and _on(account, "bf16"):
        raise ValueError("--fp16 and --bf16 are both given: Megatron-LM takes one of them")
    fsdp = _on(account, "use-megatron-fsdp") or _on(account, "use-custom-fsdp")
    sent = str(account.get("megatron-fsdp-grad-comm-dtype", "auto"))
    if sent == "auto":
        sent = str(account.get("megatron-fsdp-main-grads-dtype", "auto"))
    in_bf16 = _on(account, "grad-reduce-in-bf16")
    if fsdp and compute == "bf16":
        in_bf16 = sent in ("auto", "bf16")
    reduce = "bf16" if in_bf16 and compute == "bf16" else "fp32"
    account.translated("bf16 fp16", f'Precision("{compute}"), gradients are summed in {reduce}')
    account.translated(
        "grad-reduce-in-bf16 megatron-fsdp-grad-comm-dtype", f'Precision(reduce="{reduce}")'
    )
    asked = dataclasses.replace(asked, compute=compute, reduce=reduce)
    asked = _states(account, asked)
    keys = "initial-loss-scale loss-scale-window loss-scale hysteresis min-loss-scale"
    if compute != "fp16":
        account.not_needed(keys, "only fp16 has a loss scale")
        return asked
    first = float(account.number("initial-loss-scale", 2.0**32) or 1)
    window = account.count("loss-scale-window", 1000)
    account.translated(
        "fp16 initial-loss-scale loss-scale-window",
        f"Precision(initial_scale={first!r}, growth_interval={window}), its own unless given",
    )
    account.no_equal("loss-scale", "the scale always moves")
    account.no_equal("hysteresis", "the scale is halved at the first overflow")
    account.no_equal("min-loss-scale", "the scale goes down to 1, and no setting stops it")
    return dataclasses.replace(asked, initial_scale=first, growth_interval=window)


def _states(account: Account, asked: Asked) -> Asked:
    kinds = {str(account.get(f"{name}-dtype", "fp32")) for name in ("exp-avg", "exp-avg-sq")}
    states = {"bf16": "bf16", "fp8": "8bit"}.get(kinds.pop()) if len(kinds) == 1 else None
    keys = "exp-avg-dtype exp-avg-sq-dtype"
    if states is None:
        account.no_equal(keys, "both moments rest in one format: states is fp32, bf16 or 8bit")
        return asked
    account.translated(keys, f'states="{states}"')
    return dataclasses.replace(asked, states=states)


def _remat(account: Account, asked: Asked) -> Asked:
    granularity = account.get("recompute-granularity")
    if _on(account, "recompute-activations"):
        granularity = "selective"
    method = account.get("recompute-method", "uniform")
    layers = account.count("recompute-num-layers", 1)
    if granularity == "selective":
        account.no_equal(
            "recompute-granularity recompute-activations recompute-modules",
            'parts of a layer are computed again there; remat="block" computes layers again, '
            '"names:..." keeps what the model marks',
        )
        return asked
    if granularity is None:
        account.not_needed(
            "recompute-method recompute-num-layers recompute-modules distribute-saved-activations",
            "only --recompute-granularity full reads it",
        )
        return asked
    if granularity != "full":
        raise ValueError(f"--recompute-granularity {granularity}: it is one of full and selective")
    parted = _on(account, "distribute-saved-activations") and asked.model > 1
    if parted and asked.sequence_parallel:
        parted = False
        account.not_needed(
            "distribute-saved-activations", "what a layer keeps is split along the sequence already"
        )
    remat = "block@partitioned" if parted else "block"
    account.translated("recompute-granularity", f'remat="{remat}"')
    account.translated("distribute-saved-activations", f'remat="{remat}"')
    account.not_needed("recompute-modules", "only --recompute-granularity selective reads it")
    if method == "block":
        account.no_equal(
            "recompute-method recompute-num-layers", 'remat="block" is of all layers, not of some'
        )
    elif layers != 1:
        account.no_equal(
            "recompute-num-layers",
            "a layer at a time is computed again; block_sqrt takes groups of about √L",
        )
    account.translated("recompute-method recompute-num-layers", f'remat="{remat}", layer by layer')
    return dataclasses.replace(asked, remat=remat)


def _offload(account: Account, asked: Asked) -> Asked:
    keys = "optimizer-cpu-offload use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d"
    if not _on(account, "optimizer-cpu-offload"):
        account.not_needed("optimizer-offload-fraction " + keys, "nothing is offloaded")
        return asked
    if account.number("optimizer-offload-fraction", 1.0) != 1:
        account.no_equal("optimizer-offload-fraction", "all states are offloaded")
    account.translated("optimizer-offload-fraction", "all of it, as here")
    account.translated(
        "optimizer-cpu-offload",
        'offload="optimizer": the update runs on the device, in pieces; masters stay there '
        'too, unless offload="optimizer,params"',
    )
    account.not_needed(keys, "pieces are streamed two at a time")
    account.not_needed("no-pin-cpu-grads no-pin-cpu-params", "host memory is always pinned")
    return dataclasses.replace(asked, offload="optimizer")


def _batch(account: Account, asked: Asked) -> Asked:
    rows, batch = account.count("micro-batch-size"), account.count("global-batch-size")
    asked = dataclasses.replace(asked, rows=rows, batch=batch)
    if batch is None:
        asked = dataclasses.replace(asked, parts=1)
    try:
        k, whole = asked.micro_batches(), asked.global_batch()
    except ValueError as error:
        split = [f"{axis}-parallel-size" for axis in ("pipeline-model", "context")]
        apart = " and ".join(f"--{n} {account.get(n)}" for n in split if account.get(n, "1") != "1")
        if not apart:
            raise
        raise ValueError(f"{error}; {apart} has no equal here: all its devices take rows") from None
    account.translated("micro-batch-size", f"micro_batches={k} of a batch of {whole} rows")
    account.translated("global-batch-size", f"a batch of {whole} rows, over all devices")
    return asked


def _optimizer(account: Account, asked: Asked) -> Asked:
    clip = float(account.number("clip-grad", 1.0) or 0.0)
    account.translated("clip-grad", f"optax.clip_by_global_norm({clip})" if clip else "never")
    name = str(account.get("optimizer", "adam"))
    decay = float(account.number("weight-decay", 0.01) or 0.0)
    own: dict[str, float] = {}
    for key, usual in {"adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8}.items():
        own[key] = float(account.number(key, usual) or 0.0)
    adam = (own["adam-beta1"], own["adam-beta2"], own["adam-eps"])
    momentum = float(account.number("sgd-momentum", 0.9) or 0.0)
    tx = None
    if name == "adam":
        l2 = _on(account, "no-decoupled-weight-decay")
        make = optax_lines.adam_l2 if l2 else optax_lines.adamw
        tx = make(*adam, decay, masked=True)
    elif name == "sgd":
        tx = optax_lines.sgd(momentum, False, decay, masked=True)
    elif name == "lion":
        betas = [float(account.number(f"lion-beta{i}", b) or 0) for i, b in ((1, 0.95), (2, 0.98))]
        tx = optax_lines.lion(betas[0], betas[1], decay, masked=True)
    else:
        account.no_equal("optimizer", "write its line of optax yourself; train.py has muon")
    keys = (
        "optimizer weight-decay adam-beta1 adam-beta2 adam-eps sgd-momentum lion-beta1 lion-beta2"
    )
    account.translated("weight-decay", "in the line of optax, of kernels and embeddings by name")
    account.translated(f"{keys} no-decoupled-weight-decay", "in the line of optax")
    return dataclasses.replace(asked, clip=clip, tx=tx, rate=_rate(account, asked))


def _steps(account: Account, asked: Asked, name: str) -> int | None:
    """A number of steps, given so or in samples."""
    steps = account.number(f"{name}-iters")
    samples = account.number(f"{name}-samples")
    if steps is None and samples is not None and asked.batch:
        steps = samples // asked.batch
    return None if steps is None else int(steps)


def _rate(account: Account, asked: Asked) -> Rate | None:
    peak = account.number("lr")
    if peak is None:
        return None
    steps = _steps(account, asked, "train")
    decay = _steps(account, asked, "lr-decay") or steps
    fraction = account.number("lr-warmup-fraction")
    warmup = _steps(account, asked, "lr-warmup") or 0
    if fraction is not None and decay is not None:
        warmup = int(fraction * decay)
    style = str(account.get("lr-decay-style", "linear"))
    first, end = (float(account.number(k, 0.0) or 0.0) for k in ("lr-warmup-init", "min-lr"))
    rate = None
    if decay is not None or style == "constant":
        made: Any = optax_lines.megatron
        rate = made(style, first, float(peak), end, warmup, decay or 0, steps)
    keys = (
        "lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-warmup-init min-lr lr-decay-iters"
    )
    keys += " lr-decay-samples lr-decay-style"
    if rate is None:
        why = "no total of steps is given" if decay is None else f"write a function for {style}"
        account.no_equal(keys, f"{why}; the rate is constant here")
        rate = optax_lines.constant(float(peak))
    account.translated(f"lr {keys} train-iters train-samples", "in lr, in steps")
    return rate


def _train(account: Account, asked: Asked) -> Asked:
    """What only train.py has a word for."""
    words: list[str] = []
    for name, flag in _TRAIN.items():
        value = account.get(name)
        if str(value).isdigit() and int(str(value)) < (2**32 if name == "seed" else 10**9):
            if int(str(value)) == 0 and name != "seed":
                account.no_equal(name, f"0 is none: leave train.py {flag} at what it is")
                continue
            words += [flag, str(value)]
            account.translated(name, f"train.py {flag} {value}")
        account.no_equal(name, f"it is given by a variable: train.py {flag}")
    return dataclasses.replace(asked, train=tuple(words))
