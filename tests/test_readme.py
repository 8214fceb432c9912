"""The README and the pages of docs/: their Python runs, and what they name is there."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
WITH_CODE = [page for page in PAGES if "```python" in (ROOT / page).read_text()]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def test_pages_that_show_python_are_run():
    names = ("guide", "nnx", "plan", "offload", "parallelism", "checkpoints", "interchange")
    names += ("finetuning", "states", "experts")
    assert {"README.md", *(f"docs/{name}.md" for name in names)} <= set(WITH_CODE)


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_blocks_run(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})
    printed = capsys.readouterr().out
    if page == "README.md":
        assert re.search(r"loss \d\.\d{3}", printed)
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
    elif page == "docs/interchange.md":
        assert "'model-00001-of-00003.safetensors'" in printed
    else:
        assert "'optimizer_state'" in printed


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
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 5000
    linked = {target for target, _ in LINK.findall(readme)}
    assert linked >= set(PAGES) - {"README.md"}
