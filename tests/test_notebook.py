"""The notebook prints what is kept of it, and nothing of the machine that it ran on."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
KEPT = DOCS / "memory.ipynb"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def read(path):
    return json.loads(path.read_text())


def texts(notebook):
    """What the cells print, as text, in order."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return ["".join(o.get("text") or o["data"]["text/plain"]) for o in outputs]


def numbers(text):
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def assert_same(got, kept, rel):
    """The same words, and numbers within a fraction."""
    assert NUMBER.sub("#", " ".join(got.split())) == NUMBER.sub("#", " ".join(kept.split()))
    assert numbers(got) == pytest.approx(numbers(kept), rel=rel)


def test_a_new_run_prints_what_is_kept(tmp_path):
    """Exactly what is held; what XLA takes within a step differs by a little from one release to
    the next, at most 10 %."""
    # Those XLA_FLAGS of other tests change what a step takes.
    own = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(DOCS.parent)}
    command = [sys.executable, str(DOCS / "notebook.py"), str(tmp_path / "new.ipynb")]
    subprocess.run(command, env=os.environ | own, cwd=tmp_path, check=True)
    got, want = texts(read(tmp_path / "new.ipynb")), texts(read(KEPT))
    assert len(got) == len(want) > 0
    for new, old in zip(got, want, strict=True):
        assert_same(new, old, rel=0.1 if "temporaries" in old else 0)


def test_another_number_or_word_is_another_output():
    assert_same("stage 3  1,024", "stage 3 1,000", rel=0.1)
    with pytest.raises(AssertionError):
        assert_same("stage 3 1,024", "stage 3 1,000", rel=0)
    with pytest.raises(AssertionError):
        assert_same("stage 3 1,024 words", "stage 3 1,024 bytes", rel=0)


def test_of_a_run_no_times_or_paths_are_kept():
    kept = read(KEPT)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert kept["metadata"] == {"kernelspec": kernel}
    assert all(cell["metadata"] == {} for cell in kept["cells"])
    assert not re.search(r'"/(?:home|root|tmp|work|usr)|<ipython', json.dumps(kept))


def test_every_cell_was_run_in_order_and_the_last_shows_a_picture():
    cells = [cell for cell in read(KEPT)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "image/png" in cells[-1]["outputs"][-1]["data"]
