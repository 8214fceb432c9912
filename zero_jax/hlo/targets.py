"""Ahead-of-time targets: device descriptions for XLA, and their peak rates.

`targets.yaml` has the figures of each device.
"""

import dataclasses
import importlib.resources
import itertools
import math

import yaml  # type: ignore[import-untyped]

from zero_jax.names import unknown


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device, with its interconnects.

    Attributes:
      name: Name for `--target` and `--device`.
      platform: "cuda", "tpu" or "cpu".
      description: Name that the device reports.
      memory_bytes: Device memory in bytes.
      flops: FLOP/s of bf16 matrix products (fp16 on a V100), dense.
      fp8_flops: FLOP/s of fp8 matrix products, dense; 0 if it has none.
      memory_bandwidth: Bytes/s of device memory.
      host_devices: Devices per host, joined by the fast interconnect.
      fast_wire: Bytes/s a device sends inside a host (NVLink, ICI).
      slow_wire: Bytes/s a device sends to other hosts, its part of the host's.
      host_memory: Bytes of host memory, a device's part of the host's.
      host_wire: Bytes/s between a device and host memory, in one direction; 0 if unknown.
      compute_capability: CUDA's (major, minor), or None.
      cores: Streaming multiprocessors.
      core_limits: Shared memory bytes of a core, of a block (opt-in), fp32 lanes of a core.
      l2_bytes: Second-level cache in bytes.
      clock_ghz: Boost clock in GHz.
    """

    name: str
    platform: str
    description: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    host_devices: int
    fast_wire: float
    slow_wire: float
    host_memory: int = 0
    host_wire: float = 0.0
    compute_capability: tuple[int, int] | None = None
    cores: int = 0
    core_limits: tuple[int, int, int] = (0, 0, 0)
    l2_bytes: int = 0
    clock_ghz: float = 0.0
    fp8_flops: float = 0.0

    def product_seconds(self, flops: float, in_fp8: float = 0.0) -> float:
        """Returns the time of matrix products at the peak rates.

        Args:
          flops: FLOPs of all products.
          in_fp8: FLOPs of those in fp8.
        """
        return (flops - in_fp8) / self.flops + in_fp8 / (self.fp8_flops or self.flops)

    def ring_wire(self, members: int, near: int) -> float:
        """Returns the bytes/s of each device in a ring of `members`, `near` of them per host.

        A ring through several hosts uses the slow interconnects of all its members on a host.
        """
        return self.fast_wire if members <= near else min(self.fast_wire, near * self.slow_wire)

    @property
    def config_text(self) -> str:
        """The description that XLA compiles for, a GpuTargetConfigProto as text."""
        assert self.compute_capability is not None, f"{self.name} is not a GPU"
        major, minor = self.compute_capability
        shared_core, shared_block, lanes = self.core_limits
        # Without device_interconnect_info, which crashes the compiler of 0.12.
        return f"""
platform_name: "CUDA"
device_description_str: "{self.description}"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core}
  shared_memory_per_block_optin: {shared_block}
  core_count: {self.cores}
  fpus_per_core: {lanes}
  memory_bandwidth: {self.memory_bandwidth:.0f}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
}}
"""


_FILE = importlib.resources.files(__package__) / "targets.yaml"
TARGETS: dict[str, Target] = {}
for _name, _fields in yaml.safe_load(_FILE.read_text("utf-8")).items():
    _tuples = {key: tuple(x) for key, x in _fields.items() if isinstance(x, list)}
    TARGETS[_name] = Target(_name, **(_fields | _tuples))


def target(name: str | Target) -> Target:
    """Returns the target of that name; returns a `Target` unchanged.

    Args:
      name: Name of a target: "h100", for example.

    Raises:
      ValueError: The name is unknown; the message has the nearest one.

    >>> target("h100").host_devices
    8
    """
    if isinstance(name, Target):
        return name
    if name not in TARGETS:
        raise ValueError(unknown("target", str(name), TARGETS))
    return TARGETS[name]


def of_kind(device_kind: str) -> Target | None:
    """Returns the target that a device reports, or None.

    >>> of_kind("NVIDIA H100 80GB HBM3").name
    'h100'
    """
    return next((own for own in TARGETS.values() if own.description == device_kind), None)


def topology(target: Target, devices: int, given: str | None = None) -> str:
    """Returns the topology of the devices in the compiler's notation.

    Args:
      target: The kind of device.
      devices: Number of devices.
      given: A topology of the caller: "PARTITIONSxHOSTSxDEVICES" on GPUs, where a partition is one
        NVLink domain, or "XxYxZ" on TPUs. None means full hosts with NVLink inside.

    Raises:
      ValueError: The devices do not fill hosts, or `given` is another number of devices.

    >>> topology(target("h100"), 64), topology(target("h100"), 4)
    ('8x1x8', '1x1x4')
    """
    if given is not None:
        parts = given.lower().split("x")
        if len(parts) != 3 or not all(p.isdigit() for p in parts):
            raise ValueError(
                f"`topology`={given!r}: write three numbers, such as 8x1x8 for 8 hosts of 8 GPUs"
            )
        if (count := math.prod(map(int, parts))) != devices:
            raise ValueError(
                f"`topology`={given!r} has {count} devices, but the plan is for {devices}: the "
                f"product must be {devices}"
            )
        return given.lower()
    if target.platform == "tpu":
        return "x".join(map(str, _box(devices)))
    size = min(target.host_devices, devices)
    if devices % size:
        raise ValueError(
            f"{devices} devices do not fill hosts of {size}: use {-(-devices // size) * size}, or "
            f"set a topology, such as {devices}x1x1 for one device per host"
        )
    return f"{devices // size}x1x{size}"


def _box(devices: int) -> tuple[int, int, int]:
    """Returns the three sizes of the most cubic box of that many chips."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    boxes = [
        (x, y, devices // (x * y))
        for x, y in itertools.combinations_with_replacement(sizes, 2)
        if devices % (x * y) == 0
    ]
    return min(boxes, key=sum)
