"""`python -m zero_jax.checkpoint`: what is there, and whether it is as it was written."""

import os
import pathlib
import shutil
import subprocess
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

ROOT = pathlib.Path(__file__).parents[2]


def tree(value=1.0):
    params = {"w": jnp.arange(21.0).reshape(7, 3) * value, "b": jnp.ones(3, jnp.bfloat16)}
    return {"params": params, "n": 3, "key": jax.random.key(0), "none": jnp.zeros((0, 2))}


@pytest.fixture
def two(tmp_path):
    """Checkpoints of steps 1 and 12; arrays over three devices."""
    params = zero_on(3).shard({"w": np.arange(21.0, dtype=np.float32).reshape(7, 3)})
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 12):
            checkpoints.save(step, tree() | {"at rest": params}, config={"width": 3})
    return tmp_path / "run"


def run(*args):
    return main([str(arg) for arg in args])


def test_inspect_shows_steps_and_the_tree(two, capsys):
    assert run("inspect", two) == 0
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert any(line.startswith("step 1 ") and line.endswith("whole") for line in lines)
    assert any(line.startswith("step 12 ") and line.endswith("whole") for line in lines)
    assert "params/w float32 (7, 3)" in lines
    assert "params/b bfloat16 (3,)" in lines
    assert f"key key<{jax.random.key_impl(jax.random.key(0))}> (2,)" in lines  # its words
    assert "none float32 (0, 2)" in lines
    assert any('{"width": 3}' in line for line in lines)
    assert f"jax {jax.__version__}" in said and "zero_jax" in said
    assert run("inspect", two, "--step", 1) == 0
    assert run("inspect", two, "--step", 2) == 2
    assert "step 2: there are steps 1, 12" in capsys.readouterr().err


def test_verify_is_silent_about_nothing(two, capsys):
    assert run("verify", two) == 0
    said = capsys.readouterr().out
    assert "step 1: " in said and "step 12: " in said
    assert run("verify", two, "--step", 12) == 0
    assert "step 1:" not in capsys.readouterr().out


@pytest.mark.parametrize("args", [("verify",), ("inspect",)])
def test_a_folder_without_checkpoints_is_an_error(tmp_path, capsys, args):
    assert run(*args, tmp_path / "none") == 2
    assert "does not hold a checkpoint" in capsys.readouterr().err
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
            assert run("verify", two) == 1, f"{path}, byte {at} of {len(good)}: not noticed"
            said = capsys.readouterr().out.splitlines()
            assert next(line for line in said if line.startswith("step 12")).endswith("DAMAGED")
            assert next(line for line in said if line.startswith("step 1:")).endswith("as written")
        path.unlink()
        assert run("verify", two) == (0 if path.name == "seal.json" else 1)
        path.write_bytes(good)
        capsys.readouterr()
    assert run("verify", two) == 0


def chunk_of(folder, name):
    with Checkpoints(folder, read_only=True) as checkpoints:
        entry = checkpoints.manifest(12).arrays[name]
    return next(p for p in files_of(folder / "12" / "state" / entry.folder) if "c" in p.parts)


def test_damaged_arrays_are_all_named(two, capsys):
    for name in ("params/w", "params/b"):
        path = chunk_of(two, name)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert run("verify", two) == 1
    said = capsys.readouterr().out
    assert "params/w" in said and "params/b" in said and "at rest" not in said


def test_the_checksum_of_the_array_is_compared_too(two, capsys, monkeypatch):
    """Chunks that are right each, and wrong together."""
    other = Checkpoints(two.parent / "other")
    other.save(12, tree(2.0))
    other.close()
    shutil.copy(chunk_of(two.parent / "other", "params/w"), chunk_of(two, "params/w"))
    assert run("verify", two) == 1
    assert "params/w: its checksum differs" in capsys.readouterr().out


def test_verify_holds_one_chunk_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 1 << 12)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.arange(50 * 33 * 7, dtype=np.float32).reshape(50, 33, 7)})
    sizes, read = [], arrays.Array.read

    def reading(*args):
        sizes.append(read(*args).nbytes)
        return read(*args)

    monkeypatch.setattr(arrays.Array, "read", reading)
    assert run("verify", tmp_path) == 0
    assert sum(sizes) == 4 * 50 * 33 * 7 and max(sizes) <= 1 << 12 and len(sizes) > 4


def test_inspect_sees_missing_and_cut_chunks_without_reading(two, capsys, monkeypatch):
    monkeypatch.setattr(arrays.Array, "read", None)
    path = chunk_of(two, "params/w")
    good = path.read_bytes()
    for change in (lambda: path.write_bytes(good[:-1]), path.unlink):
        change()
        assert run("inspect", two) == 1
        said = capsys.readouterr().out
        assert "NOT WHOLE" in said and "params/w" in said
    path.write_bytes(good)
    (two / "12" / "seal.json").unlink()
    (two / "13.orbax-checkpoint-tmp").mkdir()
    assert run("inspect", two) == 0
    said = capsys.readouterr().out
    assert "whole, without its seal" in said
    assert "13.orbax-checkpoint-tmp" in said


def test_a_step_without_a_manifest_is_not_passed_over(two, capsys):
    (two / "12" / "state" / "manifest.json").unlink()
    assert run("verify", two) == 1
    assert "manifest.json" in capsys.readouterr().out
    assert run("inspect", two) == 1


def test_chunks_of_an_array_are_its_files(two):
    with Checkpoints(two, read_only=True) as checkpoints:
        manifest = checkpoints.manifest()
    for entry in manifest.arrays.values():
        folder = two / "12" / "state" / entry.folder
        found = {p for p in files_of(folder) if p.name != "zarr.json"}
        assert found == {folder / chunk.path for chunk in inspection.chunks(entry)}


def test_it_runs_as_a_module(two):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "zero_jax.checkpoint", "verify", str(two)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "step 12" in done.stdout and not done.stderr
