"""Damaged and forged checkpoints, disks that fail, runs that are killed."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zero_jax
from zero_jax.checkpoint import arrays, inspection, retention, writer
from zero_jax.checkpoint.arrays import Array, Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.manifest import Manifest

ROOT = pathlib.Path(__file__).parents[2]
ENV = {**os.environ, "JAX_PLATFORMS": "cpu"}
TREE = {"w": jnp.arange(12.0).reshape(3, 4), "v": jnp.arange(5.0)}


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, TREE)
    return tmp_path


def restored(directory, like=TREE):
    with Checkpoints(directory, read_only=True) as checkpoints:
        return checkpoints.restore(like)


def sharded(directory):
    """Saves parameters and state of three devices; returns them."""
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:3]), 3)
    params = zero.init(lambda: {"w": jnp.arange(21.0).reshape(7, 3), "b": jnp.ones(3)})
    tree = params, zero.optimizer(optax.sgd(0.1, momentum=0.9)).init(params)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, tree, config={"width": 3})
    return tree


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    tree, folder = sharded(tmp_path), tmp_path / "1"
    rng, files = np.random.default_rng(0), files_of(folder)
    trials = [*range(240), *(-1 for _ in files)]  # the last ones delete a file
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        for count, trial in enumerate(trials):
            path = files[count % len(files)]
            good = path.read_bytes()
            at = int(rng.integers(len(good)))
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(good[:at] if trial % 3 == 0 else bad)
            if trial < 0:
                path.unlink()
            if trial >= 0 or path.name != "seal.json":  # a run can be killed before it is written
                with pytest.raises((Damaged, ValueError)):
                    checkpoints.restore(tree)
                    pytest.fail(f"{path}, byte {at} of {len(good)}: not noticed")
                assert trial % 3 or inspection.damage(folder), path
            path.write_bytes(good)
        back = checkpoints.restore(tree).tree
    for found, want in zip(*map(jax.tree.leaves, (back, tree)), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()


def test_a_chunk_that_is_larger_than_it_can_be_is_not_read(tmp_path):
    """Its size is compared with that of a chunk, seven numbers and a CRC, not of the array."""
    tree = sharded(tmp_path)
    chunk = next(p for p in files_of(tmp_path / "1" / "state" / "arrays" / "0001") if p.name == "0")
    for size, given in ((33, "33"), (10**12, "1,000,000,000,000")):
        os.truncate(chunk, size)  # sparse: it takes no space
        with pytest.raises(Damaged, match=rf"{chunk}.*\b{given}\b.*\b32\b"):
            restored(tmp_path, tree)


OTHERS = ["seal.json", "_CHECKPOINT_METADATA"]


@pytest.mark.parametrize("name", ["state/arrays/0000/c/0", "state/manifest.json", *OTHERS])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(saved, name, sealed):
    path = saved / "1" / name
    path.unlink()
    os.mkfifo(path)
    if not sealed:
        (saved / "1" / "seal.json").unlink()
    assert inspection.glance(1, saved / "1").nbytes > 0
    if name in OTHERS and not sealed:
        assert restored(saved).step == 1
        return
    assert inspection.damage(saved / "1")
    with pytest.raises(Damaged, match=path.name):
        restored(saved)


def forge(directory, whole=(), digest=None, **entry):
    """Changes a manifest, or its entry of `w`, and computes its SHA-256 again."""
    path = directory / "1" / "state" / "manifest.json"
    known = json.loads(path.read_text().rpartition("\n}\n")[0] + "\n}")
    known.update(whole)
    if entry:
        known["arrays"]["w"].update(entry)
    text = json.dumps(known, indent=1)
    path.write_text(f"{text}\n{digest or hashlib.sha256(text.encode()).hexdigest()}\n")
    (directory / "1" / "seal.json").unlink(missing_ok=True)


# fmt: off
FORGED = [  # named by the error, changes
    ("v .*w|w .*v", {"folder": "arrays/0000"}), (r"0000/\.\.", {"folder": "arrays/0000/.."}),
    ("/tmp", {"folder": "/tmp"}), ("elsewhere", {"folder": "../../elsewhere"}),
    ("state", {"folder": "state"}), ("folder", {"folder": None}), ("-4", {"shape": [3, -4]}),
    (str(2**40), {"shape": [2**40, 2**40]}), ("int", {"shape": 12}), ("3.0", {"shape": [3.0, 4]}),
    ("chunk", {"chunk": [3]}), ("0, 4", {"chunk": [0, 4]}), (str(2**62), {"chunk": [3, 2**62]}),
    ("int8", {"stored": "int8"}), ("no", {"dtype": "no", "stored": "no"}),
    ("4", {"dtype": 4, "stored": 4}), ("checksum", {"checksum": "x"}), ("more", {"more": 1}),
    (f"{2**50:,}", {"shape": [2**30, 2**20], "chunk": [1, 1]}),  # counted, not listed
    *(("manifest.json", {"whole": whole}) for whole in ({"step": "x"}, {"step": -1},
        {"format": "1"}, {"arrays": []}, {"versions": 1}, {"more": 1})),
    ("manifest.json", {"whole": {"config": "other"}, "digest": "0" * 64}),
]
# fmt: on


@pytest.mark.parametrize(("named", "changes"), FORGED)
def test_a_forged_manifest_is_damage(saved, named, changes):
    forge(saved, **changes)
    (said,) = inspection.glance(1, saved / "1").problems
    assert re.search(named, said) and inspection.damage(saved / "1")
    if named != f"{2**50:,}":  # it is of another shape than TREE
        with pytest.raises(Damaged, match=named):
            restored(saved)


def test_a_manifest_of_a_later_format_is_not_damage(saved):
    forge(saved, {"format": 99})
    with pytest.raises(ValueError, match=r"manifest\.json") as told:
        restored(saved)
    assert not isinstance(told.value, Damaged)


def test_the_array_on_the_device_is_compared_with_the_checksum(saved, monkeypatch):
    """A fault between the disk and the device: the chunks are right, the array is not."""
    read = Array.read
    monkeypatch.setattr(Array, "read", lambda *a: read(*a) + np.float32(1))
    with pytest.raises(Damaged, match="v"):
        restored(saved)


# Disks and processes that fail.


def test_an_error_of_the_system_is_raised_with_its_file(tmp_path):
    (tmp_path / "a").write_text("a file where a folder should be")
    with pytest.raises(NotADirectoryError) as told:
        Array(str(tmp_path / "a"), (4,), "float32", (4,)).write([((0,), np.zeros(4, np.float32))])
    assert told.value.filename == str(tmp_path / "a" / "c" / "0")
    with pytest.raises(OSError) as told, arrays._os_errors("/x"):
        raise ValueError(
            "RESOURCE_EXHAUSTED: Error writing local file \"/x/0\": [os_error_code='28']"
        )
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, "/x/0")


def on_fire(*_):
    raise OSError("disk on fire")


def lose_part(folder, args, write=writer.write_part):
    """A process writes to another disk: found at the save, not at the restore."""
    write(folder, args)
    for part in folder.glob("part-*.json"):
        part.unlink()


@pytest.mark.parametrize(
    ("where", "faults", "said"),
    [
        (Array, {"write": on_fire}, "on fire"),
        (writer, {"write_part": lose_part}, "0 of 1"),
        # Orbax says that a save is in progress when processes can't agree that it ended.
        (ocp.CheckpointManager,
         {"wait_until_finished": on_fire, "is_saving_in_progress": lambda _: True}, "on fire"),
    ],
)  # fmt: skip
def test_a_save_that_fails_leaves_the_one_before(saved, monkeypatch, where, faults, said):
    with Checkpoints(saved) as checkpoints:
        with monkeypatch.context() as patch:
            for name, fault in faults.items():
                patch.setattr(where, name, fault)
            with pytest.raises(OSError, match=said):
                checkpoints.save(2, TREE)
                checkpoints.wait()
        assert checkpoints.steps == [1]
        checkpoints.save(2, {"w": jnp.full(3, 2.0)})
        assert float(checkpoints.restore({"w": jnp.zeros(3)}).tree["w"][0]) == 2.0


def test_checksums_of_processes_are_added(saved, monkeypatch):
    known = Manifest.read(saved / "1" / "state")
    for rank, part in enumerate([{"w": 2**64 - 1, "v": 3}, {"w": 5, "v": 4}]):
        (saved / f"part-{rank:05d}.json").write_text(json.dumps(part))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    writer._write_manifest(saved, writer.Save(known, {}))
    found = Manifest.read(saved).arrays
    assert (found["w"].checksum, found["v"].checksum) == (4, 7)


HOLD = """
import sys
from zero_jax.checkpoint.checkpoints import Checkpoints
held = Checkpoints(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_raises_until_the_first_is_killed(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, **pipes, env=ENV, cwd=ROOT) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"{tmp_path}.*process {first.pid}"):
            Checkpoints(tmp_path)
        Checkpoints(tmp_path, read_only=True).close()
        first.kill()
    Checkpoints(tmp_path).close()


# Retention.


def test_the_latest_and_every_kth_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, {"w": jnp.full(3, step)})
        assert checkpoints.steps == [4, 7, 8]
        assert float(checkpoints.restore({"w": jnp.ones(3, int)}, 7).tree["w"][0]) == 7


def test_killed_while_deleting_it_leaves_whole_checkpoints(tmp_path):
    counts = ["0", "4", "8"]  # of files that are deleted before it is killed
    command = [sys.executable, str(ROOT / "tests" / "deleting_run.py"), str(tmp_path), *counts]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(counts), done.stdout + done.stderr
    like = {name: jnp.zeros(3, int) for name in ("a", "b", "c")}
    for folder in (tmp_path / count for count in counts):
        with Checkpoints(folder, read_only=True) as checkpoints:
            assert len(checkpoints.steps) >= 2
            for step in checkpoints.steps:
                tree = checkpoints.restore(like, step).tree
                assert all(np.all(np.asarray(x) == step) for x in tree.values())
        # The next run finishes deleting, and can save and discard the same steps again.
        with Checkpoints(folder, keep=2) as checkpoints:
            for step in range(checkpoints.latest + 1, 8):
                checkpoints.save(step, like)
            assert checkpoints.steps == [6, 7]
        assert not list((folder / retention.FOLDER).iterdir())


def test_later_checkpoints_are_set_aside_once(tmp_path):
    for name in ("3", "5", "12", "notes"):
        (tmp_path / name).mkdir()
    assert retention.set_aside(tmp_path, 3) == [5, 12]
    (tmp_path / "4").mkdir()
    assert retention.set_aside(tmp_path, 3) is None and (tmp_path / "4").exists()


def test_discarded_steps_are_deleted_and_failures_reported_once(tmp_path, monkeypatch, capsys):
    folder, rmdir = tmp_path / retention.FOLDER, os.rmdir
    for name in ("1/a", "1/b", "2/a"):
        (folder / name).mkdir(parents=True)

    def fails(path, **kwargs):
        if pathlib.Path(path).name == "a" and ("1." in str(path) or "dir_fd" in kwargs):
            raise PermissionError(13, "not yours", str(path))
        rmdir(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", fails)
        patch.setattr(retention, "_INTERVAL", 0.01)
        with contextlib.closing(retention.Sweeper(tmp_path)):
            time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(retention.FOLDER in line for line in lines)
    assert not list(folder.glob("*/b"))
    # The next run deletes them, and a step of the same number that it discards itself.
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TREE)
    assert not list(folder.iterdir())
