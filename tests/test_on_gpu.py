"""The script that checks a GPU, on the CPU that is here: what it says, keeps and calls passed."""

import json

import jax
import on_gpu
import pytest


def test_what_is_not_a_number_has_not_passed():
    assert on_gpu.Found("", 1.0, 1.0).passed
    assert not on_gpu.Found("", 1.5, 1.0).passed
    assert not on_gpu.Found("", float("nan"), 1.0).passed


@pytest.mark.slow
def test_a_check_asked_for_alone_leaves_the_others_in_the_file(tmp_path, capsys):
    file = tmp_path / "found.json"
    row = {"check": "blocks", "found": [{"what": "", "apart": 2, "limit": 1, "passed": False}]}
    here = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    file.write_text(json.dumps({**here, "checks": [row, {"check": "checkpoints", "error": "x"}]}))
    assert on_gpu.main(["--json", str(file), "--only", "checkpoints", "options"]) == 1
    known = {row["check"]: row for row in json.loads(file.read_text())["checks"]}
    assert known.keys() == {"blocks", "checkpoints", "options"} and known["blocks"] == row
    assert [f["passed"] for f in known["checkpoints"]["found"]] == [True]
    assert "1 of 3 checks" not in capsys.readouterr().out
    assert on_gpu.main(["--json", str(file), "--only", "blocks"]) == 0
