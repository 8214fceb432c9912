"""Step programs are as recorded; fingerprints depend on operations, not on names."""

import json
import os
import subprocess
import sys

import fingerprints
import jax
import jax.numpy as jnp
import pytest

RELEASES = {"0.10.2", "0.12.0.1"}  # of JAX, in CI
KNOWN = jax.__version__ in RELEASES | fingerprints.recorded()["releases"].keys()
recorded_release = pytest.mark.skipif(not KNOWN, reason=fingerprints.how_to_record())


@recorded_release
def test_one_program_of_each_feature_is_as_recorded(monkeypatch):
    cases = fingerprints.cases()
    names = [f"{name}, stage {i % 4}" for i, name in enumerate(fingerprints.features())]
    names.append("int8 gather and int4 scatter, stage 3")
    monkeypatch.setattr(fingerprints, "cases", lambda: {name: cases[name] for name in names})
    programs = fingerprints.recorded()["releases"][jax.__version__]["programs"]
    known = {name: programs[name] for name in names}
    assert fingerprints.differences(fingerprints.fingerprints(), known) == {}


@pytest.mark.slow
@recorded_release
def test_every_program_is_as_recorded():
    """In a process of its own, without the settings and caches of other tests."""
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
        assert len(texts) == len(programs), "two programs are equal"


def normalised(fn):
    """Returns the text that JAX prints, and the text that is hashed."""
    x = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    text = jax.jit(fn).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    return text, fingerprints.normalised(text)


def test_names_and_copies_of_functions_change_nothing():
    def twice(x):
        return x + x

    def doubled(x):
        return x + x

    def one_function(x):
        add = jax.jit(twice)
        return {"sum": add(add(x)), "half": jax.jit(lambda y: y / 2)(x)}

    def another_name_for_each(y):
        half = jax.jit(lambda z: z / 2)(y)
        return {"sum ": jax.jit(doubled)(jax.jit(twice)(y)), "a half": half}

    (text, wanted), (other_text, got) = map(normalised, (one_function, another_name_for_each))
    assert text.count("func.func private") == 2 < other_text.count("func.func private")
    assert "twice" in text and "twice" not in wanted
    assert got == wanted


def test_a_cast_in_a_function_changes_the_name_in_its_calls():
    def main_of(dtype):
        inner = jax.jit(lambda x: (x.astype(dtype) * 3).astype(x.dtype))
        return normalised(lambda x: inner(inner(x)))[1].partition("func.func public")[2]

    assert main_of(jnp.bfloat16).count("call @_") == main_of(jnp.float32).count("call @_") == 2
    assert main_of(jnp.bfloat16) != main_of(jnp.float32)


def test_a_record_names_the_changes_and_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fingerprints, "RECORDED", tmp_path / "fingerprints.json")
    fingerprints.RECORDED.write_text('{"releases": {"0.9.0": {}}, "history": []}')
    assert fingerprints.compare() == 1
    assert f'--record "JAX {jax.__version__}"' in capsys.readouterr().out
    programs = {"same": "0 0", "cast": "1 0", "set": "2 0", "gone": "3 0"}
    fingerprints.record(programs, "first")
    now = {"same": "0 0", "cast": "9 0", "set": "2 9", "new": "4 0"}
    changed = fingerprints.differences(now, programs)
    assert list(changed) == ["cast", "set", "new", "gone"]
    assert changed["cast"] == "program" and changed["set"] == "compiler options"
    assert fingerprints.record(now, "second") == list(changed)
    assert fingerprints.record(now, "nothing changed") == []
    data = json.loads(fingerprints.RECORDED.read_text())
    history = [(entry["reason"], entry["changed"]) for entry in data["history"]]
    assert history == [("second", list(changed)), ("first", ["all"])]
    assert data["releases"][jax.__version__]["programs"] == now
