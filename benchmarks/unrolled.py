"""Layers that are not scanned, beside the same that are: memory, wire and step on absent H100s.

    python benchmarks/unrolled.py [--model 7.5b] [--devices 64 8] [--forms scanned nnx linen plain]

Compiles a training step of a GPT at stage 3, 4 rows of 1024 tokens a device, remat "block", with
its blocks in a scan, as a list of NNX modules, as linen modules, and as plain functions that cast
all of a layer's parameters before the first is used. Prints JSON, one object for each program.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import zero_jax
from zero_jax.commands.case import Case
from zero_jax.models import gpt
from zero_jax.models.cross_entropy import chunked_cross_entropy

ROWS = 4


class ListGPT(nnx.Module):
    """The GPT of models/gpt.py with a list of blocks."""

    def __init__(self, config: gpt.GPTConfig, rngs: nnx.Rngs):
        self.config = config
        self.wte = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.wpe = nnx.Embed(config.seq, config.width, rngs=rngs)
        self.blocks = nnx.List(
            [gpt.Block(config, rngs, zero_jax.attention) for _ in range(config.layers)]
        )
        self.ln_f = nnx.LayerNorm(config.width, rngs=rngs)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        embed, places = self.wte.embedding[...], self.wpe.embedding[...]
        x = embed[tokens] + places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)


class LinenBlock(nn.Module):
    config: gpt.GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, D = x.shape
        dtype = x.dtype
        h = nn.LayerNorm(epsilon=1e-5, dtype=dtype, use_fast_variance=False)(x)
        qkv = nn.Dense(3 * D, dtype=dtype)(h).reshape(B, T, self.config.heads, 3, -1)
        mixed = zero_jax.attention(*jnp.unstack(qkv, axis=3)).reshape(B, T, D)
        x = x + nn.Dense(D, dtype=dtype)(mixed)
        h = nn.LayerNorm(epsilon=1e-5, dtype=dtype, use_fast_variance=False)(x)
        return x + nn.Dense(D, dtype=dtype)(gpt.gelu(nn.Dense(4 * D, dtype=dtype)(h)))


class LinenGPT(nn.Module):
    config: gpt.GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        init = nn.initializers.normal(0.02)
        embed = self.param("wte", init, (config.vocab, config.width))
        places = self.param("wpe", init, (config.seq, config.width))
        x = embed[tokens] + places[: tokens.shape[1]]
        for i in range(config.layers):
            x = LinenBlock(config, name=f"block_{i}")(x)
        return nn.LayerNorm(epsilon=1e-5, dtype=x.dtype)(x), embed


def plain_init(config: gpt.GPTConfig) -> Any:
    D = config.width
    shapes = {"qkv": (D, 3 * D), "proj": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    ends = {"bqkv": 3 * D, "bproj": D, "bup": 4 * D, "bdown": D, "g1": D, "b1": D, "g2": D, "b2": D}
    layer = {k: jnp.zeros(s) for k, s in shapes.items()} | {
        k: jnp.zeros(s) for k, s in ends.items()
    }
    ends = {"wte": jnp.zeros((config.vocab, D)), "wpe": jnp.zeros((config.seq, D))}
    return {"layers": [layer] * config.layers, "gf": jnp.zeros(D), "bf": jnp.zeros(D), **ends}


def _norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
    return (normal * gain + bias).astype(x.dtype)


def plain_hidden(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    B, T, D = x.shape
    for layer in params["layers"]:
        p = {name: w.astype(x.dtype) for name, w in layer.items()}  # all of them, at the top
        h = _norm(x, p["g1"], p["b1"])
        qkv = (h @ p["qkv"] + p["bqkv"]).reshape(B, T, heads, 3, -1)
        mixed = zero_jax.attention(*jnp.unstack(qkv, axis=3)).reshape(B, T, D)
        x = x + mixed @ p["proj"] + p["bproj"]
        h = _norm(x, p["g2"], p["b2"])
        x = x + gpt.gelu(h @ p["up"] + p["bup"]) @ p["down"] + p["bdown"]
    return _norm(x, params["gf"], params["bf"])


def _entropy(x: jax.Array, embed: jax.Array, labels: jax.Array, chunk: int) -> zero_jax.Weighted:
    flat = labels.reshape(-1)
    ones = jnp.ones(flat.shape)
    found = chunked_cross_entropy(x.reshape(len(flat), -1), embed, flat, ones, chunk)
    return zero_jax.Weighted(*found)


def forms(config: gpt.GPTConfig) -> dict[str, tuple[Callable[[], Any], Callable[..., Any]]]:
    """Of each form of the model a function that makes its parameters, and the loss."""
    chunk = config.loss_chunk
    listed = nnx.graphdef(nnx.eval_shape(lambda: ListGPT(config, nnx.Rngs(0))))
    linen = LinenGPT(config)

    def nnx_loss(params: Any, rows: jax.Array) -> zero_jax.Weighted:
        model = nnx.merge(listed, params)
        x = model.hidden(rows[:, :-1])
        return _entropy(x, model.wte.embedding[...], rows[:, 1:], chunk)

    def linen_loss(params: Any, rows: jax.Array) -> zero_jax.Weighted:
        x, embed = linen.apply(params, rows[:, :-1])
        return _entropy(x, embed, rows[:, 1:], chunk)

    def plain_loss(params: Any, rows: jax.Array) -> zero_jax.Weighted:
        x = plain_hidden(params, rows[:, :-1], config.heads)
        return _entropy(x, params["wte"], rows[:, 1:], chunk)

    tokens = jnp.zeros((1, 8), jnp.int32)
    return {
        "nnx": (lambda: nnx.state(ListGPT(config, nnx.Rngs(0)), nnx.Param), nnx_loss),
        "linen": (lambda: linen.init(jax.random.key(0), tokens), linen_loss),
        "plain": (lambda: plain_init(config), plain_loss),
    }


def measured(form: str, model: str, devices: int, remat: str) -> dict[str, Any]:
    """What a step of one form holds, sends and hides."""
    config = gpt.preset(model)
    precision = zero_jax.Precision("bf16", reduce_dtype="bf16")
    mesh = zero_jax.abstract_mesh(devices)
    zero = zero_jax.Zero(mesh, 3, precision=precision, remat=remat)
    case = Case(config, zero, "adamw", ROWS * devices)
    if form == "scanned":
        plan = case.plan(3, target="h100")
    else:
        make, loss = forms(config)[form]
        plan = zero.plan(
            *(loss, zero.optimizer(case.tx), zero.eval_shape(make), case.batch),
            target="h100",
            model_flops=case.model_flops,
        )
    assert plan.compiled is not None and plan.time is not None
    overlap = plan.compiled.overlap()
    return {
        "form": form,
        "devices": devices,
        "remat": remat,
        "layers": [[x.count, x.elements, x.scanned] for x in plan.layers],
        "gb": round(plan.compiled.total_bytes / 1e9, 3),
        "predicted_gb": round(plan.predicted.total_bytes / 1e9, 3),
        "words": round(sum(plan.compiled.sent_elements.values()) / plan.num_params, 4),
        "concurrent": round(overlap.fraction, 4),
        "overlapped": round(plan.time.overlapped, 4),
        "step": round(plan.time.seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="7.5b")
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--forms", nargs="+", default=["scanned", "nnx", "linen", "plain"])
    parser.add_argument("--remat", default="block")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for devices in given.devices:
        for form in given.forms:
            print(json.dumps(measured(form, given.model, devices, given.remat)), flush=True)


if __name__ == "__main__":
    main()
