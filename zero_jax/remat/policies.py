"""Remat policies by name: the activations of a layer that are saved, and where.

  none          all activations
  dots          the layer's input and its matrix products
  names:a,b     the layer's input and values that the model marks with
                `jax.ad_checkpoint.checkpoint_name(x, "a")`
  block         the layer's input
  block_sqrt    the input of every group of about √L layers; those of one group's layers while
                that group runs backward

Saved values are stored on the `device`, or at the place after an @ ("block@host",
"block_sqrt@partitioned", "names:a@host,b", "names@host:a,b@host"; the place after the policy's name
is that of the layer's input):

  host              in pinned host memory
  partitioned       P_a: 1/MP of it on each device of the `model` axis
  partitioned+host  P_a+cpu: 1/MP of it, in pinned host memory

P_a sends nothing to store a value that is replicated over the `model` axis, and one all-gather per
layer to fetch it; Megatron's five all-reduces send 10 times as much. (A value that is sharded over
`model` would be gathered first: store such values on the device.)

Source: ZeRO (arXiv:1910.02054), section 6.1, for P_a and P_a+cpu.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from zero_jax.names import nearest, unknown
from zero_jax.sharding.mesh import MODEL, AnyMesh
from zero_jax.sharding.model_axis import over_model
from zero_jax.tracing.jaxpr import is_product

# A policy of `jax.checkpoint_policies`.
JaxPolicy = Callable[..., object]
# Policies that need no knowledge of the model, by decreasing memory.
POLICIES = ("none", "dots", "block", "block_sqrt")
# FLOPs of a step's layers, in units of a forward pass: 3, and 1 for each level of recomputation.
# Products that `dots` saves are not computed again, elementwise operations are.
_PASSES = {
    "none": 3.0,
    "jax": 4.0,
    "dots": 3.0 + 1e-3,
    "names": 4.0 - 1e-3,
    "block": 4.0,
    "block_sqrt": 5.0,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a saved value is stored between forward and backward.

    Attributes:
      host: In pinned host memory, not on the device.
      partitioned: 1/MP of it per device, sharded over the mesh axis `model`.
    """

    host: bool = False
    partitioned: bool = False

    def __str__(self) -> str:
        return "+".join(k for k in ("partitioned", "host") if getattr(self, k)) or "device"

    def put(self, x: jax.Array) -> jax.Array:
        """Returns the value as it is stored here; inside `shard_map`."""
        if not can_move(x):
            return x
        if self.partitioned:
            x = over_model(_split, [x], [PartitionSpec()], PartitionSpec(MODEL))
        return jax.device_put(x, jax.memory.Space.Host) if self.host else x

    def fetch(self, stored: jax.Array, like: jax.Array | jax.core.ShapedArray) -> jax.Array:
        """Inverts `put`; `like` has the shape and dtype of the value."""
        if not can_move(like):
            return stored
        if self.host:
            stored = jax.device_put(stored, jax.memory.Space.Device)
        if not self.partitioned:
            return stored

        def gather(piece: jax.Array) -> jax.Array:
            full = jax.lax.all_gather(piece, MODEL, tiled=True)
            return full[: math.prod(like.shape)].reshape(like.shape)

        return over_model(gather, [stored], [PartitionSpec(MODEL)], PartitionSpec())


def can_move(aval: object) -> bool:
    """Returns True for a float array, False for a counter, key, scalar or token."""
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", bool)
    return bool(shape) and jnp.issubdtype(dtype, jnp.floating)


def _split(x: jax.Array) -> jax.Array:
    """Returns this device's contiguous piece of the flat value."""
    parts = jax.lax.axis_size(MODEL)
    flat = x.reshape(-1)
    size = -(-flat.size // parts)
    if size * parts > flat.size:
        flat = jnp.pad(flat, (0, size * parts - flat.size))
    return jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(MODEL) * size, size)


DEVICE = Place()
PLACES = {str(p): p for p in (DEVICE, Place(True), Place(False, True), Place(True, True))}
# Results of `save_and_offload_only_these_names`, whose types JAX does not export. A policy that
# moves a value has another type, with a field `dst`; all others return a bool.
_JAX_RESULTS = {"RecomputeType": None, "SaveableType": DEVICE}


@dataclasses.dataclass(frozen=True, init=False)
class Remat:
    """Activation checkpointing policy; the strings of `Zero(remat=...)` are short for it.

    Attributes:
      kind: "none", "dots", "block", "block_sqrt", "names", or "jax" for `policy`.
      inputs: Where inputs of layers (of groups, for block_sqrt) are saved: a `Place` or its name:
        "device", "host", "partitioned" or "partitioned+host".
      names: Names of saved values and their places: a mapping, pairs, or names alone. Stored as
        pairs.
      policy: A policy of `jax.checkpoint_policies`, or a function with its signature; kind "jax".

    Raises:
      ValueError: A kind or a place is unknown, or the fields contradict each other.

    >>> str(Remat("names", "host", {"attention": "device"}))
    'names@host:attention'
    """

    kind: str
    inputs: Place
    names: tuple[tuple[str, Place], ...]
    policy: JaxPolicy | None

    def __init__(
        self,
        kind: str,
        inputs: Place | str = DEVICE,
        names: Mapping[str, Place | str] | Iterable[str | tuple[str, Place | str]] = (),
        policy: JaxPolicy | None = None,
    ):
        items = names.items() if isinstance(names, Mapping) else names
        pairs = [(item, DEVICE) if isinstance(item, str) else item for item in items]
        places = tuple((name, _place(at)) for name, at in pairs)
        vars(self).update(kind=kind, inputs=_place(inputs), names=places, policy=policy)
        _check(self)

    @property
    def passes(self) -> float:
        """FLOPs of the layers in units of one forward pass; the backward pass alone is 2.

        For a policy of JAX this is an upper bound: it decides for each equation.
        """
        return _PASSES[self.kind]

    @property
    def places(self) -> tuple[Place, ...]:
        """All places of saved values."""
        return (self.inputs, *(place for _, place in self.names))

    @property
    def partitioned(self) -> bool:
        """True if saved values are sharded over the `model` axis."""
        return any(place.partitioned for place in self.places)

    def place_of(self, eqn: jex.JaxprEqn) -> Place | None:
        """Returns where the results of an equation of a layer are saved; None if they are not."""
        if self.policy is not None:
            result = self.policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
            if getattr(result, "dst", None) is not None:
                return Place(host=True)
            return _JAX_RESULTS.get(type(result).__name__, DEVICE if result else None)
        if self.kind == "dots":
            return DEVICE if is_product(eqn) else None
        return dict(self.names).get(eqn.params["name"]) if eqn.primitive.name == "name" else None

    def __str__(self) -> str:
        if self.policy is not None:
            return getattr(self.policy, "__qualname__", repr(self.policy)).partition(".<locals>")[0]
        kind, *names = (
            name if place == DEVICE else f"{name}@{place}"
            for name, place in ((self.kind, self.inputs), *self.names)
        )
        return f"{kind}:{','.join(names)}" if names else kind


def _place(given: Place | str) -> Place:
    if isinstance(given, Place):
        return given
    if given not in PLACES:
        raise ValueError(f"`remat`: {unknown('place', str(given), PLACES)}")
    return PLACES[given]


def of_jax(policy: JaxPolicy | None) -> Remat:
    """Returns the equivalent of `jax.checkpoint(policy=...)`; None saves only the inputs."""
    return Remat("block") if policy is None else Remat("jax", policy=policy)


@functools.cache
def parse(text: str | Remat | JaxPolicy) -> Remat:
    """Reads a policy.

    Raises:
      ValueError: A policy or place is unknown, names are missing, given twice or given to a policy
        without names, or a policy saves nothing at its place.

    >>> policy = parse("names@host:a,b@partitioned")
    >>> str(policy.inputs), [(name, str(place)) for name, place in policy.names]
    ('host', [('a', 'device'), ('b', 'partitioned')])
    >>> str(parse("block@device")), parse("block_sqrt").passes
    ('block', 5.0)
    """
    if isinstance(text, Remat):
        return text
    if callable(text):
        return of_jax(text)
    policy, colon, marked = str(text).partition(":")
    (kind, inputs), *names = map(_name_and_place, [policy, *(marked.split(",") if colon else ())])
    return Remat(kind, inputs, names)


def _name_and_place(part: str) -> tuple[str, str]:
    """Splits "a@host"; the default is the device."""
    name, at, place = (word.strip() for word in part.partition("@"))
    return name, place if at else str(DEVICE)


def _check(policy: Remat) -> None:
    """Raises ValueError if kind, places, names and policy contradict each other."""
    text, known = str(policy), [name for name, _ in policy.names]
    if policy.kind == "jax" or policy.policy is not None:
        if policy.kind != "jax" or policy.policy is None or known or policy.inputs != DEVICE:
            raise ValueError(
                f'`kind`={policy.kind!r} with `policy`={policy.policy!r}: kind "jax" alone takes a '
                "policy, and requires one. It decides both `names` and `inputs`: leave those out"
            )
        return
    kinds = (*POLICIES, "names")
    if policy.kind not in kinds:
        near = nearest(policy.kind, kinds)
        raise ValueError(
            f"`remat`={text!r}: use one of {', '.join(kinds)}; the nearest is {near!r}"
        )
    if policy.inputs != DEVICE and policy.kind in ("none", "dots"):
        raise ValueError(
            f"`remat`={text!r}: {policy.kind} saves its values on the device. Other places are "
            'for the inputs of layers, for example "block@host", or for marked values, '
            '"names:a@host"'
        )
    if (policy.kind == "names") != bool(known):
        raise ValueError(
            f'`remat`={text!r}: "names", and no other policy, requires names of values, for '
            'example "names:a,b". Mark values with jax.ad_checkpoint.checkpoint_name(x, "a")'
        )
    wrong = (not name or name != name.strip() or {",", "@"} & {*name} for name in known)
    if any(wrong) or len(set(known)) < len(known):
        raise ValueError(
            f'`remat`={text!r}: write each name once, for example "names:a,b@host". It has no '
            "comma, no @ and no blank at its ends"
        )


def on_host(text: str) -> str:
    """Returns the policy with all saved values in host memory, for `offload="activations"`.

    Raises:
      ValueError: The policy saves all values, or products, on the device.

    >>> on_host("block"), on_host("names@partitioned:a,b")
    ('block@host', 'names@partitioned+host:a@host,b@host')
    """
    policy = parse(text)
    if policy.kind in ("none", "dots", "jax"):
        raise ValueError(
            f'`offload`="activations" with `remat`={text!r}: saved activations of layers move to '
            'the host, but this policy saves too many. Use remat="block"'
        )
    inputs, *places = (Place(True, place.partitioned) for place in policy.places)
    names = zip((name for name, _ in policy.names), places, strict=True)
    return str(Remat(policy.kind, inputs, names))


def check(text: str | Remat | JaxPolicy, mesh: AnyMesh) -> Remat:
    """Reads a policy and checks that the mesh has what it needs; an abstract one has all memories.

    Raises:
      ValueError: As in `parse`; partitioned without a `model` axis; host on devices without
        pinned host memory.
    """
    policy = parse(text)
    if policy.partitioned and MODEL not in mesh.axis_names:
        raise ValueError(
            f"`remat`={text!r} partitions saved activations over the mesh axis {MODEL!r}, but the "
            f"mesh has only {', '.join(mesh.axis_names)}. Use zero_jax.make_mesh(model=2), or "
            "leave partitioned out"
        )
    if any(p.host for p in policy.places) and not isinstance(mesh, AbstractMesh):
        kinds = [m.kind for m in mesh.local_devices[0].addressable_memories()]
        if "pinned_host" not in kinds:
            raise ValueError(
                f"`remat`={text!r} saves values in pinned host memory, but "
                f"{mesh.local_devices[0]} has only {', '.join(kinds)}: leave host out"
            )
    return policy
