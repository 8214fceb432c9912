"""A training run from settings to the final sample; every process executes it."""

import contextlib
import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zero_jax
from training import export, optimizers, report_page
from training.config import Config, as_yaml, shared
from training.data_files import DataChanged
from training.memory import peak_bytes, room_for
from training.multiprocess import (
    interrupted,
    path_of_first_process,
    shutdown_distributed,
    together,
)
from training.plan import RunPlan, by_stage, facts, held_bytes, load, print_plan, start_event
from training.preemption import Stop, Stopped
from training.profile import Profile
from training.resuming import RunRecord, base_checksum
from training.run_folder import RunLog, next_folder
from training.saving import Saver, can_resume, check_resume
from training.scalars import import_wandb
from training.show import Show, Speed, progress
from training.trainer import Trainer
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.models import families
from zero_jax.models.experts import Routed
from zero_jax.sharding.replicas import check_replicas

PyTree = Any
Restored = tuple[PyTree, int]  # parameters and optimizer state, and their step

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
    """The training loop of a run.

    Attributes:
        trainer: Model, optimizer and train step.
        log: Writer of the run's folder.
        saver: Saves and restores checkpoints.
        stop: Returns an exit code when the run is to end.
        watchdog: Detects dead processes and steps that hang.
        profile: Traces a few steps, in process 0.
        lead: True in process 0, which prints progress.
    """

    trainer: Trainer
    log: RunLog
    saver: Saver
    stop: Stop
    watchdog: Watchdog
    profile: Profile
    lead: bool

    _place: Any = None  # position in the data after the last batch

    def say(self, *words: Any, sep: str = " ") -> None:
        if self.lead:
            print(*words, sep=sep, flush=True)

    def train(self) -> PyTree:
        """Trains from the last checkpoint or from the start; returns the final parameters.

        Raises:
            Stopped: The run was asked to end; a checkpoint is saved.
            ValueError: The checkpoint is past `max_steps`.
            NonFiniteError: Gradients were not finite too often or in every step, or the loss of
                the model from a folder is not finite before any step.
        """
        config, trainer = self.trainer.plan.config, self.trainer
        restored = self._restore()
        if restored is None:
            with self.watchdog.pause("initialising the parameters", times=STORAGE):
                restored = trainer.init(), 0
            self._before(restored[0][0])
        states, done = restored
        warning = optimizers.rescheduled(config, self.saver.before, done)
        if warning is not None and done < config.max_steps:
            self.say("warning:", warning)
        self.log.event("states", step=done, **held_bytes(*states))
        if done > config.max_steps:
            raise ValueError(
                f"{self.trainer.out} is at step {done}, past --max-steps {config.max_steps}: use a "
                "larger --max-steps, or another --output-dir"
            )
        if done == config.max_steps:
            self.say(
                f"Step {done} is the last of --max-steps {config.max_steps}: nothing is left to "
                "train"
            )
        for left in range(config.max_rollbacks, -1, -1):
            try:
                with progress(config.max_steps, start=done, enabled=self.lead) as show:
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
                self.say(f"Rolled back to step {done} ({left - 1} rollbacks left): {error}")
                self.log.event("back", step=done)
        self._check_trained(states[1])
        return states[0]

    def _restore(self) -> Restored | None:
        """Returns the states of the latest checkpoint in this run's dtypes, and their step."""
        with self.watchdog.pause("restoring a checkpoint", times=STORAGE):
            saved = self.saver.resume(self.trainer.like, self.say)
            if saved is None:
                return None
            states, step = saved
            return self.trainer.full_states(states, self.say), step

    def _before(self, params: PyTree) -> None:
        """Evaluates the model of `--init-from` before training, and shows a sample."""
        if self.trainer.plan.config.init_from is None:
            return
        loss = self.evaluate(params, self.trainer.plan.config.max_eval_batches)
        self.log.evaluation(0, val_loss=loss)
        self.say(f"{BEFORE}: validation loss {loss:.4f}")
        self.check_loss(loss, BEFORE)
        self.show_sample(params, BEFORE)

    def check_loss(self, loss: float, when: str) -> None:
        """Raises an error if the loss of the parameters is not finite.

        Raises:
            NonFiniteError: The held-out loss is NaN or infinite.
        """
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

    def _check_trained(self, opt_state: PyTree) -> None:
        """Raises NonFiniteError if every step was skipped, so that nothing was trained."""
        steps = self.trainer.plan.config.max_steps
        if 0 < steps <= int(opt_state.guard.skipped):
            raise zero_jax.NonFiniteError(
                f"all of --max-steps {steps} were skipped because their gradients were not finite, "
                "so the parameters are unchanged: check the data, or use another --compute-dtype"
            )

    def show_sample(self, params: PyTree, what: str) -> None:
        """Prints the model's continuation of held-out data, where a device has room for it."""
        trainer, config = self.trainer, self.trainer.plan.config
        held = sum(x.nbytes for x in jax.tree.leaves(params)) if trainer.model.adapted else 0
        size = 4 * families.num_params(trainer.model.config) + held
        prompt = trainer.plan.corpus.prompt(config.seq_len) if config.sample_tokens else None
        if prompt is None or not room_for(size, "sample", self.say):
            return
        with self.watchdog.pause("generating a sample", times=STORAGE):
            whole = trainer.zero.unshard(params)
            if self.lead:
                self.say(f"{what}:", trainer.sample(whole, prompt), sep="\n")

    def evaluate(self, params: PyTree, max_batches: int | None = None) -> float:
        """Held-out loss in nats per token; the watchdog times each batch by itself."""
        with self.watchdog.pause("an evaluation"):
            return self.trainer.evaluate(params, max_batches, lambda _: self.watchdog.progress())

    def evaluate_all(self, params: PyTree) -> float:
        """Returns the loss over all held-out text; prints progress, and can be stopped.

        Raises:
            Stopped: The run was asked to end; the trained parameters are saved, if any are.
        """
        total, printed = self.trainer.plan.corpus.held_out_batches(), set[int]()

        def each(done: int) -> None:
            self.watchdog.progress()
            tenth = done * 10 // total if total else 0
            if total and total >= LONG and tenth not in (0, 10) and tenth not in printed:
                printed.add(tenth)
                self.say(f"evaluating: {done} of {total} batches")
            if code := self.stop():
                raise self.stopped(code)

        with self.watchdog.pause("an evaluation"):
            return self.trainer.evaluate(params, each=each)

    def stopped(self, code: int) -> Stopped:
        """Returns the exception of a run that was asked to end, with its newest checkpoint."""
        return Stopped(code, self.trainer.out, self.saver.saved)

    def _steps(self, states: tuple[PyTree, PyTree], done: int, show: Show) -> tuple[PyTree, PyTree]:
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

        for number in range(done + 1, config.max_steps + 1):
            if code := self.stop():
                report(0)
                self.watchdog.rest()
                self._save(number - 1, (params, opt_state), now=True)
                raise self.stopped(code)
            self.profile.before(number - done, params)
            try:
                batch, self._place = next(rows)
            except DataChanged:
                report(0)
                self.watchdog.rest()
                if jax.process_count() == 1:  # other processes may not have seen the change
                    self._save(number - 1, (params, opt_state), now=True)
                    if saved := self.saver.saved:
                        self.say(f"Step {saved} is saved in {self.trainer.out}")
                raise
            params, opt_state, metrics = trainer.step(params, opt_state, batch)
            waiting.append((number, metrics))
            if number == done + 1:
                report(0)
                speed.restart()  # this step included compilation
            report(1)
            self.watchdog.step(number)
            with self.watchdog.pause("saving a checkpoint", times=STORAGE):
                self._between(number, params, opt_state)
            if config.eval_steps and number % config.eval_steps == 0 and number < config.max_steps:
                report(0)
                loss = self.evaluate(params, config.max_eval_batches)
                self.log.evaluation(number, val_loss=loss)
                self.say(f"step {number}/{config.max_steps}  validation loss {loss:.4f}")
                speed.restart()
        report(0)
        self.watchdog.rest()
        return params, opt_state

    def _between(self, number: int, params: PyTree, opt_state: PyTree) -> None:
        config = self.trainer.plan.config
        if config.check_replicas_steps and number % config.check_replicas_steps == 0:
            check_replicas((params, opt_state))
        self._save(number, (params, opt_state), now=number == config.max_steps)

    def _save(self, number: int, states: tuple[PyTree, PyTree], now: bool) -> None:
        trainer, before = self.trainer, self.saver.saved
        place = functools.partial(trainer.gather_place, self._place)
        self.saver.save(number, trainer.saved_states(states), place, now=now)
        if self.saver.saved != before:
            self.log.event("checkpoint", step=number)


def run(config: Config) -> None:
    """Executes a run; every process calls it."""
    settings = shared(config)

    def read() -> RunPlan:
        if config.wandb_project is not None and jax.process_index() == 0:
            import_wandb(config.wandb_project)
        plan = load(config)
        export.check(plan)
        return plan

    plan = together(settings, "input", read)
    base = together(settings, "base weights", lambda: base_checksum(config))
    contents = {**plan.corpus.contents, **base}
    alike = {**plan.corpus.order, **{f"checksum of the {k}": v for k, v in contents.items()}}
    together({**settings, **alike}, "data", lambda: None)
    trainer = Trainer(plan)
    lead = jax.process_index() == 0
    say = print if lead else lambda *_, **__: None
    shapes = trainer.shapes()
    known = facts(plan, trainer.zero, shapes)
    record = RunRecord(known, plan.corpus.order, contents)
    unit = plan.corpus.unit

    def print_costs() -> tuple[dict[str, float], dict[str, Any]]:
        """Prints the plan; returns the entropies of the text and the facts of the start."""
        if not lead:
            return {}, {}
        step = trainer.predict()
        stages = by_stage(trainer.zero, shapes, trainer.plain_tx, step.window)
        print_plan(known, trainer.zero, stages, step)
        print(plan.corpus.outlook(config.max_steps))
        levels = plan.corpus.marks(plan.model.config.vocab)
        return levels, start_event(step, stages, levels, unit)

    levels, costs = together(settings, "plan", print_costs)

    def open_log() -> RunLog:
        resume = lead and config.save_steps > 0 and can_resume(config.output_dir, config.resume)
        if resume:
            check_resume(pathlib.Path(config.output_dir or ""), record, config.resume_step)
        out = config.output_dir or (next_folder("runs") if lead else "runs")
        facts = {**known, **levels, "output_dir": str(out)}
        log = RunLog(out, facts, lead, resume=resume, wandb=config.wandb_project)
        log.event("start", **costs)
        if lead:
            (log.out_dir / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
        return log

    log = together(settings, "output_dir", open_log)
    trainer.out = path_of_first_process(log.out_dir)
    with (
        interrupted(trainer.out),
        Watchdog(dead_after=config.heartbeat_timeout_seconds) as watchdog,
        shutdown_distributed(),
    ):
        with contextlib.ExitStack() as stack:
            stack.enter_context(log)
            kept = (config.save_steps, config.save_total_limit, config.keep_every_steps)
            open_saver = functools.partial(Saver, trainer.out, *kept, record, config.resume_step)
            saver = stack.enter_context(together(settings, "checkpoints", open_saver))
            stop = stack.enter_context(Stop(trainer.mesh, config.max_hours))
            say(f"Writing to {log.out_dir}", flush=True)
            traced = trainer.out / "profile" if config.profile and lead else None
            profile = Profile(traced)
            loop = TrainingLoop(trainer, log, saver, stop, watchdog, profile, lead)
            with watchdog.guard():
                with profile:
                    params = loop.train()
                loss = loop.evaluate_all(params)
                log.evaluation(config.max_steps, val_loss=loss)
                loop.check_loss(loss, AFTER)
        if lead and (page := log.out_dir / report_page.FILE).exists():
            say(f"Report of this run: {page}")
        say(f"validation loss {loss:.4f} nats per {unit}, over all {plan.corpus.held_out_size}")
        for name, entropy in levels.items():
            say(f"{name:15} {entropy:.4f} nats per {unit} of the same text")
        loop.show_sample(params, "sample")
        if counts := plan.corpus.counts:
            rows = "all rows" if jax.process_count() == 1 else "the rows of process 0"
            say(f"documents in {rows}: {counts}")
        lora = None if trainer.model.adapted is None else export.adapters(trainer, params)

        def write_export() -> None:
            for line in export.write(trainer, lora) if lead else ():
                say(line)

        together(settings, "export", write_export)
