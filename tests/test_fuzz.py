"""Random losses on random trees, and that the fuzz finds faults that are planted; see fuzz.py."""

import dataclasses

import fuzz
import fuzz_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.engine import losses, rewrite, trace, weights


@pytest.mark.slow
@pytest.mark.parametrize("tree", range(1000, 1026))
def test_random_losses_are_those_of_one_device(tree):
    report = fuzz.run(range(tree, tree + 1), seed=1)
    assert report.cases == fuzz.SETTINGS_A_TREE
    assert not report.wrong + report.failed, "\n".join([*report.wrong, *report.failed])


def plant_comparison(monkeypatch):
    """A parameter that is compared is compared by identity (kind 1)."""
    equation = rewrite.run_equation

    def spoiled(eqn, values, stopped, how, riders):
        if eqn.primitive.name in ("eq", "ne"):
            return [jnp.full(eqn.outvars[0].aval.shape, eqn.primitive.name == "ne")]
        return equation(eqn, values, stopped, how, riders)

    monkeypatch.setattr(rewrite, "run_equation", spoiled)


def plant_rearrangement(monkeypatch):
    """A shard is flipped in place of the whole leaf (kind 2)."""
    honest = weights.Weight.through

    def through(self, eqn):
        if eqn.primitive.name == "rev":
            dims = eqn.params["dimensions"]
            flipped = [jax.lax.rev(x, dims) if x.ndim > max(dims) else x for x in self.arrays]
            return [self.of(flipped)]
        return honest(self, eqn)

    monkeypatch.setattr(weights.Weight, "through", through)


def plant_dtype(monkeypatch):
    """The dtype of an integer leaf says float32 (kind 3)."""
    monkeypatch.setattr(trace, "_dtype", lambda x, compute: jnp.dtype("float32"))


def plant_aux(monkeypatch):
    """The aux of the first device stands for that of all (kind 10)."""

    def first(kinds, aux, axes):
        return [
            jax.lax.all_gather(x, axes)[0] if kind == losses.MEAN else x
            for kind, x in zip(kinds, aux, strict=True)
        ]

    monkeypatch.setattr(losses, "over_devices", first)


def plant_kept(monkeypatch):
    """A loop keeps its gathered weights for the backward pass."""

    def kept(run, given):
        return run(*map(weights.opened, given.values))

    monkeypatch.setattr(rewrite, "regathered", kept)


def plant_reopened(monkeypatch):
    """What a layer reads twice is gathered twice."""
    monkeypatch.setattr(weights.Opener, "__call__", lambda _, value: weights.opened(value))


PLANTED = {
    "equals": (plant_comparison, ["equals"], np.float32, (8, 4)),
    "differs": (plant_comparison, ["differs"], np.float32, (8, 4)),
    "flip": (plant_rearrangement, ["flip rows"], np.float32, (8, 4)),
    "dtype": (plant_dtype, ["full"], np.int32, (8, 4)),
    "aux": (plant_aux, ["penalty"], np.float32, (8, 4)),
    "kept": (plant_kept, ["scan flipped"], np.float32, (8, 4)),
    "reopened": (plant_reopened, ["scan"], np.float32, (4, 64)),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found(kind, monkeypatch):
    plant, ops, dtype, shape = PLANTED[kind]
    leaf = np.asarray(np.random.default_rng(0).integers(0, 3, shape), dtype)
    float_leaf = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    case = fuzz_cases.case_of_ops([leaf, float_leaf], [ops, ["number left"]])
    settings = {
        "mesh": (4, 1, 1),
        "stage": 3,
        "micro_batches": 1,
        "remat": "block",
        "bucket_bytes": 2**30,
        "precision": "fp32",
    }
    assert fuzz.check(case, settings, 0) is None
    plant(monkeypatch)
    assert fuzz.check(dataclasses.replace(case), settings, 0) is not None
