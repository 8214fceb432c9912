"""Score of the tests on planted faults: one-line mistakes, each of which a test should find.

Applies each fault of planted_faults.txt to a copy of the repository, and runs the tests that run
its line, the quickest first, up to the first failure or the time limit. Needs a coverage file and
JUnit files of the same code (CONTRIBUTING.md has the command); not a part of CI.

    python tests/planted_faults.py --coverage .coverage --junit junit.xml 'slow or not slow' \
        --out faults.json [--jobs 2] [--only NAME] [--compare BEFORE.json]

A result is `found` by a test, `missed` (all of them pass), or `timed out`. A test that also fails
without the fault is left out. A second run resumes: it keeps the results in `--out`.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import coverage
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = pathlib.Path(__file__).with_suffix(".txt")
LIMIT = 180.0  # seconds for a fault
FIRST = 40  # tests that run before the others are collected
Run = tuple[str, list[str]]  # the `-m` that selects the tests, and their names
Tests = dict[str, dict[str, float]]  # by the `-m` that selects them: seconds by name


class Fault(NamedTuple):
    """One fault: the text `old`, which occurs once in the file, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    def problem(self, folder: pathlib.Path) -> str:
        """Returns why the fault can't be planted; "" if it can."""
        path = folder / self.file
        count = path.read_text().count(self.old) if path.exists() else 0
        if count != 1:
            where = f"{self.file} has {self.old!r} {count} times, not once"
            return f"{self.name} no longer applies: {where}"
        try:
            compile(self.applied(folder), self.file, "exec")
        except SyntaxError as error:
            return f"{self.name} is no Python: {error}"
        return ""

    def applied(self, folder: pathlib.Path) -> str:
        """Returns the faulty source."""
        return (folder / self.file).read_text().replace(self.old, self.new)


def table(text: str) -> list[Fault]:
    """Reads faults of three lines each: name and file, `- old`, `+ new`; `#` begins a comment.

    >>> table("cast zero_jax/a.py\\n- x.astype(f32)\\n+ x\\n")
    [Fault(name='cast', file='zero_jax/a.py', old='x.astype(f32)', new='x')]
    """
    faults = [
        Fault(*found) for found in re.findall(r"^([\w-]+) (\S+)\n- (.*)\n\+ (.*)$", text, re.M)
    ]
    assert len({fault.name for fault in faults}) == len(faults) == text.count("\n- "), "not a table"
    return faults


def statement(source: str, line: int) -> tuple[set[int], bool]:
    """Returns the lines of the innermost statement around a line, and if it is in a function."""
    inside, found = False, (line, line)
    for node in ast.walk(ast.parse(source)):
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not first <= line <= last:
            continue
        if isinstance(node, ast.FunctionDef):
            inside |= line >= node.body[0].lineno
        if isinstance(node, ast.stmt):  # the walk comes to inner ones later
            body = getattr(node, "body", None)
            found = first, last if not body else max(first, body[0].lineno - 1)
            found = found if line <= found[1] else (line, line)
    return set(range(found[0], found[1] + 1)), inside


class Coverage:
    """The tests that run a line, of coverage files with a context for each test."""

    def __init__(self, files: Sequence[str], tests: Tests):
        self._data = [coverage.CoverageData(file) for file in files]
        for data in self._data:
            data.read()
        self._tests = tests

    def chosen(self, fault: Fault, limit: float) -> list[Run]:
        """Returns the runs of tests for a fault, in their order.

        Tests that run the line come first, the quickest at the front. The others in their files
        follow: a fixture or a cache may hand them what the line has made in another test. A line
        that runs at import, or in no test, has the tests of the package's folder. The list ends
        where its tests take twice the limit.
        """
        source = (ROOT / fault.file).read_text()
        line = source[: source.index(fault.old)].count("\n") + 1
        lines, inside = statement(source, line)
        contexts = self._contexts(fault.file, source)
        lines = {line} if line in contexts else lines
        running = {name for at in lines for name in contexts.get(at, ())} if inside else set()
        running &= {name for own in self._tests.values() for name in own}
        package = fault.file.removeprefix("zero_jax/").partition("/")[0]
        folder = f"tests/{package}/" if (ROOT / "tests" / package).is_dir() else "tests/"
        runs, left = list[Run](), 2 * limit
        for select, seconds in self._tests.items():
            own = running & seconds.keys()
            files = {name.partition("::")[0] for name in own}
            more = {name for name in seconds if name.partition("::")[0] in files} - own
            if not running:
                more = {name for name in seconds if name.startswith(folder)}
            names = []
            for name in (*_sorted(own, seconds), *_sorted(more, seconds)):
                left -= seconds[name]
                if left > 0 or not names:
                    names.append(name)
            # Most faults are found by the first of many, and to collect all takes time too.
            runs += [(select, part) for part in (names[:FIRST], names[FIRST:]) if part]
        return runs

    def _contexts(self, file: str, source: str) -> dict[int, set[str]]:
        """Returns the names of the tests that run each line."""
        found: dict[int, set[str]] = collections.defaultdict(set)
        for data in self._data:
            for measured in data.measured_files():
                if measured.endswith(f"/{file}"):
                    for at, names in data.contexts_by_lineno(measured).items():
                        found[at].update(name.rpartition("|")[0] for name in names if name)
        known = {getattr(node, "lineno", 1) for node in ast.walk(ast.parse(source))}
        if unknown := {at for at in found if at > 0} - known:
            raise SystemExit(
                f"{file}: line {min(unknown)} of the coverage file is no statement: "
                "the coverage is of other code; measure it anew"
            )
        return found


def _sorted(names: set[str], seconds: dict[str, float]) -> list[str]:
    return sorted(names, key=lambda name: (seconds[name], name))


def durations(junit: Sequence[tuple[str, str]]) -> Tests:
    """Returns the seconds of the tests that passed, of JUnit files and what selects their tests."""
    found: Tests = collections.defaultdict(dict)
    for path, select in junit:
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            if all(child.tag in ("system-out", "properties") for child in case):
                file = case.get("classname", "").replace(".", "/")
                found[select][f"{file}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Copies the repository; tests of the docs ask git which files there are."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs tests in the order in which they are named; this file is a plugin of these runs."""
    order = {name: at for at, name in enumerate(config.args)}
    items.sort(key=lambda item: order.get(item.nodeid, len(order)))


class Outcome(NamedTuple):
    """How a run of tests ended: `kind` is passed, failed, broken or timed out; `test` failed."""

    kind: str
    test: str = ""


class Copy:
    """A copy of the repository, in an empty folder, in which faults are planted and tests run."""

    def __init__(self, folder: pathlib.Path):
        self._folder = copied(folder)
        self._passing = set[str]()

    def judged(self, fault: Fault, runs: Sequence[Run], limit: float) -> dict[str, object]:
        """Returns the result of a fault, of runs that `Coverage.chosen` returned."""
        spent, known = 0.0, {"tests": sum(len(names) for _, names in runs)}
        waiting = collections.deque(runs)
        while waiting:
            select, names = waiting.popleft()
            began = time.monotonic()
            with self._planted(fault):
                outcome = self._run(select, names, limit - spent)
            took = time.monotonic() - began
            if outcome.kind == "failed" and not self._passes(select, outcome.test):
                known.setdefault("fail without the fault", []).append(outcome.test)
                if others := [name for name in names if name != outcome.test]:
                    waiting.appendleft((select, others))
                continue
            if outcome.kind == "broken":
                there = self._run(select, names, LIMIT, "--collect-only")
                if there.kind != "passed":
                    raise SystemExit(
                        f"tests are missing: the JUnit files are of others\n{there.test}"
                    )
            spent += took
            known["seconds"] = round(spent, 1)
            if outcome.kind in ("failed", "broken"):
                by = outcome.test if outcome.kind == "failed" else "an import or a crash"
                return {"result": "found", "by": by} | known
            if outcome.kind == "timed out" or spent > limit:
                return {"result": "timed out"} | known
        return {"result": "missed"} | known

    @contextlib.contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        path = self._folder / fault.file
        source, faulty = path.read_text(), fault.applied(self._folder)
        try:
            _write(path, faulty)
            yield
        finally:
            _write(path, source)

    def _passes(self, select: str, name: str) -> bool:
        """Returns whether a test passes without a fault."""
        if name not in self._passing and self._run(select, [name], LIMIT).kind == "passed":
            self._passing.add(name)
        return name in self._passing

    def _run(self, select: str, names: Sequence[str], limit: float, *more: str) -> Outcome:
        """Runs tests in this order, up to the first failure."""
        asked, said = (self._folder.with_suffix(kind) for kind in (".tests", ".said"))
        asked.write_text("".join(f"{name}\n" for name in names))
        options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "planted_faults"]
        command = [sys.executable, "-m", "pytest", *options, *more, "-m", select, f"@{asked}"]
        path = f"{self._folder}{os.pathsep}{self._folder / 'tests'}"
        with said.open("w") as file:  # no pipe: what a test leaves running would hold it open
            run = subprocess.Popen(
                command,
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            run.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return Outcome("timed out")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        if run.returncode == 0:
            return Outcome("passed")
        lines = said.read_text().splitlines()
        told = [line.partition(" ")[2] for line in lines if line[:6] in ("FAILED", "ERROR ")]
        failed = [name for name in names for one in told if one.startswith(name)]
        if failed:
            return Outcome("failed", max(failed, key=len))
        return Outcome("broken", "\n".join(lines[-9:]))


def _write(path: pathlib.Path, source: str) -> None:
    """Writes a source, and removes its bytecode: Python compares times by the second."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--coverage", nargs="+", help="files of `pytest --cov --cov-context=test`")
    add(
        "--junit",
        nargs=2,
        action="append",
        default=[],
        metavar=("FILE", "MARKERS"),
        help="its --junitxml, and the -m that selects those tests; several, first the quicker ones",
    )
    add("--out", help="JSON of results, written as they come; those that it has are kept")
    add("--only", action="append", help="name of a fault, which runs again; several")
    add("--jobs", type=int, default=1)
    add("--limit", type=float, default=LIMIT, help="seconds for a fault")
    add("--compare", help="JSON of an earlier run: an error if a fault it has found is not found")
    given = parser.parse_args()
    faults = table(TABLE.read_text())
    if problems := [said for fault in faults if (said := fault.problem(ROOT))]:
        raise SystemExit("\n".join(problems))
    if unknown := set(given.only or ()) - {fault.name for fault in faults}:
        raise SystemExit(f"--only: no fault is called {', '.join(sorted(unknown))}")
    print(f"{len(faults)} faults apply")
    if given.out is None:
        return
    out = pathlib.Path(given.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    todo = [f for f in faults if (f.name in given.only if given.only else f.name not in results)]
    tests = Coverage(given.coverage, durations(given.junit))
    lock = threading.Lock()
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(given.jobs) as pool,
    ):
        copies = queue.SimpleQueue()
        for job in range(given.jobs):
            copies.put(Copy(pathlib.Path(folder, str(job))))

        def judge(fault: Fault) -> None:
            copy = copies.get()
            try:
                result = copy.judged(fault, tests.chosen(fault, given.limit), given.limit)
            finally:
                copies.put(copy)
            with lock:
                results[fault.name] = result
                out.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{fault.name}: {result}", flush=True)

        list(pool.map(judge, todo))
    judged = [results[fault.name] for fault in faults if fault.name in results]
    kinds = collections.Counter(own["result"] for own in judged)
    print(
        f"found {kinds['found']} of {len(judged)} ({kinds['found'] / max(len(judged), 1):.1%}), "
        f"missed {kinds['missed']}, timed out {kinds['timed out']}; "
        f"not judged {len(faults) - len(judged)}"
    )
    before = json.loads(pathlib.Path(given.compare).read_text()) if given.compare else {}
    lost = [
        name
        for name, own in before.items()
        if own["result"] == "found" and name in results and results[name]["result"] != "found"
    ]
    if lost:
        raise SystemExit(f"found before, and not now: {', '.join(lost)}")


if __name__ == "__main__":
    main()
