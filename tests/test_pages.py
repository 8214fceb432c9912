"""The commands of README and docs/ run as printed, except those with a comment that says why not.

The commands of a page run from top to bottom in a copy of the repository, as a reader would.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from test_readme import PAGES, ROOT, text_of

BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```sh\n(.*?)```", re.DOTALL)
# Settings of these tests, which a reader does not have.
OURS = ("XLA_FLAGS", "JAX_", "ZERO_JAX_CACHE", "PYTEST_", "PYTHONPATH")


def blocks(page):
    """Returns (comment, commands) of a page, block by block."""
    return BLOCK.findall(text_of(page))


def commands(page, compiled):
    """Returns the commands that run here and that `.ci/run` or the README's test does not run."""
    done = {block for _, block in blocks("README.md")} if page != "README.md" else set()
    found = [
        block
        for comment, block in blocks(page)
        if block not in done and not comment.startswith(("test", "run by .ci/run", "not run: "))
    ]
    return [b for b in found if ("--compile" in b or "plan meshes" in b) == compiled]


def run_all(found, folder):
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
    run_all(commands(page, compiled=False), tmp_path)


@pytest.mark.compile
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, compiled=True)])
def test_commands_that_compile_for_gpus_run(page, tmp_path):
    run_all(commands(page, compiled=True), tmp_path)


def test_comments_say_why_a_block_is_not_run():
    comments = {comment for page in PAGES for comment, _ in blocks(page)}
    skipped = {comment for comment in comments if comment.startswith("not run: ")}
    assert skipped and all(re.match(r"not run: (needs|the test of this page) ", s) for s in skipped)
    assert comments - skipped <= {"", "test", "run by .ci/run", "train", "finetune"}
    # Nothing is installed into the environment of the tests.
    found = [block for page in PAGES for both in (False, True) for block in commands(page, both)]
    assert all("-m venv" in block for block in found if "pip install" in block)


def test_a_failing_command_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="false"):
        run_all(["false | true\n"], tmp_path)
