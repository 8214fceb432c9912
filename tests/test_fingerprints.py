"""Step programs are as recorded; fingerprints depend on operations, not on names."""

import fingerprints
import jax
import jax.numpy as jnp
import pytest

RELEASES = {"0.10.2", "0.12.0.1"}  # of JAX, in CI


def test_a_quarter_of_the_programs_is_as_recorded():
    """One stage of each feature; `python tests/fingerprints.py`, in `.ci/run`, compares all."""
    releases, programs = fingerprints.recorded()["releases"], fingerprints.cases()
    assert releases.keys() >= RELEASES and len(programs) >= 40
    for release in releases.values():
        assert release["programs"].keys() == programs.keys()
        texts = {fingerprint.split()[0] for fingerprint in release["programs"].values()}
        assert len(texts) == len(programs), "two programs are equal"
    if jax.__version__ not in releases:
        pytest.skip(fingerprints.HOW)
    known = releases[jax.__version__]["programs"]
    chosen = [name for i, name in enumerate(programs) if (i + i // 4) % 4 == 0]
    found = {n: " ".join(map(fingerprints.sha256, programs[n].lowered())) for n in chosen}
    assert len(found) >= 10 and found == {name: known[name] for name in chosen}


def normalised(fn):
    x = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    text = jax.jit(fn).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    return text, fingerprints.normalised(text)


def test_names_and_copies_of_functions_change_nothing():
    @jax.jit
    def twice(x):
        return x + x

    @jax.jit
    def doubled(x):
        return x + x

    def called(first, second, names):
        out = jax.jit(lambda y: y / 2)
        return normalised(lambda x: {names[0]: second(first(x)), names[1]: out(x)})

    text, wanted = called(twice, twice, ("sum", "half"))
    other_text, got = called(twice, doubled, ("sum ", "a half"))
    assert text.count("func.func private") == 2 < other_text.count("func.func private")
    assert "twice" in text and "twice" not in wanted
    assert got == wanted


def test_a_record_names_the_changes_and_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "RECORDED", tmp_path / "fingerprints.json")
    fingerprints.RECORDED.write_text('{"releases": {"0.9.0": {}}, "history": []}')
    assert fingerprints.compare() == 1
    programs = {"same": "0 0", "cast": "1 0", "set": "2 0", "gone": "3 0"}
    fingerprints.record(programs, "first")
    now = {"same": "0 0", "cast": "9 0", "set": "2 9", "new": "4 0"}
    changed = fingerprints.differences(now, programs)
    assert [*changed.items()][:2] == [("cast", "program"), ("set", "compiler options")]
    assert fingerprints.record(now, "second") == [*changed] == ["cast", "set", "new", "gone"]
    history = [(x["reason"], x["changed"]) for x in fingerprints.recorded()["history"]]
    assert history == [("second", [*changed]), ("first", ["all"])]
