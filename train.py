"""Trains a GPT with ZeRO: `python train.py`, and `python train.py --help` for what can be chosen.

It checks what it is given, says what it will do and what that costs in bytes per device, trains,
and ends with the held-out loss beside two marks from counts alone, and a sample. Settings, data
and report are in `training/`, the model in `models/`; what ZeRO asks for is in `Trainer`.
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import zero_jax
from training import optimizers
from training.config import Config, mesh_sizes, shared
from training.data import batches, eval_batches
from training.entropy import bigram_entropy, unigram_entropy
from training.plan import Plan, check_batch, facts, load, print_plan
from training.profile import Profile
from training.report import RunLog, next_folder
from training.room import LESS_MEMORY, host_memory, room_for
from training.saving import Saver, goes_on, same_everywhere, state_files
from training.show import Show, Speed, progress
from training.stop import INTERRUPTED, Stop, Stopped
from training.supervise import WRONG, supervise
from training.text import decode
from zero_jax.checkpoint.replicas import check_replicas
from zero_jax.cluster.processes import launched_processes
from zero_jax.cluster.watchdog import ENDED, Watchdog
from zero_jax.models import gpt
from zero_jax.sharding import mesh

PyTree = Any
T = TypeVar("T")

DEVICES = 4  # of a machine without GPUs, unless it is asked for others
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

    def evaluate(self, params: PyTree, max_batches: int | None = None) -> float:
        """Held-out loss in nats per token: exact, however the batches fall."""
        rows = eval_batches(self.plan.held_out, max_batches=max_batches, **self._share())
        means = (self._mean_loss(params, zero_jax.global_batch(self.mesh, row)) for row in rows)
        pairs = [(float(loss), float(weight)) for loss, weight in one_late(means)]
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


@dataclasses.dataclass
class Run:
    """A training run with what surrounds it.

    Attributes:
        log: What it leaves behind.
        saver: Its checkpoints.
        stop: Whether it is asked to end.
        watchdog: Looks after all processes.
        profile: Traces a few steps, in the process that shows.
        lead: Whether this is the process that shows how far it is.
    """

    trainer: Trainer
    log: RunLog
    saver: Saver
    stop: Stop
    watchdog: Watchdog
    profile: Profile
    lead: bool

    def say(self, *words: Any) -> None:
        if self.lead:
            print(*words, flush=True)

    def train(self) -> PyTree:
        """Goes on from the last checkpoint, or begins; returns the parameters after the last step.

        Raises:
            Stopped: The run was asked to end; what it had is saved.
            NonFiniteError: Gradients were not finite too often.
        """
        config, like = self.trainer.plan.config, self.trainer.like
        states, done = self.saver.resume(like, self.say) or (self.trainer.init(), 0)
        for left in range(config.rollbacks, -1, -1):
            try:
                with progress(config.steps, start=done, enabled=self.lead) as show:
                    return self._steps(states, done, show)
            except zero_jax.NonFiniteError as error:
                self.watchdog.rest()
                found = self.saver.go_back(like, self.say) if left else None
                if found is None:
                    raise
                self.say(f"Went back to step {found[1]}, {left - 1} more times at most: {error}")
                states, done = found
        raise AssertionError("unreachable")

    def evaluate(self, params: PyTree, max_batches: int | None = None) -> float:
        """Held-out loss in nats per token; the watchdog does not count the time."""
        with self.watchdog.pause():
            return self.trainer.evaluate(params, max_batches)

    def _steps(self, states: tuple[PyTree, PyTree], done: int, show: Show) -> PyTree:
        trainer, config = self.trainer, self.trainer.plan.config
        speed = Speed(config.batch * trainer.plan.model.seq)
        params, opt_state = states
        rows = trainer.batches(self.saver.sample(done))
        waiting: list[tuple[int, zero_jax.Metrics]] = []  # as in `one_late`

        def report(most: int) -> None:
            """Writes down all steps but so many."""
            while len(waiting) > most:
                number, metrics = waiting.pop(0)
                loss, rate = float(metrics.loss), speed.tick()
                show(number, loss, rate)
                skipped, norm = int(metrics.skipped_in_a_row) > 0, float(metrics.grad_norm)
                self.log.step(
                    number, loss=loss, grad_norm=norm, tokens_per_second=rate, skipped=skipped
                )

        for number in range(done + 1, config.steps + 1):
            if code := self.stop():
                report(0)
                self.watchdog.rest()
                self.saver.save(number - 1, (params, opt_state), now=True)
                raise Stopped(code)
            self.profile.before(number - done, params)
            params, opt_state, metrics = trainer.step(params, opt_state, next(rows))
            waiting.append((number, metrics))
            if number == done + 1:
                report(0)
                speed.restart()  # it was compiled
            report(1)
            self.watchdog.step(number)
            with self.watchdog.pause():
                self._between(number, params, opt_state)
            if config.eval_every and number % config.eval_every == 0 and number < config.steps:
                report(0)
                loss = self.evaluate(params, config.eval_batches)
                self.log.evaluation(number, val_loss=loss)
                self.say(f"step {number}/{config.steps}  validation loss {loss:.4f}")
                speed.restart()
        report(0)
        self.watchdog.rest()
        return params

    def _between(self, number: int, params: PyTree, opt_state: PyTree) -> None:
        config = self.trainer.plan.config
        if config.check_replicas_every and number % config.check_replicas_every == 0:
            check_replicas((params, opt_state))
        self.saver.save(number, (params, opt_state), now=number == config.steps)


def run(config: Config) -> None:
    """The whole run, as every process of it goes through it."""
    settings = shared(config)
    plan = together(settings, "input", lambda: load(config))
    trainer = Trainer(plan)
    lead = jax.process_index() == 0
    say = print if lead else lambda *_, **__: None
    shapes = trainer.shapes()
    known = facts(plan, trainer.zero, shapes)
    marks: dict[str, float] = {}  # what counting alone would reach
    if lead:
        print_plan(known, trainer.zero, shapes, trainer.plain_tx, trainer.predict())
        marks["unigram entropy"] = unigram_entropy(plan.held_out, plan.model.vocab)
        marks["bigram entropy"] = bigram_entropy(plan.held_out, plan.model.vocab)

    def open_log() -> RunLog:
        resume = lead and config.checkpoint_every > 0 and goes_on(config.out, config.fresh)
        out = config.out or (next_folder("runs") if lead else "runs")
        facts = {**known, **marks, "out": str(out)}
        return RunLog(out, facts, lead, levels=marks, resume=resume)

    log = together(settings, "out", open_log)
    trainer.out = same_everywhere(log.out_dir)
    with (
        Watchdog(trainer.out / "alive", dead_after=config.dead_after) as watchdog,
        leaving_together(),
    ):
        with contextlib.ExitStack() as stack:
            stack.enter_context(log)
            kept = (config.checkpoint_every, config.keep, config.keep_every)
            open_saver = functools.partial(Saver, trainer.out, *kept, known)
            saver = stack.enter_context(together(settings, "checkpoints", open_saver))
            stop = stack.enter_context(Stop(trainer.mesh, config.max_hours))
            say(f"Writing to {log.out_dir}", flush=True)
            traced = trainer.out / "profile" if config.profile and lead else None
            profile = Profile(traced)
            job = Run(trainer, log, saver, stop, watchdog, profile, lead)
            with profile:
                params = job.train()
            loss = job.evaluate(params)
            log.evaluation(config.steps, val_loss=loss)
        unit = "byte" if plan.corpus.byte_level else "token"
        say(f"validation loss {loss:.4f} nats per {unit}, over all {plan.held_out.size:,} held out")
        for name, entropy in marks.items():
            say(f"{name:15} {entropy:.4f} nats per {unit} of the same text")
        if config.sample_length and room_for(4 * gpt.num_params(plan.model), "sample", say):
            whole = trainer.zero.full(params)
            if lead:
                text = trainer.sample(whole)
                say("sample:", decode(text) if plan.corpus.byte_level else text.tolist(), sep="\n")


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """Leaves the group while the watchdog looks on: who leaves waits for all others."""
    try:
        yield
    except Stopped:
        _leave()
        raise
    _leave()


def _leave() -> None:
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def cpu_devices(config: Config) -> int | None:
    """How many devices a machine without GPUs is asked to have."""
    named = math.prod(mesh_sizes(config.mesh).values()) if config.mesh else None
    return config.devices or named


def join(config: Config) -> None:
    """Makes the devices of a machine without GPUs, and joins the other processes."""
    count = config.num_processes or launched_processes()
    devices = cpu_devices(config)
    # A mesh that does not name `data` leaves the rest of the devices to it, however many.
    known = config.devices is not None or "data" in mesh_sizes(config.mesh)
    if devices is not None and known and devices % count:
        raise ValueError(
            f"{devices} devices must be a multiple of {count} processes: take --devices "
            f"{(devices // count + 1) * count}"
        )
    # Of states in host memory XLA pins no more than 64 GiB by itself.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_memory() >> 30))
    jax.config.update("jax_num_cpu_devices", max(1, (devices or DEVICES) // count))
    zero_jax.initialize(config.coordinator, config.num_processes, config.process_id)


def supervised(config: Config, given: Sequence[str]) -> int:
    """Starts this command again, in as many processes as asked for."""
    own = list(given)
    at = next(i for i, word in enumerate(own) if word.partition("=")[0] == "--supervise")
    del own[at : at + (1 if "=" in own[at] else 2)]
    assert config.supervise is not None
    if config.out is None:
        print("error: --supervise needs --out, the folder to go on in", file=sys.stderr)
        return WRONG
    command = [sys.executable, os.path.abspath(__file__), *own]
    return supervise(
        command,
        config.supervise,
        restarts=config.restarts,
        grace=3 * config.dead_after + 10,
        divides=cpu_devices(config) or DEVICES,
    )


def together(settings: Mapping[str, Any], what: str, attempt: Callable[[], T]) -> T:
    """Does what may fail in one process alone, so that all of them end when it does."""
    trouble: Exception | None = None
    try:
        result = attempt()
    except (ValueError, OSError) as error:
        trouble = error
    if jax.distributed.is_initialized():
        zero_jax.check_agreement({**settings, what: trouble or "fine"})
    if trouble is not None:
        raise trouble
    return result


def main(args: Sequence[str] | None = None) -> int:
    """Runs with these arguments, by default those of the command line; returns the exit code."""
    given = list(sys.argv[1:] if args is None else args)
    config = tyro.cli(Config, args=given)
    if config.supervise is not None:
        return supervised(config, given)
    try:
        join(config)
        run(config)
    except Stopped as asked:
        print("stopped", file=sys.stderr)
        return asked.code
    except KeyboardInterrupt:
        print("stopped at once, nothing saved", file=sys.stderr)
        return INTERRUPTED
    except jax.errors.JaxRuntimeError as error:
        full = "RESOURCE_EXHAUSTED" in str(error)
        if jax.process_count() == 1 and (config.debug or not full):
            raise
        said = str(error).partition("\n")[0] + LESS_MEMORY * (
            full and "host memory" not in str(error)
        )
        print("error:", said, file=sys.stderr, flush=True)
        code = WRONG if full else ENDED  # to start again would help against the latter only
        if jax.process_count() == 1:
            return code
        os._exit(code)  # a usual exit waits for the other processes, and one of them is gone
    except (ValueError, OSError, zero_jax.NonFiniteError) as error:
        if config.debug:
            raise
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return 1 if isinstance(error, zero_jax.NonFiniteError) else WRONG
    return 0


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED and jax.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(code)  # a usual exit waits for the other processes, which wait for this one
    sys.exit(code)
