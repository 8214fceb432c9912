"""Compiles a step for a target device ahead of time, in a separate process.

The step is traced here on an abstract mesh, exported (`jax.export`), and compiled by a child
process that knows the target: an H100 by its description, a TPU by its topology, CPU devices by
number. The child's compiler is the one that a run on that hardware uses, so memory, collectives
and schedule are those of the real program. A process of its own, because the GPU compiler needs
settings that must stand before JAX starts, and because it dies without a word where ptxas or
libdevice is missing.

What such a compile cannot show is listed by `not_shown`.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zero_jax import releases
from zero_jax.hlo import auditor, latencies
from zero_jax.hlo.targets import Target, topology
from zero_jax.sharding.layout import key_impl
from zero_jax.sharding.mesh import AnyMesh

_NOT_SHOWN = {
    "cuda": (
        "library workspace (cuBLAS, cuDNN) and NCCL's buffers, often 1 to 3 GB together",
        "kernels chosen by autotuning, which may use more or less scratch memory",
        "cuDNN's fused attention: the model's attention for other devices is compiled instead",
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
_MEMORY = tuple(
    f"{prefix}{kind}_size_in_bytes"
    for prefix in ("", "host_")
    for kind in ("argument", "output", "alias", "temp")
)


def check(target: Target, devices: int, given: str | None = None) -> str:
    """Returns the topology to compile for; called before any tracing.

    Args:
      target: The target to compile for.
      devices: Number of devices.
      given: See `topology`.

    Raises:
      ValueError: The target cannot be compiled for here; the message says what to install.
    """
    if target.compute_capability is None and target.platform == "cuda":
        raise ValueError(
            f"`target`={target.name!r} is for predictions only, JAX does not run on it: use h100"
        )
    _check_installed(target)
    return "" if target.platform == "cpu" else topology(target, devices, given)


def compile_for(
    target: Target,
    step: Any,
    args: Sequence[Any],
    mesh: AnyMesh,
    *,
    donated: int = 2,
    given_topology: str | None = None,
    options: Mapping[str, Any] | None = None,
    told: Mapping[str, float] | None = None,
    timeout: float = 1800,
) -> auditor.Audit:
    """Compiles a step for a target and audits it.

    Args:
      target: what to compile for.
      step: a function of `args`; not jitted.
      args: trees of ShapeDtypeStructs whose shardings, if any, are on `mesh`.
      mesh: an AbstractMesh (or a Mesh), for the sizes and names of its axes.
      donated: how many of the args are donated.
      given_topology: see `topology`.
      options: of the compiler, as `jax.jit` takes them.
      told: how long instructions take, for XLA's scheduler, see `latencies`.
      timeout: seconds after which the child is ended.

    Raises:
      ValueError: see `check`; or the step calls back to Python.
      RuntimeError: the compiler failed; shows its last lines.
    """
    shape = check(target, mesh.size, given_topology)
    exported = _export(target, step, args, donated)
    with tempfile.TemporaryDirectory(prefix="zero_jax_prove_") as folder:
        here = pathlib.Path(folder)
        (here / "step.bin").write_bytes(exported["program"])
        if told is not None:
            profile = here / f"told{latencies.SUFFIX}"
            profile.write_text(latencies.text(told))
            options = {**(options or {}), releases.LATENCIES: str(profile)}
        request = {
            **exported["request"],
            "platform": target.platform,
            "name": target.name,
            "config": target.config_text if target.platform == "cuda" else "",
            "topology": shape,
            "axes": list(mesh.shape.items()),
            "options": dict(options or {}),
        }
        (here / "request.json").write_text(json.dumps(request))
        _run_child(here, target, mesh.size, timeout)
        numbers = json.loads((here / "memory.json").read_text())
        text = (here / "program.txt").read_text()
    return auditor.of_text(text, types.SimpleNamespace(**numbers), dict(mesh.shape))


def install_line(target: Target) -> str:
    """What to install to compile for a target."""
    version = importlib.metadata.version("jaxlib")
    if target.platform == "tpu":
        return "pip install libtpu"
    return (
        f"pip install jax-cuda12-plugin=={version} nvidia-cuda-nvcc-cu12 "
        "nvidia-cuda-runtime-cu12 nvidia-nvjitlink-cu12 (in a checkout: pip install -e '.[prove]')"
    )


def not_shown(target: Target) -> tuple[str, ...]:
    """What a program compiled for a target that is not there does not say, or says wrongly."""
    return _NOT_SHOWN[target.platform]


def _check_installed(target: Target) -> None:
    known = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}
    modules = known.get(target.platform, ())
    if modules and not any(map(importlib.util.find_spec, modules)):
        raise ValueError(
            f"compiling for {target.name} requires {modules[0]}, which is not installed: "
            f"{install_line(target)}"
        )


def _export(target: Target, step: Any, args: Sequence[Any], donated: int) -> dict[str, Any]:
    """Returns the step as a portable program of flat arrays, and the description of the arrays."""
    leaves, treedef = jax.tree.flatten(tuple(args))
    count = len(jax.tree.leaves(tuple(args[:donated])))
    impls = [
        key_impl(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else None for x in leaves
    ]

    def flat(*arrays: Any) -> tuple[Any, ...]:
        wrapped = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(arrays, impls, strict=True)
        ]
        return tuple(jax.tree.leaves(step(*jax.tree.unflatten(treedef, wrapped))))

    plain = [x if impl is None else _key_data(x) for x, impl in zip(leaves, impls, strict=True)]
    jitted = jax.jit(flat, donate_argnums=tuple(range(count)))
    try:
        exported = jax.export.export(jitted, platforms=[target.platform])(*plain)
        program = bytes(exported.serialize())
    except NotImplementedError as error:
        raise ValueError(
            "the step calls back to Python (jax.debug.print, a callback), which cannot be "
            "compiled for another machine. Remove the callback to compile ahead of time. The "
            f"error of JAX: {error}"
        ) from error
    request = {
        "shapes": [list(x.shape) for x in plain],
        "dtypes": [str(x.dtype) for x in plain],
        "specs": [_spec(x) for x in plain],
        "kinds": [_kind(x) for x in plain],
        "donated": count,
    }
    return {"program": program, "request": request}


def _key_data(key: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, key)


def _spec(leaf: Any) -> list[Any]:
    sharding = getattr(leaf, "sharding", None)
    return [list(e) if isinstance(e, tuple) else e for e in sharding.spec] if sharding else []


def _kind(leaf: Any) -> str:
    """The memory in which an argument rests."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) or "device"


def _run_child(here: pathlib.Path, target: Target, devices: int, timeout: float) -> None:
    flags = FLAGS if target.platform == "cuda" else ""
    child = _ran(here, target, devices, timeout, flags)
    if child.returncode and flags and releases.NO_KERNEL in child.stderr:
        warnings.warn(
            f"XLA for {target.name} cannot choose a kernel for a matrix product of this step "
            "without timing, so all products are compiled as library calls. In other steps this "
            "changed bytes by 1 % and seconds by 2 %",
            stacklevel=2,
        )
        child = _ran(here, target, devices, timeout, f"{flags} {releases.BY_LIBRARY}")
    if child.returncode == 0:
        return
    said = [line[:300] for line in child.stderr.splitlines() if line.strip()][-12:]
    text = "\n".join(said)
    if child.returncode < 0 or "libdevice" in text or "ptxas" in text:
        raise ValueError(
            f"the compiler for {target.name} exited with {child.returncode}, most often because "
            f"ptxas or libdevice is missing: {install_line(target)}\n{text}"
        )
    raise RuntimeError(f"compiling for {target.name} failed:\n{text}")


def _ran(
    here: pathlib.Path, target: Target, devices: int, timeout: float, flags: str
) -> "subprocess.CompletedProcess[str]":
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_NUM_CPU_DEVICES": str(devices if target.platform == "cpu" else 1),
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-m", "zero_jax.hlo.prove", str(here)]
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"compiling for {target.name} took more than {timeout:.0f} s and was stopped"
        ) from error


def _devices(request: dict[str, Any], count: int) -> Sequence[Any]:
    from jax.experimental import topologies

    if request["platform"] == "cpu":
        return jax.devices()[:count]
    if request["platform"] == "tpu":
        name = f"{request['name']}:{request['topology']}"
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return topologies.get_topology_desc(
        "any",
        platform="cuda",
        target_config=request["config"],
        topology=request["topology"],
    ).devices


def _child(here: pathlib.Path) -> None:
    request = json.loads((here / "request.json").read_text())
    names, sizes = zip(*request["axes"], strict=True)
    devices = np.array(_devices(request, int(np.prod(sizes)))).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    exported = jax.export.deserialize(bytearray((here / "step.bin").read_bytes()))
    donated, hosted = request["donated"], "pinned_host" in request["kinds"]
    # With a concrete mesh of devices that are not there, JAX drops memory kinds without a word;
    # with an abstract one every argument and result needs a kind.
    own = mesh.abstract_mesh if hosted else mesh
    placed = [
        NamedSharding(
            own, PartitionSpec(*map(_entry, spec)), **({"memory_kind": kind} if hosted else {})
        )
        for spec, kind in zip(request["specs"], request["kinds"], strict=True)
    ]
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype, sharding in zip(request["shapes"], request["dtypes"], placed, strict=True)
    ]
    options: dict[str, Any] = {}
    if hosted:  # the donated arguments come back as the first results, and the rest is small
        small = NamedSharding(own, PartitionSpec(), memory_kind="device")
        count = len(exported.out_avals) - donated
        options = {"out_shardings": (*placed[:donated], *[small] * count)}
    jitted = jax.jit(exported.call, donate_argnums=tuple(range(donated)), **options)
    with jax.set_mesh(mesh) if hosted else contextlib.nullcontext():
        compiled = jitted.lower(*args).compile(compiler_options=request["options"])
    memory = compiled.memory_analysis()
    numbers = {name: getattr(memory, name) for name in _MEMORY}
    (here / "memory.json").write_text(json.dumps(numbers))
    (here / "program.txt").write_text(compiled.as_text() or "")


def _entry(entry: Any) -> Any:
    return tuple(entry) if isinstance(entry, list) else entry


if __name__ == "__main__":
    _child(pathlib.Path(sys.argv[1]))
