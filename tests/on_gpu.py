"""Checks that zero_jax is right on the GPU of this machine, in a few minutes.

    python tests/on_gpu.py                 # prints the results, writes docs/on_gpu.json
    python tests/on_gpu.py --missing       # only checks that have not passed with this code
    python tests/on_gpu.py --only remat    # one check; the others stay in the file
    python tests/on_gpu.py --json FILE     # on a CPU, to try the script itself

Each check runs in its own process, several at a time, and yields (name, difference, limit).
Training is compared with a plain optax loop in fp32 on the same device.
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
from benchmarks.gpu import code_of
from zero_jax import releases
from zero_jax.adapters import quantised
from zero_jax.engine import compiler, offload_check
from zero_jax.fp8.product import SCOPE
from zero_jax.hlo.fp8_products import fp8_products
from zero_jax.hlo.hlo_text import parse
from zero_jax.models import gpt
from zero_jax.models.attend import attend
from zero_jax.offload.host import Offload
from zero_jax.plan.text_model import TextModel

FILE = Path(__file__).parent.parent / "docs" / "on_gpu.json"
SECONDS = 300  # the most for one check
STEPS = 6
# The tolerance of tests/test_parity.py: a wrong mean, norm or padding is off by 10^4 or more.
ULPS = 256
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
SGD = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9))
GPT = gpt.GPTConfig(layers=4, width=128, heads=2, vocab=256, seq=128)
STREAMED, LARGE_PIECES = ({"offload": Offload(True, piece_bytes=n)} for n in (2**12, 2**16))
REMAT = {"remat": ("none", "dots", "block", "block_sqrt")}
REMAT["remat on the host"] = ("block@host", "block_sqrt@host")
# Largest relative rounding errors: half of the distance of two numbers; the codes of 8-bit states
# have 3 bits of mantissa and are rounded up or down.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "8bit": 2.0**-3}
# Results of this model that are rounded one after the other, from the tokens to a gradient: ten per
# layer and direction. Their errors are independent and add up like steps of a random walk: limits
# are twice its length.
ROUNDED = 20 * GPT.layers
# By check: the settings, and the limit of the difference from plain optax. From 1 on it counts fp32
# ulps of parameters. Below, it is a fraction of the distance that the parameters move; that of the
# loss is its square, because errors average out over tokens and leave terms of second order.
COMPARED = {
    **{name: [({"remat": own}, ULPS) for own in policies] for name, policies in REMAT.items()},
    "precision": [
        ({"precision": kind}, 2 * ROUNDED**0.5 * ROUNDING[kind]) for kind in ("bf16", "fp16")
    ],
    "states": [
        ({"optimizer_state_dtype": "8bit"}, ROUNDING["8bit"]),
        ({"optimizer_state_dtype": "bf16"}, 2 * ROUNDING["bf16"]),
    ],
    "tiers": [(STREAMED, ULPS), ({"offload": Offload(True, True, piece_bytes=4096)}, ULPS)],
}


def on_one_device(**settings):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:1]), 3, **settings)


def problem_of(config, attention_fn=zero_jax.attention):
    model, start = TextModel(config, attention_fn=attention_fn), gpt_problem(config)
    return dataclasses.replace(start, make=model.make, loss=model.loss)


def relative(got, want):
    """Returns ‖a - b‖ / ‖b‖ of two trees."""
    got, want = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (got, want)
    )
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compared(cases, config=GPT, tx=ADAM):
    """Compares settings with plain optax and JAX's own attention, in fp32."""
    losses, params = train_plain(problem_of(config, attend), tx, STEPS)
    problem = problem_of(config)

    def moved(params):
        return jax.tree.map(lambda x, start: np.asarray(x) - start, params, problem.start)

    for settings, limit in cases:
        got = train_zero(problem, tx, STEPS, 1, stage=3, **settings)
        if limit < 1:
            yield f"{settings}: losses", relative(got[0], losses), limit**2
            yield f"{settings}: movement", relative(moved(got[1]), moved(params)), limit
        else:
            yield f"{settings}: ulps of parameters", ulps(got[1], params), limit
        if "offload" in settings:
            state = got[2].optimizer(tx).init(got[2].shard(problem.start))
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.size > 1024}
            yield f"state only in {kinds}", "pinned_host" not in kinds, 0


def states_on_host():
    """8-bit states that stream from host memory are those on the device."""
    problem, eight = problem_of(GPT), {"optimizer_state_dtype": "8bit"}
    _, want, _ = train_zero(problem, ADAM, STEPS, 1, **eight)
    _, got, _ = train_zero(problem, ADAM, STEPS, 1, **eight, **LARGE_PIECES)
    yield "8-bit states in host memory: ulps of parameters", ulps(got, want), 2**14


def fp8():
    """Training in fp8 follows bf16, and every matmul of a layer is an fp8 product."""
    precision = zero_jax.Precision("bf16", matmul_dtype="fp8")
    problem = problem_of(GPT)
    want, got = (
        train_zero(problem, ADAM, STEPS, 1, precision=own)[0] for own in ("bf16", precision)
    )
    yield "losses, beside bf16", relative(got, want), 1e-2
    if jax.default_backend() == "gpu":
        # Four matmuls in a layer, with two gradients each.
        count = fp8_products(parse(compiled_step(precision, problem)), SCOPE).count
        least = 12 * GPT.layers
        yield f"fp8 products: {count}; missing of {least}", max(0, least - count), 0


def compiled_step(precision, problem):
    zero = on_one_device(precision=precision)
    params, tx = zero.shard(problem.start), zero.optimizer(ADAM)
    lowered = zero.train_step(problem.loss, tx).lower(params, tx.init(params), problem.batch)
    return lowered.compile().as_text()


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


# Head dim, heads of queries and of keys, window.
HEADS = [(64, 4, 4, None), (128, 4, 4, None), (128, 4, 1, None), (64, 4, 2, 96), (96, 4, 2, None)]
HEADS += [(256, 2, 2, None)]
PACKED = [(64, 4, 4, None), (128, 4, 2, None), (128, 4, 4, 96)]


def attention(cases, packed):
    """Output and gradients beside attention in fp32 with all scores.

    The kernels round shares of the softmax, their gradients and the results to bf16, so that norms
    of the errors are at most two roundings.
    """
    how = "cudnn" if jax.default_backend() == "gpu" else "xla"
    for head_dim, queries, keys, window in cases:
        drawn = jax.random.split(jax.random.key(0), 4)
        heads = (queries, keys, keys, queries)
        *qkv, weights = (
            jax.random.normal(key, (2, 512, n, head_dim), jnp.bfloat16)
            for key, n in zip(drawn, heads, strict=True)
        )
        # Documents of 100 tokens, and in the second row of 37.
        ends = jnp.arange(512) // jnp.array([[100], [37]])
        documents = ends if packed else None

        def objective(qkv, fn, documents=documents, window=window, weights=weights):
            out = fn(*qkv, segment_ids=documents, window=window).astype(jnp.float32)
            return (out * weights.astype(jnp.float32)).sum(), out

        run = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)
        exact = run([x.astype(jnp.float32) for x in qkv], attend)
        found = run(qkv, functools.partial(zero_jax.attention, implementation=how))
        errors = map(relative, jax.tree.leaves(found), jax.tree.leaves(exact))
        name = f"{how}, heads of {head_dim}, {queries} for {keys} of keys, window {window}"
        yield f"{name}, packed {packed}: largest error", max(errors), 2 * ROUNDING["bf16"]


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
    text = compiled_step("bf16", problem_of(GPT))
    yield "cuDNN's kernel: missing", "cudnn$fmha" not in text, 0


# In the order in which they start.
CHECKS = {name: functools.partial(compared, cases) for name, cases in COMPARED.items()}
CHECKS["tiers"] = functools.partial(compared, COMPARED["tiers"], ODD_GPT)
CHECKS["attention"] = functools.partial(attention, HEADS, False)
CHECKS["packed attention"] = functools.partial(attention, PACKED, True)
CHECKS |= {"fp8": fp8, "blocks": blocks, "states on the host": states_on_host}
CHECKS |= {"options": options, "skipped": skipped, "offload": offload_itself}
CHECKS |= {f"stages of {name}": functools.partial(stages, name) for name in PROBLEMS}
CHECKS |= {"optimizers": optimizers, "files": state_files, "checkpoints": checkpoints}


def verdict(name, apart, limit):
    return {"what": name, "apart": apart, "limit": limit, "passed": bool(apart <= limit)}


def in_process(check, deadline):
    """Returns the row of a check in a process of its own; None if no time is left."""
    # Autotuning takes most of the time and has no effect on correctness.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    env = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--one", check]
    began = time.monotonic()
    if deadline - began < 1:
        return None
    try:
        seconds = min(SECONDS, deadline - began)
        done = subprocess.run(command, capture_output=True, env=env, timeout=seconds)
        out, error = done.stdout, done.returncode and done.stderr.decode()[-3000:]
    except subprocess.TimeoutExpired as stopped:
        out, error = stopped.stdout or b"", f"stopped after {seconds:.0f} s"
    found = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    row = {"check": check, "seconds": round(time.monotonic() - began), "found": found}
    row["passed"] = not error and all(one["passed"] for one in found)
    return row | ({"error": error} if error else {})


def main(args=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--missing", action="store_true", help="what has not passed with this code")
    parser.add_argument("--minutes", type=float, default=60)
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
    here = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "code": code_of("train")}
    known = {"device": jax.devices()[0].device_kind, "checks": []}
    # Results of the same device stay in the file, except those of the chosen checks.
    old = json.loads(parsed.json.read_text()) if parsed.json.exists() else {}
    known = old if old.get("device") == known["device"] else known
    rows = {row["check"]: row for row in known["checks"]}
    names = parsed.only
    if parsed.missing:
        good = {name for name, row in rows.items() if row["passed"]}
        names = [x for x in names if x not in good or rows[x].get("code") != here["code"]]
    deadline = time.monotonic() + 60 * parsed.minutes
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        started = {pool.submit(in_process, name, deadline): name for name in names}
        for done in as_completed(started):
            if (row := done.result()) is None:
                print(f"{started[done]}: no time was left")
                continue
            rows[row["check"]] = row | here
            print(json.dumps(row, indent=1), flush=True)
            known["checks"] = list(rows.values())
            parsed.json.write_text(json.dumps(known, indent=1) + "\n")
    bad = sum(not row["passed"] for row in rows.values())
    print(f"{len(rows) - bad} of {len(rows)} checks passed")
    return bad


if __name__ == "__main__":
    sys.exit(main())
