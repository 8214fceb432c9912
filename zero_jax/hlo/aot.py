"""Ahead-of-time compilation of a step for a target device, in a separate process.

The step is traced here on an abstract mesh, exported (`jax.export`), and compiled by a child
process that knows the target: an H100 by its description, a TPU by its topology, CPU devices by
number. The child's compiler is the one that a run on that hardware uses, so memory, collectives
and schedule are those of the real program. A separate process, because the GPU compiler needs
settings that must be set before JAX starts, and because it exits without a message if ptxas or
libdevice is missing.

`NOT_SHOWN` lists the limits of such a compilation.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zero_jax import releases
from zero_jax.hlo import auditor, targets
from zero_jax.hlo.latencies import SUFFIX, modelled, text_of
from zero_jax.hlo.targets import Target
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.sharding.paths import PyTree

# By platform: all that such a compilation does not show, or shows wrongly.
NOT_SHOWN = {
    "cuda": (
        "library workspace (cuBLAS, cuDNN) and NCCL's buffers, often 1 to 3 GB together",
        "kernels chosen by autotuning, which may use more or less scratch memory",
    ),
    "tpu": (
        "elements sent: the compiler turns gathers and scatters into all-reduces",
        "FLOPs: its products are convolutions, whose padding is counted too",
    ),
    "cpu": ("bf16 is widened to fp32, in communication and in temporaries",),
}
# There is nothing to time kernels on, and nobody runs them: they need not be fast.
FLAGS = (
    "--xla_gpu_autotune_level=0 --xla_gpu_disable_gpuasm_optimizations=true"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
TIMEOUT = 1800  # seconds
PROGRAM = "program.json"  # of the child: HLO text, memory sizes
_CUDNN_ATTENTION = [
    f"__cudnn$fmha{kind}{backward}"
    for kind in ("Softmax", "ScaleBiasSoftmax")
    for backward in ("", "Backward")
]
_COMPILERS = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}


def check(
    target: Target | None,
    devices: int,
    topology: str | None = None,
    latencies: str | pathlib.Path | None = None,
) -> str:
    """Returns the topology to compile for, "" without a target; called before any tracing.

    Raises:
      ValueError: The target cannot be compiled for here, and the message says what to install; or
        another argument, see `compile_for`, does not fit it.
    """
    if latencies is not None:
        if target is None or target.platform != "cuda":
            name = "the devices of the mesh" if target is None else target.name
            raise ValueError(
                f"`latencies`={str(latencies)!r} requires a GPU target, and this plan is for "
                f"{name}: use target='h100', or leave it out"
            )
        path = pathlib.Path(latencies).absolute()
        if path.suffix != SUFFIX or not path.parent.is_dir() or len(str(path).split()) > 1:
            raise ValueError(
                f"`latencies`={str(latencies)!r}: XLA reads a {SUFFIX} file in a folder that "
                f"exists, at a path without spaces, and this is {path}: use step{SUFFIX}"
            )
    if target is None:
        if topology is not None:
            raise ValueError(f"`topology`={topology!r} requires a target: set target='h100'")
        return ""
    if target.compute_capability is None and target.platform == "cuda":
        raise ValueError(
            f"`target`={target.name!r} is for predictions only, JAX does not run on it: use h100"
        )
    modules = _COMPILERS.get(target.platform, ())
    if modules and not any(map(importlib.util.find_spec, modules)):
        raise ValueError(
            f"compiling for {target.name} requires {modules[0]}, which is not installed: "
            f"{_install_line(target)}"
        )
    return "" if target.platform == "cpu" else targets.topology(target, devices, topology)


def compile_for(
    target: Target,
    step: Callable[..., PyTree],
    args: Sequence[PyTree],
    mesh: AnyMesh,
    *,
    donated: int = 2,
    topology: str | None = None,
    options: Mapping[str, str | float] | None = None,
    latencies: str | pathlib.Path | None = None,
) -> auditor.Audit:
    """Compiles a step for a target and audits it.

    Args:
      target: The target to compile for.
      step: A function of `args`; not jitted.
      args: Trees of ShapeDtypeStructs whose shardings, if any, are on `mesh`.
      mesh: An AbstractMesh (or a Mesh), for the sizes and names of its axes.
      donated: Number of donated arguments.
      topology: See `targets.topology`.
      options: Compiler options, as for `jax.jit`.
      latencies: A .pbtxt file to write modelled latencies of instructions to; the step is then
        compiled again with them. See `hlo.latencies`.

    Raises:
      ValueError: See `check`; the step calls back to Python; or a loop of unknown length has no
        latencies.
      RuntimeError: The compiler failed, and the message has its last lines; or it took too long.
    """
    request = {
        "topology": _topology(target, check(target, mesh.size, topology, latencies)),
        "axes": list(mesh.shape.items()),
        "donated": len(jax.tree.leaves(tuple(args[:donated]))),
    }
    with tempfile.TemporaryDirectory(prefix="zero_jax_aot_") as folder:
        here = pathlib.Path(folder)
        (here / "step.bin").write_bytes(_exported(target, step, args))

        def compiled(options: Mapping[str, str | float]) -> auditor.Audit:
            (here / "request.json").write_text(json.dumps(request | {"options": options}))
            _run_child(here, target, mesh.size)
            text, sizes = json.loads((here / PROGRAM).read_text())
            return auditor.of_text(text, sizes, dict(mesh.shape))

        options = dict(options or {})
        audit = compiled(options)
        if latencies is None:
            return audit
        profile = pathlib.Path(latencies).absolute()
        seconds = modelled(audit.program, audit.collectives, target, releases.at_once(options))
        profile.write_text(text_of(seconds))
        return compiled({**options, releases.LATENCIES: str(profile)})


def _install_line(target: Target) -> str:
    """Returns the command that installs the compiler for a target."""
    version = importlib.metadata.version("jaxlib")
    if target.platform == "tpu":
        return "pip install libtpu"
    return (
        f"pip install jax-cuda12-plugin=={version} nvidia-cuda-nvcc-cu12 "
        "nvidia-cuda-runtime-cu12 nvidia-nvjitlink-cu12 (in a checkout: pip install -e '.[prove]')"
    )


def _topology(target: Target, topology: str) -> dict[str, str]:
    """Returns the arguments of `get_topology_desc` for a target; {} for CPU devices."""
    if target.platform == "cpu":
        return {}
    if target.platform == "tpu":
        return {"platform": "tpu", "topology_name": f"{target.name}:{topology}"}
    config = {"target_config": target.config_text, "topology": topology}
    return {"platform": "cuda", "topology_name": "any", **config}


def _exported(target: Target, step: Callable[..., PyTree], args: Sequence[PyTree]) -> bytes:
    """Returns the step as a portable program of flat arrays."""
    leaves, treedef = jax.tree.flatten(tuple(args))

    def flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(step(*jax.tree.unflatten(treedef, arrays))))

    # JAX forgets the sharding of an argument that it removes.
    jitted = jax.jit(flat, keep_unused=True)
    # JAX may change these calls; the same installation reads the program that writes it.
    names = (*_CUDNN_ATTENTION, "LayoutConstraint")
    allowed = list(map(jax.export.DisabledSafetyCheck.custom_call, names))
    export = jax.export.export(jitted, platforms=[target.platform], disabled_checks=allowed)
    try:
        return bytes(export(*leaves).serialize())
    except NotImplementedError as error:
        raise ValueError(
            "the step calls back to Python (jax.debug.print, a callback), which cannot be "
            "compiled for another machine. Remove the callback to compile ahead of time. The "
            f"error of JAX: {error}"
        ) from error


def _run_child(here: pathlib.Path, target: Target, devices: int) -> None:
    """Compiles in a child process, again without some kernels if XLA cannot choose one."""
    flags = FLAGS if target.platform == "cuda" else ""
    child = _started(here, target, devices, flags)
    if child.returncode and flags and releases.NO_KERNEL in child.stderr:
        warnings.warn(
            f"XLA for {target.name} cannot choose a kernel for a matrix product of this step "
            "without timing, so all products are compiled as library calls. In other steps this "
            "changed bytes by 1 % and seconds by 2 %",
            stacklevel=2,
        )
        child = _started(here, target, devices, f"{flags} {releases.BY_LIBRARY}")
    if child.returncode == 0:
        return
    lines = [line[:300] for line in child.stderr.splitlines() if line.strip()]
    text = "\n".join(lines[-12:])
    if child.returncode < 0 or "libdevice" in text or "ptxas" in text:
        raise ValueError(
            f"the compiler for {target.name} exited with {child.returncode}, most often because "
            f"ptxas or libdevice is missing: {_install_line(target)}\n{text}"
        )
    raise RuntimeError(f"compiling for {target.name} failed:\n{text}")


def _started(
    here: pathlib.Path, target: Target, devices: int, flags: str
) -> "subprocess.CompletedProcess[str]":
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{_of_user(os.environ.get('XLA_FLAGS', ''))} {flags}",
        "JAX_NUM_CPU_DEVICES": str(devices if target.platform == "cpu" else 1),
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-m", "zero_jax.hlo.aot", str(here)]
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"compiling for {target.name} took more than {TIMEOUT:.0f} s and was stopped"
        ) from error


def _of_user(flags: str) -> str:
    """Returns the user's flags for GPUs, which a run would have too."""
    return " ".join(flag for flag in flags.split() if flag.startswith("--xla_gpu_"))


def _child(here: pathlib.Path) -> None:
    """Compiles the exported step as requested; writes the program's text and memory sizes."""
    request = json.loads((here / "request.json").read_text())
    names, sizes = zip(*request["axes"], strict=True)
    described = request["topology"]
    devices = topologies.get_topology_desc(**described).devices if described else jax.devices()
    grid = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    exported = jax.export.deserialize(bytearray((here / "step.bin").read_bytes()))
    donated, replicated = request["donated"], NamedSharding(mesh.abstract_mesh, PartitionSpec())
    shardings = [
        s if isinstance(s, NamedSharding) else replicated
        for s in exported.in_shardings_jax(mesh.abstract_mesh)
    ]
    results: dict[str, Any] = {}
    if hosted := any(s.memory_kind == "pinned_host" for s in shardings):
        # On a concrete mesh of devices that are not present JAX drops memory kinds silently. On an
        # abstract mesh every argument and result needs a kind.
        shardings = [s.with_memory_kind(s.memory_kind or "device") for s in shardings]
        # The donated arguments are the first results, updated; the others are small.
        small = replicated.with_memory_kind("device")
        count = len(exported.out_avals) - donated
        results = {"out_shardings": (*shardings[:donated], *[small] * count)}
    else:
        shardings = [NamedSharding(mesh, s.spec) for s in shardings]
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    jitted = jax.jit(exported.call, donate_argnums=tuple(range(donated)), **results)
    with jax.set_mesh(mesh) if hosted else contextlib.nullcontext():
        compiled = jitted.lower(*args).compile(compiler_options=request["options"])
    program = compiled.as_text() or "", auditor.memory_sizes(compiled)
    (here / PROGRAM).write_text(json.dumps(program))


if __name__ == "__main__":
    _child(pathlib.Path(sys.argv[1]))
