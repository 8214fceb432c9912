"""The README and the pages of docs/: their Python runs, and what they name is there."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# What docs/conf.py writes for the time of a build.
MADE = {f"docs/{name}.md" for name in ("index", "contributing", "changelog", "examples")}
DOCS = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")} - MADE
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md", *sorted(DOCS))
FIRST = "docs/first-steps.md"
WITH_CODE = [p for p in PAGES if "```python" in (ROOT / p).read_text() and p != FIRST]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def test_pages_that_show_python_are_run():
    names = ("guide", "nnx", "plan", "offload", "parallelism", "checkpoints", "interchange")
    names += ("finetuning", "states", "experts", "models", "does-not-fit")
    assert {"README.md", *(f"docs/{name}.md" for name in names)} <= set(WITH_CODE)


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_blocks_run(page, capsys):
    blocks = blocks_of(page, "python")
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})
    printed = capsys.readouterr().out
    if page == "README.md":
        losses = re.findall(r"loss (\d+\.\d{3})\n", printed)
        assert len(losses) == 3 and float(losses[-1]) < float(losses[0])
    elif page == "docs/guide.md":
        assert "'buffers'" in printed
    elif page == "docs/offload.md":
        assert "pinned_host" in printed and "step 3" in printed
    elif page == "docs/checkpoints.md":
        assert "step 4: restored" in printed and "{'sample': 32}" in printed
    elif page == "docs/parallelism.md":
        assert "'model'" in printed and "block@partitioned" in printed
    elif page == "docs/nnx.md":
        assert printed.endswith(" (16, 1)\n")
    elif page == "docs/finetuning.md":
        assert "params/layers_0/kernel" in printed and "loss" in printed
    elif page == "docs/states.md":
        assert printed == "uint8\nfloat32\n"
    elif page == "docs/experts.md":
        assert re.fullmatch(r"dropped [1-9]\d* of 4096\nas before True\n", printed)
    elif page == "docs/models.md":
        libraries = ("linen", "nnx", "equinox", "haiku", "keras", "plain", "masked")
        libraries = (*libraries, "normalised", "by", "annotated")
        assert [line.split()[0] for line in printed.splitlines()] == list(libraries)
    elif page == "docs/does-not-fit.md":
        assert re.search(r"stage 3 remat \w+\n$", printed)
    elif page == "docs/interchange.md":
        assert "'model-00001-of-00003.safetensors'" in printed
    else:
        assert "'optimizer_state'" in printed


def test_the_first_steps_print_what_the_page_shows(tmp_path):
    (tmp_path / "first.py").write_text("\n".join(blocks_of(FIRST, "python")))
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = f"JAX_NUM_CPU_DEVICES=4 JAX_PLATFORMS=cpu {sys.executable} first.py"
    ran = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.stdout == "".join(blocks_of(FIRST, "text")), ran.stderr


@pytest.mark.parametrize("page", sorted(DOCS))
def test_a_page_says_for_whom_it_is_before_anything_else(page):
    assert re.match(r"# .*\n\n(For|What) who(ever| )", (ROOT / page).read_text())


def test_messages_in_the_questions_are_those_of_the_code():
    texts = []
    for path in (ROOT / "zero_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                texts.append(said(node))
    asked = re.findall(r'^## "(.*)"$', (ROOT / "docs/faq.md").read_text(), re.MULTILINE)
    assert len(asked) >= 10
    for message in asked:
        assert any(message in text for text in texts), message


def said(node: ast.expr) -> str:
    """A string as it is written, with dots for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(said(v) if isinstance(v, ast.Constant) else "..." for v in values)


def blocks_of(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page):
    import zero_jax

    for name in re.findall(r"zero_jax\.(\w+)", (ROOT / page).read_text()):
        assert hasattr(zero_jax, name) or importlib.util.find_spec(f"zero_jax.{name}"), name


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_is_there(page):
    """As `tests/fuzz.py`, or within the library: `engine/step.py`."""
    for name in re.findall(r"(?<![\w/*.-])\w+(?:/\w+)+\.(?:py|md)\b", (ROOT / page).read_text()):
        assert (ROOT / name).exists() or (ROOT / "zero_jax" / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in LINK.findall((ROOT / page).read_text()):
        if target.startswith("https://"):
            continue
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in map(anchor_of, titles), f"{target}#{anchor}"


def anchor_of(title: str) -> str:
    """What a forge makes of a title: letters, digits and hyphens, in lower case.

    >>> anchor_of("What is predicted"), anchor_of("train.py")
    ('what-is-predicted', 'trainpy')
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_readme_is_short_and_leads_to_every_page():
    assert len((ROOT / "README.md").read_bytes()) <= 5000
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for target, _ in LINK.findall((ROOT / page).read_text()):
            path = ((ROOT / page).parent / target).resolve()
            linked = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
            waiting += [linked] * (linked in PAGES and linked not in reached)
    of_reference = {page for page in DOCS if page.startswith("docs/reference/")}
    assert reached >= set(PAGES) - of_reference
