"""Memory of long rows: a compiled step with and without `mlp_chunk`, on absent H100s.

    python benchmarks/long_rows.py [--tokens 16384 65536] [--chunks 0 4096] [--layers 2]

Compiles a training step of a decoder with the matrices of Llama 3.1 8B's MLP at stage 3, one row a
device, remat "block", for an H100. `--chunks 0` is an MLP of all tokens at once. The compiler has
no fused attention for a device that is absent, and attention in blocks of queries would hold
scores: so the model has one narrow head with a window of 1024 tokens, the MLP dominates, and the
step's time is not that of Llama. Prints JSON, one object for each program.
"""

import argparse
import json
import time
from typing import Any

import jax

import zero_jax
from zero_jax.commands.case import Case
from zero_jax.models import decoder

# Llama 3.1 8B but for its heads, layers and vocabulary.
SHAPE: dict[str, Any] = {"width": 4096, "hidden": 14336, "vocab": 32768}
NARROW: dict[str, Any] = {"heads": 1, "kv_heads": 1, "head_dim": 16, "window": 1024}


def measured(tokens: int, chunk: int | None, devices: int, layers: int, remat: str) -> dict:
    """Returns the memory, communication and modelled time of a step."""
    config = decoder.DecoderConfig(layers=layers, seq=tokens, mlp_chunk=chunk, **SHAPE, **NARROW)
    precision = zero_jax.Precision("bf16", reduce_dtype="bf16")
    mesh = zero_jax.abstract_mesh(devices)
    case = Case(config, zero_jax.Zero(mesh, 3, precision=precision, remat=remat), "adamw", devices)
    began = time.perf_counter()
    plan = case.plan(3, target="h100")
    assert plan.compiled is not None and plan.time is not None
    largest = [[t.bytes, t.shape, t.source] for t in plan.compiled.peak.temporaries[:5]]
    return {
        "tokens": tokens,
        "mlp_chunk": chunk,
        "devices": devices,
        "layers": layers,
        "remat": remat,
        "temp_gb": round(plan.compiled.temp_bytes / 1e9, 3),
        "host_gb": round(plan.compiled.host_bytes / 1e9, 3),
        "total_gb": round(plan.compiled.total_bytes / 1e9, 3),
        "predicted_gb": round(plan.predicted.total_bytes / 1e9, 3),
        "sent_elements": plan.compiled.sent_elements,
        "seconds": round(plan.time.seconds, 4),
        "largest": largest,
        "compile_seconds": round(time.perf_counter() - began),
        "jax": jax.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536], help="of a device")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 4096])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--remat", nargs="+", default=["block"])
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for tokens in given.tokens:
        for chunk in given.chunks:
            for remat in given.remat:
                found = measured(tokens, chunk or None, given.devices, given.layers, remat)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
