"""Which mesh: of those that fit, the fastest on a roofline."""

import types

import pytest

from zero_jax.commands import plan as command
from zero_jax.plan import meshes

LIMIT = 100


def planned(mp, compiled, sizes, seconds):
    """A plan of one mesh, as far as it is looked at."""
    if mp == 16:
        raise ValueError("12 heads do not divide by 16")
    taken = seconds[mp]
    time = types.SimpleNamespace(seconds=taken, exposed_seconds=taken / 4, covered=0.5)
    return types.SimpleNamespace(
        total_bytes=sizes[mp],
        axes={"data": 64 // mp},
        time=time if compiled else None,
        countable=True,
        words_per_param=3.0,
    )


def compared(sizes, seconds, asked=None):
    def plan(mp, compiled):
        if asked is not None and compiled:
            asked.append(mp)
        return planned(mp, compiled, sizes, seconds)

    return list(meshes.compare(meshes.splits(64), plan, LIMIT))


def test_the_fastest_of_those_that_fit_is_named():
    asked = []
    sizes, seconds = {1: 180, 2: 120, 4: 90, 8: 70}, {1: 1.0, 2: 2.0, 4: 4.0, 8: 3.0}
    rows = compared(sizes, seconds, asked)
    assert asked == [2, 4, 8], "what is foretold far above the limit is not compiled"
    assert [row.why for row in rows] == [
        *("does not fit, as predicted", "does not fit", "", ""),
        "12 heads do not divide by 16",
    ]
    assert meshes.fastest(rows) is rows[3]
    said = meshes.format_meshes(rows)
    assert "fastest that fits" in said.splitlines()[4]
    assert "25%" in said and said.endswith("take model=8")


def test_where_none_fits_it_says_so():
    rows = compared(dict.fromkeys((1, 2, 4, 8), 200), dict.fromkeys((1, 2, 4, 8), 1.0))
    assert meshes.fastest(rows) is None
    assert "none fits" in meshes.format_meshes(rows)


def test_a_target_without_figures_is_refused(capsys):
    args = ["meshes", "--model", "nano", "--devices", "4", "--target", "cpu"]
    assert command.main([*args, "--memory-limit", "1"]) == 2
    assert "has no figures to compare meshes by" in capsys.readouterr().err


def test_what_meshes_does_not_take_is_refused(capsys):
    args = ["meshes", "--model", "nano", "--devices", "4", "--model-parallel", "2"]
    assert command.main(args) == 2
    assert "--model-parallel is not for meshes" in capsys.readouterr().err


@pytest.mark.compile
def test_the_command_compiles_and_recommends(capsys):
    args = ["--model", "nano", "--devices", "4", "--batch-per-device", "2", "--seq", "64"]
    assert command.main(["meshes", *args, "--reduce", "bf16"]) == 0
    said = capsys.readouterr().out
    assert said.count("fastest that fits") == 1
    assert "take model=" in said.splitlines()[-1]
