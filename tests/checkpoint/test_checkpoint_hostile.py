"""Checkpoints that someone edited: pipes in place of files, and manifests with a right checksum."""

import hashlib
import json
import os

import jax.numpy as jnp
import pytest

from zero_jax.checkpoint import inspection
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints

TREE = {"w": jnp.arange(12.0).reshape(3, 4), "v": jnp.arange(5.0)}


@pytest.fixture
def saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, TREE)
    return tmp_path


def restored(directory):
    with Checkpoints(directory, read_only=True) as checkpoints:
        return checkpoints.restore(TREE)


@pytest.mark.parametrize(
    "name", ["state/arrays/0000/c/0", "state/manifest.json", "seal.json", "_CHECKPOINT_METADATA"]
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(saved, name, sealed):
    path = saved / "1" / name
    path.unlink()
    os.mkfifo(path)
    if not sealed:
        (saved / "1" / "seal.json").unlink()
    assert inspection.glance(1, saved / "1").nbytes > 0
    if name in ("_CHECKPOINT_METADATA", "seal.json") and not sealed:
        assert restored(saved).step == 1
        return
    assert inspection.damage(saved / "1")
    with pytest.raises(Damaged, match=path.name):
        restored(saved)


def test_a_chunk_that_is_larger_than_it_can_be_is_not_read(saved):
    path = saved / "1" / "state/arrays/0000/c/0"
    os.truncate(path, 10**12)  # sparse: it takes no room
    with pytest.raises(Damaged, match=r"1,000,000,000,000 bytes, and its chunk 24"):
        restored(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"folder": "arrays/0000"}, "v .*w|w .*v"),
        ({"folder": "arrays/0000/.."}, "outside"),
        ({"folder": "state"}, "arrays/NUMBER"),
        ({"folder": None}, "folder"),
        ({"shape": [3, -4]}, "shape"),
        ({"shape": [2**40, 2**40]}, "no disk"),
        ({"shape": 12}, "int"),
        ({"shape": [3.0, 4]}, "shape"),
        ({"chunk": [3]}, "chunks"),
        ({"chunk": [0, 4]}, "chunks"),
        ({"chunk": [3, 2**62]}, "chunks"),
        ({"stored": "int8"}, "stored as int8"),
        ({"dtype": "no", "stored": "no"}, "no"),
        ({"dtype": 4, "stored": 4}, "4"),
        ({"checksum": "x"}, "checksum"),
        ({"more": 1}, "more"),
    ],
)
def test_a_forged_array_is_damage(saved, change, said):
    forged(saved, lambda known: known["arrays"]["w"].update(change))
    with pytest.raises(Damaged, match=said):
        restored(saved)
    assert inspection.damage(saved / "1") and inspection.glance(1, saved / "1").problems


@pytest.mark.parametrize(
    "change",
    [{"step": "x"}, {"step": -1}, {"format": "1"}, {"arrays": []}, {"versions": 1}, {"more": 1}],
)
def test_a_forged_manifest_is_damage(saved, change):
    forged(saved, lambda known: known.update(change))
    with pytest.raises(Damaged, match=r"manifest\.json"):
        restored(saved)


def test_more_chunks_than_files_are_counted_not_listed(saved):
    change = {"shape": [2**30, 2**20], "chunk": [1, 1]}
    forged(saved, lambda known: known["arrays"]["w"].update(change))
    (said,) = inspection.glance(1, saved / "1").problems
    assert f"of {2**50:,} chunks" in said
    assert inspection.damage(saved / "1")


def forged(directory, edit):
    """Edits a manifest and computes its SHA-256 anew."""
    path = directory / "1" / "state" / "manifest.json"
    known = json.loads(path.read_text().rpartition("\n}\n")[0] + "\n}")
    edit(known)
    text = json.dumps(known)
    path.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    (directory / "1" / "seal.json").unlink()
