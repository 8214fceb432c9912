"""The examples run as their docstrings say, and change as few lines as they claim; the notebook."""

import ast
import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

DOCS, EXAMPLES = (Path(__file__).parent.parent / name for name in ("docs", "examples"))
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "held")
LOOPS = ("one_device", "whole"), ("sharded", "one_of_two", "adapters")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
CLAIM = re.compile(r"\+(\d+) -(\d+) lines")
HELD = re.compile(r"^cpu:(\d+): (.*) bytes$", re.MULTILINE)
LOSS = re.compile(r"loss.* (\d+\.\d+) -> (\d+\.\d+)")
RUN = """import multiprocessing, runpy, sys
import flax.linen, flax.nnx, jax, optax, zero_jax
names, sys.argv[1:] = sys.argv[1:], []
for name in names:
    print("##", name, flush=True)
    run = multiprocessing.get_context("fork").Process(
        target=runpy.run_path, args=(f"examples/{name}.py", None, "__main__"))
    run.start()
    run.join()
    if run.exitcode:
        sys.exit(run.exitcode)
"""
REST = [name for name in NAMES if name != "two_processes"]


def source(name):
    return (EXAMPLES / f"{name}.py").read_text()


def changed(name):
    """Returns how many lines of code are new and gone from one loop to the other, if it has two."""
    text = source(name)
    known = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    loops = [known[each] for names in LOOPS for each in names if each in known]
    if not loops:
        return None
    lines = text.splitlines()
    one, many = (lines[node.lineno : node.end_lineno - 1] for node in loops)
    found = [line for line in difflib.ndiff(one, many) if line[2:].strip()[:1] not in ("", "#")]
    new = sum(line.startswith("+ ") for line in found)
    # `import zero_jax` is new too, except where both loops use the library.
    return new + ("def whole(" not in text), sum(line.startswith("- ") for line in found)


@pytest.mark.parametrize("names", [["two_processes"], pytest.param(REST, marks=pytest.mark.slow)])
def test_examples_run(names):
    env = os.environ | {"PYTHONPATH": f"{EXAMPLES.parent}:{EXAMPLES}", "JAX_PLATFORMS": "cpu"}
    command, root = [sys.executable, "-c", RUN, *names], EXAMPLES.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rematerialization" not in done.stderr  # a warning of XLA
    printed = dict(part.split("\n", 1) for part in done.stdout.split("## ")[1:])
    for name in names:
        for first, last in LOSS.findall(printed[name]):
            assert float(last) < float(first)
        if name not in ("plan_own_model", "assert_in_ci"):
            assert LOSS.search(printed[name])
            by_device = HELD.findall(printed[name])
            # All devices hold as much as the first: states are spread evenly.
            assert len({device for device, _ in by_device}) == 4
            assert len({sizes for _, sizes in by_device}) == len(by_device) // 4


def test_docstrings_and_the_readme_claim_the_counted_lines():
    readme = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|.*\| *(.*?) *\|$", readme, re.MULTILINE)
    assert sorted(name for name, _ in rows) == NAMES and len(NAMES) == 11
    for name, claim in rows:
        docstring = ast.get_docstring(ast.parse(source(name)))
        assert f"    python examples/{name}.py" in docstring
        assert claim == ("+{} -{}".format(*changed(name)) if changed(name) else "")
        if changed(name):
            assert tuple(map(int, CLAIM.search(docstring).groups())) == changed(name)
    assert changed("haiku_mlp") == (5, 3)
    assert all((EXAMPLES / target).exists() for target in re.findall(r"\]\(([^)]+)\)", readme))


CHANGED = [("stage=3", "stage=2", "test_no_device_holds_more_than_its_share")]
MORE = '"block", grad_accum_steps=2'
CHANGED += [('"block"', MORE, "test_a_step_sends_three_elements_per_parameter")]


@pytest.mark.parametrize(("old", "new", "failing"), CHANGED)
def test_the_file_for_ci_fails_for_a_step_that_holds_or_sends_more(old, new, failing, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # tests have eight devices too
    names = {"__name__": "assert_in_ci"}
    exec(compile(source("assert_in_ci").replace(old, new), "assert_in_ci", "exec"), names)
    with pytest.raises(AssertionError):
        names[failing]()


def texts(path):
    """Returns the text of each cell; a stream may be stored in several parts."""
    cells = [cell.get("outputs", ()) for cell in json.loads(path.read_text())["cells"]]
    text = [[x for o in cell for x in o.get("text") or o["data"]["text/plain"]] for cell in cells]
    return ["".join(parts) for parts in text]


@pytest.mark.slow
def test_a_new_run_prints_what_is_stored(tmp_path):
    # XLA_FLAGS of other tests change the temporaries of a step.
    own = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(DOCS.parent)}
    command = [sys.executable, str(DOCS / "notebook.py"), str(tmp_path / "new.ipynb")]
    subprocess.run(command, env=os.environ | own, cwd=tmp_path, check=True)
    got, want = texts(tmp_path / "new.ipynb"), texts(DOCS / "memory.ipynb")
    assert len(got) == len(want) > 0
    for new, old in zip(got, want, strict=True):
        assert NUMBER.sub("#", new).split() == NUMBER.sub("#", old).split()
        # Temporaries differ by at most 10 % from one release of XLA to the next.
        rel = 0.1 if "temporaries" in old else 0
        got, want = ([float(n.replace(",", "")) for n in NUMBER.findall(x)] for x in (new, old))
        assert got == pytest.approx(want, rel=rel)


def test_no_times_or_paths_are_stored_and_every_cell_was_run_in_order():
    stored = json.loads((DOCS / "memory.ipynb").read_text())
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert stored["metadata"] == {"kernelspec": kernel}
    assert all(cell["metadata"] == {} for cell in stored["cells"])
    assert not re.search(r'"/(?:home|root|tmp|work|usr)|<ipython', json.dumps(stored))
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "image/png" in cells[-1]["outputs"][-1]["data"]
