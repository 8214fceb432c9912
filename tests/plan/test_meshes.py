"""Which mesh: of those that fit, the fastest on a roofline."""

import types

import pytest

from zero_jax.commands import plan as command
from zero_jax.plan import meshes

FITS = {1: 180, 2: 120, 4: 90, 8: 70}


@pytest.mark.parametrize(
    ("sizes", "compiled", "why", "fastest"),
    [
        (FITS, [2, 4, 8], ["does not fit, as predicted", "does not fit", "", ""], 3),
        (dict.fromkeys(FITS, 200), [], ["does not fit, as predicted"] * 4, None),
    ],
)
def test_the_fastest_of_those_that_fit_is_named(sizes, compiled, why, fastest):
    """For 64 devices and 100 bytes; far above the limit nothing is compiled."""
    seconds, asked = {1: 1.0, 2: 2.0, 4: 4.0, 8: 3.0}, []

    def plan(mp, compile):
        if mp == 16:
            raise ValueError("12 heads do not divide by 16")
        asked.extend([mp] * compile)
        taken = seconds[mp]
        time = types.SimpleNamespace(seconds=taken, exposed_seconds=taken / 4, covered=0.5)
        return types.SimpleNamespace(
            total_bytes=sizes[mp],
            axes={"data": 64 // mp},
            time=time if compile else None,
            countable=True,
            words_per_param=3.0,
        )

    rows = list(meshes.compare(meshes.splits(64), plan, 100))
    assert asked == compiled
    assert [row.why for row in rows] == [*why, "12 heads do not divide by 16"]
    assert meshes.fastest(rows) is (rows[fastest] if fastest else None)
    said = meshes.format_meshes(rows)
    if fastest:
        assert "fastest that fits" in said.splitlines()[4]
        assert "25%" in said and said.endswith("take model=8")
    else:
        assert "none fits" in said


@pytest.mark.compile
def test_the_command_compiles_and_recommends(capsys):
    args = ["--model", "nano", "--devices", "4", "--batch-per-device", "2", "--seq", "64"]
    assert command.main(["meshes", *args, "--reduce", "bf16"]) == 0
    said = capsys.readouterr().out
    assert said.count("fastest that fits") == 1
    assert "take model=" in said.splitlines()[-1]
