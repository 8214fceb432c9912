"""Is zero_jax right on the GPU that is here? Comparisons on one device, in a few minutes.

    python tests/on_gpu.py                 # prints them, writes docs/on_gpu.json
    python tests/on_gpu.py --only remat    # one alone; what the file has of others stays
    python tests/on_gpu.py --json FILE     # on a CPU, to try the script itself

What fake devices cannot show: XLA's GPU backend, its options, cuDNN's attention, host memory that
is not the device's own. Each check runs in a process of its own, several at a time, and ends with
how far apart two ways were and how far they may be. Matrix products are as exact as they can be
(`jax_default_matmul_precision`), since on a GPU fp32 means TF32 by default.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import PROBLEMS, gpt_problem, train_plain, train_zero, ulps, zoo_without_empty

import zero_jax
from zero_jax import releases
from zero_jax.adapters import quantised
from zero_jax.engine import compiler, offload_check
from zero_jax.models import gpt
from zero_jax.models.attend import attend
from zero_jax.offload.tiers import Offload
from zero_jax.zero import Zero

FILE = Path(__file__).parent.parent / "docs" / "on_gpu.json"
AT_ONCE = 8  # processes
SECONDS = 300  # of one check
STEPS = 6
# As in tests/test_parity.py: a wrong mean, norm or padding is off by 10^4 or more.
ULPS = 256
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
SGD = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9))
GPT = gpt.GPTConfig(layers=4, width=128, heads=2, vocab=256, seq=128)


@dataclasses.dataclass(frozen=True)
class Found:
    """How far two ways were apart, and how far they may be."""

    what: str
    apart: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.apart <= self.limit  # not, if it is NaN


def stages(name: str) -> Iterator[Found]:
    """Losses and parameters beside plain optax, at every stage, with micro-batches."""
    problem, tx = PROBLEMS[name](), SGD if name == "resnet" else ADAM
    losses, params = train_plain(problem, tx, STEPS)
    for stage in range(4):
        micro_batches = 1 if name == "resnet" else 2  # whose batch norm sees a micro-batch
        own = train_zero(problem, tx, STEPS, 1, stage=stage, micro_batches=micro_batches)
        np.testing.assert_allclose(own[0], losses, rtol=1e-4)
        yield Found(f"{name}, stage {stage}: ulps of parameters", ulps(own[1], params), ULPS)


def optimizers() -> Iterator[Found]:
    """Muon and Adafactor beside plain optax."""
    for name, tx, limit in (
        ("muon", optax.contrib.muon(1e-2), 4096),
        ("adafactor", optax.adafactor(1e-2, min_dim_size_to_factor=4), ULPS),
    ):
        problem = zoo_without_empty()
        want, got = train_plain(problem, tx, STEPS)[1], train_zero(problem, tx, STEPS, 1, stage=3)
        yield Found(f"{name}, stage 3: ulps of parameters", ulps(got[1], want), limit)


def offload_itself() -> Iterator[Found]:
    """What `python -m zero_jax.offload --check` says."""
    for outcome in offload_check.check(jax.local_devices()[0]):
        assert not outcome.error, outcome
        yield Found(outcome.what, outcome.gap, offload_check.TOLERANCE)


def tiers() -> Iterator[Found]:
    """States, and masters with them, in host memory; where they lie."""
    problem = PROBLEMS["gpt"]()
    want = train_zero(problem, ADAM, STEPS, 1, stage=3)[1]
    for offload in (
        Offload(optimizer=True, piece_bytes=4096),
        Offload(optimizer=True, params=True, piece_bytes=4096),
    ):
        _, params, zero = train_zero(problem, ADAM, STEPS, 1, stage=3, offload=offload)
        yield Found(f"{offload}: ulps of parameters", ulps(params, want), ULPS)
        state = zero.optimizer(ADAM).init(zero.shard(problem.start))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.size > 1024}
        yield Found(f"{offload}: states not in {kinds}", "pinned_host" not in kinds, 0)


def state_files() -> Iterator[Found]:
    """States in files."""
    problem = PROBLEMS["gpt"]()
    want = train_zero(problem, ADAM, STEPS, 1, stage=3)[1]
    with tempfile.TemporaryDirectory() as folder:
        offload = Offload(optimizer=True, tier="nvme", directory=folder)
        got = train_zero(problem, ADAM, STEPS, 1, stage=3, offload=offload)[1]
        yield Found("states in files: ulps of parameters", ulps(got, want), ULPS)


def _trained(config: gpt.GPTConfig, steps: int = STEPS, **settings: Any) -> Any:
    return train_zero(gpt_problem(config), ADAM, steps, 1, stage=3, **settings)


def remat() -> Iterator[Found]:
    """Every policy, kept values in host memory too."""
    want = _trained(GPT, remat="none")[1]
    for policy in ("dots", "block", "block_sqrt", "block@host", "block_sqrt@host"):
        yield Found(
            f"{policy}: ulps of parameters", ulps(_trained(GPT, remat=policy)[1], want), ULPS
        )


def precision() -> Iterator[Found]:
    """bf16 and fp16 beside fp32: the losses; a step whose gradients overflow is left out."""
    want = _trained(GPT)[0]
    for name, limit in (("bf16", 5e-3), ("fp16", 5e-3)):
        got = _trained(GPT, precision=zero_jax.Precision(name))[0]
        yield Found(f"{name}: of the loss", _apart(got, want), limit)
    zero = Zero(zero_jax.make_mesh(devices=jax.devices()[:1]), 3)
    params = zero.init(lambda: {"w": jnp.ones((64, 64))})
    tx = zero.optimizer(ADAM)
    step = zero.train_step(lambda p, x: jnp.mean(x @ p["w"]), tx)
    before = zero.full(params)
    bad = jnp.full((8, 64), jnp.inf)
    params, _, metrics = step(params, tx.init(params), bad)
    yield Found("a step of infinities: skipped", abs(int(metrics.skipped) - 1), 0)
    yield Found("and its parameters: ulps", ulps(zero.full(params), before), 0)


def attention() -> Iterator[Found]:
    """cuDNN's kernel: values and gradients no further from fp32 than twice XLA's own in bf16."""
    if jax.default_backend() != "gpu":
        yield Found("cuDNN: no GPU here", 0, 0)
        return
    for head, kv, window, documents in (
        (64, 4, None, False),
        (128, 4, None, False),
        (128, 2, None, False),
        (64, 4, 96, False),
        (96, 2, None, False),
        (64, 4, None, True),
        (128, 2, None, True),
    ):
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, weights = (
            jax.random.normal(key, (2, 512, n, head), jnp.float32).astype(jnp.bfloat16)
            for key, n in zip(keys, (4, kv, kv, 4), strict=True)
        )
        rows = jnp.cumsum(jnp.arange(512) % 100 == 99)[None].repeat(2, 0) if documents else None

        given = q, k, v
        run = functools.partial(_attended, weights, rows, window)
        exact = run("xla", *(x.astype(jnp.float32) for x in given))
        errors = [_norm_apart(run(own, *given), exact) for own in ("cudnn", "xla")]
        name = f"cudnn, heads of {head}, {kv} of 4 keys, window {window}, documents {documents}"
        yield Found(f"{name}: error beside twice XLA's", errors[0], 2 * errors[1] + 1e-4)


def _attended(weights: Any, rows: Any, window: int | None, own: str, *given: Any) -> Any:
    """Gradients of q, k and v, and what attention gives."""

    def objective(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v, rows, implementation=own, window=window)
        return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

    return jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(*given)


def whole_model() -> Iterator[Found]:
    """A GPT in bf16, cuDNN's attention and its own in XLA; what "auto" takes."""
    got = [
        _trained(dataclasses.replace(GPT, attention=own), precision=zero_jax.Precision("bf16"))[0]
        for own in ("auto", "xla")
    ]
    yield Found("attention auto and xla, bf16: of the loss", _apart(*got), 5e-3)
    if jax.default_backend() != "gpu":
        return
    zero = Zero(
        zero_jax.make_mesh(devices=jax.devices()[:1]), 3, precision=zero_jax.Precision("bf16")
    )
    problem = gpt_problem(GPT)
    params = zero.shard(problem.start)
    step, state = zero.train_step(problem.loss, ADAM), zero.optimizer(ADAM).init(params)
    text = step.lower(params, state, problem.batch).compile().as_text()
    yield Found("auto is cuDNN's kernel: missing", "cudnn$fmha" not in text, 0)


def states() -> Iterator[Found]:
    """States of 8 bits: their codes on the device, from host memory, and the loss beside fp32's."""
    want = _trained(GPT, 12)[0]
    yield Found("8 bits: of the loss", _apart(_trained(GPT, 12, states="8bit")[0], want), 2e-2)
    on_device = _trained(GPT, states="8bit")
    offload = Offload(optimizer=True, piece_bytes=65536)
    on_host = _trained(GPT, states="8bit", offload=offload)
    yield Found("8 bits, from the host: ulps", ulps(on_host[1], on_device[1]), 2**14)


def blocks() -> Iterator[Found]:
    """int8 and nf4 of frozen weights: the bits of NumPy."""
    x = np.random.default_rng(0).normal(size=(256, 96)).astype(np.float32)
    for kind in quantised.KINDS:
        ours = jax.jit(lambda x, kind=kind: quantised.quantise(x, kind, -2))(x)
        theirs = quantised.quantise(x, kind, -2)
        wrong = int((np.asarray(ours.codes) != np.asarray(theirs.codes)).sum())
        yield Found(f"{kind}: codes that differ from NumPy's", wrong, 0)
        got, want = (np.asarray(own.open(jnp.float32)) for own in (ours, theirs))
        yield Found(f"{kind}: opened, ulps", ulps(got, want), 4)


def checkpoints() -> Iterator[Found]:
    """Written and read: the same bits."""
    problem = PROBLEMS["zoo"]()
    zero = Zero(zero_jax.make_mesh(devices=jax.devices()[:1]), 3)
    params = zero.shard(problem.start)
    tx = zero.optimizer(ADAM)
    step, state = zero.train_step(problem.loss, tx), tx.init(params)
    for _ in range(2):
        params, state, _ = step(params, state, problem.batch)
    with tempfile.TemporaryDirectory() as folder:
        with zero_jax.Checkpoints(folder) as store:
            store.save(2, (params, state))
            store.wait()
            again = store.restore((params, state))
    got, want = jax.device_get((again.tree, (params, state)))
    equal = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), got, want)
    yield Found("leaves that differ", jax.tree.leaves(equal).count(False), 0)


def options() -> Iterator[Found]:
    """Every option that the step gives to XLA for GPUs is known to it."""
    if jax.default_backend() != "gpu":
        yield Found("options: no GPU here", 0, 0)
        return
    for spellings in (releases.GATHER_AHEAD, releases.AT_ONCE):
        yield Found(f"{spellings[0][0]} is unknown", not compiler.first_known(spellings), 0)
    given = compiler.options(2**30, 64, (2**26, 2**26))
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=given)
    yield Found(f"{len(given)} options taken: refused", 0, 0)


def _apart(got: Any, want: Any) -> float:
    """The largest relative difference of two lists of losses."""
    return float(np.max(np.abs(np.asarray(got) / np.asarray(want) - 1)))


def _norm_apart(got: Any, want: Any) -> float:
    """The largest ‖a - b‖ / ‖b‖ of two trees' leaves."""
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    apart = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in apart)


CHECKS: dict[str, Callable[[], Iterator[Found]]] = {
    "remat": remat,
    "attention": attention,
    "precision": precision,
    "whole model": whole_model,
    "states": states,
    "tiers": tiers,
    **{f"stages of {name}": functools.partial(stages, name) for name in PROBLEMS},
    "offload": offload_itself,
    "optimizers": optimizers,
    "files": state_files,
    "blocks": blocks,
    "checkpoints": checkpoints,
    "options": options,
}


def alone(name: str) -> dict[str, Any]:
    """One check, in a process of its own."""
    began = time.monotonic()
    # Which of XLA's kernels is the fastest is not asked here, and takes most of the time.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    env = os.environ | {"ZERO_JAX_OFFLOAD_CHECK": "off", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        text = error.stdout or ""
        text = text.decode() if isinstance(text, bytes) else text
        lines = [json.loads(x) for x in text.splitlines() if x.startswith("{")]
        return {"check": name, "error": f"stopped after {SECONDS} s", "found": lines}
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    known = {"check": name, "seconds": round(time.monotonic() - began), "found": lines}
    if done.returncode:
        known["error"] = done.stderr[-3000:] or f"exit code {done.returncode}"
    return known


def one(name: str) -> None:
    """Runs a check here and prints what it finds, a line each."""
    jax.config.update("jax_default_matmul_precision", "highest")
    warnings.filterwarnings("error", module="zero_jax")
    for found in CHECKS[name]():
        print(json.dumps({**dataclasses.asdict(found), "passed": found.passed}), flush=True)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    parsed = parser.parse_args(args)
    # What looks at a device takes most of its memory, unless it is told not to.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if parsed.one:
        one(parsed.one)
        return 0
    if parsed.json == FILE and jax.default_backend() != "gpu":
        parser.error("JAX sees no GPU here; --json FILE tries the script on a CPU")
    here = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    rows = earlier(parsed.json, here, parsed.only)
    known = {**here, "date": time.strftime("%Y-%m-%d"), "checks": rows}
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        for done in as_completed([pool.submit(alone, name) for name in parsed.only]):
            rows.append(done.result())
            print(told(rows[-1]), flush=True)
            parsed.json.write_text(json.dumps(known, indent=1) + "\n")
    bad = [row for row in rows if "error" in row or not all(f["passed"] for f in row["found"])]
    print(f"{len(rows) - len(bad)} of {len(rows)} checks passed")
    return len(bad)


def earlier(file: Path, here: dict[str, str], asked: list[str]) -> list[dict[str, Any]]:
    """What the file has of the same JAX and device, but for the checks that are asked for."""
    known = json.loads(file.read_text()) if file.exists() else {}
    if {k: known.get(k) for k in here} != here:
        return []
    return [row for row in known["checks"] if row["check"] not in asked]


def _verdict(found: dict[str, Any]) -> str:
    return "passed" if found["passed"] else "FAILED"


def told(row: dict[str, Any]) -> str:
    lines = [
        f"{_verdict(f)}: {f['what']}: {f['apart']:.3g} of {f['limit']:.3g}"
        for f in row.get("found", ())
    ]
    error = [re.sub(r"(?m)^", "    ", row["error"][-600:])] if "error" in row else []
    return "\n  ".join([f"{row['check']} ({row.get('seconds', 0)} s)", *lines, *error])


if __name__ == "__main__":
    sys.exit(main())
