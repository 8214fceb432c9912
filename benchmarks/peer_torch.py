"""One process of peers.py in PyTorch: DDP, FSDP2, or DeepSpeed's ZeRO."""

import os
import sys

import numpy as np
import peer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

if sys.argv[1].startswith("deepspeed"):  # an environment of its own has it
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, D = x.shape
        qkv = self.qkv(self.ln1(x)).view(B, T, self.heads, 3, D // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """models/gpt.py in PyTorch: the same function of the same weights."""

    def __init__(self, parsed):
        super().__init__()
        self.wte = nn.Embedding(parsed.vocab, parsed.width)
        self.wpe = nn.Embedding(parsed.seq, parsed.width)
        blocks = (Block(parsed.width, parsed.heads) for _ in range(parsed.layers))
        self.blocks = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(parsed.width)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens[:, 1:])

    def embed(self, inputs):
        return self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))

    def loss(self, x, labels):
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def load(model: GPT, path: str) -> None:
    """Fills in the arrays of models/gpt.py, whose layers are stacked and matrices transposed."""
    arrays = np.load(path)
    modules = {"attn/qkv": "qkv", "attn/proj": "proj", "mlp/up": "up", "mlp/down": "down"}
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name in arrays:
            *parts, kind = name.split("/")
            array = torch.from_numpy(arrays[name])
            array = array.mT if kind == "kernel" else array
            leaf = "bias" if kind == "bias" else "weight"
            if parts[0] != "blocks":
                params.pop(f"{parts[0]}.{leaf}").copy_(array)
                continue
            module = modules.get("/".join(parts[1:]), parts[-1])
            for number, one in enumerate(array):
                params.pop(f"blocks.{number}.{module}.{leaf}").copy_(one)
    assert not params, f"without weights: {list(params)}"


def main() -> None:
    parsed = peer.arguments()
    host, port = parsed.address.split(":")
    known = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": parsed.rank, "LOCAL_RANK": 0}
    os.environ.update({k: str(v) for k, v in known.items()}, WORLD_SIZE=str(parsed.world))
    torch.set_num_threads(parsed.threads)
    model = GPT(parsed)
    load(model, parsed.weights)
    steps = {"ddp": ddp, "fsdp2": fsdp2}
    name, _, stage = parsed.name.partition("-")
    step = zero(model, parsed, int(stage)) if name == "deepspeed" else steps[name](model)

    def train(rows: np.ndarray) -> float:
        loss = step(torch.from_numpy(rows)).detach()
        dist.all_reduce(loss)
        return loss.item() / parsed.world

    peer.measure(parsed, train)
    dist.barrier()
    dist.destroy_process_group()


def ddp(model: nn.Module):
    dist.init_process_group("gloo")
    return _plain(nn.parallel.DistributedDataParallel(model))


def fsdp2(model: nn.Module):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    # By default it would keep what is not in a block, half of this model, until its backward pass.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return _plain(model)


def _plain(model: nn.Module):
    tx = _adamw(model)

    def step(rows):
        loss = model(rows)
        loss.backward()
        tx.step()
        tx.zero_grad()
        return loss

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=peer.LEARNING_RATE, weight_decay=peer.WEIGHT_DECAY, fused=True
    )


def zero(model: nn.Module, parsed, stage: int):
    deepspeed.init_distributed(dist_backend="gloo")
    words = 12 * parsed.width**2  # of a layer: what travels at once
    config = {
        "train_micro_batch_size_per_gpu": parsed.rows,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2 * words,
            "allgather_bucket_size": 2 * words,
            "stage3_prefetch_bucket_size": 2 * words,
            # Else it keeps every weight of so small a model from forward to backward.
            "stage3_max_live_parameters": 2 * words,
            "stage3_max_reuse_distance": 2 * words,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)

    def step(rows):
        loss = engine(rows)
        engine.backward(loss)
        engine.step()
        return loss

    return step


if __name__ == "__main__":
    main()
