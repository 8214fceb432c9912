"""The README and the pages of docs/: Python and commands run, and names and links in them exist."""

import ast
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zero_jax
from zero_jax.commands.settings import ZeroSettings

ROOT = Path(__file__).parent.parent
# docs/conf.py writes these pages during a build.
WRITTEN = {f"docs/{x}.md" for x in ("index", "contributing", "changelog", "examples", "security")}
DOCS = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")} - WRITTEN
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", *sorted(DOCS))
FIRST = "docs/quickstart-training-loop.md"
LINK = re.compile(r"\]\((?!https://)([^)#\s]*)(?:#([^)\s]*))?\)")
# Patterns that the output of each page's Python matches.
PRINTS = {
    "README.md": [r"\A(loss \d+\.\d{3}\n){3}\Z"], "docs/offload.md": ["pinned_host", "step 3"],
    "docs/plan.md": ["'optimizer_state'"], "docs/finetuning.md": ["params/layers_0/kernel", "loss"],
    "docs/long-context.md": [r"\Aas on one device True\n\Z"],
    "docs/parallelism.md": ["'model'", "block@partitioned"], "docs/losses.md": [r"\Aweight 21\n\Z"],
    "docs/checkpoints.md": ["step 4: restored", "{'sample': 32}"],
    "docs/states.md": [r"\Auint8\nfloat32\n\Z"], "docs/multi-node.md": [r"\A\(64, 8\) 1\n\Z"],
    "docs/experts.md": [r"\Adropped [1-9]\d* of 4096\nas before True\n\Z"],
    "docs/models.md": [r"\Alinen (.*\n){9}annotated .*\n\Z"],
    "docs/out-of-memory.md": [r"stage 3 remat \w+\n\Z"],
    "docs/interchange.md": ["'model-00001-of-00003.safetensors'"],
    "docs/quickstart-planning.md": ["'optimizer_state'", r"GB per device\n\Z"],
    "docs/profiling.md": [r"\.xplane\.pb'\]\n\d+ \d+ \d+\n\Z"],
    "docs/optimizers.md": [r"\Aloss of the average \d\.\d{3}, norm \d\.\d{3}\n\Z"],
    "docs/gradient-accumulation.md": [r"\Aloss \d\.\d{3}\n\Z"], "docs/nnx.md": [r" \(16, 1\)\n\Z"],
    "docs/mixed-precision.md": [r"\Afloat32 skipped 0\n\Z"],
    "docs/activation-checkpointing.md": [
        "none .*'saved'", "block .*'work'", r"loss \d\.\d{3}\n\Z"],
    "docs/evaluation.md": [r"full \(13, 9\)", r"Padded \(13, 9\)\n\Z"]}  # fmt: skip
SLOW = {f"docs/{name}.md" for name in ("experts", "models", "interchange")}
BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```sh\n(.*?)```", re.DOTALL)
OURS = ("XLA_FLAGS", "JAX_", "PYTEST_", "PYTHONPATH")  # not of a reader


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text_of(page), re.DOTALL)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PRINTS]
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
    env = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | env
    command = [sys.executable, "first.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.stdout == "".join(blocks_of(FIRST, "text")), ran.stderr


def test_messages_in_the_questions_are_those_of_the_code():
    def literal(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(literal, node.values))
        return str(node.value) if isinstance(node, ast.Constant) else "..."

    trees = [ast.parse(path.read_text()) for path in (ROOT / "zero_jax").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [literal(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    assert {page for page in PAGES if blocks_of(page, "python")} == {FIRST, *PRINTS}
    messages = re.findall(r'^## "(.*)"$', text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert len(messages) >= 10
    assert not [x for x in messages if not any(x in text for text in texts)]


def test_every_name_and_file_exists():
    """Files as `tests/fuzz.py`, or within the library: `engine/step.py`."""
    for page in PAGES:
        for name in re.findall(r"zero_jax\.(\w+)", text_of(page)):
            assert hasattr(zero_jax, name) or importlib.util.find_spec(f"zero_jax.{name}"), name
        for name in re.findall(r"(?<![\w/*.-])\w+(?:/\w+)+\.(?:py|md)\b", text_of(page)):
            assert (ROOT / name).exists() or (ROOT / "zero_jax" / name).exists(), (page, name)


def test_links_lead_to_pages_and_titles_and_the_readme_to_every_page():
    assert len((ROOT / "README.md").read_bytes()) <= 7500
    linked = {}
    for page in PAGES:
        linked[page] = set()
        for target, anchor in LINK.findall(text_of(page)):
            path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
            assert path.exists(), (page, target)
            linked[page].add(str(path.relative_to(ROOT)))
            if anchor:
                titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                known = [re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in titles]
                assert anchor in known, f"{page}: {target}#{anchor}"
    reached, waiting = set(), {"README.md"}
    while waiting:
        reached |= waiting
        waiting = {link for page in waiting for link in linked[page] if link in PAGES} - reached
    assert reached >= {page for page in PAGES if not page.startswith("docs/reference/")}


def commands(page, compiled):
    done = {block for _, block in BLOCK.findall(text_of("README.md")) if page != "README.md"}
    found, left = BLOCK.findall(text_of(page)), ("test", "run by .ci/run", "not run: ")
    found = [block for said, block in found if block not in done and not said.startswith(left)]
    return [b for b in found if bool(re.search("plan (compile|auto|meshes)", b)) == compiled]


MARKS = (False, pytest.mark.slow), (True, pytest.mark.compile)
COMMANDS = [pytest.param(p, g, marks=m) for p in PAGES for g, m in MARKS if commands(p, g)]


@pytest.mark.parametrize(("page", "compiled"), COMMANDS)
def test_commands_run(page, compiled, tmp_path):
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYTHONPATH": str(tmp_path)}
    for block in commands(page, compiled):
        shell = ["bash", "-euo", "pipefail", "-c", block]
        ran = subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, f"{block}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"


def test_comments_say_why_a_block_is_not_run():
    comments = {comment for page in PAGES for comment, _ in BLOCK.findall(text_of(page))}
    skipped = {comment for comment in comments if comment.startswith("not run: ")}
    assert skipped and all(re.match(r"not run: (needs|the test of this page) ", s) for s in skipped)
    assert comments - skipped <= {"", "test", "run by .ci/run", "train", "finetune"}
    # Nothing is installed into the environment of the tests.
    found = [block for page in PAGES for both in (False, True) for block in commands(page, both)]
    assert all("-m venv" in block for block in found if "pip install" in block)


def test_settings_have_one_name_type_default_and_unit():
    table = runpy.run_path(str(ROOT / "docs" / "settings_table.py"))
    known, faults = table["sources"](), table["faults"]
    assert text_of("docs/settings.md") == table["page"]() and faults(known) == []
    for name, key, new in (("stage", "default", 7), ("remat", "kind", int), ("seed", "unit", None)):
        other = [x._replace(**{key: new}) if x[:2] == ("train.py", name) else x for x in known]
        assert faults(other) and all(fault.startswith(f"{name}: ") for fault in faults(other))
    mesh, flags = zero_jax.abstract_mesh(2), ZeroSettings().zero_settings()
    assert zero_jax.Zero(mesh).config == zero_jax.Zero(mesh, **flags)
