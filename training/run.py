"""A training run from settings to the final sample; every process executes it."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zero_jax
from training import export, optimizers
from training.config import FIRST_TRACED, LAST_TRACED, Config, as_yaml, shared
from training.data_files import DataChanged
from training.memory import lack_of_room, peak_bytes
from training.multiprocess import say, together
from training.plan import by_stage, facts, print_plan, start_event
from training.preemption import INTERRUPTED, Stop, Stopped
from training.run_folder import PAGE, RunLog, next_folder
from training.saving import RunRecord, Saver, base_checksum, check_resume, newest_step
from training.scalars import import_wandb
from training.show import Show, Speed, progress
from training.trainer import States, Trainer, load
from zero_jax.distributed.agreement import gather_texts
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.models import families
from zero_jax.models.experts import Routed
from zero_jax.plan.planning import bytes_on
from zero_jax.sharding.checks import check_replicas

PyTree = Any

BEFORE, AFTER = "before training", "after training"
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
    """The training loop of a run; `profile` is that of `traced`."""

    trainer: Trainer
    log: RunLog
    saver: Saver
    stop: Stop
    watchdog: Watchdog
    profile: Callable[[int, PyTree], None]

    _place: Any = None  # position in the data after the last batch

    def train(self) -> PyTree:
        """Trains from the last checkpoint or from the start; returns the final parameters.

        Raises Stopped if the run was asked to end, after a checkpoint.
        """
        trainer, config = self.trainer, self.trainer.plan.config
        last = config.max_steps
        states, done = self._restore() or (self._initial(), 0)
        warning = optimizers.rescheduled(config, self.saver.before, done)
        if warning is not None and done < last:
            say("warning:", warning)
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
            say(f"--profile traces nothing: this start has fewer than {FIRST_TRACED} steps left")
        for left in range(config.max_rollbacks, -1, -1):
            try:
                with progress(last, start=done, enabled=jax.process_index() == 0) as show:
                    states = self._steps(states, done, show)
                break
            except zero_jax.NonFiniteError as error:
                self.watchdog.rest()
                place = trainer.gather_place(self._place) if left else None
                restored = self._restore() if left else None
                if restored is None:
                    raise
                self.saver.place = place  # after the batch that failed
                states, done = restored
                say(f"Rolled back to step {done} ({left - 1} rollbacks left): {error}")
                self.log.event("back", step=done)
        if 0 < last <= int(states[1].guard.skipped):
            raise zero_jax.NonFiniteError(
                f"all of --max-steps {last} were skipped because their gradients were not finite, "
                "so the parameters are unchanged: check the data, or use another --compute-dtype"
            )
        return states[0]

    def _restore(self) -> tuple[States, int] | None:
        """Returns the states of the latest checkpoint in this run's dtypes, and their step."""
        with self.watchdog.pause("restoring a checkpoint", times=STORAGE):
            saved = self.saver.resume(self.trainer.like)
            return None if saved is None else (self.trainer.full_states(saved[0]), saved[1])

    def _initial(self) -> States:
        """Returns new states; evaluates the model of `--init-from` and shows a sample."""
        with self.watchdog.pause("initialising the parameters", times=STORAGE):
            states = self.trainer.init()
        config = self.trainer.plan.config
        if config.init_from is not None:
            loss = self.evaluate(states[0], config.max_eval_batches)
            self.log.evaluation(0, val_loss=loss)
            say(f"{BEFORE}: validation loss {loss:.4f}")
            self.check_loss(loss, BEFORE)
            self.show_sample(states[0], BEFORE)
        return states

    def check_loss(self, loss: float, when: str) -> None:
        """Raises NonFiniteError if the held-out loss is NaN or infinite."""
        if math.isfinite(loss):
            return
        config = self.trainer.plan.config
        lower = "use a lower --lr, resume an earlier checkpoint with --resume-step, " * (
            when == AFTER
        )
        raise zero_jax.NonFiniteError(
            f"the validation loss {when} is {loss}, and nothing is exported: {lower}use another "
            f"dtype than --compute-dtype {config.compute_dtype} (bf16 and fp32 hold larger numbers "
            "than fp16), or check the data"
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

    def evaluate(self, params: PyTree, max_batches: int | None = None) -> float:
        """Returns the held-out loss in nats per token.

        Over all batches it prints its progress, and raises Stopped if the run was asked to end.
        """
        total = self.trainer.plan.corpus.held_out_batches() or 0  # unknown for documents

        def each(done: int) -> None:
            self.watchdog.progress()  # it times each batch by itself
            if max_batches is not None:
                return
            if LONG <= total > done and done * 10 // total > (done - 1) * 10 // total:
                say(f"evaluating: {done} of {total} batches")
            if code := self.stop():
                raise Stopped(code, self.trainer.out, self.saver.saved)

        with self.watchdog.pause("an evaluation"):
            return self.trainer.evaluate(params, max_batches, each)

    def _steps(self, states: States, done: int, show: Show) -> States:
        trainer, config = self.trainer, self.trainer.plan.config
        speed = Speed(config.global_batch_size * config.seq_len)
        # All rates at once: reading one from the device in every step would wait for that step.
        rates = np.asarray(
            optimizers.rate(config)(jnp.arange(config.max_steps + 1, dtype=jnp.float32))
        )
        params, opt_state = states
        self._place = self.saver.place
        rows = trainer.batches(self._place)
        self.watchdog.begin()
        waiting: list[tuple[int, zero_jax.Metrics]] = []  # as in `one_late`

        def report(most: int) -> None:
            """Logs all finished steps except the latest `most`."""
            while len(waiting) > most:
                number, metrics = waiting.pop(0)
                loss, rate = float(metrics.loss), speed.tick()
                show(number, loss, rate)
                skipped, norm = int(metrics.skipped_in_a_row) > 0, float(metrics.grad_norm)
                self.log.step(
                    number,
                    loss=loss,
                    grad_norm=norm,
                    tokens_per_second=rate,
                    skipped=skipped,
                    step_seconds=speed.tokens_per_step / rate,
                    learning_rate=float(rates[number - 1 - int(metrics.skipped)]),
                    memory_bytes=peak_bytes(),
                    **routing(metrics.aux),
                )

        def end(number: int, *, save: bool) -> None:
            """Logs all steps, and saves after step `number`."""
            report(0)
            self.watchdog.rest()
            if save:
                self._save(number, (params, opt_state), now=True)

        for number in range(done + 1, config.max_steps + 1):
            if code := self.stop():
                end(number - 1, save=True)
                raise Stopped(code, trainer.out, self.saver.saved)
            self.profile(number - done, params)
            try:
                batch, self._place = next(rows)
            except DataChanged:
                alone = jax.process_count() == 1  # other processes may not have seen the change
                end(number - 1, save=alone)
                if alone and self.saver.saved:
                    say(f"Step {self.saver.saved} is saved in {trainer.out}")
                raise
            params, opt_state, metrics = trainer.step(params, opt_state, batch)
            waiting.append((number, metrics))
            if number == done + 1:
                report(0)
                speed.restart()  # this step included compilation
            report(1)
            self.watchdog.step(number)
            with self.watchdog.pause("saving a checkpoint", times=STORAGE):
                if config.check_replicas_steps and number % config.check_replicas_steps == 0:
                    check_replicas((params, opt_state))
                self._save(number, (params, opt_state), now=number == config.max_steps)
            if config.eval_steps and number % config.eval_steps == 0 and number < config.max_steps:
                report(0)
                loss = self.evaluate(params, config.max_eval_batches)
                self.log.evaluation(number, val_loss=loss)
                say(f"step {number}/{config.max_steps}  validation loss {loss:.4f}")
                speed.restart()
        end(config.max_steps, save=False)
        return params, opt_state

    def _save(self, number: int, states: States, now: bool) -> None:
        place = functools.partial(self.trainer.gather_place, self._place)
        if self.saver.save(number, self.trainer.saved_states(states), place, now=now):
            self.log.event("checkpoint", step=number)


@contextlib.contextmanager
def traced(folder: pathlib.Path | None) -> Iterator[Callable[[int, PyTree], None]]:
    """Traces a few steps of this start by JAX's profiler; None as the destination traces nothing.

    Yields a function to call before each step, with its number in this start, from 1, and with
    arrays of the step before.
    """

    def before(step: int, results: PyTree) -> None:
        if folder is None or step not in (FIRST_TRACED, LAST_TRACED + 1):
            return
        jax.block_until_ready(results)  # earlier steps are not in the trace
        trace.close()
        if step == FIRST_TRACED:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else 100,000 Python calls
            jax.profiler.start_trace(folder, profiler_options=options)
            trace.callback(jax.profiler.stop_trace)

    with contextlib.ExitStack() as trace:
        yield before


@contextlib.contextmanager
def _end_of_processes(folder: pathlib.Path, dead_after: float) -> Iterator[Watchdog]:
    """Ends all processes of a run together, under a watchdog.

    A second Ctrl-C in the block raises `Stopped` with the newest checkpoint.
    """
    try:
        with Watchdog(dead_after=dead_after) as watchdog:
            try:
                yield watchdog
            except Stopped:
                jax.distributed.shutdown()  # waits for all processes
                raise
            jax.distributed.shutdown()
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends already
        saved = None
        with contextlib.suppress(OSError, ValueError):
            saved = newest_step(folder)
        raise Stopped(INTERRUPTED, folder, saved, at_once=True) from error


def run(config: Config) -> None:
    """Executes a run; every process calls it."""
    settings, lead = shared(config), jax.process_index() == 0
    with together(settings, "input"):
        if config.wandb_project is not None and lead:
            import_wandb(config.wandb_project)
        plan = load(config)
        export.check(plan)
    corpus = plan.corpus
    with together(settings, "base weights"):
        contents = {**corpus.contents, **base_checksum(config)}
    checksums = {f"checksum of the {name}": value for name, value in contents.items()}
    zero_jax.check_agreement({**settings, **corpus.order, **checksums})
    trainer = Trainer(plan)
    known = facts(trainer)
    record = RunRecord(known, corpus.order, contents)
    levels: dict[str, float] = {}
    costs: dict[str, Any] = {}
    with together(settings, "plan"):
        if lead:
            step = trainer.predict()
            stages = by_stage(trainer, step.window)
            print_plan(trainer, known, stages, step)
            print(corpus.outlook(config.max_steps))
            levels = corpus.marks(plan.model.config.vocab)
            costs = start_event(step, stages, levels, corpus.unit)
    with together(settings, "output_dir"):
        resume = lead and check_resume(config, record)
        out = config.output_dir or (next_folder("runs") if lead else "runs")
        saved = {**known, **levels, "output_dir": str(out)}
        log = RunLog(out, saved, lead, resume=resume, wandb=config.wandb_project)
        log.event("start", **costs)
        if lead:
            (log.out_dir / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
    # Of process 0, because checkpoints are on shared storage.
    trainer.out = pathlib.Path(gather_texts(str(log.out_dir.resolve()))[0])
    with _end_of_processes(trainer.out, config.heartbeat_timeout_seconds) as watchdog:
        with log, contextlib.ExitStack() as stack:
            with together(settings, "checkpoints"):
                saver = stack.enter_context(Saver(config, trainer.out, record))
            stop = stack.enter_context(Stop(trainer.mesh, config.max_hours))
            say(f"Writing to {log.out_dir}")
            traces = trainer.out / "profile" if config.profile and lead else None
            with watchdog.guard():
                with traced(traces) as profile:
                    loop = TrainingLoop(trainer, log, saver, stop, watchdog, profile)
                    params = loop.train()
                loss = loop.evaluate(params)
                log.evaluation(config.max_steps, val_loss=loss)
                loop.check_loss(loss, AFTER)
        if lead and (page := log.out_dir / PAGE).exists():
            say(f"Report of this run: {page}")
        say(f"validation loss {loss:.4f} nats per {corpus.unit}, over all {corpus.held_out_size}")
        for name, entropy in levels.items():
            say(f"{name:15} {entropy:.4f} nats per {corpus.unit} of the same text")
        loop.show_sample(params, "sample")
        if counts := corpus.counts:
            rows = "all rows" if jax.process_count() == 1 else "the rows of process 0"
            say(f"documents in {rows}: {counts}")
        with together(settings, "export"):
            export.write(trainer, params)
