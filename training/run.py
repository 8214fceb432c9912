"""A training run from settings to the final sample; every process executes it."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zero_jax
from training import export
from training.config import FIRST_TRACED, LAST_TRACED, Config, as_yaml, shared
from training.data_files import DataChanged
from training.memory import lack_of_room, peak_bytes
from training.multiprocess import say, together
from training.plan import by_stage, facts, print_plan, start_event
from training.preemption import Stop, Stopped
from training.run_folder import PAGE, RunLog, next_folder
from training.saving import Saver, base_checksum, check_resume, newest_step
from training.scalars import import_wandb
from training.show import Meter
from training.supervise import INTERRUPTED
from training.trainer import PyTree, States, Trainer, load, rate
from zero_jax.distributed.agreement import gather_texts
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.models import families
from zero_jax.models.experts import Routed
from zero_jax.plan.planning import bytes_on
from zero_jax.sharding.checks import check_replicas

SETTINGS = "config.yaml"  # in the folder of a run
STORAGE = 5.0  # factor of the watchdog's patience; by default an hour for a large model's states
LONG = 50  # an evaluation of this many batches prints its progress


def routing(routed: Routed | None) -> dict[str, float]:
    """Returns the metrics of expert routers in a step; empty for a model without experts."""
    if routed is None:
        return {}
    return {
        "dropped": int(jnp.sum(routed.dropped_B)),
        "balance": float(jnp.mean(routed.balance_B)),
        "router_z": float(jnp.mean(routed.z_B)),
    }


@dataclasses.dataclass
class TrainingLoop:
    """The training loop of a run."""

    trainer: Trainer
    log: RunLog
    saver: Saver
    stop: Stop
    watchdog: Watchdog
    describe: Callable[[int | None], str]  # how to resume from a step

    imbalances: list[float] = dataclasses.field(default_factory=list)  # of attention, by step
    _place: Any = None  # position in the data after the last batch
    _trace: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def train(self) -> PyTree:
        """Trains from the last checkpoint or from the start; returns the final parameters."""
        trainer, config = self.trainer, self.trainer.plan.config
        last, tokens = config.max_steps, config.global_batch_size * config.seq_len
        lead = jax.process_index() == 0
        states, done, place = self._restore() or (self._initial(), 0, None)
        held = {"parameters": bytes_on(states[0]), "optimizer_state": bytes_on(states[1])}
        self.log.event("states", step=done, **held)
        if done > last:
            raise ValueError(
                f"{trainer.out} is at step {done}, past --max-steps {last}: use a larger "
                "--max-steps, or another --output-dir"
            )
        if done == last:
            say(f"Step {done} is the last of --max-steps {last}: nothing is left to train")
        if config.profile and last - done < FIRST_TRACED:
            say(f"--profile traces nothing: fewer than {FIRST_TRACED} steps are left")
        for left in range(config.max_rollbacks, -1, -1):
            try:
                with self._trace, Meter(last, tokens, start=done, enabled=lead) as meter:
                    states = self._steps(states, done, place, meter)
                break
            except zero_jax.NonFiniteError as error:
                self.watchdog.rest()
                if not left:
                    raise
                place = trainer.gather_place(self._place)  # after the batch that failed
                restored = self._restore()
                if restored is None:
                    raise
                states, done, _ = restored
                say(f"Rolled back to step {done} ({left - 1} rollbacks left): {error}")
                self.log.event("back", step=done)
        if 0 < last <= int(states[1].guard.skipped):
            raise zero_jax.NonFiniteError(
                f"all of --max-steps {last} were skipped because their gradients were not finite, "
                "so the parameters are unchanged: check the data, or use another --compute-dtype"
            )
        return states[0]

    def _restore(self) -> tuple[States, int, Any] | None:
        with self.watchdog.pause("restoring a checkpoint", times=STORAGE):
            return self.saver.resume()

    def _initial(self) -> States:
        """Returns new states; evaluates the model of `--init-from` and shows a sample."""
        with self.watchdog.pause("initialising the parameters", times=STORAGE):
            states = self.trainer.init()
        config = self.trainer.plan.config
        if config.init_from is not None:
            loss = self.evaluate(states[0], 0, config.max_eval_batches)
            say(f"before training: validation loss {loss:.4f}")
            self.check_loss(loss, "before training")
            self.show_sample(states[0], "before training")
        return states

    def check_loss(self, loss: float, when: str) -> None:
        """Raises NonFiniteError if the held-out loss is NaN or infinite."""
        if not math.isfinite(loss):
            dtype = self.trainer.plan.config.compute_dtype
            raise zero_jax.NonFiniteError(
                f"the validation loss {when} is {loss}, and nothing is exported: check the data, "
                f"or use a lower --lr, or another dtype than --compute-dtype {dtype} (bf16 and "
                "fp32 hold larger numbers than fp16)"
            )

    def show_sample(self, params: PyTree, what: str) -> None:
        """Prints the model's continuation of held-out data, where a device has room for it."""
        trainer, config = self.trainer, self.trainer.plan.config
        held = sum(x.nbytes for x in jax.tree.leaves(params)) if trainer.model.adapted else 0
        size = 4 * families.num_params(trainer.model.config) + held
        prompt = trainer.plan.corpus.prompt(config.seq_len) if config.sample_tokens else None
        if prompt is None:
            return
        if message := lack_of_room(size, "sample"):
            say(message)
            return
        with self.watchdog.pause("generating a sample", times=STORAGE):
            whole = trainer.zero.unshard(params)
            if jax.process_index() == 0:
                say(f"{what}:", trainer.sample(whole, prompt), sep="\n")

    def evaluate(self, params: PyTree, step: int, max_batches: int | None = None) -> float:
        """Logs and returns the held-out loss after `step` steps, in nats per token.

        Over all batches it prints its progress, and raises Stopped if the run was asked to end.
        """
        total = self.trainer.plan.corpus.held_out_batches() or 0  # unknown for documents

        def each(done: int) -> None:
            self.watchdog.progress()  # it times each batch by itself
            if max_batches is None:
                if LONG <= total > done and done * 10 // total > (done - 1) * 10 // total:
                    say(f"evaluating: {done} of {total} batches")
                self.raise_if_stopped()

        with self.watchdog.pause("an evaluation"):
            loss = self.trainer.evaluate(params, max_batches, each)
        self.log.evaluation(step, val_loss=loss)
        return loss

    def raise_if_stopped(self, save: Callable[[], None] = lambda: None) -> None:
        """Raises Stopped, after a call of `save`, if the run was asked to end."""
        if not (code := self.stop()):
            return
        save()
        raise Stopped(code, self.describe(self.saver.saved))

    def _steps(self, states: States, done: int, place: Any, meter: Meter) -> States:
        trainer, config = self.trainer, self.trainer.plan.config
        tokens = config.global_batch_size * config.seq_len
        # All rates at once: reading one from the device in every step would wait for that step.
        rates = np.asarray(rate(config)(jnp.arange(config.max_steps + 1, dtype=jnp.float32)))
        params, opt_state = states
        self._place = place
        rows = trainer.batches(place)
        self.watchdog.begin()
        # As in `one_late`; with the imbalance of the batch.
        waiting: list[tuple[int, zero_jax.Metrics, jax.Array | None]] = []

        def report(most: int) -> None:
            """Logs all finished steps except the latest `most`."""
            while len(waiting) > most:
                number, metrics, imbalance = waiting.pop(0)
                loss = float(metrics.loss)
                speed = meter.step(number, loss)
                self.log.step(
                    number,
                    loss=loss,
                    grad_norm=float(metrics.grad_norm),
                    tokens_per_second=speed,
                    skipped=int(metrics.skipped_in_a_row) > 0,
                    step_seconds=tokens / speed,
                    learning_rate=float(rates[number - 1 - int(metrics.skipped)]),
                    memory_bytes=peak_bytes(),
                    attention_imbalance=None if imbalance is None else float(imbalance),
                    **routing(metrics.aux),
                )
                if imbalance is not None:
                    self.imbalances.append(float(imbalance))

        def end(number: int, *, save: bool) -> None:
            """Logs all steps, and saves after step `number`."""
            report(0)
            self.watchdog.rest()
            if save:
                self._save(number, (params, opt_state), now=True)

        for number in range(done + 1, config.max_steps + 1):
            self.raise_if_stopped(functools.partial(end, number - 1, save=True))
            self._profile(number - done, params)
            try:
                batch, self._place, imbalance = next(rows)
            except DataChanged:
                alone = jax.process_count() == 1  # other processes may not have seen the change
                end(number - 1, save=alone)
                if alone and self.saver.saved:
                    say(f"Step {self.saver.saved} is saved in {trainer.out}")
                raise
            params, opt_state, metrics = trainer.step(params, opt_state, batch)
            waiting.append((number, metrics, imbalance))
            if number == done + 1:
                report(0)
                meter.restart()  # this step included compilation
            report(1)
            self.watchdog.step(number)
            with self.watchdog.pause("saving a checkpoint", times=STORAGE):
                if config.check_replicas_steps and number % config.check_replicas_steps == 0:
                    check_replicas((params, opt_state))
                self._save(number, (params, opt_state), now=number == config.max_steps)
            if config.eval_steps and number % config.eval_steps == 0 and number < config.max_steps:
                report(0)
                loss = self.evaluate(params, number, config.max_eval_batches)
                say(f"step {number}/{config.max_steps}  validation loss {loss:.4f}")
                meter.restart()
        end(config.max_steps, save=False)
        return params, opt_state

    def _save(self, number: int, states: States, now: bool) -> None:
        if self.saver.save(number, states, self._place, now=now):
            self.log.event("checkpoint", step=number)

    def _profile(self, step: int, results: PyTree) -> None:
        """Traces a few steps of this start; called before each with results of that before."""
        wanted = self.trainer.plan.config.profile and jax.process_index() == 0
        if not wanted or step not in (FIRST_TRACED, LAST_TRACED + 1):
            return
        jax.block_until_ready(results)  # earlier steps are not in the trace
        self._trace.close()
        if step == FIRST_TRACED:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else 100,000 Python calls
            jax.profiler.start_trace(self.trainer.out / "profile", profiler_options=options)
            self._trace.callback(jax.profiler.stop_trace)


def run(config: Config) -> None:
    """Executes a run; every process calls it."""
    lead = jax.process_index() == 0
    with together("input", shared(config)):
        if config.wandb_project is not None and lead:
            import_wandb(config.wandb_project)
        plan = load(config)
        export.check(plan)
        contents = {**plan.corpus.contents, **base_checksum(config)}
    corpus = plan.corpus
    checksums = {f"checksum of the {name}": value for name, value in contents.items()}
    zero_jax.check_agreement({**corpus.order, **checksums})
    trainer = Trainer(plan)
    with together("matmul_dtype"):
        trainer.check_products()
    known = facts(trainer, contents)
    levels: dict[str, float] = {}
    costs: dict[str, Any] = {}
    with together("output_dir"):
        if lead:
            step = trainer.predict()
            stages = by_stage(trainer, step.window)
            print_plan(known, stages, step)
            print(corpus.outlook(config.max_steps))
            levels = corpus.marks(plan.model.config.vocab)
            costs = start_event(step, stages, levels, corpus.unit)
        resume = lead and check_resume(plan.config, known)
        out = config.output_dir or (next_folder("runs") if lead else "runs")
        saved = {**known, **levels, "output_dir": str(out)}
        log = RunLog(out, saved, lead, resume=resume, wandb=config.wandb_project)
        log.event("start", **costs)
        if lead:
            (log.out_dir / SETTINGS).write_text(as_yaml(config), encoding="utf-8")
    # Of process 0, because checkpoints are on shared storage.
    trainer.out = pathlib.Path(gather_texts(str(log.out_dir.resolve()))[0])
    words = ["--config", str(trainer.out / SETTINGS), "--output-dir", str(trainer.out)]
    words += [] if config.export_dir is None else ["--export-dir", config.export_dir]
    command = f"python train.py {shlex.join(words)}"
    describe = functools.partial(_how_to_resume, trainer.out, command)

    def newest() -> str:
        return describe(newest_step(trainer.out))

    dead_after = config.heartbeat_timeout_seconds
    with Watchdog(dead_after=dead_after) as watchdog, _left_together(newest):
        with log, contextlib.ExitStack() as stack:
            stop = stack.enter_context(Stop(trainer.mesh, config.max_hours, newest))
            with together("checkpoints"):
                saver = stack.enter_context(Saver(trainer, known))
            say(f"Writing to {log.out_dir}")
            with watchdog.guard():
                loop = TrainingLoop(trainer, log, saver, stop, watchdog, describe)
                params = loop.train()
                loss = loop.evaluate(params, config.max_steps)
                loop.check_loss(loss, "after training")
        if lead and (page := log.out_dir / PAGE).exists():
            say(f"Report of this run: {page}")
        say(f"validation loss {loss:.4f} nats per {corpus.unit}, over all {corpus.held_out_size}")
        for name, entropy in levels.items():
            say(f"{name:15} {entropy:.4f} nats per {corpus.unit} of the same text")
        loop.show_sample(params, "sample")
        if loop.imbalances:
            mean = sum(loop.imbalances) / len(loop.imbalances)
            share = f"the busiest devices have {mean:.2f} times the mean number of pairs"
            say(f"attention over packed rows: {share} of tokens")
        if counts := corpus.counts:
            rows = "all rows" if jax.process_count() == 1 else "the rows of process 0"
            say(f"documents in {rows}: {counts}")
        with together("export"):
            export.write(trainer, params)


def _how_to_resume(out: pathlib.Path, command: str, saved: int | None) -> str:
    if saved is None:
        return f"stopped; no checkpoint is saved in {out}"
    newest = f"stopped; the newest checkpoint is of step {saved}, which is saved in {out}"
    return f"{newest}. To resume:\n{command}"


@contextlib.contextmanager
def _left_together(newest: Callable[[], str]) -> Iterator[None]:
    """Leaves `jax.distributed` with all processes after the block, also if it was stopped.

    A Ctrl-C that `Stop` does not handle, as in an export, raises Stopped at once.
    """
    try:
        yield
    except Stopped:
        jax.distributed.shutdown()  # waits for all processes
        raise
    except KeyboardInterrupt as error:
        raise Stopped(INTERRUPTED, newest()) from error
    jax.distributed.shutdown()
