"""`python -m zero_jax.checkpoint`: `inspect` and `verify`."""

import runpy
import shutil
import sys

import exchange
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange import zero_on
from test_checkpoint_faults import files_of

from zero_jax.checkpoint import arrays
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.commands.checkpoint import main


def save(folder, *steps, value=1.0):
    own = zero_on(3).shard({"w": np.arange(21.0, dtype=np.float32).reshape(7, 3)})
    params = {"w": jnp.arange(21.0).reshape(7, 3) * value, "b": jnp.ones(3, jnp.bfloat16)}
    tree = {"params": params, "n": 3, "key": jax.random.key(0), "none": jnp.zeros((0, 2))}
    for step in steps:
        exchange.save(folder, tree | {"sharded": own}, {"width": 3}, step)
    return folder


@pytest.fixture
def two(tmp_path):
    return save(tmp_path / "run", 1, 12)


@pytest.fixture
def run(capsys):
    """Returns the exit code and the output."""
    return lambda *args: (main([str(arg) for arg in args]), "".join(capsys.readouterr()))


def chunk_of(folder, name):
    with Checkpoints(folder, read_only=True) as checkpoints:
        entry = checkpoints.manifest(12).arrays[name]
    return next(p for p in files_of(folder / "12" / "state" / entry.folder) if "c" in p.parts)


def test_inspect_shows_steps_and_the_tree_and_names_steps_that_do_not_exist(two, run):
    code, said = run("inspect", two)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert code == 0
    assert all(any(line.startswith(f"step {n} ") for line in lines) for n in (1, 12))
    assert {"params/w float32 (7, 3)", "params/b bfloat16 (3,)", "none float32 (0, 2)"} <= {*lines}
    assert f"key key<{jax.random.key_impl(jax.random.key(0))}> (2,)" in lines  # its words
    assert '{"width": 3}' in said and f"jax {jax.__version__}" in said and "zero_jax" in said
    assert run("inspect", two, "--step", 1)[0] == 0
    code, said = run("inspect", two, "--step", 2)
    assert code == 2 and "step 2" in said and "1, 12" in said
    for command in ("verify", "inspect"):
        code, said = run(command, two / "none")
        assert code == 2 and str(two / "none") in said and not (two / "none").exists()


def test_verify_names_every_damaged_array(two, run, capsys, monkeypatch):
    code, said = run("verify", two)
    assert code == 0 and "step 1: " in said and "step 12: " in said
    path = chunk_of(two, "params/b")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    # Each chunk of the other array is right, and together they are wrong.
    other = save(two.parent / "other", 12, value=2.0)
    shutil.copy(chunk_of(other, "params/w"), chunk_of(two, "params/w"))
    code, said = run("verify", two)
    lines = {line.split()[1]: line for line in said.splitlines() if line[:4] == "step"}
    assert code == 1 and "DAMAGED" in lines["12:"] and "DAMAGED" not in lines["1:"]
    assert "params/w: its checksum" in said and "params/b" in said and "sharded" not in said
    monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", str(two), "--step", "1"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("zero_jax.checkpoint", run_name="__main__")
    assert "step 12" not in capsys.readouterr().out


def test_verify_holds_one_chunk_at_a_time(tmp_path, run, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 1 << 12)
    exchange.save(tmp_path, {"w": np.arange(50 * 33 * 7, dtype=np.float32).reshape(50, 33, 7)})
    parts, read = [], arrays.Array.read
    monkeypatch.setattr(arrays.Array, "read", lambda *args: parts.append(read(*args)) or parts[-1])
    assert run("verify", tmp_path)[0] == 0
    sizes = [part.nbytes for part in parts]
    assert sum(sizes) == 4 * 50 * 33 * 7 and max(sizes) <= 1 << 12 and len(sizes) > 4


def test_inspect_notices_missing_files_without_reading_arrays(two, run, monkeypatch):
    monkeypatch.setattr(arrays.Array, "read", None)
    path = chunk_of(two, "params/w")
    good = path.read_bytes()
    for change in (lambda: path.write_bytes(good[:-1]), path.unlink):
        change()
        code, said = run("inspect", two)
        assert code == 1 and "NOT WHOLE" in said and "params/w" in said
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
