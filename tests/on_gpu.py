"""Checks that zero_jax is right on the GPU of this machine, in a few minutes.

    python tests/on_gpu.py                 # prints the results, writes docs/on_gpu.json
    python tests/on_gpu.py --only remat    # one check; the others stay in the file
    python tests/on_gpu.py --json FILE     # on a CPU, to try the script itself

Each check runs in its own process, several at a time, and yields (name, difference, limit).
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import ODD_GPT, PROBLEMS, gpt_problem, train_plain, train_zero, ulps, zoo_problem

import zero_jax
from zero_jax import releases
from zero_jax.adapters import quantised
from zero_jax.engine import compiler, offload_check
from zero_jax.models import gpt
from zero_jax.offload.host import Offload

FILE = Path(__file__).parent.parent / "docs" / "on_gpu.json"
SECONDS = 300  # the most for one check
STEPS = 6
# The tolerance of tests/test_parity.py: a wrong mean, norm or padding is off by 10^4 or more.
ULPS = 256
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
SGD = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9))
GPT = gpt.GPTConfig(layers=4, width=128, heads=2, vocab=256, seq=128)
BF16 = {"precision": zero_jax.Precision("bf16")}
EIGHT_BITS = {"optimizer_state_dtype": "8bit"}
STREAMED, LARGE_PIECES = ({"offload": Offload(True, piece_bytes=n)} for n in (2**12, 2**16))
REMAT = [{"remat": p} for p in ("dots", "block", "block_sqrt", "block@host", "block_sqrt@host")]
# By check: the model, settings of the reference, settings that are compared with it, and the limit:
# fp32 ulps of parameters or, below 1, the relative difference of losses.
COMPARED = {
    "remat": (GPT, {"remat": "none"}, REMAT, ULPS),
    "precision": (GPT, {}, [BF16, {"precision": zero_jax.Precision("fp16")}], 5e-3),
    "whole model": (GPT, {**BF16, "attention": "xla"}, [{**BF16, "attention": "auto"}], 5e-3),
    "states": (GPT, {"steps": 12}, [{**EIGHT_BITS, "steps": 12}], 2e-2),
    "states on the host": (GPT, EIGHT_BITS, [{**EIGHT_BITS, **LARGE_PIECES}], 2**14),
    "tiers": (ODD_GPT, {}, [STREAMED, {"offload": Offload(True, True, piece_bytes=4096)}], ULPS),
}


def on_one_device(**settings):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:1]), 3, **settings)


def compared(config, reference, others, limit):
    def train(steps=STEPS, attention="auto", **settings):
        problem = gpt_problem(dataclasses.replace(config, attention=attention))
        return train_zero(problem, ADAM, steps, 1, stage=3, **settings)

    want = train(**reference)
    for settings in others:
        got = train(**settings)
        losses = float(np.max(np.abs(np.asarray(got[0]) / np.asarray(want[0]) - 1)))
        yield str(settings), losses if limit < 1 else ulps(got[1], want[1]), limit
        if "offload" in settings:
            state = got[2].optimizer(ADAM).init(got[2].shard(gpt_problem(config).start))
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.size > 1024}
            yield f"state only in {kinds}", "pinned_host" not in kinds, 0


def plain(problem, tx, name, limit, **settings):
    losses, params = train_plain(problem, tx, STEPS)
    got = train_zero(problem, tx, STEPS, 1, **settings)
    np.testing.assert_allclose(got[0], losses, rtol=1e-4)
    return f"{name}, {settings}: ulps of parameters", ulps(got[1], params), limit


def stages(name):
    k, tx = (1, SGD) if name == "resnet" else (2, ADAM)  # batch norm sees one micro-batch
    for stage in range(4):
        yield plain(PROBLEMS[name](), tx, name, ULPS, stage=stage, grad_accum_steps=k)


def optimizers():
    zoo, adafactor = zoo_problem(empty=False), optax.adafactor(1e-2, min_dim_size_to_factor=4)
    yield plain(zoo, optax.contrib.muon(1e-2), "muon", 4096, stage=3)
    yield plain(zoo, adafactor, "adafactor", ULPS, stage=3)


def state_files():
    with tempfile.TemporaryDirectory() as folder:
        offload = Offload(True, tier="nvme", directory=folder)
        yield plain(PROBLEMS["gpt"](), ADAM, "states in files", ULPS, stage=3, offload=offload)


def offload_itself():
    for outcome in offload_check.check(jax.local_devices()[0]):
        assert not outcome.error, outcome
        yield outcome.what, outcome.gap, offload_check.TOLERANCE


def skipped():
    zero = on_one_device()
    params = zero.init(lambda: {"w": jnp.ones((64, 64))})
    tx, before = zero.optimizer(ADAM), zero.unshard(params)
    step = zero.train_step(lambda p, x: jnp.mean(x @ p["w"]), tx)
    params, _, metrics = step(params, tx.init(params), jnp.full((8, 64), jnp.inf))
    yield "a step of infinities: not skipped", 1 - int(metrics.skipped), 0
    yield "its parameters: ulps", ulps(zero.unshard(params), before), 0


def attention():
    """Errors of cuDNN's kernel are at most twice those of XLA in bf16, both beside fp32."""
    cases = [(64, 4, None, False), (128, 4, None, False), (128, 2, None, False)]
    cases += [(64, 4, 96, False), (96, 2, None, False), (64, 4, None, True), (128, 2, None, True)]
    for head, kv, window, documents in cases if jax.default_backend() == "gpu" else ():
        keys = zip(jax.random.split(jax.random.key(0), 4), (4, kv, kv, 4), strict=True)
        drawn = [jax.random.normal(key, (2, 512, n, head), jnp.float32) for key, n in keys]
        *qkv, weights = (x.astype(jnp.bfloat16) for x in drawn)
        rows = jnp.cumsum(jnp.arange(512) % 100 == 99)[None].repeat(2, 0) if documents else None

        def objective(qkv, how, rows=rows, window=window, weights=weights):
            out = zero_jax.attention(*qkv, segment_ids=rows, implementation=how, window=window)
            return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

        # Gradients of q, k and v, and the output.
        run = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)
        exact = run([x.astype(jnp.float32) for x in qkv], "xla")
        cudnn, xla = (largest_error(run(qkv, own), exact) for own in ("cudnn", "xla"))
        name = f"cudnn, heads of {head}, {kv} of 4 keys, window {window}, documents {documents}"
        yield f"{name}: error beside twice XLA's", cudnn, 2 * xla + 1e-4


def largest_error(got, want):
    """Returns the largest ‖a - b‖ / ‖b‖ of two trees' leaves."""
    leaves = (jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in (got, want))
    errors = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), *leaves)
    return max(jax.tree.leaves(errors))


def blocks():
    x = np.random.default_rng(0).normal(size=(256, 96)).astype(np.float32)
    for kind in quantised.KINDS:
        ours = jax.jit(lambda x, kind=kind: quantised.quantise(x, kind, -2))(x)
        theirs = quantised.quantise(x, kind, -2)
        wrong = int((np.asarray(ours.codes) != np.asarray(theirs.codes)).sum())
        yield f"{kind}: codes that differ from NumPy's", wrong, 0
        got, want = (np.asarray(own.open(jnp.float32)) for own in (ours, theirs))
        yield f"{kind}: opened, ulps", ulps(got, want), 4


def checkpoints():
    problem, zero = PROBLEMS["zoo"](), on_one_device()
    params, tx = zero.shard(problem.start), zero.optimizer(ADAM)
    params, state, _ = zero.train_step(problem.loss, tx)(params, tx.init(params), problem.batch)
    with tempfile.TemporaryDirectory() as folder, zero_jax.Checkpoints(folder) as store:
        store.save(2, (params, state))
        store.wait()
        again = store.restore((params, state))
    got, want = jax.device_get((again.tree, (params, state)))
    equal = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), got, want)
    yield "leaves that differ", jax.tree.leaves(equal).count(False), 0


def options():
    """XLA for GPUs knows every option that a step gives it, and "auto" is cuDNN's attention."""
    if jax.default_backend() != "gpu":
        return
    yield f"{releases.AT_ONCE} is unknown", not compiler.if_known(releases.AT_ONCE, 3), 0
    given = compiler.options(2**30, 64, (2**26, 2**26))
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=given)
    zero, problem = on_one_device(**BF16), gpt_problem(GPT)
    params, tx = zero.shard(problem.start), zero.optimizer(ADAM)
    lowered = zero.train_step(problem.loss, tx).lower(params, tx.init(params), problem.batch)
    yield "cuDNN's kernel: missing", "cudnn$fmha" not in lowered.compile().as_text(), 0


CHECKS = {name: functools.partial(compared, *check) for name, check in COMPARED.items()}
CHECKS |= {f"stages of {name}": functools.partial(stages, name) for name in PROBLEMS}
CHECKS |= {"attention": attention, "offload": offload_itself, "optimizers": optimizers}
CHECKS |= {"files": state_files, "blocks": blocks, "checkpoints": checkpoints}
CHECKS |= {"options": options, "skipped": skipped}


def verdict(name, apart, limit):
    return {"what": name, "apart": apart, "limit": limit, "passed": bool(apart <= limit)}


def in_process(check):
    # Autotuning takes most of the time and has no effect on correctness.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    env = os.environ | {"XLA_FLAGS": flags}
    command = ["timeout", str(SECONDS), sys.executable, __file__, "--one", check]
    began = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    row = {"check": check, "seconds": round(time.monotonic() - began), "found": found}
    if done.returncode:
        row["error"] = f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return row


def main(args=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    parsed = parser.parse_args(args)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the device
    if parsed.one:
        jax.config.update("jax_default_matmul_precision", "highest")
        warnings.filterwarnings("error", module="zero_jax")
        for result in CHECKS[parsed.one]():
            print(json.dumps(verdict(*result)), flush=True)
        return 0
    if parsed.json == FILE and jax.default_backend() != "gpu":
        parser.error("JAX sees no GPU here; --json FILE tries the script on a CPU")
    here = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    # Results of the same JAX and device stay in the file, except those of the chosen checks.
    old = json.loads(parsed.json.read_text()) if parsed.json.exists() else {}
    rows = old["checks"] if {key: old.get(key) for key in here} == here else []
    rows = [row for row in rows if row["check"] not in parsed.only]
    known = {**here, "date": time.strftime("%Y-%m-%d"), "checks": rows}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for done in as_completed([pool.submit(in_process, name) for name in parsed.only]):
            rows.append(done.result())
            print(json.dumps(rows[-1], indent=1), flush=True)
            parsed.json.write_text(json.dumps(known, indent=1) + "\n")
    bad = [row for row in rows if "error" in row or not all(f["passed"] for f in row["found"])]
    print(f"{len(rows) - len(bad)} of {len(rows)} checks passed")
    return len(bad)


if __name__ == "__main__":
    sys.exit(main())
