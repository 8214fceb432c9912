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

BLOCK = re.compile(r"(<!-- (.*) -->\n)?```sh\n(.*?)```", re.DOTALL)
# Settings of these tests, which a reader has not.
OURS = ("XLA_FLAGS", "JAX_", "ZERO_JAX_CACHE", "PYTEST_", "PYTHONPATH")


def blocks(page):
    """(commands, what is said of them in a comment) of a page."""
    found = BLOCK.findall((ROOT / page).read_text())
    return [(commands, said) for _, said, commands in found]


def runs_here(said):
    """Whether a block is for this machine: `.ci/run` runs the test command itself."""
    return said != "test" and not said.startswith("not run: ")


def compiles(commands):
    return "--compile" in commands or "plan meshes" in commands


def pages_with(wanted):
    return [p for p in PAGES if any(runs_here(s) and wanted(c) for c, s in blocks(p))]


def work_through(page, folder, wanted, done):
    """Runs the blocks of a page that are wanted, but for one that another page has run."""
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    env["PATH"] = f"{pathlib.Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = str(folder)
    for commands, said in blocks(page):
        if not (runs_here(said) and wanted(commands)) or commands in done:
            continue
        shell = ["bash", "-euo", "pipefail", "-c", commands]
        ran = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, f"{commands}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"


def of_readme(page):
    return {c for c, _ in blocks("README.md")} if page != "README.md" else set()


@pytest.mark.heavy
@pytest.mark.parametrize("page", pages_with(lambda commands: not compiles(commands)))
def test_commands_run(page, tmp_path):
    work_through(page, tmp_path, lambda commands: not compiles(commands), of_readme(page))


@pytest.mark.prove
@pytest.mark.parametrize("page", pages_with(compiles))
def test_commands_that_compile_for_gpus_run(page, tmp_path):
    work_through(page, tmp_path, compiles, of_readme(page))


def test_a_block_that_is_not_run_says_what_it_lacks():
    said = [s for page in PAGES for _, s in blocks(page) if not runs_here(s) and s != "test"]
    assert said and all(re.match(r"not run: (needs|the test of this page) ", s) for s in said)
    assert "needs" not in {s for page in PAGES for _, s in blocks(page) if runs_here(s)}


def test_a_command_that_fails_is_seen(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("```sh\nfalse | true\n```\n")
    monkeypatch.setattr("test_pages.blocks", lambda _: [("false | true\n", "")])
    with pytest.raises(AssertionError, match="false"):
        work_through("page.md", tmp_path / "copy", lambda _: True, set())
