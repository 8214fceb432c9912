"""LoRA and QLoRA: low-rank adapters of a frozen model.

A weight matrix W becomes W + s·A·B with A (in, r), B (r, out) and s = alpha / r; B is initialised
to zero. A and B are fp32 master parameters, sharded and updated like any parameters. W is frozen in
16, 8 or 4 bits, sharded at every stage from 1 on, and communicated in its stored format. At stage 3
each device stores bits/8·Ψ/N bytes of W, gathers it twice a step in those bits, and dequantises one
matrix at a time.

Sources: Hu et al., LoRA, arXiv:2106.09685, section 4.1; Dettmers et al., QLoRA, arXiv:2305.14314.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.adapters.matrix import Dims, Matrix, is_matrix, run
from zero_jax.adapters.quantised import KINDS, Quantised, mapped, quantise
from zero_jax.names import unknown
from zero_jax.sharding import paths
from zero_jax.sharding.paths import PyTree

LossFn = Callable[..., PyTree]
ALL_LINEAR = "all-linear"
_FLOATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
BASES = (*_FLOATS, *KINDS)


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters of a frozen, optionally quantised model: LoRA and QLoRA.

    Args:
      rank: Rank r of the adapters.
      alpha: A·B is scaled by s = alpha / r. The default is 2·r.
      targets: "all-linear" adapts every leaf that the model uses only in matrix products. Otherwise
        patterns searched in paths like "blocks/attn/q/kernel".
      base: Stored dtype of the frozen model. "bf16" or "fp32" applies to all of it. "int8" or "nf4"
        applies to its matrices; the rest is bf16.
      seed: Seed of the initial values of A.

    Raises:
      ValueError: The rank is below 1, the base is unknown, or a target pattern is empty.

    >>> import optax, zero_jax
    >>> make = lambda key: {"w": jax.random.normal(key, (64, 8))}
    >>> loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    >>> batch, key = jnp.ones((8, 64)), jax.random.key(0)
    >>> adapted = Lora(rank=2, base="nf4").adapt(loss, jax.eval_shape(make, key), batch)
    >>> zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, frozen=adapted.frozen)
    >>> params = zero.init(adapted.init(make), key)
    >>> tx = zero.optimizer(optax.adamw(1e-3))
    >>> step = zero.train_step(adapted.loss, tx)
    >>> params, opt_state, metrics = step(params, tx.init(params), batch)
    >>> sorted(params), params["base"]["w"].codes.dtype
    (['base', 'lora'], dtype('uint8'))
    """

    rank: int = 16
    alpha: float | None = None
    targets: str | Sequence[str] = ALL_LINEAR
    base: str = "bf16"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"`rank`={self.rank}: at least 1 is required")
        if self.base not in BASES:
            raise ValueError(unknown("base", self.base, BASES, "Choose one of"))
        if not self.targets or not all(self.targets):
            raise ValueError(
                f"`targets`={self.targets!r}: an empty pattern matches every path. Use "
                f"{ALL_LINEAR!r} for all matrices"
            )

    @property
    def scale(self) -> float:
        """Scale s of A·B."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    def adapt(self, loss_fn: LossFn, params: PyTree, batch: PyTree, *extras: PyTree) -> "Adapted":
        """Finds the matrices of a loss that adapters can be added to; allocates nothing.

        Args:
          loss_fn: `loss_fn(params, batch, *extras)`, written for full parameters.
          params: Parameters of the loss, or their shapes.
          batch: A batch of any number of rows, or its shapes.
          *extras: Further arguments of the loss, or their shapes.

        Returns:
          The adapted loss, with functions to initialise and merge its parameters.

        Raises:
          ValueError: A target is not used in matrix products alone, or a pattern matches nothing.
        """
        multiplied = _multiplied(loss_fn, params, batch, extras)
        return Adapted(self, loss_fn, multiplied, _targets(self.targets, params, multiplied))


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A loss of {"base": the frozen model, "lora": A and B by the path of their matrix}.

    Attributes:
      lora: The adapter settings.
      loss_fn: The loss of the full parameters.
      multiplied: Leaves used only in matrix products, with their dims.
      targets: Paths of the leaves that have an adapter.
    """

    lora: Lora
    loss_fn: LossFn
    multiplied: Mapping[str, Dims]
    targets: Sequence[str]

    @property
    def frozen(self) -> str:
        """Pattern of the frozen leaves, for `Zero(frozen=...)`."""
        return "^base(/|$)"

    def init(self, make: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Wraps a function that makes the model into one that makes base and adapters."""

        def made(*args: PyTree) -> PyTree:
            params = make(*args)
            return {"base": self.rests(params), "lora": self.new(params)}

        return made

    def rests(self, params: PyTree) -> PyTree:
        """Converts the model to the stored dtypes of the base."""

        def one(name: str, leaf: jax.Array) -> jax.Array | Quantised:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            if self.lora.base in KINDS and name in self.multiplied:
                dim = max(self.multiplied[name].inputs, key=lambda d: leaf.shape[d])
                packed = quantise(leaf, self.lora.base, dim)
                # Blocks that are mostly padding would take more than they save.
                if sum(x.nbytes for x in jax.tree.leaves(packed)) < 2 * leaf.size:
                    return packed
            return leaf.astype(_FLOATS.get(self.lora.base, jnp.bfloat16))

        return mapped(one, params)

    def new(self, params: PyTree) -> PyTree:
        """Initialises adapters: A uniformly like `torch.nn.Linear`, B with zeros."""
        shapes = {name: leaf.shape for name, leaf in paths.named_leaves(params)}
        adapters = {}
        for name in self.targets:
            dims, shape = self.multiplied[name], shapes[name]
            a, b = dims.shapes(shape, self.lora.rank)
            key = jax.random.fold_in(jax.random.key(self.lora.seed), zlib.crc32(name.encode()))
            most = math.prod(shape[d] for d in dims.inputs) ** -0.5
            random = jax.random.uniform(key, a, minval=-most, maxval=most)
            adapters[name] = {"a": random, "b": jnp.zeros(b)}
        return adapters

    def loss(self, params: PyTree, batch: PyTree, *extras: PyTree) -> PyTree:
        """Computes the loss of the adapted model, for `Zero`; never materialises W + s·A·B."""
        compute = params["lora"][self.targets[0]]["a"].dtype
        return run(self.loss_fn, self._matrices(params, compute), (batch, *extras))

    def _matrices(self, params: PyTree, compute: DTypeLike) -> PyTree:
        """Returns the adapted model in the compute dtype, with a `Matrix` for some leaves."""

        def one(name: str, leaf: jax.Array | Quantised) -> jax.Array | Matrix:
            low = params["lora"].get(name)
            if low is not None or isinstance(leaf, Quantised):
                pair = None if low is None else (low["a"], low["b"])
                dims, scale = self.multiplied[name], self.lora.scale
                return Matrix(leaf, pair, name, compute, dims, scale)
            return leaf.astype(compute) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return mapped(one, params["base"])

    def merged(self, params: PyTree) -> PyTree:
        """Returns the full fp32 model with its adapters added, for sampling or inspection."""
        tree = self._matrices(params, jnp.float32)
        return jax.tree.map(lambda x: x.whole() if is_matrix(x) else x, tree, is_leaf=is_matrix)


def _multiplied(
    loss_fn: LossFn, params: PyTree, batch: PyTree, extras: tuple[PyTree, ...]
) -> dict[str, Dims]:
    """Returns the leaves that a loss uses only in matrix products, always along the same dims."""
    reads: dict[str, set[Dims | None]] = {}

    def one(name: str, leaf: jax.Array) -> jax.Array | Matrix:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return Matrix(leaf, None, name, leaf.dtype) if is_float else leaf

    def traced(params: PyTree, *args: PyTree) -> PyTree:
        note = lambda path, dims: reads.setdefault(path, set()).add(dims)  # noqa: E731
        return run(loss_fn, mapped(one, params), args, note)

    jax.eval_shape(traced, params, batch, *extras)
    return {
        name: dims
        for name, _ in paths.named_leaves(params)
        for dims in reads.get(name, ())
        if len(reads[name]) == 1 and dims is not None and dims.inputs and dims.outputs
    }


def _targets(
    targets: str | Sequence[str], params: PyTree, multiplied: Mapping[str, Dims]
) -> list[str]:
    names, chosen = [name for name, _ in paths.named_leaves(params)], set[str]()
    for pattern in [targets] if isinstance(targets, str) else targets:
        found = paths.matches("" if pattern == ALL_LINEAR else pattern, names, "targets")
        named = list(itertools.compress(names, found))
        if multiplied.keys().isdisjoint(named):
            raise ValueError(
                f"`targets`={pattern!r}: {named[0]!r} is not a matrix that the model only "
                f"multiplies by; those are {', '.join(multiplied) or 'none'}"
            )
        chosen.update(named)
    return [name for name in multiplied if name in chosen]
