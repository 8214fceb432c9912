"""Score of the tests on planted faults: one-line mistakes, each of which a test should find.

Applies each fault of planted_faults.txt to a copy of the repository, and runs the tests that run
its line, the quickest first, up to the first failure or the time limit. Needs a coverage file and
JUnit files of the same code; not a part of CI.

    python tests/planted_faults.py --coverage .coverage --junit junit.xml 'slow or not slow' \
        --out faults.json [--jobs 2] [--only NAME]

A test that also fails without the fault is left out. A second run keeps the results in `--out`.
planted_faults.json names the test that found each fault: `--again` runs no other, in minutes.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".txt")
FOUND = Path(__file__).with_suffix(".json")
LIMIT = 180.0  # seconds for a fault
FIRST = 40  # tests that run before the others are collected
Run = tuple[str, list[str]]  # the `-m` that selects the tests, and their names
Tests = dict[str, dict[str, float]]  # by the `-m` that selects them: seconds by name


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str

    def problem(self) -> str:
        source = (ROOT / self.file).read_text() if (ROOT / self.file).exists() else ""
        if (count := source.count(self.old)) != 1:
            return f"{self.name} no longer applies: {self.file} has {self.old!r} {count} times"
        try:
            compile(source.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            return f"{self.name} is no Python: {error}"
        return ""


def table(text: str) -> list[Fault]:
    """Reads faults of three lines each: name and file, `- old`, `+ new`; `#` begins a comment."""
    rows = re.findall(r"^([\w-]+) (\S+)\n- (.*)\n\+ (.*)$", text, re.M)
    assert len({name for name, *_ in rows}) == len(rows) == text.count("\n- "), "not a table"
    return [Fault(*row) for row in rows]


def statement(source: str, line: int) -> tuple[set[int], bool]:
    """Returns the lines of the innermost statement around a line, and if it is in a function."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= line <= node.end_lineno]
    inside = any(isinstance(x, ast.FunctionDef) and line >= x.body[0].lineno for x in around)
    first, last = (around[-1].lineno, around[-1].end_lineno) if around else (line, line)
    if body := getattr(around[-1], "body", None) if around else None:
        last = max(first, body[0].lineno - 1)
    return set(range(first, last + 1)) if line <= last else {line}, inside


def contexts(files: Sequence[str], file: str, source: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = collections.defaultdict(set)
    for data in map(coverage.CoverageData, files):
        data.read()
        for measured in data.measured_files():
            if measured.endswith(f"/{file}"):
                for at, names in data.contexts_by_lineno(measured).items():
                    found[at].update(name.rpartition("|")[0] for name in names if name)
    nodes = [node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno")]
    # A method in a chain of calls is on the line of its name, where its call ends.
    known = {1} | {at for node in nodes for at in (node.lineno, node.end_lineno)}
    if unknown := {at for at in found if at > 0} - known:
        line = f"line {min(unknown)} of the coverage file is no statement"
        raise SystemExit(f"{file}: {line}: the coverage is of other code; measure it anew")
    return found


def chosen(fault: Fault, files: Sequence[str], tests: Tests, limit: float) -> list[Run]:
    """Returns the runs of tests for a fault, in their order.

    Tests that run the line come first, the quickest at the front, then the others in their files: a
    fixture or a cache may hand them what the line has made. A line that runs at import, or in no
    test, has the tests of the package's folder and those that belong to no package.
    """
    source = (ROOT / fault.file).read_text()
    line = source[: source.index(fault.old)].count("\n") + 1
    (lines, inside), known = statement(source, line), contexts(files, fault.file, source)
    lines = {line} if line in known else lines
    running = {name for at in lines for name in known.get(at, ())} if inside else set()
    running &= {name for own in tests.values() for name in own}
    package = fault.file.removeprefix("zero_jax/").partition("/")[0]
    folder = f"tests/{package}/" if (ROOT / "tests" / package).is_dir() else "tests/"
    runs, left = list[Run](), 2 * limit
    for select, seconds in tests.items():
        own = running & seconds.keys()
        paths = {name.partition("::")[0] for name in own}
        more = {name for name in seconds if name.partition("::")[0] in paths} - own
        if not running:
            more = {name for name in seconds if name.startswith((folder, "tests/test_"))}
        names = []
        for name in sorted(own | more, key=lambda name: (name in more, seconds[name], name)):
            left -= seconds[name]
            if left > 0 or not names:
                names.append(name)
        # Most faults are found by the first of many, and to collect all takes time too.
        runs += [(select, part) for part in (names[:FIRST], names[FIRST:]) if part]
    return runs


def durations(junit: Sequence[tuple[str, str]]) -> Tests:
    found: Tests = collections.defaultdict(dict)
    for path, select in junit:
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            if all(child.tag in ("system-out", "properties") for child in case):
                file = case.get("classname", "").replace(".", "/")
                found[select][f"{file}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs tests in the order in which they are named; this file is a plugin of these runs."""
    order = {name: at for at, name in enumerate(config.args)}
    items.sort(key=lambda item: order.get(item.nodeid, len(order)))


class Copy:
    """A copy of the repository, in an empty folder, in which faults are planted and tests run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._passes = functools.cache(lambda *run: self._run(*run, LIMIT)[0] == "passed")
        # Tests of the docs ask git which files there are.
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
        for name in filter(lambda name: name and os.path.lexists(ROOT / name), names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
            subprocess.run(command, cwd=folder, check=True)

    def judged(self, fault: Fault, runs: Sequence[Run], limit: float) -> dict[str, object]:
        spent, known = 0.0, {"tests": sum(len(names) for _, names in runs)}
        path, waiting = self._folder / fault.file, collections.deque(runs)
        source = path.read_text()
        while waiting:
            select, names = waiting.popleft()
            began = time.monotonic()
            try:
                _write(path, source.replace(fault.old, fault.new))
                kind, test = self._run(select, names, limit - spent)
            finally:
                _write(path, source)
            took = time.monotonic() - began
            if kind == "failed" and not self._passes(select, (test,)):
                known.setdefault("fail without the fault", []).append(test)
                if others := [name for name in names if name != test]:
                    waiting.appendleft((select, others))
                continue
            if kind == "broken":
                collected, said = self._run(select, names, LIMIT, "--collect-only")
                if collected != "passed":
                    raise SystemExit(f"tests are missing: the JUnit file is of others\n{said}")
            spent += took
            known["seconds"] = round(spent, 1)
            if kind in ("failed", "broken"):
                by = test if kind == "failed" else "an import or a crash"
                return {"result": "found", "by": by} | known
            if kind == "timed out" or spent > limit:
                return {"result": "timed out"} | known
        return {"result": "missed"} | known

    def _run(self, select: str, names: Sequence[str], limit: float, *more: str) -> tuple[str, str]:
        """Runs tests in this order; returns passed, failed, broken or timed out, and which."""
        asked, said = (self._folder.with_suffix(kind) for kind in (".tests", ".said"))
        asked.write_text("".join(f"{name}\n" for name in names))
        options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "planted_faults"]
        command = [sys.executable, "-m", "pytest", *options, *more, "-m", select, f"@{asked}"]
        path = f"{self._folder}{os.pathsep}{self._folder / 'tests'}"
        how = {"cwd": self._folder, "start_new_session": True}
        how["env"] = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        with said.open("w") as file:  # no pipe: what a test leaves running would hold it open
            run = subprocess.Popen(command, stdout=file, stderr=file, **how)
        try:
            run.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return "timed out", ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        if run.returncode == 0:
            return "passed", ""
        lines = said.read_text().splitlines()
        told = [line.partition(" ")[2] for line in lines if line[:6] in ("FAILED", "ERROR ")]
        failed = [name for name in names for one in told if one.startswith(name)]
        if failed:
            return "failed", max(failed, key=len)
        return "broken", "\n".join(lines[-9:])


def _write(path: Path, source: str) -> None:
    """Writes a source, and removes its bytecode: Python compares times by the second."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    add, several = parser.add_argument, {"action": "append", "default": [], "nargs": 2}
    add("--coverage", nargs="+", help="files of `pytest --cov --cov-context=test`")
    known = "its --junitxml, and the -m that selects those tests; several, first the quicker ones"
    add("--junit", **several, metavar=("FILE", "MARKERS"), help=known)
    add("--out", type=Path, help="JSON of results, written as they come; those it has are kept")
    add("--again", action="store_true", help="run the test that found the fault before, no other")
    add("--only", action="append", help="name of a fault, which runs again; several")
    add("--jobs", type=int, default=1)
    add("--limit", type=float, default=LIMIT, help="seconds for a fault")
    given, faults = parser.parse_args(), table(TABLE.read_text())
    if problems := [said for fault in faults if (said := fault.problem())]:
        raise SystemExit("\n".join(problems))
    if unknown := set(given.only or ()) - {fault.name for fault in faults}:
        raise SystemExit(f"--only: no fault is called {', '.join(sorted(unknown))}")
    print(f"{len(faults)} faults apply")
    if given.out is None:
        return
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    todo = [f for f in faults if (f.name in given.only if given.only else f.name not in results)]
    tests, again = durations(given.junit), json.loads(FOUND.read_text())
    pool = concurrent.futures.ThreadPoolExecutor(given.jobs)
    with tempfile.TemporaryDirectory() as folder, pool:
        copies = queue.SimpleQueue()
        for job in range(given.jobs):
            copies.put(Copy(Path(folder, str(job))))

        def judge(fault: Fault) -> tuple[str, dict[str, object]]:
            copy = copies.get()
            try:
                if given.again:
                    runs = [("slow or not slow", [again[fault.name]])]
                else:
                    runs = chosen(fault, given.coverage, tests, given.limit)
                return fault.name, copy.judged(fault, runs, given.limit)
            finally:
                copies.put(copy)

        for done in concurrent.futures.as_completed([pool.submit(judge, f) for f in todo]):
            name, result = done.result()
            results[name] = result
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {result}", flush=True)
    kinds = collections.Counter(results[f.name]["result"] for f in faults if f.name in results)
    share = f"{kinds['found']} of {kinds.total()} ({kinds['found'] / max(kinds.total(), 1):.1%})"
    others = f"missed {kinds['missed']}, timed out {kinds['timed out']}"
    print(f"found {share}, {others}; not judged {len(faults) - kinds.total()}")
    missed = {name for name, own in results.items() if own["result"] != "found"}
    if lost := [name for name in again if name in missed]:
        raise SystemExit(f"found before, and not now: {', '.join(lost)}")
    again |= {name: own["by"] for name, own in results.items() if "::" in own.get("by", "")}
    FOUND.write_text(json.dumps(again, indent=1) + "\n")


if __name__ == "__main__":
    main()
