"""Predicted and compiled bytes on absent H100s: of steps as others write them, and of presets.

    python benchmarks/forecasts.py                # all, JSON, one object for each program
    python benchmarks/forecasts.py full muon      # these

Most are one decoder in plain functions (norms, grouped gates, attention in blocks), as people write
it, with what decides on memory changed one at a time: logits whole or in chunks, layers scanned or
not, experts, a frozen base with adapters, long rows, host tiers, optimizers; and a ResNet.
Gradients are summed in bf16, but in those whose names end in fp32, and in presets, which are as
the command plans them by default.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zero_jax
from zero_jax.models import families, optimizers, resnet
from zero_jax.models.cross_entropy import chunked_cross_entropy
from zero_jax.plan.text_model import TextModel

PyTree = Any
BF16 = zero_jax.Precision("bf16", reduce_dtype="bf16")
SUMS_IN_FP32 = zero_jax.Precision("bf16")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder in plain functions.

    Attributes:
      layers, width, heads, hidden, vocab: its sizes; `hidden` is that of the gated MLP.
      scanned: whether layers are a scan.
      chunk: tokens whose logits exist at once; None for all.
      experts: MLPs a layer, of which each token takes two; 0 for one that all take.
      rank: of adapters on the MLP's matrices, beside a base; 0 for none.
    """

    layers: int = 24
    width: int = 2048
    heads: int = 16
    hidden: int = 5632
    vocab: int = 50304
    scanned: bool = True
    chunk: int | None = 512
    experts: int = 0
    rank: int = 0

    def init(self) -> PyTree:
        """Parameters, zeros: they are only ever traced."""
        D, F = self.width, self.hidden
        layer: dict[str, tuple[int, ...]] = {"qkv": (D, 3 * D), "out": (D, D), "n1": (D,)}
        own = (self.experts,) if self.experts else ()
        layer |= {"gate": (*own, D, F), "up": (*own, D, F), "down": (*own, F, D), "n2": (D,)}
        if self.experts:
            layer["router"] = (D, self.experts)
        if self.rank:
            for name, (a, b) in {"gate": (D, F), "up": (D, F), "down": (F, D)}.items():
                layer[f"lora_{name}_a"], layer[f"lora_{name}_b"] = (a, self.rank), (self.rank, b)
        if self.scanned:
            layers: PyTree = {k: jnp.zeros((self.layers, *shape)) for k, shape in layer.items()}
        else:
            one = {k: jnp.zeros(shape) for k, shape in layer.items()}
            layers = [one] * self.layers
        ends = {"embed": (self.vocab, D), "head": (self.vocab, D), "norm": (D,)}
        return {"layers": layers} | {k: jnp.zeros(shape) for k, shape in ends.items()}

    def loss(self, params: PyTree, rows: jax.Array) -> jax.Array | zero_jax.Weighted:
        """The mean cross entropy of rows of tokens (B, T + 1)."""
        x = params["embed"][rows[:, :-1]]
        if self.scanned:
            x, _ = jax.lax.scan(lambda x, w: (self._layer(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = self._layer(x, w)
        x, labels = _norm(x, params["norm"]), rows[:, 1:].reshape(-1)
        flat = x.reshape(len(labels), -1)
        if self.chunk is None:
            logits = (flat @ params["head"].T).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(losses)
        ones = jnp.ones(labels.shape)
        found = chunked_cross_entropy(flat, params["head"], labels, ones, self.chunk)
        return zero_jax.Weighted(*found)

    def _layer(self, x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        B, T, D = x.shape
        qkv = (_norm(x, w["n1"]) @ w["qkv"]).reshape(B, T, self.heads, 3, -1)
        x = x + zero_jax.attention(*jnp.unstack(qkv, axis=3)).reshape(B, T, D) @ w["out"]
        h = _norm(x, w["n2"])
        if self.experts:
            return x + self._routed(h.reshape(-1, D), w).reshape(x.shape)
        gated = jax.nn.silu(_adapted(h, w, "gate")) * _adapted(h, w, "up")
        return x + _adapted(gated, w, "down")

    def _routed(self, h: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Two experts a token, each of which takes a quarter more than its even share."""
        tokens, experts = len(h), self.experts
        places = 2 * tokens * 5 // (4 * experts)
        chances = jax.nn.softmax((h @ w["router"]).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(chances, 2)
        wanted = jax.nn.one_hot(chosen, experts, dtype=jnp.int32).reshape(2 * tokens, experts)
        place = jnp.sum((jnp.cumsum(wanted, 0) - 1) * wanted, -1)
        expert, kept = chosen.reshape(-1), place < places
        slot = jnp.where(kept, expert * places + place, experts * places)
        source = jnp.repeat(jnp.arange(tokens), 2)
        empty = jnp.zeros((experts * places + 1, h.shape[-1]), h.dtype)
        sent = empty.at[slot].set(h[source])[:-1].reshape(experts, places, -1)
        gated = jax.nn.silu(jnp.einsum("epd,edf->epf", sent, w["gate"]))
        gated = gated * jnp.einsum("epd,edf->epf", sent, w["up"])
        made = jnp.einsum("epf,efd->epd", gated, w["down"]).reshape(experts * places, -1)
        back = jnp.where(kept[:, None], made[jnp.minimum(slot, len(made) - 1)], 0)
        scaled = back * weights.reshape(-1, 1).astype(h.dtype)
        return jnp.sum(scaled.reshape(tokens, 2, -1), 1)


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (normal * gain).astype(x.dtype)


def _adapted(x: jax.Array, w: Mapping[str, jax.Array], name: str) -> jax.Array:
    y = x @ w[name]
    a = f"lora_{name}_a"
    return y if a not in w else y + (x @ w[a]) @ w[f"lora_{name}_b"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A step; see the fields."""

    make: Callable[[], PyTree]
    loss: Callable[..., Any]
    batch: Callable[[int], PyTree]  # of so many devices
    extras: tuple[Any, ...] = ()
    has_aux: bool = False
    tx: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-4))
    devices: int = 8
    target: str = "h100"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def decoder(
    rows: int = 4, tokens: int = 1024, sizes: Mapping[str, Any] | None = None, **how: Any
) -> Program:
    """The step of a decoder on so many rows a device."""
    model = Decoder(**(sizes or {}))

    def batch(devices: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows * devices, tokens + 1), jnp.int32)

    settings = {"stage": 3, "remat": "block"} | how.pop("settings", {})
    return Program(model.init, model.loss, batch, settings=settings, **how)


def preset(
    name: str, devices: int, rows: int = 1, precision: zero_jax.Precision = SUMS_IN_FP32
) -> Program:
    """A model of `zero_jax.models` on rows of 1024 tokens, each layer rematerialised."""
    model = TextModel(families.preset(name))

    def batch(devices: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows * devices, 1025), jnp.int32)

    settings = {"stage": 3, "remat": "block", "precision": precision}
    return Program(model.make, model.loss, batch, devices=devices, settings=settings)


def images(**settings: Any) -> Program:
    """The step of a ResNet-50 on 32 images of 224 x 224 a device."""
    model = resnet.resnet50(classes=1000)
    like = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)), train=False)
    )

    def make() -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like["params"])

    def loss(params: PyTree, batch: PyTree, stats: PyTree) -> tuple[zero_jax.Weighted, PyTree]:
        found, new = resnet.loss(model, params, stats, *batch)
        return zero_jax.Weighted(*found), new

    def batch(devices: int) -> PyTree:
        count = 32 * devices
        pixels = jax.ShapeDtypeStruct((count, 224, 224, 3), jnp.float32)
        return pixels, jax.ShapeDtypeStruct((count,), jnp.int32)

    return Program(make, loss, batch, (like["batch_stats"],), True, settings=settings)


WHOLE = {"chunk": None}
EXPERTS = {"layers": 8, "experts": 8}
LARGE = {"layers": 80, "width": 8192, "heads": 64, "hidden": 28672, "vocab": 128256}
IN_FP32 = {"precision": SUMS_IN_FP32}
PROGRAMS: dict[str, Callable[[], Program]] = {
    "full": lambda: decoder(sizes=WHOLE),
    "chunks": lambda: decoder(),
    "full-stage-1": lambda: decoder(sizes=WHOLE, settings={"stage": 1}),
    "full-stage-2": lambda: decoder(sizes=WHOLE, settings={"stage": 2}),
    "full-none": lambda: decoder(sizes=WHOLE, settings={"remat": "none"}),
    "full-dots-k2": lambda: decoder(sizes=WHOLE, settings={"remat": "dots", "grad_accum_steps": 2}),
    "full-64": lambda: decoder(sizes=WHOLE, devices=64),
    "unrolled": lambda: decoder(sizes={"scanned": False}),
    "unrolled-full": lambda: decoder(sizes=WHOLE | {"scanned": False}),
    "experts": lambda: decoder(sizes=EXPERTS),
    "experts-none": lambda: decoder(sizes=EXPERTS, settings={"remat": "none"}),
    "frozen": lambda: decoder(sizes=WHOLE | {"rank": 16}, settings={"frozen": "^(?!.*lora)"}),
    "long": lambda: decoder(rows=1, tokens=131072, sizes={"layers": 4}),
    "longer-host": lambda: decoder(
        rows=1, tokens=262144, sizes={"layers": 4}, settings={"remat": "block@host"}
    ),
    "80b-64": lambda: decoder(sizes=LARGE, devices=64),
    "host": lambda: decoder(settings={"offload": "optimizer"}),
    "muon": lambda: decoder(tx=optimizers.make("muon", optax.constant_schedule(1e-3))),
    "adafactor": lambda: decoder(tx=optimizers.make("adafactor", optax.constant_schedule(1e-3))),
    "resnet": lambda: images(stage=2, remat="none"),
    "resnet-3": lambda: images(stage=3, remat="block"),
    "full-fp32": lambda: decoder(sizes=WHOLE, settings=IN_FP32),
    "chunks-fp32": lambda: decoder(settings=IN_FP32),
    "full-64-fp32": lambda: decoder(sizes=WHOLE, devices=64, settings=IN_FP32),
    "experts-fp32": lambda: decoder(sizes=EXPERTS, settings=IN_FP32),
    "host-fp32": lambda: decoder(settings=IN_FP32 | {"offload": "optimizer"}),
    "80b-64-fp32": lambda: decoder(sizes=LARGE, devices=64, settings=IN_FP32),
    "1.5b-8": lambda: preset("1.5b", 8),
    "7.5b-64": lambda: preset("7.5b", 64),
    "qwen3-1.7b-8": lambda: preset("qwen3-1.7b", 8),
    "llama-3.1-8b-8": lambda: preset("llama-3.1-8b", 8),
    "llama-3.1-8b-64": lambda: preset("llama-3.1-8b", 64),
    "llama-3.1-70b-64": lambda: preset("llama-3.1-70b", 64),
    "full-cpu": lambda: decoder(
        sizes=WHOLE | {"layers": 4, "width": 512, "hidden": 1408, "heads": 8}, target="cpu"
    ),
}


def planned(program: Program) -> zero_jax.Plan:
    """The plan of a program, compiled."""
    settings = {"precision": BF16, **program.settings}
    zero = zero_jax.Zero(zero_jax.abstract_mesh(program.devices), **settings)
    return zero.plan(
        *(program.loss, zero.optimizer(program.tx), zero.eval_shape(program.make)),
        *(program.batch(program.devices), *program.extras),
        has_aux=program.has_aux,
        target=program.target,
    )


def measured(name: str) -> dict[str, Any]:
    """What is predicted and what was compiled, GB."""
    plan = planned(PROGRAMS[name]())
    audit = plan.compiled
    assert audit is not None
    terms = {k: round(v / 1e9, 3) for k, v in plan.predicted.terms.items() if v > 5e6}
    largest = [
        f"{t.bytes / 1e9:.3f} {t.shape.split('{')[0]} {t.source}" for t in audit.peak.temporaries
    ]
    return {
        "name": name,
        "predicted_gb": round(plan.predicted.total_bytes / 1e9, 3),
        "compiled_gb": round(audit.total_bytes / 1e9, 3),
        "error": round(plan.error, 4),
        "terms": terms,
        "temporaries_gb": round(audit.temp_bytes / 1e9, 3),
        "fragmentation": round(audit.fragmentation, 3),
        "step_seconds": round(plan.time.seconds, 4) if plan.time else None,
        "overlapped": round(plan.time.overlapped, 3) if plan.time else None,
        "largest": largest[:8],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of " + ", ".join(PROGRAMS))
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for name in given.names or PROGRAMS:
        print(json.dumps(measured(name)), flush=True)


if __name__ == "__main__":
    main()
