"""The README and the pages of docs/: Python and commands run, and names and links in them exist."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zero_jax

ROOT = Path(__file__).parent.parent
# Pages that docs/conf.py writes during a build.
WRITTEN = ("index", "contributing", "changelog", "examples", "security")
GENERATED = {f"docs/{name}.md" for name in WRITTEN}
DOCS = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")} - GENERATED
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", *sorted(DOCS))
FIRST = "docs/quickstart-training-loop.md"
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
# Patterns that the output of each page's Python matches.
# fmt: off
PRINTS = {
    "README.md": [r"\A(loss \d+\.\d{3}\n){3}\Z"],
    "docs/offload.md": ["pinned_host", "step 3"], "docs/plan.md": ["'optimizer_state'"],
    "docs/checkpoints.md": ["step 4: restored", "{'sample': 32}"],
    "docs/parallelism.md": ["'model'", "block@partitioned"],
    "docs/nnx.md": [r" \(16, 1\)\n\Z"], "docs/finetuning.md": ["params/layers_0/kernel", "loss"],
    "docs/states.md": [r"\Auint8\nfloat32\n\Z"],
    "docs/experts.md": [r"\Adropped [1-9]\d* of 4096\nas before True\n\Z"],
    "docs/models.md": [r"\Alinen (.*\n){9}annotated .*\n\Z"],
    "docs/out-of-memory.md": [r"stage 3 remat \w+\n\Z"],
    "docs/interchange.md": ["'model-00001-of-00003.safetensors'"],
    "docs/quickstart-planning.md": ["'optimizer_state'", r"GB per device\n\Z"],
    "docs/profiling.md": [r"\.xplane\.pb'\]\n\d+ \d+ \d+\n\Z"],
    "docs/losses.md": [r"\Aweight 21\n\Z"],
    "docs/optimizers.md": [r"\Aloss of the average \d\.\d{3}, norm \d\.\d{3}\n\Z"],
    "docs/gradient-accumulation.md": [r"\Aloss \d\.\d{3}\n\Z"],
    "docs/mixed-precision.md": [r"\Afloat32 skipped 0\n\Z"],
    "docs/activation-checkpointing.md": [
        "none .*'saved'", "block .*'buffers'", r"loss \d\.\d{3}\n\Z"],
    "docs/evaluation.md": [r"full \(13, 9\)", r"Padded \(13, 9\)\n\Z"],
    "docs/multi-node.md": [r"\A\(64, 8\) 1\n\Z"]}
# fmt: on
SLOW = {f"docs/{name}.md" for name in ("experts", "models", "interchange")}
BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```sh\n(.*?)```", re.DOTALL)
OURS = ("XLA_FLAGS", "JAX_", "ZERO_JAX_CACHE", "PYTEST_", "PYTHONPATH")  # not of a reader


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text_of(page), re.DOTALL)


RUN = [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PRINTS]


@pytest.mark.parametrize("page", RUN)
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
        if isinstance(node, ast.JoinedStr):
            return "".join(map(literal, node.values))
        return str(node.value) if isinstance(node, ast.Constant) else "..."

    trees = [ast.parse(path.read_text()) for path in (ROOT / "zero_jax").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [literal(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    assert {page for page in PAGES if blocks_of(page, "python")} == {FIRST, *PRINTS}
    messages = re.findall(r'^## "(.*)"$', text_of("docs/troubleshooting.md"), re.MULTILINE)
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
    assert len((ROOT / "README.md").read_bytes()) <= 7500
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
                # Letters, digits and hyphens, in lower case.
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


def run_all(found, folder):
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = str(folder)
    for block in found:
        shell = ["bash", "-euo", "pipefail", "-c", block]
        ran = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, f"{block}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"


COMPILED = pytest.mark.slow, pytest.mark.compile
COMMANDS = [(p, gpus) for p in PAGES for gpus in (False, True) if commands(p, gpus)]


@pytest.mark.parametrize(
    ("page", "compiled"), [pytest.param(*row, marks=COMPILED[row[1]]) for row in COMMANDS]
)
def test_commands_run(page, compiled, tmp_path):
    run_all(commands(page, compiled), tmp_path)


def test_comments_say_why_a_block_is_not_run():
    comments = {comment for page in PAGES for comment, _ in BLOCK.findall(text_of(page))}
    skipped = {comment for comment in comments if comment.startswith("not run: ")}
    assert skipped and all(re.match(r"not run: (needs|the test of this page) ", s) for s in skipped)
    assert comments - skipped <= {"", "test", "run by .ci/run", "train", "finetune"}
    # Nothing is installed into the environment of the tests.
    found = [block for page in PAGES for both in (False, True) for block in commands(page, both)]
    assert all("-m venv" in block for block in found if "pip install" in block)
