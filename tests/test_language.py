"""Language of docs, public docstrings, messages and help: no banned opening or phrase."""

import ast
import inspect
import pkgutil
import re
import types

import pytest
from test_readme import PAGES, ROOT, text_of

from training.main import main as train
from zero_jax.commands import plan

OPENING = re.compile(r"(What|Whether|Of|That|Whoever|As|For whoever) ")
PHRASES = (
    "of which", "in whose", "it is said", "of one's own", "unless given", "as far as", "to be had",
    "for ever", "foretold", "forecast", "at rest", "born", "fake device", "whoever", "worked off",
    "dealt out", "rides", "in the open", "comes back", "goes on", "refused", "is told", "are told",
)  # fmt: skip
PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})s?\b", re.IGNORECASE)
SPOKEN = {"warn", "_warn", "print", "say", "print_error", "report", "error"}  # functions
SOURCES = [p for top in ("zero_jax", "training", "models") for p in (ROOT / top).rglob("*.py")]
HELP = [(train,), *((plan.main, name) for name in ("memory", "compile", "auto", "meshes"))]
DOCUMENTED = re.compile(r"\.\. auto(?:function|class|exception):: (\S+)")


def sentences(text: str) -> list[str]:
    """Returns the sentences of Markdown without code, comments and targets of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))
    text = re.sub(r"^\s*(?:[-*>]|\d+\.|#+)\s+", "\n\n", text, flags=re.MULTILINE)
    cells = [cell for line in re.findall(r"^\|.*$", text, re.MULTILINE) for cell in line.split("|")]
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^\|.*$", "\n", text, flags=re.MULTILINE)) + cells
    found = [s for p in paragraphs for s in re.split(r"(?<=[.!?])\s+", " ".join(p.split()))]
    return [sentence for sentence in found if re.search(r"\w", sentence)]


@pytest.mark.parametrize("page", (*PAGES, "CHANGELOG.md"))
def test_sentences_are_short_and_use_the_words_of_the_field(page):
    check(text_of(page))


@pytest.mark.parametrize(
    "name", sorted({n for page in PAGES for n in DOCUMENTED.findall(text_of(page))})
)
def test_so_are_those_of_public_docstrings(name):
    value, kinds = pkgutil.resolve_name(name), (types.FunctionType, property, classmethod)
    own = vars(value).items() if isinstance(value, type) else ()
    for one in (value, *(x for key, x in own if key[0] != "_" and isinstance(x, kinds))):
        text = re.sub(r"^ *(>>>|\.\.\.) .*$", "", inspect.getdoc(one) or "", flags=re.MULTILINE)
        check(re.sub(r"^ *[\w, *]+:(\s|$)", "\n\n", text, flags=re.MULTILINE))


def strings(node: ast.AST) -> str:
    """Returns the strings of an expression as paragraphs, with X for placeholders."""
    if isinstance(node, ast.JoinedStr):
        return "".join(x.value if isinstance(x, ast.Constant) else "X" for x in node.values)
    own = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return "\n\n".join([own, *map(strings, ast.iter_child_nodes(node))])


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(ROOT)) for path in SOURCES}))
def test_so_are_those_of_messages(folder):
    for node in (
        n for p in (ROOT / folder).glob("*.py") for n in ast.walk(ast.parse(p.read_text()))
    ):
        call = node.exc if isinstance(node, ast.Raise) else node
        name = getattr(call, "func", None) and ast.unparse(call.func).rpartition(".")[2]
        if name and (name in SPOKEN or call is not node):
            check(strings(call))


@pytest.mark.parametrize("command", HELP, ids=lambda command: command[-1])
def test_so_are_those_of_help(command, capsys):
    with pytest.raises(SystemExit):
        command[0]([*command[1:], "--help"])
    text = capsys.readouterr().out
    assert "--remat" in text
    check(re.sub(r"^ +-.*?(  |$)", "\n\n", text, flags=re.MULTILINE))


def check(text):
    for sentence in sentences(text):
        assert len(sentence.split()) <= 35, sentence
        assert not OPENING.match(sentence), sentence
        assert not PHRASE.search(sentence), sentence


def test_a_private_word_an_opening_and_a_long_sentence_are_found():
    found = sentences("- Of N, `code`.\n\n| a | at rest |\n|---|---|\n\nOne [two](b.md).\nThree.")
    assert found == ["Of N, CODE.", "One two.", "Three.", "a", "at rest"]
    assert OPENING.match(found[0]) and PHRASE.search(found[-1]) and not PHRASE.search(found[1])
