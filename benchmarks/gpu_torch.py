"""One row of gpu.py in PyTorch: the same GPT, compiled, in bf16 with fp32 masters and AdamW.

Each block is compiled, and the loss: the whole model at once would take minutes for 48 layers. What
goes from block to block is bf16, as in models/gpt.py. In fp8 torchao scales each tensor by its
largest element in every product of a block's matrices, forward and backward.
"""

import argparse
import json
import statistics
import time

import torch
from peer_torch import GPT
from torch.utils.checkpoint import checkpoint

STEPS, WARM = 8, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    own = json.loads(parser.parse_args().one)
    device = own["device"]
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU")
    with torch.device(device):
        model = GPT(argparse.Namespace(**own))
    if own.get("matmuls") == "fp8":
        try:
            _to_fp8(model, emulate=device != "cuda")
        except ImportError as error:
            print(json.dumps({"skipped": f"no torchao: {error}"}))
            return
    embed = model.embed
    model.embed = lambda inputs: embed(inputs).bfloat16()
    model.loss = torch.compile(model.loss)
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
        if own["remat"] == "block":
            block.forward = _rematerialised(block.forward)
    tx = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    rows = torch.randint(0, own["vocab"], (own["rows"], own["seq"] + 1), device=device)

    def once() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model(rows)
        loss.backward()
        tx.step()
        tx.zero_grad()
        loss.item()

    for _ in range(WARM):
        once()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        once()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found = {"seconds": statistics.median(seconds), "torch": torch.__version__}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(found))


def _to_fp8(model: GPT, *, emulate: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model.blocks, config=Float8LinearConfig(emulate=emulate))


def _rematerialised(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


if __name__ == "__main__":
    main()
