"""Temporaries of attention over packed rows by cuDNN, compiled for an absent H100.

    python benchmarks/attention.py                # 6 programs, 2 minutes
    python benchmarks/attention.py --tokens 8192

Forward and backward of one row on each of 8 devices, 32 heads of 128, 8 heads of keys, bf16.
"offsets" gives cuDNN the start and length of each document, as `zero_jax.attention` does; "mask"
gives `jax.nn.dot_product_attention` a mask, which becomes a bias of 2·T² bytes. cuDNN's workspace
is not part of the numbers. Prints JSON. Needs the extra `prove`.
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax import abstract_mesh
from zero_jax.context_parallel import cudnn
from zero_jax.hlo import aot, auditor, targets

DEVICES, HEADS, KEY_HEADS, HEAD_DIM = 8, 32, 8, 128
TOKENS = (8192, 32768, 131072)


def by_mask(q: jax.Array, k: jax.Array, v: jax.Array, *, segment_ids: jax.Array) -> jax.Array:
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")


WAYS = {"offsets": cudnn.attention, "mask": by_mask}


def audit_of(way: str, tokens: int) -> auditor.Audit:
    """Returns the audit of gradients of attention on one device."""
    mesh = abstract_mesh(DEVICES)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> tuple:
        def loss(*qkv: jax.Array) -> jax.Array:
            return jnp.sum(WAYS[way](*qkv, segment_ids=ids).astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    shape = functools.partial(jax.ShapeDtypeStruct, sharding=rows)
    args = [
        shape((DEVICES, tokens, heads, HEAD_DIM), jnp.bfloat16)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    args.append(shape((DEVICES, tokens), jnp.int32))
    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=rows.spec, out_specs=rows.spec, check_vma=False
    )
    target = targets.target("h100")
    with cudnn.compiling_for(target.platform, target.compute_capability):
        return aot.compile_for(target, mapped, args, mesh, donated=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parsed = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    rows = []
    for tokens in parsed.tokens:
        for way in WAYS:
            audit = audit_of(way, tokens)
            largest = [f"{t.shape} {t.bytes / 1e6:.0f} MB" for t in audit.peak.temporaries[:4]]
            rows.append({"way": way, "tokens": tokens, "temp_bytes": audit.temp_bytes})
            rows[-1]["largest"] = largest
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    settings = {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    settings |= {"documents": cudnn.DOCUMENTS, "target": "h100", "rows_per_device": 1}
    print(json.dumps({**versions, **settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
