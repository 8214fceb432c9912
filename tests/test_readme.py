"""The README and the pages of docs/: their Python runs, and the names and links in them exist."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import zero_jax

ROOT = pathlib.Path(__file__).parent.parent
# Pages that docs/conf.py writes during a build.
GENERATED = {f"docs/{name}.md" for name in ("index", "contributing", "changelog", "examples")}
DOCS = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")} - GENERATED
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md", *sorted(DOCS))
FIRST = "docs/first-steps.md"
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
# Patterns that the output of each page's Python matches.
PRINTS = {
    "README.md": [r"\A(loss \d+\.\d{3}\n){3}\Z"],
    "docs/guide.md": ["'buffers'"],
    "docs/offload.md": ["pinned_host", "step 3"],
    "docs/checkpoints.md": ["step 4: restored", "{'sample': 32}"],
    "docs/parallelism.md": ["'model'", "block@partitioned"],
    "docs/nnx.md": [r" \(16, 1\)\n\Z"],
    "docs/finetuning.md": ["params/layers_0/kernel", "loss"],
    "docs/states.md": [r"\Auint8\nfloat32\n\Z"],
    "docs/experts.md": [r"\Adropped [1-9]\d* of 4096\nas before True\n\Z"],
    "docs/models.md": [r"\Alinen (.*\n){9}annotated .*\n\Z"],
    "docs/does-not-fit.md": [r"stage 3 remat \w+\n\Z"],
    "docs/interchange.md": ["'model-00001-of-00003.safetensors'"],
    "docs/plan.md": ["'optimizer_state'"],
}
SLOW = {f"docs/{name}.md" for name in ("experts", "models", "interchange")}


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text_of(page), re.DOTALL)


def test_all_pages_with_python_are_run():
    assert {page for page in PAGES if blocks_of(page, "python")} == {FIRST, *PRINTS}


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in PRINTS]
)
def test_code_blocks_run(page, capsys):
    exec(compile("\n".join(blocks_of(page, "python")), page, "exec"), {"__name__": page})
    printed = capsys.readouterr().out
    assert all(re.search(pattern, printed) for pattern in PRINTS[page]), printed
    losses = re.findall(r"loss (\d+\.\d{3})\n", printed) if page == "README.md" else [1, 0]
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.slow
def test_the_first_steps_print_what_the_page_shows(tmp_path):
    (tmp_path / "first.py").write_text("\n".join(blocks_of(FIRST, "python")))
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    env |= {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "first.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.stdout == "".join(blocks_of(FIRST, "text")), ran.stderr


def test_messages_in_the_questions_are_those_of_the_code():
    def literal(node: ast.expr) -> str:
        """Returns a string as written, with dots in place of values."""
        if isinstance(node, ast.JoinedStr):
            return "".join(
                literal(v) if isinstance(v, ast.Constant) else "..." for v in node.values
            )
        return str(node.value)

    trees = [ast.parse(path.read_text()) for path in (ROOT / "zero_jax").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [literal(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    messages = re.findall(r'^## "(.*)"$', text_of("docs/faq.md"), re.MULTILINE)
    assert len(messages) >= 10
    for message in messages:
        assert any(message in text for text in texts), message


def test_every_name_and_file_exists():
    """Files as `tests/fuzz.py`, or within the library: `engine/step.py`."""
    for page in PAGES:
        for name in re.findall(r"zero_jax\.(\w+)", text_of(page)):
            assert hasattr(zero_jax, name) or importlib.util.find_spec(f"zero_jax.{name}"), name
        for name in re.findall(r"(?<![\w/*.-])\w+(?:/\w+)+\.(?:py|md)\b", text_of(page)):
            assert (ROOT / name).exists() or (ROOT / "zero_jax" / name).exists(), (page, name)


def test_links_lead_to_pages_and_titles_and_the_readme_to_every_page():
    assert len((ROOT / "README.md").read_bytes()) <= 5000
    linked = {}
    for page in PAGES:
        linked[page] = set()
        for target, anchor in LINK.findall(text_of(page)):
            if target.startswith("https://"):
                continue
            path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
            assert path.exists(), (page, target)
            linked[page].add(str(path.relative_to(ROOT)))
            if anchor:
                titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert anchor in map(anchor_of, titles), f"{page}: {target}#{anchor}"
    reached, waiting = set(), {"README.md"}
    while waiting:
        reached |= waiting
        waiting = {link for page in waiting for link in linked[page] if link in PAGES} - reached
    assert reached >= {page for page in PAGES if not page.startswith("docs/reference/")}


def anchor_of(title: str) -> str:
    """Returns a title's anchor: letters, digits and hyphens, in lower case."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
