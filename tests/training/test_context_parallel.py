"""`train.py --context-parallel`: the same samples, losses and checkpoints as without."""

import functools
import itertools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import small_runs as runs
from jax.sharding import PartitionSpec
from small_runs import folder
from test_train import TUNE, stop_before, tune

import training.run
from training.config import Config
from training.main import main
from training.plan import facts
from training.supervise import RESUMABLE
from training.trainer import Trainer, load

__all__ = ["folder", "tune"]  # fixtures


def trainer(context):
    known = {"data": "text.txt", "seq_len": 16, "global_batch_size": 8, "devices": 8}
    return Trainer(load(Config(**known, context_parallel=context)))


@pytest.mark.parametrize("context", [2, 8])
def test_batches_are_the_inputs_and_labels_of_the_same_samples(folder, context):
    one, own = trainer(1), trainer(context)
    assert dict(own.mesh.shape) == {"data": 8 // context, "context": context}
    pairs = zip(one.batches(), own.batches(), strict=True)
    for ((tokens,), place, left), (batch, other, _) in itertools.islice(pairs, 3):
        assert left is None and place == other and sorted(batch) == ["inputs", "labels"]
        assert np.array_equal(batch["inputs"], tokens[:, :-1])
        assert np.array_equal(batch["labels"], tokens[:, 1:])
        assert batch["labels"].sharding.spec == PartitionSpec(("data",))
    *_, planned = own._step_of(own.zero, own.model)
    assert {name: x.shape for name, x in planned.items()} == {"inputs": (8, 16), "labels": (8, 16)}
    known = facts(own, {})
    assert known["order"] == facts(one, {})["order"]
    assert (known["tokens_per_step"], known["tokens_per_device"]) == (128, 16)


# Sums over tokens in another order, in fp32. Adam divides by gradients that are nearly zero too, so
# single parameters differ by up to twice the rate, losses by far less.
CLOSE = functools.partial(np.testing.assert_allclose, rtol=2e-5)
SFT = "--optimizer adamw --lr 1e-3 --max-steps 4 --eval-steps 2 --save-steps 4".split()


def tuned(tune, out, context, *more):
    """Returns the losses of the steps, and the held-out losses, of a run that ends."""
    own = ["--context-parallel", str(context), "--output-dir", out]
    assert tune(*SFT, *own, *more) == 0
    return runs.curve(out), runs.metrics(out, "val_loss")


def test_packed_conversations_train_as_without_and_resume_at_another_size(
    tune, capsys, monkeypatch
):
    losses, held_out = tuned(tune, "one", 1)
    assert len(losses) == 4 and len(held_out) == 3 and losses[-1] < losses[0]
    for context in (2, 4):
        found = tuned(tune, out := f"context{context}", context)
        CLOSE(found[0], losses)
        CLOSE(found[1], held_out)
        mesh = json.loads(Path(out, "config.json").read_text())["mesh"]
        assert mesh == {"data": 8 // context, "context": context}
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "Stop", stop_before(3))
        stopped = [*SFT, "--context-parallel", "2", "--output-dir", "moved"]
        assert tune(*stopped) == RESUMABLE
    assert runs.saved_steps("moved") == [2] and runs.curve("moved") == runs.curve("context2")[:2]
    capsys.readouterr()
    found = tuned(tune, "moved", 4)
    said = capsys.readouterr()
    assert "step 2: restored" in said.out and "warning" not in said.out + said.err
    CLOSE(found[0], losses)
    CLOSE(found[1][-1], held_out[-1])


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_at_another_size(tune):
    longer = ["--max-steps", "12", "--save-steps", "2"]
    losses, held_out = tuned(tune, "one", 1, *longer)
    own = ["--context-parallel", "2", "--output-dir", "killed"]
    process = runs.start(*TUNE, *SFT, *longer, *own)
    runs.wait_for(lambda: Path("killed").exists() and runs.saved_steps("killed"), process)
    process.kill()
    runs.finish([process])
    assert process.returncode == -signal.SIGKILL and max(runs.saved_steps("killed")) < 12
    found = tuned(tune, "killed", 4, *longer)
    CLOSE(found[0], losses)
    CLOSE(found[1][-1], held_out[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("base", "context"), [("fp32", 2), ("nf4", 8)])
def test_adapters_train_as_without(tune, base, context):
    lora = "--lora-rank", "2", "--lora-base-dtype", base
    want, found = (tuned(tune, f"{size}", size, *lora) for size in (1, context))
    for got, known in zip(found, want, strict=True):
        CLOSE(got, known)


@pytest.mark.slow
def test_windows_of_a_text_train_as_without_also_in_micro_batches(folder, shared):
    def trained(out, *more):
        assert main([*runs.RUN, *runs.HERE, "--seq-len", "32", "--output-dir", out, *more]) == 0
        return [*runs.curve(out), runs.last_loss(out)]

    want = trained("one")
    for number, more in enumerate(("", "--grad-accum-steps 2 --remat block", "--stage 1")):
        own = ["--context-parallel", "4", *more.split()]
        CLOSE(trained(f"{number}", *own), want)
