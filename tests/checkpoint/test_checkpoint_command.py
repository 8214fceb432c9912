"""`python -m zero_jax.checkpoint`: `inspect` and `verify`."""

import runpy
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint_faults import files_of
from test_checkpoints import zero_on

from zero_jax.checkpoint import arrays, inspection
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.commands.checkpoint import main


def tree(value=1.0):
    params = {"w": jnp.arange(21.0).reshape(7, 3) * value, "b": jnp.ones(3, jnp.bfloat16)}
    return {"params": params, "n": 3, "key": jax.random.key(0), "none": jnp.zeros((0, 2))}


@pytest.fixture(scope="module")
def _two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    params = zero_on(3).shard({"w": np.arange(21.0, dtype=np.float32).reshape(7, 3)})
    with Checkpoints(folder) as checkpoints:
        for step in (1, 12):
            checkpoints.save(step, tree() | {"sharded": params}, config={"width": 3})
    return folder


@pytest.fixture
def two(_two, tmp_path):
    """Checkpoints of steps 1 and 12; arrays over three devices."""
    return shutil.copytree(_two, tmp_path / "run")


def run(capsys, *args):
    """The exit code, the output and the errors."""
    code = main([str(arg) for arg in args])
    return code, *capsys.readouterr()


def test_inspect_shows_steps_and_the_tree(two, capsys):
    code, said, _ = run(capsys, "inspect", two)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert code == 0
    assert all(any(line.startswith(f"step {n} ") for line in lines) for n in (1, 12))
    assert {"params/w float32 (7, 3)", "params/b bfloat16 (3,)", "none float32 (0, 2)"} <= {*lines}
    assert f"key key<{jax.random.key_impl(jax.random.key(0))}> (2,)" in lines  # its words
    assert any('{"width": 3}' in line for line in lines)
    assert f"jax {jax.__version__}" in said and "zero_jax" in said
    assert run(capsys, "inspect", two, "--step", 1)[0] == 0
    code, _, error = run(capsys, "inspect", two, "--step", 2)
    assert code == 2 and "step 2" in error and "1, 12" in error


def test_verify_reads_one_step_or_all(two, capsys, monkeypatch):
    code, said, _ = run(capsys, "verify", two)
    assert code == 0 and "step 1: " in said and "step 12: " in said
    monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", str(two), "--step", "12"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("zero_jax.checkpoint", run_name="__main__")
    said = capsys.readouterr().out
    assert "step 12:" in said and "step 1:" not in said


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_folder_without_checkpoints_is_an_error(tmp_path, capsys, command):
    code, _, error = run(capsys, command, tmp_path / "none")
    assert code == 2 and str(tmp_path / "none") in error
    assert not (tmp_path / "none").exists()


def test_verify_notices_every_flipped_bit_and_names_the_step(two, capsys):
    rng = np.random.default_rng(0)
    for path in files_of(two / "12"):
        good = path.read_bytes()
        for trial in range(3):
            at = int(rng.integers(len(good)))
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(good[:at] if trial == 2 else bad)
            code, said, _ = run(capsys, "verify", two)
            assert code == 1, f"{path}, byte {at} of {len(good)}: not noticed"
            lines = {line.split()[1]: line for line in said.splitlines() if line[:4] == "step"}
            assert "DAMAGED" in lines["12:"] and "DAMAGED" not in lines["1:"]
        path.unlink()
        assert run(capsys, "verify", two)[0] == (0 if path.name == "seal.json" else 1)
        path.write_bytes(good)
    assert run(capsys, "verify", two)[0] == 0


def chunk_of(folder, name):
    with Checkpoints(folder, read_only=True) as checkpoints:
        entry = checkpoints.manifest(12).arrays[name]
    return next(p for p in files_of(folder / "12" / "state" / entry.folder) if "c" in p.parts)


def test_damaged_arrays_are_all_named(two, capsys):
    for name in ("params/w", "params/b"):
        path = chunk_of(two, name)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, said, _ = run(capsys, "verify", two)
    assert code == 1 and "params/w" in said and "params/b" in said and "sharded" not in said


def test_the_checksum_of_the_array_is_compared_too(two, capsys):
    """Each chunk is right, and together they are wrong."""
    with Checkpoints(two.parent / "other") as other:
        other.save(12, tree(2.0))
    shutil.copy(chunk_of(two.parent / "other", "params/w"), chunk_of(two, "params/w"))
    code, said, _ = run(capsys, "verify", two)
    assert code == 1 and "params/w" in said and "checksum" in said


def test_verify_holds_one_chunk_at_a_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 1 << 12)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.arange(50 * 33 * 7, dtype=np.float32).reshape(50, 33, 7)})
    sizes, read = [], arrays.Array.read

    def reading(*args):
        sizes.append(read(*args).nbytes)
        return read(*args)

    monkeypatch.setattr(arrays.Array, "read", reading)
    assert run(capsys, "verify", tmp_path)[0] == 0
    assert sum(sizes) == 4 * 50 * 33 * 7 and max(sizes) <= 1 << 12 and len(sizes) > 4


def test_inspect_notices_missing_files_without_reading_arrays(two, capsys, monkeypatch):
    monkeypatch.setattr(arrays.Array, "read", None)
    path = chunk_of(two, "params/w")
    good = path.read_bytes()
    for change in (lambda: path.write_bytes(good[:-1]), path.unlink):
        change()
        code, said, _ = run(capsys, "inspect", two)
        assert code == 1 and "NOT WHOLE" in said and "params/w" in said
    path.write_bytes(good)
    (two / "12" / "seal.json").unlink()
    (two / "13.orbax-checkpoint-tmp").mkdir()
    code, said, _ = run(capsys, "inspect", two)
    assert code == 0 and "seal" in said and "13.orbax-checkpoint-tmp" in said
    (two / "12" / "state" / "manifest.json").unlink()
    for command in ("verify", "inspect"):
        code, said, _ = run(capsys, command, two)
        assert code == 1 and "manifest.json" in said


def test_chunks_of_an_array_are_its_files(two):
    with Checkpoints(two, read_only=True) as checkpoints:
        manifest = checkpoints.manifest()
    for entry in manifest.arrays.values():
        folder = two / "12" / "state" / entry.folder
        found = {p for p in files_of(folder) if p.name != "zarr.json"}
        assert found == {folder / chunk.path for chunk in inspection.chunks(entry)}
