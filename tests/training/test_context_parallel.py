"""`train.py --context-parallel`: the same samples, as inputs and labels."""

import itertools

import numpy as np
import pytest
from jax.sharding import PartitionSpec
from small_runs import folder

from training.config import Config
from training.plan import facts
from training.trainer import Trainer, load

__all__ = ["folder"]  # a fixture


def trainer(context):
    known = {"data": "text.txt", "seq_len": 16, "global_batch_size": 8, "devices": 8}
    return Trainer(load(Config(**known, context_parallel=context)))


@pytest.mark.parametrize("context", [2, 8])
def test_batches_are_the_inputs_and_labels_of_the_same_samples(folder, context):
    one, own = trainer(1), trainer(context)
    assert dict(own.mesh.shape) == {"data": 8 // context, "context": context}
    pairs = zip(one.batches(), own.batches(), strict=True)
    for ((tokens,), place), (batch, other) in itertools.islice(pairs, 3):
        assert place == other and sorted(batch) == ["inputs", "labels"]
        assert np.array_equal(batch["inputs"], tokens[:, :-1])
        assert np.array_equal(batch["labels"], tokens[:, 1:])
        assert batch["labels"].sharding.spec == PartitionSpec(("data",))
    *_, planned = own._step_of(own.zero)
    assert {name: x.shape for name, x in planned.items()} == {"inputs": (8, 16), "labels": (8, 16)}
    known = facts(own, {})
    assert known["order"] == facts(one, {})["order"]
    assert (known["tokens_per_step"], known["tokens_per_device"]) == (128, 16)
