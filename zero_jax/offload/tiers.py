"""Offload settings: `Zero(mesh, offload="optimizer,params")`.

  optimizer    the optimizer state, 8Ψ/N bytes per device for Adam
  params       the fp32 master parameters, 4Ψ/N bytes; requires `optimizer` (on nvme a copy of
               them, see nvme.py)
  activations  activations saved by remat; applied through the remat policy and only parsed here

The host tier is JAX's `pinned_host` memory, which the devices read and write directly. The third
tier, `nvme=DIR`, uses memory-mapped files. Source: ZeRO, section 9 (heterogeneous tiers as its
next step); piecewise updates as in ZeRO-Offload (arXiv:2101.06840), section 5.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from zero_jax.names import nearest
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.sharding.partition import Partitioner, mirrors, state_partitions

PyTree = Any
HOST = "pinned_host"
STATES = ("optimizer", "params", "activations")
TIERS = ("host", "nvme", "auto")
GRAMMAR = "optimizer,params,activations[:host|nvme=DIR|auto]"
PIECE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Offload:
    """States stored outside device memory.

    Attributes:
      optimizer: Offload the optimizer state.
      params: Also offload the fp32 master parameters.
      activations: Offload saved activations; `Zero` applies it through its remat policy.
      tier: "host" or "nvme".
      directory: Directory of the nvme tier.
      auto: Keep the states on the device, with a warning, if it has no host memory kind.
      piece_bytes: Maximum bytes of state, update and master parameters in one piece of the update.
        Two pieces are on the device at once.
      host_bytes: Maximum bytes of pieces in host memory per process of the nvme tier. None derives
        it from `piece_bytes`.

    Raises:
      ValueError: `piece_bytes` is below 4 KiB, `host_bytes` is below 16 KiB, or `params` is set
        without `optimizer`.
    """

    optimizer: bool = False
    params: bool = False
    activations: bool = False
    tier: str = "host"
    directory: str | None = None
    auto: bool = False
    piece_bytes: int = PIECE_BYTES
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.piece_bytes, int) or self.piece_bytes < 4096:
            raise ValueError(
                f"`piece_bytes`={self.piece_bytes!r}: at least 4096 bytes are required. The "
                f"default is {PIECE_BYTES} (64 MiB)"
            )
        if self.host_bytes is not None and self.host_bytes < 1 << 14:
            raise ValueError(f"`host_bytes`={self.host_bytes!r}: at least 16384 bytes are required")
        if self.params and not self.optimizer:
            raise ValueError(
                '`offload`="params": only the update uses fp32 master parameters, so the '
                'optimizer state must be offloaded too. Use offload="optimizer,params"'
            )

    @property
    def states(self) -> bool:
        """True if any model state is stored outside device memory."""
        return self.optimizer

    @property
    def streams(self) -> bool:
        """True if states are stored in host memory and streamed through the device in the step."""
        return self.optimizer and self.tier == "host"

    @property
    def in_files(self) -> bool:
        """True if states are stored in files and updated by the host."""
        return self.optimizer and self.tier == "nvme"

    @property
    def streams_params(self) -> bool:
        """True if fp32 master parameters are also streamed from host memory."""
        return self.params and self.tier == "host"

    def __str__(self) -> str:
        words = [word for word in STATES if getattr(self, word)]
        place = {"nvme": f":nvme={self.directory}"}.get(self.tier, ":auto" if self.auto else "")
        return ",".join(words) + place if words else "none"


NONE = Offload()


def parse(given: "str | Offload | None") -> Offload:
    """Parses the setting: an `Offload`, None, or names as on the command line.

    Raises:
      ValueError: A name or a tier is unknown; the message has the nearest one.

    >>> parse("optimizer,params").params, parse("optimizer:nvme=/scratch").directory
    (True, '/scratch')
    """
    if given is None or given == "none":
        return NONE
    if isinstance(given, Offload):
        return given
    if not isinstance(given, str):
        raise ValueError(f"`offload`={given!r}: write {GRAMMAR}, or pass an Offload")
    names, _, place = given.partition(":")
    words = [word.strip() for word in names.split(",")]
    tier, _, directory = place.partition("=")
    written = [(word, STATES) for word in words]
    if place:
        written.append((tier, TIERS))
    for word, known in written:
        if word not in known:
            raise ValueError(
                f"`offload`={given!r}: {word!r} is not one of {', '.join(known)}; the nearest is "
                f'{nearest(word, known)!r}. Write {GRAMMAR}; offload="optimizer" uses host memory'
            )
    if (tier == "nvme") != bool(directory):
        raise ValueError(
            f"`offload`={given!r}: the nvme tier, and no other, requires a directory: "
            f"{names}:nvme=/path/on/nvme"
        )
    return Offload(
        **{word: True for word in words},
        tier="nvme" if tier == "nvme" else "host",
        directory=directory or None,
        auto=tier == "auto",
    )


def settle(offload: Offload, mesh: AnyMesh) -> Offload:
    """Returns the offload that the devices of a mesh support; warns if "auto" disables it.

    Raises:
      ValueError: The devices have no host memory kind, and the setting is not "auto".
    """
    if not offload.streams or isinstance(mesh, AbstractMesh):
        return offload
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST in kinds:
        return offload
    lacks = f"{device.device_kind} has no {HOST} memory in this JAX (it has {', '.join(kinds)})"
    if not offload.auto:
        raise ValueError(
            f'`offload`="{offload}": {lacks}. Leave `offload` out, or use '
            f'offload="{offload}:auto" to offload only where it is supported'
        )
    stays = dataclasses.replace(offload, optimizer=False, params=False)
    warnings.warn(f'`offload`="{offload}": {lacks}, so the state stays on the device', stacklevel=5)
    return stays


def place(placed: PyTree, leaves: PyTree, offload: Offload) -> PyTree:
    """Returns shardings of master parameters: in host memory if offloaded, from rank 1 on."""
    if not offload.streams_params:
        return placed
    return jax.tree.map(lambda s, x: s.with_memory_kind(HOST) if x.shape else s, placed, leaves)


def offloaded(state: PyTree, params: PyTree, splitter: Partitioner) -> list[bool]:
    """Returns True for each state leaf that is offloaded: it mirrors a parameter with a dim."""
    splits = splitter(params)
    of_state = state_partitions(state, params, splits)
    owners = mirrors(of_state, splits)
    return [o is not None and bool(x.shape) for x, o in zip(of_state, owners, strict=True)]


def place_state(placed: PyTree, offloaded: Sequence[bool]) -> PyTree:
    """Returns shardings of a state: in host memory for the leaves that are offloaded."""
    flags = jax.tree.unflatten(jax.tree.structure(placed), offloaded)
    return jax.tree.map(lambda s, flag: s.with_memory_kind(HOST) if flag else s, placed, flags)


def is_on_host(leaf: Any) -> bool:
    """Returns True for an array, a traced value or a ShapeDtypeStruct in host memory."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    if kind is None and isinstance(leaf, jax.core.Tracer):
        return bool(jax.typeof(leaf).memory_space == jax.memory.Space.Host)
    return kind == HOST


def to_device(tree: PyTree) -> PyTree:
    """Moves leaves from host memory to the device; for use inside `jit`."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def bytes_on(tree: PyTree, kind: str = "device") -> int:
    """Returns the bytes of one device's shards in one kind of memory."""
    return sum(_leaf_bytes(x) for x in jax.tree.leaves(tree) if is_on_host(x) == (kind == HOST))


def _leaf_bytes(leaf: Any) -> int:
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    sharding = getattr(leaf, "sharding", None)
    shape = np.shape(leaf)
    if isinstance(sharding, NamedSharding):
        shape = sharding.shard_shape(shape)
    return int(np.prod(shape)) * jax.dtypes.result_type(leaf).itemsize
