"""The site of these pages: `sphinx-build -W -b html docs OUT`, with the extra `docs`.

The pages are read on a forge, too, so they are plain Markdown. README, CONTRIBUTING and CHANGELOG,
which stand above this folder, are written into it for a build, and links to them turned.
"""

import pathlib
import re

import zero_jax

project, author, release = "zero_jax", "The zero_jax developers", zero_jax.__version__
copyright = "the zero_jax developers, Apache-2.0"

# In the order of a reader's day.
CONTENTS = {
    "Begin": ["install", "first-steps", "models", "nnx", "does-not-fit", "coming-from", "guide"],
    "Train": ["finetuning", "interchange", "experts", "launchers", "checkpoints"],
    "Memory and speed": ["offload", "states", "parallelism", "plan", "pipelines", "performance"],
    "Look up": ["reference/index", "glossary", "faq"],
    "Behind it": ["evidence", "architecture", "contributing", "changelog"],
}
FROM_ABOVE = {"README.md": "index", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}
HERE = pathlib.Path(__file__).parent
_LINK = re.compile(r"(\]\()([^)#\s]+)")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme, html_title, html_show_sphinx = "furo", "zero_jax", False
myst_heading_anchors = 3  # those that a forge makes
nb_execution_mode = "off"  # a notebook is kept with its outputs; tests/ runs it
# Docstrings say `x` for code.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints, autodoc_preserve_defaults = "description", True
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype, napoleon_use_ivar = False, True
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True


def setup(app):
    app.connect("config-inited", _write_pages)
    app.connect("source-read", _turn_links)


def _write_pages(app, config):
    for name, page in FROM_ABOVE.items():
        text = (HERE.parent / name).read_text()
        text = _LINK.sub(lambda found: found[1] + _from_above(found[2]), text)
        if page == "index":
            text += "".join(map(_contents, CONTENTS))
        path = HERE / f"{page}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _contents(caption):
    pages = "\n".join(CONTENTS[caption])
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def _turn_links(app, name, source):
    if name not in FROM_ABOVE.values():
        source[0] = _LINK.sub(lambda found: found[1] + _from_docs(found[2]), source[0])


def _from_above(target):
    if target.startswith("https:"):
        return target
    if target in FROM_ABOVE:
        return f"{FROM_ABOVE[target]}.md"
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def _from_docs(target):
    above = target.removeprefix("../")
    return f"{FROM_ABOVE[above]}.md" if above in FROM_ABOVE else target
