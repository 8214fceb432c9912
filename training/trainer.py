"""A run before its first step: model, data, optimizer and train step."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import zero_jax
from training import balance, corpus
from training.config import Config, resolve
from training.corpus import Corpus
from training.multiprocess import say, together
from training.packing import LOOK, Arrays
from zero_jax import interchange
from zero_jax.commands.case import choose
from zero_jax.commands.settings import ROW, check_context
from zero_jax.hlo import targets
from zero_jax.interchange import peft
from zero_jax.low_bit.state import FP32, kind_of
from zero_jax.models import families, generate, gpt, optimizers
from zero_jax.offload.nvme import discard, folder_of
from zero_jax.plan import expert_elements
from zero_jax.plan.text_model import TextModel, shifted
from zero_jax.sharding import mesh

PyTree = Any
States = tuple[PyTree, PyTree]  # parameters, and the optimizer's state
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Complete settings, with the model and the data."""

    config: Config
    model: TextModel
    corpus: Corpus


def load(config: Config) -> RunPlan:
    """Reads the data and decides the open settings; raises ValueError if they do not fit."""
    config = resolve(config)
    known: families.Config
    if config.init_from is None:
        known = families.preset(config.model)
    else:
        known = interchange.config(config.init_from)
        if config.vocab_size not in (None, known.vocab):
            raise ValueError(
                f"--vocab-size {config.vocab_size}: the model in {config.init_from} has "
                f"{known.vocab}; leave --vocab-size out"
            )
        interchange.check(config.init_from)  # before a size of config.json takes memory
    known = families.with_capacity(known, config.expert_capacity_factor)
    known = dataclasses.replace(known, mlp_chunk=config.mlp_chunk)
    seq_len = min(known.seq, ROW) if config.seq_len is None else config.seq_len
    sharing = config.axes().get(mesh.CONTEXT, 1)  # devices that share a row
    check_context(sharing, known, seq_len)
    data = corpus.load(config, config.vocab_size or known.vocab, seq_len)
    if config.init_from is None:
        vocab = config.vocab_size or (256 if data.byte_level else known.vocab)
        positions = {"seq": seq_len} if isinstance(known, gpt.GPTConfig) else {}
        known = dataclasses.replace(known, vocab=vocab, **positions)
    if seq_len > known.seq:
        raise ValueError(f"--seq-len {seq_len}: the model supports at most {known.seq} tokens")
    config = dataclasses.replace(config, seq_len=seq_len, vocab_size=known.vocab)
    return RunPlan(config, TextModel(known, config.adapters(config.seed)), data)


def rate(config: Config) -> optax.Schedule:
    """Returns the learning rate by number of updates: linear warmup, then cosine to a tenth.

    >>> config = Config(learning_rate=1.0, warmup_steps=2, max_steps=6)
    >>> [round(float(rate(config)(step)), 3) for step in (0, 1, 2, 6)]
    [0.0, 0.5, 1.0, 0.1]
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    assert peak is not None and warmup is not None
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, config.max_steps, end_value=peak / 10
    )


def optimizer_of(config: Config) -> optax.GradientTransformation:
    """Returns the optimizer of a run, not yet sharded."""
    decay, clip = config.weight_decay, config.max_grad_norm
    return optimizers.make(config.optimizer, rate(config), weight_decay=decay, clip=clip)


class Trainer:
    """The model, optimizer and train step of a run; `init` allocates parameters.

    Raises ValueError if the mesh or the batch does not fit the devices.
    """

    def __init__(self, plan: RunPlan) -> None:
        config = plan.config
        self.plan, self.model = plan, plan.model
        self.out = pathlib.Path()  # folder of the run
        self.mesh = zero_jax.make_mesh(**self._sizes())
        self._check_batch()
        self.plain_tx = optimizer_of(config)
        self.zero = zero_jax.Zero(self.mesh, frozen=self.model.frozen, **config.zero_settings())
        if config.stage == "auto":
            tokens = config.seq_len // mesh.context_size(self.mesh)
            step_of = functools.partial(self._step_of, self.zero)
            self.zero, self.model = choose(self.zero, self.model, step_of, tokens)
            config = dataclasses.replace(config, mlp_chunk=self.model.config.mlp_chunk)
            self.plan = dataclasses.replace(plan, config=config, model=self.model)
        self.tx = self.zero.optimizer(self.plain_tx)
        trained = self.model.trained_loss
        self.step = self.zero.train_step(trained, self.tx, has_aux=self.model.routes)
        self._mean_loss = self.zero.evaluate(self.model.loss)

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self.plan.config.seed)

    def _sizes(self) -> dict[str, int]:
        """Returns the given mesh axes, or for --stage auto the fastest expert parallelism."""
        config, sizes = self.plan.config, self.plan.config.axes()
        if config.stage != "auto" or sizes or config.lora_rank is not None:
            return sizes
        devices = jax.device_count()
        tokens = config.global_batch_size // (devices * config.grad_accum_steps) * config.seq_len
        wires = targets.of_kind(jax.devices()[0].device_kind)
        own = (self.model.config, devices, tokens, config.remat, wires)
        return {"experts": expert_elements.groups(*own)}

    def _check_batch(self) -> None:
        batch, parts = self.plan.config.global_batch_size, self.plan.config.grad_accum_steps
        unit = (devices := mesh.batch_shards(self.mesh)) * parts
        if batch % unit:
            sizes = [size for size in (batch // unit * unit, -(-batch // unit) * unit) if size]
            raise ValueError(
                f"--global-batch-size {batch} must be a multiple of {devices} devices x "
                f"{parts} micro-batches = {unit}: use {' or '.join(map(str, sizes))}"
            )

    def _step_of(self, zero: zero_jax.Zero, model: TextModel) -> tuple[Any, ...]:
        """Returns the arguments of `Zero.plan`: loss, optimizer, parameters and batch."""
        config = self.plan.config
        shape = (config.global_batch_size, config.seq_len + 1)
        params = zero.eval_shape(model.make, self._key)
        batch: PyTree = (jax.ShapeDtypeStruct(shape, jnp.int32),)
        batch = jax.eval_shape(shifted, batch) if self._shares_rows else batch
        return model.trained_loss, zero.optimizer(self.plain_tx), params, batch

    def predict(self) -> zero_jax.Plan:
        """Returns the plan of a step, with NVMe files as host memory."""
        zero = self.zero
        if zero.config.offload.in_files:  # an abstract mesh: host memory is not used
            zero = zero.replace(mesh=mesh.abstract_of(self.mesh), offload="optimizer")
        return zero.plan(*self._step_of(zero, self.model), has_aux=self.model.routes)

    def check_products(self) -> None:
        """Compiles a step in fp8; raises ValueError if GPUs run its products in another dtype.

        Every process calls it: XLA for GPUs chooses kernels together.
        """
        if not self.zero.config.precision.matmul_dtype:
            return
        if not mesh.on_gpu(self.mesh):
            say("matmul_dtype: CPU devices emulate fp8, they multiply rounded numbers in fp32")
        elif not self.zero.config.offload.in_files:
            of_step = self._step_of(self.zero, self.model)
            plan = self.zero.plan(*of_step, has_aux=self.model.routes, compile=True)
            assert plan.fp8 is not None
            say(f"{plan.fp8.count:,} matrix products of a step run in fp8")

    def shapes(self) -> PyTree:
        """Returns the full parameters as `ShapeDtypeStruct`."""
        return jax.eval_shape(self.model.make, self._key)

    @functools.cached_property
    def _abstract(self) -> PyTree:
        """The sharded parameters as `ShapeDtypeStruct`."""
        return self.zero.eval_shape(self.model.make, self._key)

    def like(self, saved: Mapping[str, Any]) -> States:
        """Returns the abstract states of a checkpoint of a run with the settings `saved`."""
        states = saved.get("optimizer_state_dtype", FP32)
        if self.zero.config.offload.in_files:
            if states != FP32:
                raise ValueError(
                    f"{self.out} was saved with --optimizer-state-dtype {states}, and NVMe files "
                    "hold fp32: resume without :nvme until the next checkpoint, then with it"
                )
            return self.saved_states(self.init())
        tx = self.zero.replace(optimizer_state_dtype=states).optimizer(self.plain_tx)
        return self.saved_states((self._abstract, tx.init(self._abstract)))

    def init(self) -> States:
        """Returns new states; deletes state files of an earlier start of this run."""
        params, directory = self._params(), self.zero.config.offload.directory
        if directory is None:
            return params, self.tx.init(params)
        owner = folder_of(directory) / "run.txt"
        if owner.is_file() and owner.read_text() == str(self.out):
            discard(directory)  # a checkpoint replaces their content
        state = self.tx.init(params)
        owner.write_text(str(self.out))
        return params, state

    def _params(self) -> PyTree:
        config, adapted = self.plan.config, self.model.adapted
        params = self._given()
        if config.init_from is None or adapted is None:
            return params
        alone = self.zero.replace(frozen=None)
        if config.lora_init_from is None:
            shapes = jax.eval_shape(self.model.own)
            return params | alone.init(lambda: {"lora": adapted.new(shapes)})
        given = peft.load_adapter(config.lora_init_from, self.model.config)
        if set(given) != set(adapted.targets):
            raise ValueError(
                f"--lora-init-from {config.lora_init_from} has adapters of {', '.join(given)}, and "
                f"this run's are of {', '.join(adapted.targets)}: give --lora-targets"
            )
        return params | alone.shard({"lora": {name: given[name] for name in adapted.targets}})

    def _given(self) -> PyTree:
        """Returns the parameters in --init-from, frozen under adapters, or else all, from the seed.

        An error in one process is raised in all.
        """
        folder = self.plan.config.init_from
        if folder is None:
            return self.zero.init(self.model.make, self._key)
        with together("weights"):
            if self.model.adapted is None:
                params = interchange.load(folder, self._abstract)
            else:
                params = {"base": interchange.load(folder, self._abstract["base"], rounded=True)}
        return params

    def saved_states(self, states: States) -> States:
        """Returns the states that a checkpoint saves: all except a frozen base model."""
        if self.model.adapted is None:
            return states
        return {"lora": states[0]["lora"]}, states[1]

    def full_states(self, saved: States) -> States:
        """Returns full states from those of a checkpoint; converts the optimizer state dtype."""
        params, state = saved
        if self.model.adapted is not None:
            params = self._given() | params
        before, states = kind_of(state.inner), self.zero.config.optimizer_state_dtype
        if before != states:
            say(f"Converted the optimizer state from {before} to {states}")
            state = self.tx.restated(state, params)
        return params, state

    @property
    def _shares_rows(self) -> bool:
        return mesh.context_size(self.mesh) > 1

    def _global(self, rows: Arrays) -> PyTree:
        """Returns the global batch with these rows of this process."""
        return zero_jax.global_batch(self.mesh, shifted(rows) if self._shares_rows else rows)

    def batches(self, place: Any = None) -> Iterator[tuple[PyTree, Any, jax.Array | None]]:
        """Yields global batches from a position in the data on, and the position after each.

        The third value is the imbalance of a batch's attention work, None if all rows are alike.
        """
        index, count = zero_jax.batch_share(self.mesh)
        devices, parts = mesh.batch_shards(self.mesh), self.zero.grad_accum_steps
        measured = functools.partial(balance.imbalance, devices=devices, micro_batches=parts)
        imbalance, left = jax.jit(measured), None
        for rows, after in self.plan.corpus.batches(place, index, count):
            if self.plan.corpus.packed and devices > 1:
                _, _, segments, _ = rows
                work = balance.work_of(segments, self.model.config)
                order = balance.order_of(work, devices // count, parts)
                rows = tuple(x[order] for x in rows)
                left = imbalance(zero_jax.global_batch(self.mesh, np.float32(work[order])))
            yield self._global(rows), after, left

    def gather_place(self, place: Any) -> Any:
        """Returns the position in the data of all processes; each knows only its own lanes."""
        if not isinstance(place, list) or jax.process_count() == 1:
            return place
        lanes = np.full((len(place), LOOK + 1), -1, np.int32)
        for lane, known in zip(lanes, place, strict=True):
            lane[: len(known)] = known
        index, count = zero_jax.batch_share(self.mesh)
        gathered = multihost_utils.process_allgather((np.int32(index), lanes))
        by_index = {int(i): lanes for i, lanes in zip(*gathered, strict=True)}
        rows = [lane for i in range(count) for lane in by_index[i]]
        return [[int(n) for n in lane if n >= 0] for lane in rows]

    def evaluate(
        self,
        params: PyTree,
        max_batches: int | None = None,
        each: Callable[[int], Any] = lambda done: None,
    ) -> float:
        """Returns the held-out loss in nats per token; calls `each` with the finished batches."""
        rows = self.plan.corpus.held_out(*zero_jax.batch_share(self.mesh), max_batches)
        means = (self._mean_loss(params, self._global(row)) for row in rows)
        total = weights = 0.0
        for done, (loss, weight) in enumerate(one_late(means), 1):
            total, weights = total + float(loss) * float(weight), weights + float(weight)
            each(done)
        if not weights:
            raise ValueError(
                "no held-out document has anything to learn within a row: use a longer --seq-len"
            )
        return total / weights

    def sample(self, params: PyTree, prompt: np.ndarray) -> str:
        """Continues a prompt of tokens with unsharded parameters; greedily for documents."""
        config, adapted = self.plan.config, self.model.adapted
        alone = jax.tree.map(lambda x: x.addressable_data(0), params)
        model = self.model.model(alone if adapted is None else jax.jit(adapted.merged)(alone))
        own = (jnp.asarray(prompt, jnp.int32), config.sample_tokens, self._key)
        tokens = generate.generate(model, *own, self.plan.corpus.temperature)
        return self.plan.corpus.show(np.asarray(tokens), prompt.size)


def one_late(results: Iterable[T]) -> Iterator[T]:
    """Yields each result after the next one is queued, so that devices never wait for the host."""
    for result, _ in itertools.pairwise(itertools.chain(results, (None,))):
        assert result is not None
        yield result
