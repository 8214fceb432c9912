"""Step programs are as recorded; their fingerprints see operations, and not names."""

import json
import os
import subprocess
import sys

import fingerprints
import jax
import jax.numpy as jnp
import pytest

RELEASES = {"0.10.2", "0.12.0.1"}  # of JAX, in CI


def test_no_step_program_differs_from_its_record():
    """In a process of its own, since what earlier tests traced and configured must not matter."""
    if jax.__version__ not in RELEASES | fingerprints.recorded()["releases"].keys():
        pytest.skip(fingerprints.how_to_record())
    env = {name: x for name, x in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, fingerprints.__file__]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_programs_are_recorded_for_each_release_of_ci():
    releases, programs = fingerprints.recorded()["releases"], fingerprints.cases()
    assert releases.keys() >= RELEASES
    assert len(programs) >= 40
    for release in releases.values():
        assert release["programs"].keys() == programs.keys()
        texts = {fingerprint.split()[0] for fingerprint in release["programs"].values()}
        assert len(texts) == len(programs), "no program is there twice"


def normalised(fn):
    """Returns the text as JAX prints it, and as it is hashed."""
    x = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    text = jax.jit(fn).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    return text, fingerprints.normalised(text)


def test_names_and_copies_of_functions_leave_no_trace():
    def twice(x):
        return x + x

    def doubled(x):
        return x + x

    def halved(x):
        return x / 2

    def one_function(x):
        add = jax.jit(twice)
        return {"sum": add(add(x)), "half": jax.jit(halved)(x)}

    def another_name_for_each(y):
        divide = jax.jit(lambda z: z / 2)
        return {"sum ": jax.jit(doubled)(jax.jit(twice)(y)), "a half": divide(y)}

    (text, wanted), (other_text, got) = map(normalised, (one_function, another_name_for_each))
    assert text.count("func.func private") == 2
    assert other_text.count("func.func private") == 3
    assert wanted.count("func.func private") == 2
    assert "twice" in text
    assert "twice" not in wanted
    assert got == wanted


def test_a_cast_in_a_function_changes_the_name_by_which_it_is_called():
    def main_of(dtype):
        @jax.jit
        def inner(x):
            return (x.astype(dtype) * 3).astype(x.dtype)

        return normalised(lambda x: inner(inner(x)))[1].partition("func.func public")[2]

    assert main_of(jnp.bfloat16).count("call @_") == main_of(jnp.float32).count("call @_") == 2
    assert main_of(jnp.bfloat16) != main_of(jnp.float32)


def test_a_record_names_what_changed_with_the_reason_newest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "RECORDED", tmp_path / "fingerprints.json")
    fingerprints.RECORDED.write_text('{"releases": {}, "history": []}')
    programs = {"kept": "0 0", "cast": "1 0", "set": "2 0", "gone": "3 0"}
    fingerprints.record(programs, "first")
    now = {"kept": "0 0", "cast": "9 0", "set": "2 9", "new": "4 0"}
    assert fingerprints.differences(now, programs) == {
        "cast": "program",
        "set": "compiler options",
        "new": "not recorded",
        "gone": "recorded, no longer a program",
    }
    assert fingerprints.record(now, "second") == ["cast", "set", "new", "gone"]
    assert fingerprints.record(now, "nothing changed") == []
    data = json.loads(fingerprints.RECORDED.read_text())
    assert [(entry["reason"], entry["changed"]) for entry in data["history"]] == [
        ("second", ["cast", "set", "new", "gone"]),
        ("first", ["all"]),
    ]
    assert data["releases"][jax.__version__]["programs"] == now


def test_a_release_without_a_record_prints_how_to_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fingerprints, "RECORDED", tmp_path / "fingerprints.json")
    fingerprints.RECORDED.write_text('{"releases": {"0.9.0": {}}, "history": []}')
    assert fingerprints.compare() == 1
    assert f'--record "JAX {jax.__version__}"' in capsys.readouterr().out
