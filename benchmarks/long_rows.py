"""Rows of up to millions of tokens: memory and modelled time of a step on absent H100s.

    python benchmarks/long_rows.py             # 8 programs, 4 minutes on two cores
    python benchmarks/long_rows.py --models qwen3-8b --devices 8 --tokens 131072
    python benchmarks/long_rows.py --tables    # prints the table of what is there

Compiles a training step of AdamW on one row, which all devices share by a context axis: stage 3 in
bf16 with bf16 reduction, remat "block@host", MLPs in chunks of 8,192 tokens, cuDNN's attention.
Writes docs/long_rows.json. Seconds are modelled at peak rates, without transfers to the host.
Needs the extra `prove`.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax

from zero_jax import Precision, Zero, abstract_mesh
from zero_jax.commands.case import Case
from zero_jax.models import decoder, families

FILE = pathlib.Path(__file__).parent.parent / "docs" / "long_rows.json"
REMAT, CHUNK = "block@host", 8192
# Model, devices, tokens of the row.
CASES = [
    *(("llama-3.1-8b", 8, 2**n) for n in (17, 19, 20, 22)),
    *(("qwen3-8b", 8, 2**n) for n in (17, 19, 20)),
    ("llama-3.1-8b", 32, 2**22),
]


def measured(model: str, devices: int, tokens: int, chunk: int | None) -> dict[str, Any]:
    """Returns the memory, communication and modelled time of a step."""
    known = families.preset(model)
    assert isinstance(known, decoder.DecoderConfig)
    config = dataclasses.replace(known, seq=max(known.seq, tokens), mlp_chunk=chunk)
    precision = Precision("bf16", reduce_dtype="bf16")
    zero = Zero(abstract_mesh(1, context=devices), 3, precision=precision, remat=REMAT)
    case = Case(config, zero, "adamw", rows=1, tokens=tokens)
    began = time.perf_counter()
    plan = case.plan(3, target="h100")
    assert plan.compiled is not None and plan.time is not None
    compiled, heads, keys = plan.compiled, config.heads, max(config.kv_heads, devices)
    return {
        "model": model,
        "devices": devices,
        "tokens": tokens,
        "mlp_chunk": chunk,
        "total_gb": round(compiled.total_bytes / 1e9, 3),
        "temp_gb": round(compiled.temp_bytes / 1e9, 3),
        "host_gb": round(compiled.host_bytes / 1e9, 3),
        "predicted_gb": round(plan.predicted.total_bytes / 1e9, 3),
        "sent_elements": compiled.sent_elements,
        # Others look up rows of the embedding.
        "attention_elements": sum(
            c.sent_elements
            for c in compiled.collectives
            if c.kind == "all-to-all" and "lookup" not in c.op_name
        ),
        # Each of three passes sends queries and outputs, keys and values.
        "derived_all_to_all": 6
        * config.layers
        * (heads + keys)
        * config.head_dim
        * tokens
        // devices,
        "concurrent": round(compiled.overlap().fraction, 3),
        "seconds": round(plan.time.seconds, 3),
        "compile_seconds": round(time.perf_counter() - began),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| model | devices | tokens | device GB (predicted) | host GB per device "
        "| modelled step s | elements of attention (derived) | bytes concurrent with matmuls |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = row["predicted_gb"] / row["total_gb"] - 1
        sent = row["attention_elements"]
        lines.append(
            f"| {row['model']} | {row['devices']} | {row['tokens']:,} | {row['total_gb']:.2f} "
            f"({error:+.1%}) | {row['host_gb']:.1f} | {row['seconds']:.1f} | {sent:.3e} "
            f"({sent / row['derived_all_to_all'] - 1:+.1%}) | {row['concurrent']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", default=[case[0] for case in CASES])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[case[2] for case in CASES])
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of an MLP; 0 for all")
    parser.add_argument("--tables", action="store_true")
    given = parser.parse_args()
    if given.tables:
        print(table(json.loads(FILE.read_text())["rows"]))
        return
    jax.config.update("jax_platforms", "cpu")
    known = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    for model, devices, tokens in CASES:
        if model in given.models and devices in given.devices and tokens in given.tokens:
            row = measured(model, devices, tokens, given.chunk or None)
            print(json.dumps(row), flush=True)
            same = ("model", "devices", "tokens", "mlp_chunk")
            known = [r for r in known if any(r[k] != row[k] for k in same)] + [row]
            content = {"jax": jax.__version__, "remat": REMAT, "rows": known}
            FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
