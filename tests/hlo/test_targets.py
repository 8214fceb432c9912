"""Reports of a compiler process for absent devices, and the targets."""

import subprocess
import types

import pytest

from zero_jax.hlo import prove, targets

H100 = targets.target("h100")
NO_KERNEL = "No supported config found for HLO: %x"


# fmt: off
ENDS = [  # exit code, what is printed, runs, error
    (1, NO_KERNEL, 2, None, ""),  # products are compiled as a library's
    (1, "x", 1, RuntimeError, "h100 (.|\n)*x"),
    (-6, "x", 1, ValueError, "h100 .*-6(.|\n)*pip install"),
    (1, "no ptxas here", 1, ValueError, "ptxas(.|\n)*pip install"),
    (None, "", 1, RuntimeError, "h100 .* 1 s"),
]
# fmt: on


@pytest.mark.parametrize(("code", "said", "runs", "error", "words"), ENDS)
def test_how_a_compiler_ends(code, said, runs, error, words, monkeypatch, tmp_path):
    tried = []

    def run(command, env, timeout, **_):
        tried.append(env["XLA_FLAGS"])
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return types.SimpleNamespace(returncode=0 if len(tried) == 2 else code, stderr=said)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(error, match=words) if error else pytest.warns(UserWarning, match="h100"):
        prove._run_child(tmp_path, H100, 8, 1.0)
    assert len(tried) == runs
    assert ("triton_gemm=false" in tried[-1]) == (runs == 2)


def test_devices_fill_hosts_or_a_box():
    cases = [("h100", 64, "8x1x8"), ("h100", 4, "1x1x4"), ("v5p", 64, "4x4x4"), ("v5p", 8, "2x2x2")]
    for name, devices, want in cases:
        target = targets.target(name)
        assert targets.topology(target, devices) == want
        assert targets.topology(target, devices, f"1X1X{devices}") == f"1x1x{devices}"
    assert prove.check(targets.target("cpu"), 64) == ""
