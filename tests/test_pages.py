"""The commands of README and docs/ run as they are printed, but for those that say what they lack.

A page is worked through from top to bottom in a copy of the repository, as a reader would.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from test_readme import PAGES, ROOT

BLOCK = re.compile(r"(<!-- ([^\n]*) -->\n)?```sh\n(.*?)```", re.DOTALL)
# Settings of these tests, which a reader has not.
OURS = ("XLA_FLAGS", "JAX_", "ZERO_JAX_CACHE", "PYTEST_", "PYTHONPATH")


def blocks(page):
    """(commands, what is said of them in a comment) of a page, block by block."""
    found = BLOCK.findall((ROOT / page).read_text())
    return [(block, said) for _, said, block in found]


def runs_here(said):
    """Whether a block is for this machine, and `.ci/run` does not run it itself."""
    return said not in ("test", "run by .ci/run") and not said.startswith("not run: ")


def compiles(block):
    return "--compile" in block or "plan meshes" in block


def commands(page, compiled):
    """What a page runs; what README has too is run for README."""
    done = {found for found, _ in blocks("README.md")} if page != "README.md" else set()
    found = [found for found, said in blocks(page) if runs_here(said) and found not in done]
    return [c for c in found if compiles(c) == compiled]


def work_through(found, folder):
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    env["PATH"] = f"{pathlib.Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = str(folder)
    for block in found:
        shell = ["bash", "-euo", "pipefail", "-c", block]
        ran = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, f"{block}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, compiled=False)])
def test_commands_run(page, tmp_path):
    work_through(commands(page, compiled=False), tmp_path)


@pytest.mark.compile
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, compiled=True)])
def test_commands_that_compile_for_gpus_run(page, tmp_path):
    work_through(commands(page, compiled=True), tmp_path)


def test_a_block_that_is_not_run_says_what_it_lacks():
    said = [s for page in PAGES for _, s in blocks(page) if s.startswith("not run: ")]
    assert said and all(re.match(r"not run: (needs|the test of this page) ", s) for s in said)
    others = {s for page in PAGES for _, s in blocks(page) if runs_here(s)}
    assert others <= {"", "train", "finetune"}  # a comment that is none would hide nothing


def test_what_is_installed_goes_into_an_environment_of_its_own():
    """And not into that of the tests."""
    found = [c for page in PAGES for both in (False, True) for c in commands(page, both)]
    assert all("-m venv" in block for block in found if "pip install" in block)


def test_a_command_that_fails_is_seen(tmp_path):
    with pytest.raises(AssertionError, match="false"):
        work_through(["false | true\n"], tmp_path)
