"""`train.py` on text and from a folder: what a run says and writes, exact resume, how it ends."""

import dataclasses
import gzip
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import types
import unittest.mock
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs as runs
from flax import nnx
from safetensors.numpy import load_file, save_file
from small_runs import finish, folder, metrics, start, start_many
from test_documents import chat
from test_run_folder import wandb

import training.run
import training.trainer
import zero_jax
from training import byte_tokenizer, export, generate, memory, saving
from training.config import Config, parse, resolve
from training.main import main
from training.plan import by_stage, start_event
from training.preemption import Stop
from training.run import routing
from training.run_folder import RunFolder
from training.supervise import FAILED, RESUMABLE
from training.trainer import Trainer, load, optimizer_of
from zero_jax import Zero, abstract_mesh
from zero_jax.checkpoint.manifest import Manifest
from zero_jax.commands import checkpoint as checkpoint_command
from zero_jax.commands.case import Case
from zero_jax.models import gpt, hf
from zero_jax.models.optimizers import RATES, decayed
from zero_jax.plan.planning import bytes_on

__all__ = ["finish", "folder", "metrics", "start", "start_many", "wandb"]  # also for other folders
OUT = [*runs.FIRST, "--output-dir", "out"]


def stop_before(step):
    """A `Stop` that asks a run to end before a step."""
    calls = itertools.count(1)
    ask = {"__call__": lambda self: RESUMABLE if next(calls) == step else 0}
    return type("StopThere", (Stop,), ask)


@pytest.fixture
def done(first_run, folder, shared):
    """A folder to run in, in which the first run is done."""
    shutil.copytree(first_run[0] / "out", folder / "out")
    return folder


def test_a_run_says_what_it_will_do_and_writes_metrics_checkpoints_page_and_model(first_run):
    home, said = first_run
    order = ["data 8", "bytes per device on data 8", "stage 0", "stage 3, this run", "between"]
    order += ["Predicted peak", "4 steps are ", "step 2/4", "step 4/4"]
    order += ["nats per byte", "unigram", "bigram", "sample:", runs.TEXT[-240:][:16]]
    assert order == sorted(order, key=said.index)
    out = home / "out"
    config, psi = RunFolder(out).config, gpt.num_params(gpt.preset("nano", seq=32))
    known = {"stage": 3, "devices": 8, "vocab_size": 256, "seq_len": 32, "learning_rate": 1e-3}
    assert config | known | {"psi": psi} == config
    assert {"mesh", "processes", "jax", "bigram entropy", "train_tokens"} <= config.keys()
    step = "step loss grad_norm tokens_per_second skipped step_seconds learning_rate"
    step, val = {*step.split()}, {"step", "val_loss"}  # a CPU does not count its memory
    assert [set(line) for line in metrics(out)] == [step, step, val, step, step, val]
    assert [line["step"] for line in metrics(out)] == [1, 2, 2, 3, 4, 4]
    # Linear over two steps, then a cosine to a tenth: half way it is (1 + 0.1) / 2.
    rates = [line["learning_rate"] for line in metrics(out) if "loss" in line]
    assert rates == pytest.approx([0, 0.5e-3, 1e-3, 0.55e-3], rel=1e-5)
    assert all((out / name).stat().st_size > 0 for name in ("loss.png", "report.html"))
    manifest = Manifest.read(out / "checkpoints/4/state")
    assert (manifest.config["max_steps"], manifest.extra["sample"]) == (4, 32)
    assert str(home) not in (out / "checkpoints/4/state/manifest.json").read_text()
    assert {"tokenizer.json", "chat_template.jinja"} <= {x.name for x in home.glob("small/*")}


def test_a_stopped_run_resumes_as_the_run_that_never_stopped(
    first_run, folder, shared, wandb, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "Stop", stop_before(4))
        assert main([*OUT, "--wandb-project", "zero"]) == RESUMABLE
    error = capsys.readouterr().err
    assert f"step 3, which is saved in {Path('out').resolve()}" in error
    monkeypatch.setattr(training.run, "LONG", 2)
    with monkeypatch.context() as patch:  # again after the last step and a batch of evaluation
        patch.setattr(training.run, "Stop", stop_before(2))
        assert main(error.rpartition("python train.py ")[2].split()) == RESUMABLE
    said = capsys.readouterr()
    assert "step 3: restored" in said.out and "missing: none" in said.out
    assert "evaluating: 1 of 2" in said.out and "step 4, which is saved" in said.err
    assert main([*OUT, "--wandb-project", "zero"]) == 0
    whole = first_run[0] / "out"
    assert runs.curve("out") == runs.curve(whole) and runs.last_loss("out") == runs.last_loss(whole)
    assert runs.saved_steps("out") == [2, 3, 4]
    page = Path("out/report.html").read_text()
    assert page.count("8 x cpu") == 3 and page.count("complete") >= 3, "starts and checkpoints"
    events = map(json.loads, Path("out/events.jsonl").read_text().splitlines())
    starts = [name for n in (2, 1, 0) for name in ("start", "states", *["checkpoint"] * n, "end")]
    assert [event["event"] for event in events] == starts
    assert len({call.kwargs["id"] for call in wandb.init.call_args_list}) == 1
    assert [call.kwargs["exit_code"] for call in wandb.finish.call_args_list] == [1, 1, 0]
    logged = [call.args[0].items() for call in wandb.log.call_args_list]
    assert [{k.split("/")[-1]: v for k, v in x} for x in logged] == metrics("out")


@pytest.mark.slow
def test_a_finished_run_names_edited_data_and_other_settings(done, capsys, monkeypatch):
    Path("other.txt").write_text(runs.TEXT)
    known = (manifest := Manifest.read(done / "out/checkpoints/4/state")).config
    # Earlier releases saved the order and the contents beside the settings.
    moved = {name: known[name] for name in ("order", "contents")}
    config = {name: value for name, value in known.items() if name not in moved}
    older = dataclasses.replace(manifest, config=config, extra=manifest.extra | moved)
    edited = known | {"contents": {"data": "another"}}
    both = [saving.compare(edited, each, done) for each in (manifest, older)]
    assert both[0] == both[1] != [] and saving.compare(known, older, done) == []
    changes = {"--seq-len 8": "--seq-len 32", "--seed 7": "--seed 0"}
    changes |= {"--data other.txt": "text.txt", "--optimizer lion": "--optimizer adamw"}
    for args, former in changes.items():
        plan = load(parse([*OUT, *args.split()]))
        settings = known | {"optimizer": plan.config.optimizer}
        words = args.replace(" ", ".* ")
        with pytest.raises(ValueError, match=f"{words}.* {former}.* another --output-dir"):
            saving.check_resume(plan.config, settings | {"order": plan.corpus.order})
    Path("text.txt").write_text(runs.TEXT.replace("Partition", "partition"))
    assert main(OUT) == 0
    said = capsys.readouterr().out
    assert "step 4: restored" in said and "nothing is left" in said
    (said,) = re.findall("^warning: .*", said, re.MULTILINE)
    assert "--data" in said and len(set(re.findall("[0-9a-f]{12}", said))) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lambda *_, **__: float("nan"))
        assert main([*OUT, "--export-dir", "new"]) == FAILED
    assert "after training is nan" in capsys.readouterr().err and not Path("new").exists()
    files = {path: path.read_bytes() for path in Path("out").glob("*.json*")}
    assert main([*OUT, "--no-resume"]) == 2
    assert "--no-resume" in capsys.readouterr().err
    Path("text.txt").write_text(runs.TEXT + runs.TEXT[:60])
    assert main(OUT) == 2
    assert re.search("--data .*4374.* 4320", capsys.readouterr().err)
    assert files == {path: path.read_bytes() for path in Path("out").glob("*.json*")}


@pytest.mark.slow
def test_runs_whose_steps_are_skipped_fail(folder, shared, monkeypatch, capsys):
    step = zero_jax.TrainStep.__call__

    def broken(self, params, *rest):
        return step(self, jax.tree.map(lambda x: x * jnp.nan, params), *rest)

    monkeypatch.setattr(zero_jax.TrainStep, "__call__", broken)
    for _ in range(2):  # and so does the same command again, which finds nothing to train
        assert main(OUT) == FAILED
        assert "--max-steps 4" in capsys.readouterr().err
    assert [line["skipped"] for line in metrics("out") if "loss" in line] == [1] * 4


def test_the_compiled_step_has_names_and_the_audited_bytes(folder):
    trainer = runs.shared_trainer(load(parse(OUT)))
    compiled = trainer.step.lower(*trainer.like({}), next(trainer.batches())[0]).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    parts = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    plan = trainer.zero.plan(*trainer._step_of(trainer.zero, trainer.model), compile=True)
    assert plan.total_bytes == pytest.approx(parts, rel=0.3)
    for name in ("embed", "attention", "mlp", "loss", "zero_update"):
        assert f"/{name}" in text or f"({name})" in text, name
    for kind, name in (("all-gather", "zero_gather"), ("reduce-scatter", "zero_reduce_scatter")):
        lines = [x for x in text.splitlines() if re.search(rf" {kind}(-start)?\(", x)]
        assert lines and all(name in line for line in lines), lines


def test_the_noted_bytes_are_the_planners_and_the_held_ones(folder):
    trainer = runs.shared_trainer(load(parse(OUT)))
    step, shapes = trainer.predict(), trainer.shapes()
    known = start_event(step, by_stage(trainer, step.window), {}, "byte")
    psi = sum(x.size for x in jax.tree.leaves(shapes))
    config, rest = trainer.zero.config, {"tx": trainer.plain_tx, "window": step.window}
    for stage, terms in enumerate(known["stages"]):
        assert terms == zero_jax.memory.estimate(shapes, config.at_stage(stage), **rest).terms
        assert terms["parameters"] == 4 * psi // (8 if stage else 1)  # 8 divides every leaf
    assert sum(known["predicted"].values()) == known["predicted_total"]
    states = trainer.init()
    for name, tree in zip(("parameters", "optimizer_state"), states, strict=True):
        held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(tree))
        assert held == bytes_on(tree) == known["predicted"][name]
    assert (known["versions"]["jax"], known["devices"]["devices"]) == (jax.__version__, 8)
    # The validation loss is the mean over every held-out token.
    graphdef, params = trainer.model.graphdef, trainer.zero.unshard(states[0])
    loss = jax.jit(lambda params, rows: gpt.loss(nnx.merge(graphdef, params), rows))
    rest = jnp.asarray(trainer.plan.corpus.rest[:], jnp.int32)
    rows = [rest[None, at : at + 33] for at in range(0, rest.size - 1, 32)]
    totals, weights = zip(*(loss(params, row) for row in rows), strict=True)
    assert sum(weights) == rest.size - 1 != 32 * len(rows)
    # Sums of the same fp32 losses in another order.
    assert trainer.evaluate(states[0]) == pytest.approx(float(sum(totals) / sum(weights)), rel=1e-5)


def test_routers_of_experts_are_in_the_metrics_and_results_are_read_one_late(folder):
    own = ["--model", "nano-experts", "--expert-capacity-factor", "0.5"]
    plan = load(parse([*runs.TINY, *runs.HERE, *own]))
    params = plan.model.make(jax.random.key(0))
    _, found = jax.jit(plan.model.trained_loss)(params, next(plan.corpus.batches(None, 0, 1))[0])
    assert hf.json_of(plan.model.config, "float32")["num_experts_per_tok"] == 2
    known = routing(found)
    choices = 8 * 16 * 2 * 4  # rows, tokens, of each two, layers
    assert choices / 2 <= known["dropped"] < choices
    assert known["balance"] >= 0.9 and known["router_z"] > 0
    made = []
    results = training.trainer.one_late(made.append(n) or n for n in range(4))
    assert [(result, len(made)) for result in results] == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_optimizers_are_the_planned_ones_clip_and_decay_matrices(monkeypatch):
    grads = {"kernel": jnp.full((2, 2), 100.0)}
    for clip, norm in ((2.0, 2.0), (0.0, 200.0)):
        known = {"learning_rate": 1.0, "warmup_steps": 0, "max_grad_norm": clip}
        tx = optimizer_of(Config(optimizer="sgd", weight_decay=0.0, **known))
        updates = jax.jit(lambda grads, tx=tx: tx.update(grads, tx.init(grads), grads)[0])(grads)
        assert float(optax.global_norm(updates)) == pytest.approx(norm, rel=1e-5)
    # Decay is for kernels and embeddings.
    shapes = nnx.state(nnx.eval_shape(lambda: gpt.GPT(gpt.preset("nano"), rngs=nnx.Rngs(0))))
    flags, sizes = jax.tree.leaves(decayed(shapes)), [x.size for x in jax.tree.leaves(shapes)]
    matrices = 4 * 12 * 128**2 + (256 + 64) * 128  # of four layers, of tokens and places
    assert sum(s for s, f in zip(sizes, flags, strict=True) if f) == matrices
    # The planned step has the same state and the same operations, at whatever rate.
    constant = optax.constant_schedule
    monkeypatch.setattr(training.trainer, "rate", lambda config: constant(config.learning_rate))
    for name in RATES:
        config = resolve(Config(optimizer=name))
        case = Case(gpt.preset("nano"), Zero(abstract_mesh(4)), name, rows=4)
        planned, run = (
            jax.make_jaxpr(lambda p, tx=tx: tx.update(p, tx.init(p), p))(jax.eval_shape(case.make))
            for tx in (case.tx, optimizer_of(config))
        )
        assert str(planned) == str(run), name


@pytest.mark.slow
def test_a_run_goes_back_past_the_batches_that_made_gradients_infinite(folder, shared, monkeypatch):
    seen, step = [], zero_jax.TrainStep.__call__

    def broken(self, params, opt_state, batch, *extras):
        seen.append(np.asarray(batch[0]).tobytes())
        if len(seen) == 4:
            raise zero_jax.NonFiniteError("8 steps in a row were skipped")
        return step(self, params, opt_state, batch, *extras)

    monkeypatch.setattr(zero_jax.TrainStep, "__call__", broken)
    assert main(OUT) == FAILED, "not asked to go back"
    first, _ = seen[:4], seen.clear()
    assert main([*runs.FIRST, "--output-dir", "other", "--max-rollbacks", "1"]) == 0
    assert len(runs.curve("other")) == 4
    assert seen[:4] == first and len(set(seen)) == len(seen) == 6
    assert Manifest.read(Path("other/checkpoints/4/state")).extra["sample"] == 8 * 6


@pytest.mark.slow
def test_a_stage_is_chosen_and_three_steps_are_profiled(folder, capsys, monkeypatch):
    calls, step = unittest.mock.Mock(), zero_jax.TrainStep.__call__
    calls.start.side_effect, calls.step.side_effect = jax.profiler.start_trace, step
    monkeypatch.setattr(jax.profiler, "start_trace", calls.start)
    monkeypatch.setattr(zero_jax.TrainStep, "__call__", lambda *args: calls.step(*args))
    np.save("ids.npy", np.tile(np.arange(300, dtype=np.uint16), 10))
    chosen = "--data ids.npy --vocab-size 300 --stage auto --memory-limit 1GB --model nano-experts "
    chosen += "--compute-dtype bf16 --reduce-dtype bf16 --max-grad-norm 0 --max-steps 14 --profile "
    chosen += "--output-dir out"
    assert main([*runs.TINY, *runs.HERE, *chosen.split()]) == 0
    assert [call[0] for call in calls.mock_calls].index("start") == 9, "before step 10"
    (trace,) = Path("out/profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert any("gather" in name for name in names), "visible in a viewer"
    assert not any(name.startswith("$") for name in names), "the host's own code is left out"
    out = capsys.readouterr().out
    assert re.search(r"chose stage \d, 1 micro-batches", out) and "nats per token" in out
    assert RunFolder(Path("out")).config["mesh"] == {"experts": 8, "data": 1}, "which sends less"
    sample = json.loads(out.partition("sample:")[2])
    assert len(sample) == 16 + 8
    assert sample[:16] == list(range(16))  # the last tenth begins at a multiple of 300


@pytest.mark.slow
def test_processes_train_as_one_process_does(folder):
    ((code, _, error),) = finish([start(*runs.TINY, "--output-dir", "one")])
    assert code == 0, error
    # Each process of the second and third has one device, and two of them share their rows.
    many = [(4, ""), (4, "--mesh data=2,model=2 --sequence-parallel")]
    many += [(4, "--context-parallel 2")]
    many += [(2, "--mesh replica=2,data=1,model=2 --paper-config c5")]
    for at, (count, more) in enumerate(many):
        results = finish(start_many(count, [*runs.TINY, "--output-dir", f"{at}", *more.split()]))
        said = [(code, "validation loss" in out) for code, out, _ in results]
        assert said == [(0, True)] + [(0, False)] * (count - 1), results
        one, other = (metrics(out, "loss", "val_loss") for out in ("one", f"{at}"))
        # Sums over devices in another order; Adam would divide small numbers by small numbers.
        np.testing.assert_allclose(other, one, rtol=1e-5)


TROUBLE = [  # settings by process, the folder of process 1, and what is said
    ({1: ["--stage", "1"]}, "", "stage.*'3'.*'1'"), ({}, "empty", "text.txt"),
    ({0: ["--output-dir", "text.txt"]}, "", "text.txt"), ({}, "edited", "checksum of the data"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("own", "elsewhere", "words"), TROUBLE)
def test_all_processes_end_and_tell_why_when_one_can_not_train(folder, own, elsewhere, words):
    (folder / "empty").mkdir()
    (folder / "edited").mkdir()
    (folder / "edited" / "text.txt").write_text(runs.TEXT.lower())
    processes = start_many(2, runs.TINY, own, {1: folder / elsewhere})
    for code, _, error in finish(processes, seconds=120):
        assert code == 2 and re.search(words, error, re.DOTALL), error


# Runs that end early and resume: damaged checkpoints, changed texts, other states.
OWN = ["--save-steps", "3", "--output-dir", "out"]
EIGHT = ["--max-steps", "8", "--warmup-steps", "2", *OWN]


def train_here(*args):
    return main([*runs.RUN, *runs.HERE, *args])


@pytest.mark.slow
def test_a_damaged_checkpoint_offers_the_one_before(folder, shared, capsys):
    assert train_here(*EIGHT) == 0
    chunk = next(p for p in Path("out/checkpoints/8").rglob("c/*") if p.is_file())
    damaged = bytearray(chunk.read_bytes())
    damaged[0] ^= 1
    chunk.write_bytes(damaged)
    assert train_here(*EIGHT) == 2
    assert re.search(r"step 8; .*steps are 3, 6: .*--resume-step 6", capsys.readouterr().err)
    assert train_here(*EIGHT, "--resume-step", "6") == 0
    assert "step 6: restored" in capsys.readouterr().out
    assert Path("out/checkpoints/after-6/8").is_dir() and runs.saved_steps("out") == [3, 6, 8]
    # The same command once more, as after a kill, does not go back again.
    assert train_here(*EIGHT, "--resume-step", "6") == 0
    out = capsys.readouterr().out
    assert "--resume-step 6 was applied" in out and "nothing is left to train" in out
    assert train_here(*EIGHT, "--resume-step", "7") == 2
    assert "--resume-step 7" in capsys.readouterr().err
    assert train_here("--max-steps", "9", "--warmup-steps", "2", *OWN) == 0
    assert "warning: --max-steps 9 is given" in capsys.readouterr().out
    assert train_here(*EIGHT) == 2
    assert "step 9, past --max-steps 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_that_shrinks_ends_the_run_with_its_steps_saved(folder, capsys, monkeypatch):
    calls = itertools.count(1)
    edit = {4: lambda: Path("text.txt").write_text("short")}
    ask = {"__call__": lambda self: edit.get(next(calls), int)() and 0}
    monkeypatch.setattr(training.run, "Stop", type("Shrink", (Stop,), ask))
    assert train_here("--max-steps", "200", "--save-steps", "1000", "--output-dir", "out") == 2
    said = capsys.readouterr()
    assert "text.txt changed during the run (now 5 bytes, written 2" in said.err
    (saved,) = runs.saved_steps("out")
    assert 3 <= saved == len(runs.curve("out")) and f"Step {saved} is saved in" in said.out


@pytest.mark.slow
def test_states_become_8bit_which_can_not_be_in_files(folder, capsys):
    for steps, states in (("2", "fp32"), ("3", "8bit")):
        assert train_here("--max-steps", steps, "--optimizer-state-dtype", states, *OWN) == 0
    assert "optimizer state from fp32 to 8bit" in capsys.readouterr().out
    assert train_here("--max-steps", "4", "--offload", "optimizer:nvme=nvme", *OWN) == 2
    assert "--optimizer-state-dtype 8bit" in capsys.readouterr().err


TUNE = "--init-from small --data chat.jsonl --max-steps 2 --seq-len 32 --global-batch-size 8 "
TUNE += "--devices 8 --optimizer sgd --eval-steps 0 --max-eval-batches 1 --sample-tokens 0"
TUNE = TUNE.split()
LORA = ["--lora-rank", "2", "--lora-base-dtype", "nf4"]
ENDS = {"eos_token_id": 0, "bos_token_id": 1}


@pytest.fixture
def tune(first_run, folder, shared):
    """Runs beside a model of bytes whose texts end with token 0, and 80 conversations."""
    shutil.copytree(first_run[0] / "small", "small")
    known = json.loads(Path("small/config.json").read_text())
    assert (known["vocab_size"], known["eos_token_id"]) == (256, byte_tokenizer.END[0])
    Path("small/config.json").write_text(json.dumps(known | ENDS))
    Path("small/generation_config.json").write_text(json.dumps(ENDS))
    chats = [chat(f"what is {n}", f"it is {n}{'.' * (n % 9)}") for n in range(80)]
    Path("chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats))
    return lambda *more: main([*TUNE, *more])


def change(name, value, place=(2, 3)):
    tensors = {name: array.copy() for name, array in load_file("small/model.safetensors").items()}
    tensors[name][place] = value
    save_file(tensors, "small/model.safetensors", metadata={"format": "pt"})


def check_exported(out, said, lora):
    end = byte_tokenizer.END[0]  # of turns; base models end texts with another
    assert json.loads(Path(out, "config.json").read_text())["eos_token_id"] == end
    generation = json.loads(Path(out, "generation_config.json").read_text())
    assert generation == {"eos_token_id": [end, 0], "bos_token_id": 1}
    assert (f"eos_token_id=[{end}, 0]" in said) == lora
    after = load_file(f"{out}/model.safetensors")
    for name, before in load_file("small/model.safetensors").items():
        trained = not lora or re.search(r"_attn.weight|c_proj.w|c_fc.weight", name)
        assert (before != after[name]).any() == bool(trained) or "wpe" in name, name


@pytest.mark.slow
def test_adapters_leave_files_and_resume_with_the_same_documents(tune, capsys, monkeypatch):
    assert tune(*LORA, "--output-dir", "whole", "--export-dir", "tuned") == 0
    said = capsys.readouterr().out
    assert said.index("all 72 documents in rows of 32 tokens:") < said.index("before training")
    assert "documents in all rows:" in said and "8 held-out documents" in said
    check_exported("tuned", said, lora=True)
    adapter = load_file("whole/adapter/adapter_model.safetensors")
    assert len(adapter) == 2 * 4 * 4
    assert any(x.any() for name, x in adapter.items() if "lora_B" in name)
    assert not [p for p in Path("whole/checkpoints/2").rglob("*") if "base" in p.name]
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "Stop", stop_before(2))
        assert tune(*LORA, "--output-dir", "out") == RESUMABLE
    assert tune(*LORA, "--output-dir", "out") == 0
    assert runs.curve("out") == runs.curve("whole") and runs.saved_steps("out") == [1, 2]
    for name, array in load_file("out/adapter/adapter_model.safetensors").items():
        np.testing.assert_array_equal(array, adapter[name])
    change("transformer.h.1.mlp.c_fc.weight", np.nan)
    assert tune(*LORA, "--export-dir", "new", "--output-dir", "nan") == 2
    assert "model.safetensors: transformer.h.1.mlp.c_fc.weight" in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.slow
def test_all_weights_are_trained_unless_their_loss_is_not_finite(tune, capsys):
    assert tune("--output-dir", "out", "--export-dir", "tuned") == 0
    check_exported("tuned", capsys.readouterr().out, lora=False)
    for name in ("transformer.ln_f.weight", "transformer.wte.weight"):
        change(name, 3e38, place=...)
    assert tune("--save-steps", "0", "--output-dir", "inf") == FAILED
    error = capsys.readouterr().err
    assert "before training is" in error and "--compute-dtype fp32" in error
    assert '"loss"' not in Path("inf/metrics.jsonl").read_text()
    assert not Path("inf/checkpoints").exists()


def test_adapters_may_stand_beside_a_model_that_begins_anew(folder, capsys):
    sizes = {"lora_rank": 2, "seq_len": 16, "global_batch_size": 8, "devices": 8}
    trainer = Trainer(load(Config(data="text.txt", **sizes)))
    states = trainer.init()
    export.write(trainer, states[0])
    assert "adapter" in capsys.readouterr().out and Path("adapter/adapter_config.json").exists()
    params, _ = trainer.full_states(trainer.saved_states(states))
    for one, other in zip(*map(jax.tree.leaves, (states[0]["base"], params["base"])), strict=True):
        np.testing.assert_array_equal(one, other)  # every start makes the same


EDITED = {  # folders by name: which files are edited, or left out
    "none": {"config.json": None},
    "broken": {"tokenizer.json": lambda known: {}, "tokenizer_config.json": None},
    "lama": {"config.json": lambda known: {"model_type": "lama"}},
    "bare": {"tokenizer.json": None, "tokenizer_config.json": None},
    "big": {"tokenizer.json": lambda known: known | {"model": known["model"] | {
        "vocab": known["model"]["vocab"] | {f"token{n}": 253 + n for n in range(100)}}}},
    "plain": {"chat_template.jinja": None},
    "layers": {"config.json": lambda known: known | {"n_layer": 50_000}},
}  # fmt: skip
REFUSED = [
    ("--lora-targets q", "--lora-targets q"), ("--data text.txt=1,text.txt=2", "--data text.txt=1"),
    ("--lora-rank 0", "--lora-rank 0"), ("--init-from layers", "config.json"),
    ("--lora-base-dtype nf4", "--lora-base-dtype nf4"), ("--vocab-size 300", "--vocab-size 300"),
    ("--init-from big", "256 rows"), ("--init-from bare", "chat.jsonl .*--tokenizer"),
    ("--long-documents error --seq-len 16", "chat.jsonl, line 1: .*--seq-len 16 "),
    ("--lora-rank 2 --lora-targets attn/qq", "attn/qq"), ("--seq-len 64", "--seq-len 64.* 32 tok"),
    ("--data chat.jsonl=1,text.txt=1", r"--data .*text\.txt"), ("--init-from none", "config.json"),
    ("--export-dir small", "small"), ("--lora-init-from x", "--lora-init-from x.*--lora-rank"),
    ("--tokenizer broken", "broken"), ("--init-from plain", "plain has no chat template"),
    ("--lora-rank 2 --lora-init-from x", "x/adapter_config.json"), ("--init-from lama", "'lama'"),
    ("--save-steps 0 --export-dir new", "--export-dir.*--save-steps 0"),
    ("--data broken.jsonl", "broken.jsonl, line 2: role 'bot'"), ("--tokenizer nowhere", "nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "said"), REFUSED)
def test_settings_folders_and_data_that_do_not_fit_are_refused(tune, capsys, more, said):
    if (name := more.split()[1]) in EDITED:
        shutil.copytree("small", name)
    for file, edit in EDITED.get(name, {}).items():
        path = Path(name, file)
        path.write_text(json.dumps(edit(json.loads(path.read_text())))) if edit else path.unlink()
    bad = {"messages": [{"role": "bot", "content": ""}]}
    Path("broken.jsonl").write_text(json.dumps(chat("a", "b")) + "\n" + json.dumps(bad) + "\n")
    assert tune(*more.split()) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error:") and "\n" not in error
    assert re.search(said, error), error


@pytest.mark.slow
def test_the_job_for_a_laptop_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    root = Path(__file__).parents[2]
    pages = [(root / name).read_text() for name in ("README.md", "docs/finetuning.md")]
    blocks = (re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for page in pages)
    job, same = (next(x for x in own if "training.pairs" in x).splitlines() for own in blocks)
    assert job == same, "as both pages print it"
    _, small, pairs, *tunes = job
    monkeypatch.chdir(tmp_path)
    subprocess.run(shlex.split(pairs), env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    for command in (small, *tunes):
        fewer = f"{command} --max-steps 2 --devices 8 --max-eval-batches 1 --sample-tokens 8"
        assert main(shlex.split(fewer)[2:]) == 0
    assert len(re.findall("<.assistant.>", capsys.readouterr().out)) == 2 * len(tunes) == 4
    *_, asks = re.findall(r"```sh\n([^`]*training.generate[^`]*)```", pages[1])
    for command in asks.splitlines():
        _, _, module, *words = shlex.split(command)
        run = generate.main if module == "training.generate" else checkpoint_command.main
        assert run([*words, *["--length", "8"] * (run is generate.main)]) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_tuned_model_answers_as_the_run_showed_it_and_trains_on(tune, capsys, monkeypatch):
    lora = ["--lora-rank", "2", "--lora-base-dtype", "fp32", "--lr", "0.5", "--sample-tokens", "8"]
    assert tune(*lora, "--output-dir", "out", "--export-dir", "tuned") == 0
    first = capsys.readouterr().out
    shown = first.rpartition("<|user|>what is 72<|end|><|assistant|>")[2]
    answers = []
    for path, *more in (["out"], ["tuned"], ["small", "--adapter", "out/adapter"], ["small"]):
        assert generate.main([path, "what is 72", "--length", "8", *more]) == 0
        answers.append(capsys.readouterr().out[:-1])
    assert answers[0] and shown.startswith(answers[0]) and len(set(answers[:3])) == 1
    assert answers[3] != answers[0], "the model before it was tuned"
    # Another run begins with the adapters of this one.
    assert tune(*lora, "--output-dir", "second", "--lora-init-from", "out/adapter") == 0
    said = capsys.readouterr().out.partition("before training: validation loss ")[2]
    end = re.search(r"\nvalidation loss ([\d.]+)", first)[1]
    assert float(said.split()[0]) == pytest.approx(float(end), abs=2e-4)
    shutil.rmtree("out/adapter")
    for words, message in (  # questions that can't be asked
        (["small", ""], "question=''"), (["small", "x", "--length", "0"], "length=0"),
        (["whole", "x"], "config.json"), (["small", "x", "--adapter", "."], "adapter_config.json"),
        (["out", "x"], "export .*out/checkpoints DIR"),
    ):  # fmt: skip
        assert generate.main(words) == 2
        assert re.search(message, capsys.readouterr().err)
    full = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10**6, "bytes_in_use": 0})
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [full])
    assert generate.main(["small", "x"]) == 2
    assert "no answer: " in capsys.readouterr().err
