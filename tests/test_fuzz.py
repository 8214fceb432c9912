"""Random losses on random trees (fuzz.py), and runs that are killed at random (chaos.py)."""

import fuzz
import numpy as np
import pytest
from chaos import chaos
from fuzz import JAX_REMATS, Case
from fuzz_operations import COUNTS, OPS

SETTINGS = {"grad_accum_steps": 1, "remat": "block", "bucket_bytes": 2**30, "precision": "fp32"}


# Five trees use each operation once; each value of a setting occurs.
TREES = [
    {"mesh": (4, 1, 1), "stage": 3, "remat": "none", "frozen": lambda path: path == "3"},
    {"mesh": (3, 1, 1), "stage": 3, "remat": JAX_REMATS["everything"], "grad_accum_steps": 2},
    {"mesh": (2, 2, 1), "stage": 3, "remat": "block@host", "secondary_shards": True},
    {"mesh": (7, 1, 1), "stage": 2, "remat": "dots", "grad_accum_steps": 2},
    {"mesh": (5, 1, 1), "stage": 1, "remat": "block", "precision": "bf16", "bucket_bytes": 64},
]


@pytest.mark.parametrize("tree", range(len(TREES)))
def test_each_operation_equals_one_device_and_sends_what_it_must(tree):
    names, counts = list(OPS)[tree :: len(TREES)], list(COUNTS)[tree::5]
    shapes = [[(6, 4, 4), (8, 4), (13,)], [(4, 8), (7, 4), (0, 4)], [(), (3, 4, 4), (8, 8, 8)]]
    rngs = map(np.random.default_rng, (0, 1, 2, 0))
    drawn = [r.standard_normal(n) for r, n in zip(rngs, [*shapes[tree % 3], (4, 64)], strict=True)]
    leaves = [(0.5 * np.asarray(x)).astype(np.float32) for x in drawn]
    leaves += [np.arange(32, dtype=np.int32).reshape(8, 4) % 5]
    case = Case(leaves, [*(names[at::4] for at in range(4)), counts])
    assert fuzz.check(case, SETTINGS | TREES[tree], tree) is None


@pytest.mark.slow
@pytest.mark.parametrize("tree", range(1000, 1010))
def test_random_losses_equal_one_device(tree):
    counts, faults = fuzz.run(range(tree, tree + 1), seed=1)
    assert counts["cases", ""] == fuzz.SETTINGS_A_TREE and not faults, "\n".join(faults)


@pytest.mark.slow
def test_killed_runs_have_the_losses_of_an_undisturbed_run(tmp_path):
    faults, found = chaos(4, 0, tmp_path, counts=(1, 2))
    assert faults.total() >= 4 and found["finished"] >= 1 and found["checkpoints"] > 0
