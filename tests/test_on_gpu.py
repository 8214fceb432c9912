"""The script that checks a GPU, on the CPU: verdicts, and the results that stay in the file."""

import json

import jax
import on_gpu
import pytest


def test_nan_has_not_passed():
    differences = (1.0, 1.5, float("nan"))
    assert [on_gpu.verdict("", x, 1.0)["passed"] for x in differences] == [True, False, False]


@pytest.mark.slow
def test_one_check_leaves_the_others_in_the_file(tmp_path):
    file = tmp_path / "found.json"
    row = {"check": "blocks", "found": [{"what": "", "apart": 2, "limit": 1, "passed": False}]}
    here = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    file.write_text(json.dumps({**here, "checks": [row, {"check": "checkpoints", "error": "x"}]}))
    assert on_gpu.main(["--json", str(file), "--only", "checkpoints", "options"]) == 1
    known = {row["check"]: row for row in json.loads(file.read_text())["checks"]}
    assert known.keys() == {"blocks", "checkpoints", "options"} and known["blocks"] == row
    assert [f["passed"] for f in known["checkpoints"]["found"]] == [True]
    assert on_gpu.main(["--json", str(file), "--only", "blocks"]) == 0
