"""Fingerprints of training steps: a refactoring that changes no program leaves them identical.

    python tests/fingerprints.py                       # prints the programs that differ
    python tests/fingerprints.py --record "one line"   # records them anew, with the reason
    python tests/fingerprints.py --save DIR            # writes their texts, to compare checkouts

A fingerprint is the SHA-256 of a step's lowered StableHLO for CUDA devices, and that of the
compiler options that the step passes to XLA for GPUs. `fingerprints.json` has one set per JAX
release, and the history of records with their reasons, newest first.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, muon

import zero_jax
from zero_jax.models import decoder, gpt
from zero_jax.plan.text_model import TextModel
from zero_jax.remat.policies import POLICIES

RECORDED = Path(__file__).with_name("fingerprints.json")
PACKAGES = {name: version(name) for name in ("flax", "optax")}  # that add operations to a program
# A private function or a mesh in StableHLO, and each use of a name.
NAME = r'[\w.$-]+|"[^"]+"'
SYMBOL = re.compile(
    rf"^  (?:sdy\.mesh|func\.func private) @(?P<name>{NAME})(?: = .*|\([\s\S]*?^  }})\n",
    re.MULTILINE,
)
USE = re.compile(f"@({NAME})")

MESH = zero_jax.abstract_mesh(4)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
LAYERS, WIDTH, VOCAB, TOKENS, ROWS, EXPERTS = 4, 64, 128, 16, 16, 4
PyTree = Any
HOW = f"JAX {jax.__version__} has no recorded fingerprints. Check out the commit to compare with, "
HOW += f'and run python tests/fingerprints.py --record "JAX {jax.__version__}"'


def make() -> PyTree:
    shapes = {"down": (2 * WIDTH, WIDTH), "scale": (WIDTH,), "up": (WIDTH, 2 * WIDTH)}
    layers = {name: jnp.ones((LAYERS, *shape)) for name, shape in shapes.items()}
    return {"embed": jnp.ones((VOCAB, WIDTH)), "head": jnp.ones((WIDTH, VOCAB)), "layers": layers}


def layer(x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
    return x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"], None


def cross_entropy(params: PyTree, x: jax.Array, tokens: jax.Array) -> zero_jax.Weighted:
    logits = (x @ params["head"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return zero_jax.Weighted(jnp.sum(losses), jnp.float32(losses.size))


def scanned(params: PyTree, tokens: jax.Array) -> zero_jax.Weighted:
    x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
    return cross_entropy(params, x, tokens)


def make_unrolled() -> PyTree:
    params = make()
    layers = [{name: x[i] for name, x in params["layers"].items()} for i in range(LAYERS)]
    return params | {"layers": layers}


def unrolled(params: PyTree, tokens: jax.Array) -> zero_jax.Weighted:
    x = params["embed"][tokens[:, :-1]]
    for p in params["layers"]:
        x, _ = layer(x, p)
    return cross_entropy(params, x, tokens)


def make_routed() -> PyTree:
    """Makes experts, whose dims are named, in place of each MLP."""
    layers = {"router": jnp.ones((LAYERS, WIDTH, EXPERTS)), "scale": jnp.ones((LAYERS, WIDTH))}
    for name, dims in {"down": (2 * WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH)}.items():
        stacked = jnp.ones((LAYERS, EXPERTS, *dims))
        layers[name] = nn.Partitioned(stacked, (None, "experts", None, None))
    return make() | {"layers": layers}


def routed(params: PyTree, tokens: jax.Array) -> tuple[zero_jax.Weighted, jax.Array]:
    """Sends each token to one expert; the aux is each row's mean weight of each expert."""

    def mixture(x: jax.Array, p: PyTree) -> tuple[jax.Array, jax.Array]:
        probs_BxTxE = jax.nn.softmax((x * p["scale"]) @ p["router"])
        chosen_BxTxE = jax.nn.one_hot(jnp.argmax(probs_BxTxE, -1), EXPERTS, dtype=x.dtype)
        weights_BxTxE = probs_BxTxE * chosen_BxTxE
        sent_BxExTxD = jnp.einsum("bte,btd->betd", weights_BxTxE, x)
        up_BxExTxF = jnp.tanh(jnp.einsum("betd,edf->betf", sent_BxExTxD, p["up"]))
        down_BxExTxD = jnp.einsum("betf,efd->betd", up_BxExTxF, p["down"])
        return x + down_BxExTxD.sum(1), weights_BxTxE.mean(1)

    params = nn.unbox(params)
    x, weights_LxBxE = jax.lax.scan(mixture, params["embed"][tokens[:, :-1]], params["layers"])
    return cross_entropy(params, x, tokens), weights_LxBxE.mean(0)


@dataclasses.dataclass(frozen=True)
class Case:
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mesh: AbstractMesh = MESH
    make: Callable[[], PyTree] = make
    loss: Callable[..., Any] = scanned
    tx: optax.GradientTransformation = ADAMW
    has_aux: bool = False

    def lowered(self) -> tuple[str, str]:
        zero = zero_jax.Zero(self.mesh, **{"precision": "bf16", **self.settings})
        placed = NamedSharding(self.mesh, PartitionSpec(zero.batch_axes))
        tokens = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32, sharding=placed)
        params, tx = zero.eval_shape(self.make), zero.optimizer(self.tx)
        step = zero.train_step(self.loss, tx, has_aux=self.has_aux)
        args = params, tx.init(params), tokens
        program = step.trace(*args).lower(lowering_platforms=("cuda",))
        options = json.dumps(step.compiler_options(*args), indent=1, sort_keys=True)
        return normalised(program.as_text()), options


def dims_for_muon(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: MuonDimensionNumbers(1, 2) if x.ndim == 3 else None, params)


def of_model(config: Any, settings: Mapping[str, Any], **mesh: int) -> Case:
    model, mesh = TextModel(config), zero_jax.abstract_mesh(**mesh)
    return Case(settings, mesh, model.make, model.trained_loss, has_aux=model.routes)


def cases() -> dict[str, Case]:
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)
    lora = zero_jax.Lora(rank=2, base="nf4").adapt(scanned, jax.eval_shape(make), tokens)
    specs = {"up": PartitionSpec(None, None, "model"), "down": PartitionSpec(None, "model")}
    by_experts, by_model = zero_jax.abstract_mesh(2, experts=2), zero_jax.abstract_mesh(4, model=2)
    features = {
        "scanned": Case(),
        "unrolled": Case(make=make_unrolled, loss=unrolled),
        "experts": Case({}, by_experts, make_routed, routed, has_aux=True),
        "tensor parallel": Case({"param_specs": specs}, by_model),
        "LoRA": Case({"frozen": lora.frozen}, make=lora.init(make), loss=lora.loss),
        "Muon": Case(tx=muon(1e-3, muon_weight_dimension_numbers=dims_for_muon)),
        "8-bit state": Case({"optimizer_state_dtype": "8bit"}),
        "host offload": Case({"offload": zero_jax.Offload(True, True, piece_bytes=2**14)}),
        "accumulation": Case({"grad_accum_steps": 2}),
        "fp16": Case({"precision": "fp16"}),
    }
    found = {}
    for at, (name, case) in enumerate(features.items()):
        for stage in range(4):
            remat = POLICIES[(at + stage + 2) % 4]  # unrolled layers have "block" at stage 3
            settings = {"stage": stage, "remat": remat, **case.settings}
            found[f"{name}, stage {stage}"] = dataclasses.replace(case, settings=settings)
    coded = zero_jax.Precision("bf16", "bf16", param_comm_dtype="int8", grad_comm_dtype="int4")
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "seq": TOKENS, "loss_chunk": 16}
    dense, block = gpt.GPTConfig(**sizes), {"stage": 3, "remat": "block"}
    mixture = decoder.Mixture(EXPERTS, 2, capacity=0.75, balance=0.02, z=0.001)
    sparse = decoder.DecoderConfig(**sizes, kv_heads=2, head_dim=8, hidden=64, mixture=mixture)
    replicas, sequence = zero_jax.abstract_mesh(2, replica=2), {**block, "sequence_parallel": True}
    on_host = {"stage": 2, "remat": "block@partitioned+host"}
    return found | {
        "int8 gather and int4 scatter, stage 3": Case({**block, "precision": coded}),
        "buckets of 4 KiB, stage 3": Case({**block, "bucket_bytes": 4096}),
        "secondary shards, stage 3": Case({**block, "secondary_shards": True}, replicas),
        "GPT, sequence parallel, stage 3": of_model(dense, sequence, data=2, model=2),
        "GPT, activations in host memory, stage 2": of_model(dense, on_host, data=2, model=2),
        "decoder with experts, stage 3": of_model(sparse, block, data=2, experts=2),
    }


def normalised(text: str) -> str:
    """Names each private function and mesh by a hash of its content, in the order of first use."""
    text = re.sub(r'jax\.result_info = "[^"]*"', 'jax.result_info = ""', text)
    text = re.sub(r"^module @\S+", "module @step", text)
    symbols = {symbol["name"]: symbol[0] for symbol in SYMBOL.finditer(text)}
    names, written = dict[str, str](), dict[str, str]()

    def renamed(use: re.Match[str]) -> str:
        name = use[1]
        if name not in symbols:
            return use[0]
        if name not in names:
            anonymous = USE.sub(renamed, symbols[name].replace(f"@{name}", "@", 1))
            names[name] = f"@_{sha256(anonymous)[:12]}"
            written[names[name]] = anonymous.replace("@", names[name], 1)
        return names[name]

    main = USE.sub(renamed, SYMBOL.sub("", text))
    return "".join([*written.values(), main])


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprints(folder: Path | None = None) -> dict[str, str]:
    """Returns two hashes for each case, of program and options; writes the texts to `folder`."""
    found = {name: case.lowered() for name, case in cases().items()}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (program, options) in found.items():
            (folder / f"{name}.txt").write_text(f"{options}\n{program}")
    return {name: " ".join(map(sha256, texts)) for name, texts in found.items()}


def recorded() -> Any:
    return json.loads(RECORDED.read_text())


def differences(found: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    differing = {}
    for name in {**found, **known}:
        if name not in found or name not in known:
            differing[name] = "not recorded" if name in found else "recorded, no longer a program"
        elif found[name] != known[name]:
            same = found[name].split()[0] == known[name].split()[0]
            differing[name] = "compiler options" if same else "program"
    return differing


def record(found: Mapping[str, str], reason: str) -> list[str]:
    """Writes the fingerprints of the installed release; returns the names of those that changed."""
    data = recorded()
    known = data["releases"].get(jax.__version__, {"programs": {}})["programs"]
    changed = [*differences(found, known)]
    data["releases"][jax.__version__] = {"packages": PACKAGES, "programs": found}
    if changed:
        names = ["all"] if len(changed) == len({**found, **known}) else changed
        data["history"].insert(0, {"jax": jax.__version__, "reason": reason, "changed": names})
    RECORDED.write_text(json.dumps(data, indent=1) + "\n")
    return changed


def compare() -> int:
    releases = recorded()["releases"]
    if jax.__version__ not in releases:
        print(HOW)
        return 1
    found, release = fingerprints(), releases[jax.__version__]
    differing = differences(found, release["programs"])
    for name, what in differing.items():
        print(f"{name}: {what}")
    print(f"JAX {jax.__version__}: {len(differing)} of {len(found)} programs differ")
    if differing and release["packages"] != PACKAGES:
        print(f"recorded with {release['packages']}, installed {PACKAGES}: this may be the cause")
    return int(bool(differing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", metavar="REASON", help="records all, with one line of reason")
    parser.add_argument("--save", metavar="DIR", type=Path, help="writes all texts")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.record is None and args.save is None:
        return compare()
    if args.record is not None and len(args.record.splitlines()) != 1:
        parser.error(f"--record={args.record!r}: give one line of reason")
    found = fingerprints(args.save)
    if args.record is not None:
        print(f"JAX {jax.__version__}: {len(record(found, args.record))} programs recorded anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
