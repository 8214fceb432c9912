"""A model, its optimizer and their place on the devices: what ZeRO is asked for."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zero_jax
from training import optimizers
from training.config import mesh_sizes
from training.data import batches, eval_batches
from training.plan import Plan, check_batch
from training.saving import state_files
from zero_jax.models import gpt
from zero_jax.sharding import mesh

PyTree = Any
T = TypeVar("T")

PROMPT = 16  # held-out tokens that a sample begins with


class Trainer:
    """A model, its optimizer and their place on the devices. Parameters come with `init`."""

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        self.plan = plan
        self.out = pathlib.Path()  # folder of the run
        self.mesh = zero_jax.make_mesh(**mesh_sizes(config.mesh))
        check_batch(config.batch, mesh.batch_shards(self.mesh), config.micro_batches)
        self.plain_tx = optimizers.make(config)
        self.graphdef = nnx.graphdef(nnx.eval_shape(self._build, jax.random.key(0)))
        self.zero = zero_jax.Zero(self.mesh, **config.settings())
        if config.stage == "auto":
            self.zero = self.zero.choose(*self._planned())
        self.tx = self.zero.optimizer(self.plain_tx)
        self.step = self.zero.train_step(self.loss, self.tx)
        self._mean_loss = self.zero.evaluate(self.loss)

    def _planned(self) -> tuple[Any, ...]:
        """What a plan of the step is made from."""
        rows = (self.plan.config.batch, self.plan.model.seq + 1)
        batch = (jax.ShapeDtypeStruct(rows, jnp.int32),)
        params = self.zero.abstract(self._fresh, jax.random.key(0))
        return self.loss, self.plain_tx, params, batch

    def predict(self) -> zero_jax.Plan:
        """What a step will hold on each device; what is in files is shown as in host memory."""
        zero = self.zero
        if zero.settings.offload.in_files:  # on a mesh that is not there: host memory is not used
            abstract = mesh.abstract_of(self.mesh)
            zero = dataclasses.replace(zero, mesh=abstract, offload="optimizer")
        return zero.plan(*self._planned())

    def _build(self, key: jax.Array) -> gpt.GPT:
        return gpt.GPT(self.plan.model, rngs=nnx.Rngs(key))

    def _fresh(self, key: jax.Array) -> PyTree:
        return nnx.state(self._build(key), nnx.Param)

    def loss(self, params: PyTree, batch: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Cross entropy of tokens, or of tokens and a mask, as on one device: (sum, weight)."""
        return zero_jax.Weighted(*gpt.loss(nnx.merge(self.graphdef, params), *batch))

    def shapes(self) -> PyTree:
        """The logical parameters, not allocated."""
        return jax.eval_shape(self._fresh, jax.random.key(0))

    def like(self) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state as they will rest; not allocated, but for files."""
        if self.zero.settings.offload.in_files:
            return self.init()
        params = self.zero.abstract(self._fresh, jax.random.key(self.plan.config.seed))
        return params, self.tx.init(params)

    def init(self) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state, born partitioned.

        State files of the same run give way; those of another are refused.
        """
        params = self.zero.init(self._fresh, jax.random.key(self.plan.config.seed))
        with state_files(self.zero.settings.offload.directory, self.out):
            return params, self.tx.init(params)

    def batches(self, start: int = 0) -> Iterator[tuple[jax.Array, ...]]:
        """Global batches to train on, from that sample on, without end."""
        seed = self.plan.config.seed
        rows = batches(self.plan.train, seed=seed, start=start, **self._share())
        return (zero_jax.global_batch(self.mesh, (tokens,)) for tokens in rows)

    @property
    def held_out_batches(self) -> int:
        """Of how many batches a pass over all held-out tokens is."""
        windows = -(-(self.plan.held_out.size - 1) // self.plan.model.seq)
        return -(-windows // self.plan.config.batch)

    def evaluate(
        self,
        params: PyTree,
        max_batches: int | None = None,
        each: Callable[[int], Any] = lambda done: None,
    ) -> float:
        """Held-out loss in nats per token: exact, however the batches fall.

        Args:
            params: At rest.
            max_batches: Of the first so many batches alone; None for all.
            each: Is called after each batch with the number of those that are done.
        """
        rows = eval_batches(self.plan.held_out, max_batches=max_batches, **self._share())
        means = (self._mean_loss(params, zero_jax.global_batch(self.mesh, row)) for row in rows)
        pairs = []
        for loss, weight in one_late(means):
            pairs.append((float(loss), float(weight)))
            each(len(pairs))
        return sum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs)

    def sample(self, params: PyTree) -> np.ndarray:
        """Continues the first held-out tokens, working on one device."""
        config = self.plan.config
        alone = jax.tree.map(lambda x: x.addressable_data(0), params)
        model = nnx.merge(self.graphdef, alone)
        prompt = jnp.asarray(self.plan.held_out[:PROMPT], jnp.int32)
        key = jax.random.key(config.seed)
        return np.asarray(gpt.generate(model, prompt, config.sample_length, key, temperature=0.8))

    def _share(self) -> dict[str, int]:
        """The batches, and this process's part of each."""
        config = self.plan.config
        index, count = zero_jax.batch_share(self.mesh)
        share = {"shard_index": index, "shard_count": count}
        return {"batch": config.batch, "seq": self.plan.model.seq, **share}


def one_late(results: Iterable[T]) -> Iterator[T]:
    """Holds one result back: the host reads it while the devices work at the next."""
    held: list[T] = []
    for result in results:
        held.append(result)
        if len(held) > 1:
            yield held.pop(0)
    yield from held
