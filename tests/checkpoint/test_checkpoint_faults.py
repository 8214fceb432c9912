"""Checksums, damaged and forged checkpoints, disks that fail, killed runs, `inspect`, `verify`."""

import hashlib
import itertools
import json
import os
import pathlib
import re
import runpy
import shutil
import sys
import unittest.mock

import exchange
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zero_jax
from zero_jax.checkpoint import arrays, checkpoints, directory
from zero_jax.checkpoint.arrays import Damaged, StoredArray
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.manifest import Manifest
from zero_jax.commands.checkpoint import main
from zero_jax.sharding.checks import ReplicasDiffer, check_replicas

TREE = {"w": jnp.arange(12.0).reshape(3, 4), "v": jnp.arange(5.0)}
PIPES = ["state/arrays/0000/c/0", "state/manifest.json", "seal.json", "_CHECKPOINT_METADATA"]


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, TREE)
    return tmp_path


def restored(directory, like=TREE):
    return Checkpoints(directory, read_only=True).restore(like)


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
                assert trial % 3 or directory.summary(folder, read=True).problems
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


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(saved, name, sealed):
    path = saved / "1" / name
    path.unlink()
    os.mkfifo(path)
    if not sealed:
        (saved / "1" / "seal.json").unlink()
    assert directory.summary(saved / "1").nbytes > 0
    if not sealed and "state" not in name:
        assert restored(saved).step == 1
        return
    assert directory.summary(saved / "1", read=True).problems
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


FORGED = [  # named by the error, changes
    ("w .*0000.*0001", {"folder": "arrays/0000"}), (r"0000/\.\.", {"folder": "arrays/0000/.."}),
    ("/tmp", {"folder": "/tmp"}), ("elsewhere", {"folder": "../../elsewhere"}),
    ("state", {"folder": "state"}), ("folder", {"folder": None}), ("-4", {"shape": [3, -4]}),
    (str(2**40), {"shape": [2**40, 2**40]}), ("int", {"shape": 12}), ("3.0", {"shape": [3.0, 4]}),
    ("chunk", {"chunk": [3]}), ("0, 4", {"chunk": [0, 4]}), (str(2**62), {"chunk": [3, 2**62]}),
    ("int8", {"stored": "int8"}), ("no", {"dtype": "no", "stored": "no"}),
    ("4", {"dtype": 4, "stored": 4}), ("checksum", {"checksum": "x"}), ("more", {"more": 1}),
    (f"{2**50:,}", {"shape": [2**30, 2**20], "chunk": [1, 1]}),  # counted, not listed
    *(("manifest.json", {"whole": whole}) for whole in ({"step": "x"}, {"step": -1},
        {"format": "1"}, {"format": 99}, {"arrays": []}, {"versions": 1}, {"more": 1})),
    ("manifest.json", {"whole": {"config": "other"}, "digest": "0" * 64})]  # fmt: skip


@pytest.mark.parametrize(("named", "changes"), FORGED)
def test_a_forged_manifest_is_damage(saved, named, changes):
    forge(saved, **changes)
    for read in (False, True):
        (said,) = directory.summary(saved / "1", read=read).problems
        assert re.search(named, said)
    if named != f"{2**50:,}":  # it is of another shape than TREE
        with pytest.raises(ValueError, match=named) as told:
            restored(saved)
        # A manifest of a later format is not damaged.
        assert isinstance(told.value, Damaged) == (changes.get("whole") != {"format": 99})


def test_the_array_on_the_device_is_compared_with_the_checksum(saved, monkeypatch):
    """A fault between the disk and the device: the chunks are right, the array is not."""
    read = StoredArray.read
    monkeypatch.setattr(StoredArray, "read", lambda *a: read(*a) + np.float32(1))
    with pytest.raises(Damaged, match="v"):
        restored(saved)


def test_an_error_of_the_system_is_raised_with_its_file(tmp_path):
    (tmp_path / "a").write_text("a file where a folder should be")
    array = StoredArray("a", (4,), "float32", "float32", (4,))
    with pytest.raises(OSError, match=f'"{tmp_path}/a/c/0": .*Not a directory$'):
        array.write(tmp_path, [((0,), np.zeros(4, np.float32))])


def lose_part(folder, args, write=checkpoints.write_part):
    """A process writes to another disk: found at the save, not at the restore."""
    write(folder, args)
    for part in folder.glob("part-*.json"):
        part.unlink()


ON_FIRE = unittest.mock.Mock(side_effect=OSError("disk on fire"))
FAULTS = [  # Orbax says that a save is in progress when processes can't agree that it ended.
    (StoredArray, {"write": ON_FIRE}, "on fire"),
    (checkpoints, {"write_part": lose_part}, "0 of 1"),
    (ocp.CheckpointManager,
     {"wait_until_finished": ON_FIRE, "is_saving_in_progress": lambda _: True}, "on fire"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "faults", "said"), FAULTS)
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
    for rank, part in enumerate([{"w": 2**64 - 1, "v": 3}, {"w": 5, "v": 4}]):
        (saved / f"part-{rank:05d}.json").write_text(json.dumps(part))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    empty = checkpoints.SaveArgs(Manifest.read(saved / "1" / "state"), {})
    checkpoints._write_manifest(saved, empty)
    found = Manifest.read(saved).arrays
    assert (found["w"].checksum, found["v"].checksum) == (4, 7)


def test_later_checkpoints_are_set_aside_once(tmp_path):
    for name in ("3", "5", "12", "notes"):
        (tmp_path / name).mkdir()
    assert directory.set_aside(tmp_path, 3) == [5, 12]
    (tmp_path / "4").mkdir()
    assert directory.set_aside(tmp_path, 3) is None and (tmp_path / "4").exists()


@pytest.mark.parametrize("count", [0, 4, 8])
def test_a_run_that_stops_deleting_leaves_whole_checkpoints(tmp_path, monkeypatch, capsys, count):
    """It deletes so many files and no more, as where it is killed, and reports each step once."""
    left, like = [count], {name: jnp.zeros(3, int) for name in ("a", "b", "c")}

    def stops(delete):
        def deletes(path, **kwargs):
            if "dir_fd" in kwargs or str(path).startswith(f"{tmp_path}/1/"):
                left[0] -= 1
                if left[0] < 0:
                    raise PermissionError(13, "ended", str(path))
            delete(path, **kwargs)

        return deletes

    with monkeypatch.context() as patch:
        patch.setattr(directory, "_INTERVAL", 0.01)
        for name in ("unlink", "remove"):
            patch.setattr(os, name, stops(getattr(os, name)))
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            for step in range(1, 5):
                checkpoints.save(step, {name: jnp.full(3, step) for name in like})
    said = [line for line in capsys.readouterr().err.splitlines() if directory.DISCARDED in line]
    assert len(said) == 2 and left[0] < 0
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert len(checkpoints.steps) >= 2
        for step in checkpoints.steps:
            tree = checkpoints.restore(like, step).tree
            assert all(np.all(np.asarray(x) == step) for x in tree.values())
    # The next run finishes deleting, and can save and discard the same steps again.
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(checkpoints.latest + 1, 8):
            checkpoints.save(step, like)
        assert checkpoints.steps == [6, 7]
    assert not list((tmp_path / directory.DISCARDED).iterdir())


@pytest.mark.parametrize("slab", [1, 5, 1 << 20])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_the_checksum_is_that_of_all_elements(dtype, slab, monkeypatch):
    """The same sum in Python's integers."""
    monkeypatch.setattr(arrays, "_SLAB", slab)
    for shape in [(), (0,), (1,), (37,), (1, 37), (3, 0), (7, 5), (2, 3, 1, 9)]:
        piece = np.asarray(np.random.default_rng(0).integers(0, 200, shape)).astype(dtype)
        starts, total = tuple(range(3, 3 + len(shape))), 0
        for index in np.ndindex(shape):
            term = int(arrays.as_unsigned(piece)[index])
            for dim, (start, at) in enumerate(zip(starts, index, strict=True)):
                term *= int(arrays.factors(dim, start + at, 1)[0])
            total += term
        assert arrays.checksum(piece, starts) == total % arrays.MODULUS


def test_an_element_that_moves_or_changes_changes_the_checksum():
    piece = np.arange(12, dtype=np.float32).reshape(3, 4)
    others = [np.where(np.arange(12).reshape(3, 4) == at, -piece - 1, piece) for at in range(12)]
    sums = {arrays.checksum(each, (0, 0)) for each in (piece, piece[::-1].copy(), *others)}
    assert len(sums | {arrays.checksum(piece, (0, 1))}) == 3 + piece.size


@pytest.mark.parametrize(("stage", "replica"), [(0, 1), (1, 2), (3, 1), (3, 2)])
def test_one_bit_on_one_device_is_found_and_named(stage, replica):
    zero = zero_jax.Zero(zero_jax.make_mesh(replica=replica), stage)
    params = zero.shard({"w": np.ones((24, 5), np.float32), "b": np.ones(3, np.float32)})
    state, old = zero.optimizer(optax.adam(1e-3)).init(params), params["w"]
    every, found = len(jax.tree.leaves((params, state))), check_replicas((params, state))
    shards = old.addressable_shards
    parts = [np.array(shard.data) for shard in shards]
    parts[5].reshape(-1).view(np.uint32)[0] ^= 1
    placed = [jax.device_put(x, s.device) for x, s in zip(parts, shards, strict=True)]
    changed = jax.make_array_from_single_device_arrays(old.shape, old.sharding, placed)
    if (stage, replica) == (3, 1):  # the matrices have no replicas
        assert 0 < found <= every - 3 == check_replicas((params | {"w": changed}, state))
        return
    assert found == every
    with pytest.raises(ReplicasDiffer, match=r"w.*\b5\b") as error:
        check_replicas((params | {"w": changed}, state))
    if stage == 0:
        assert "[5]" in str(error.value) and "[0, 1, 2, 3, 4, 6, 7]" in str(error.value)


def test_chunks_are_even_parts_of_a_shard():
    shapes = [(36, 4096, 4096), (50304, 4096), (101,), (3, 50021, 999), (1 << 28,), (7, 5)]
    for shape, shards in itertools.product(shapes, [1, 2, 3, 8]):
        split = int(np.argmax(shape))
        held = [-(-n // shards) if d == split else n for d, n in enumerate(shape)]
        chunk = arrays.chunk_shape(shape, held, 4)
        assert all(c <= h for c, h in zip(chunk, held, strict=True))
        assert shards == 1 or held[split] % chunk[split] == 0, "or two processes write one chunk"
        assert np.prod(chunk) * 4 <= 1.2 * arrays.CHUNK_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 80])
def test_host_memory_is_that_of_the_shards_and_one_leaf(tmp_path, count):
    """`save` holds a state of 400 MiB once more, `restore` makes it and one leaf beside it."""

    def peak():
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10

    def assert_held(call):
        """Compares MiB that this process holds at most during a call with those before it."""
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is held
        before = peak()
        _kept = call(), checkpoints.wait()
        assert 390 < peak() - before < 400 + 150  # threads, code, and what the allocator keeps

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct(((400 << 18) // count,), jnp.float32, sharding=here)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"small": jnp.ones(3)})
        checkpoints.restore({"small": jnp.ones(3)})
        tree = jax.block_until_ready({f"w{name}": jnp.ones(like.shape) for name in range(count)})
        assert_held(lambda: checkpoints.save(2, tree))
        if count > 1:
            assert_held(lambda: checkpoints.restore(dict.fromkeys(tree, like)))


def save(folder, *steps, value=1.0):
    own = exchange.zero_on(3).shard({"w": np.arange(21.0, dtype=np.float32).reshape(7, 3)})
    params = {"w": jnp.arange(21.0).reshape(7, 3) * value, "b": jnp.ones(3, jnp.bfloat16)}
    tree = {"params": params, "n": 3, "key": jax.random.key(0), "none": jnp.zeros((0, 2))}
    for step in steps:
        exchange.save(folder, tree | {"sharded": own}, {"width": 3}, step)
    return folder


@pytest.fixture
def run(capsys):
    """Returns the exit code and the output."""
    return lambda *args: (main([str(arg) for arg in args]), "".join(capsys.readouterr()))


def chunk_of(folder, name):
    entry = Checkpoints(folder, read_only=True).manifest(12).arrays[name]
    return next(p for p in files_of(folder / "12" / "state" / entry.folder) if "c" in p.parts)


def test_inspect_shows_steps_and_the_tree_and_names_steps_that_do_not_exist(tmp_path, run):
    two = save(tmp_path / "run", 1, 12)
    code, said = run("inspect", two)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert code == 0 and all(any(line.startswith(f"step {n} ") for line in lines) for n in (1, 12))
    assert {"params/w float32 (7, 3)", "params/b bfloat16 (3,)", "none float32 (0, 2)"} <= {*lines}
    assert f"key key<{jax.random.key_impl(jax.random.key(0))}> (2,)" in lines  # its words
    assert '{"width": 3}' in said and f"jax {jax.__version__}" in said and "zero_jax" in said
    assert run("inspect", two, "--step", 1)[0] == 0
    code, said = run("inspect", two, "--step", 2)
    assert code == 2 and "step 2" in said and "1, 12" in said
    for command in ("verify", "inspect"):
        code, said = run(command, two / "none")
        assert code == 2 and str(two / "none") in said and not (two / "none").exists()


def test_verify_names_every_damaged_array(tmp_path, run, capsys, monkeypatch):
    two = save(tmp_path / "run", 1, 12)
    code, said = run("verify", two)
    assert code == 0 and "step 1: " in said and "step 12: " in said
    path = chunk_of(two, "params/b")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    # Each chunk of the other array is right, and together they are wrong.
    other = save(tmp_path / "other", 12, value=2.0)
    shutil.copy(chunk_of(other, "params/w"), chunk_of(two, "params/w"))
    code, said = run("verify", two)
    lines = {line.split()[1]: line for line in said.splitlines() if line[:4] == "step"}
    assert code == 1 and "DAMAGED" in lines["12:"] and "DAMAGED" not in lines["1:"]
    assert "params/w: its checksum" in said and "params/b" in said and "sharded" not in said
    monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", str(two), "--step", "1"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("zero_jax.checkpoint", run_name="__main__")
    assert "step 12" not in capsys.readouterr().out


def test_inspect_notices_missing_files_without_reading_arrays(tmp_path, run, monkeypatch):
    two = save(tmp_path / "run", 1, 12)
    monkeypatch.setattr(arrays.StoredArray, "read", None)
    path = chunk_of(two, "params/w")
    good = path.read_bytes()
    for change in (lambda: path.write_bytes(good[:-1]), path.unlink):
        change()
        code, said = run("inspect", two)
        assert code == 1 and "INCOMPLETE" in said and "params/w" in said
    path.write_bytes(good)
    (two / "12" / "seal.json").unlink()
    (two / "13.orbax-checkpoint-tmp").mkdir()
    code, said = run("inspect", two)
    assert code == 0 and "seal" in said and "13.orbax-checkpoint-tmp" in said
    monkeypatch.undo()
    (two / "12" / "state" / "manifest.json").unlink()
    for command in ("verify", "inspect"):
        code, said = run(command, two)
        assert code == 1 and "manifest.json" in said
