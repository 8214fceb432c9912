"""The examples: each runs as its first lines say, holds what it prints, and changes as few lines as
it claims."""

import ast
import difflib
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "held")
ONE, MANY = ("one_device", "whole"), ("sharded", "one_of_two", "adapters")
CLAIM = re.compile(r"\+(\d+) -(\d+) lines")
HELD = re.compile(r"^cpu:(\d+): (.*) bytes$", re.MULTILINE)
LOSS = re.compile(r"loss.* (\d+\.\d+) -> (\d+\.\d+)")


def source(name):
    return (EXAMPLES / f"{name}.py").read_text()


def run(*command, cwd=EXAMPLES.parent):
    """What a command prints; with the settings of XLA by which tests compile in less time."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A newcomer should not have to learn what XLA means by it.
    assert "rematerialization" not in done.stderr
    return done.stdout


def loops(name):
    """The bodies of the two functions that are compared, without what both return; or nothing."""
    text = source(name)
    known = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    pairs = [known[each] for names in (ONE, MANY) for each in names if each in known]
    lines = text.splitlines()
    return [lines[node.lineno : node.end_lineno - 1] for node in pairs]


def changed(name):
    """Lines that are new and lines that are gone; comments and empty lines are none."""
    one, many = loops(name)
    found = [line for line in difflib.ndiff(one, many) if line[2:].strip()[:1] not in ("", "#")]
    new = sum(line.startswith("+ ") for line in found)
    # Both loops of `lora_folder` are of the library already.
    return new + ("def whole(" not in source(name)), sum(line.startswith("- ") for line in found)


WITH_LOOPS = [name for name in NAMES if loops(name)]


def test_what_runs_is_what_was_asked_for():
    asked = "linen_trainstate nnx_dropout_batchnorm equinox_mlp haiku_mlp graph_network resnet"
    asked += " keras_model two_processes lora_folder plan_own_model assert_in_ci"
    assert set(NAMES) == set(asked.split())


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_its_first_lines_say(name):
    command = f"python examples/{name}.py"
    assert f"    {command}" in ast.get_docstring(ast.parse(source(name)))
    printed = run(*command.split()[1:])
    for first, last in LOSS.findall(printed):
        assert float(last) < float(first)
    if name not in ("plan_own_model", "assert_in_ci"):
        assert LOSS.search(printed)
        by_device = HELD.findall(printed)
        # All devices hold as much as the first: states are spread evenly.
        assert len({device for device, _ in by_device}) == 4
        assert len({sizes for _, sizes in by_device}) == len(by_device) // 4


@pytest.mark.parametrize("name", WITH_LOOPS)
def test_as_many_lines_are_changed_as_is_claimed(name):
    said = CLAIM.search(ast.get_docstring(ast.parse(source(name))))
    assert tuple(map(int, said.groups())) == changed(name)


def test_the_readme_lists_every_example_with_its_lines():
    rows = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\) \|.*\|(.*)\|$", readme(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == NAMES
    for name, target, said in rows:
        assert target == name
        assert said.strip() == ("+{} -{}".format(*changed(name)) if name in WITH_LOOPS else "")


def readme():
    return (EXAMPLES / "README.md").read_text()


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", readme())
    assert "../docs/memory.ipynb" in targets
    assert all((EXAMPLES / target).exists() for target in targets)


def test_what_is_counted_are_lines_of_code_that_differ():
    assert "    params = zero.init(model.init, jax.random.key(0), x[:1])" in loops("haiku_mlp")[1]
    # The mesh, where parameters are born, the optimizer, the gradients, and the import.
    assert changed("haiku_mlp") == (5, 3)


def test_the_file_for_ci_runs_under_pytest():
    printed = run("-m", "pytest", "-p", "no:cacheprovider", "-q", "examples/assert_in_ci.py")
    assert printed.startswith("..  ")  # both


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("stage=3", "stage=2", "test_no_device_holds_more_than_its_share"),
        # Gathers each layer a third time.
        ('"block"', '"block_sqrt"', "test_a_step_sends_three_words_for_each_parameter"),
    ],
)
def test_the_file_for_ci_fails_for_a_step_that_holds_or_sends_more(tmp_path, old, new, test):
    assert old in source("assert_in_ci")
    (tmp_path / "test_own.py").write_text(source("assert_in_ci").replace(old, new))
    with pytest.raises(AssertionError, match=rf"FAILED test_own.py::{test}"):
        run("-m", "pytest", "-p", "no:cacheprovider", "-q", "test_own.py", cwd=tmp_path)
