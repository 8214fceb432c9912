"""The site of these pages: `sphinx-build -W -b html docs OUT`, with the extra `docs`.

The pages are read on a forge, too, so they are plain Markdown. README, CONTRIBUTING and CHANGELOG,
which stand above this folder, are written into it for a build, and links to them turned.
"""

import os
import pathlib
import re
import urllib.request

import zero_jax

project, author, release = "zero_jax", "The zero_jax developers", zero_jax.__version__
copyright = "the zero_jax developers, Apache-2.0"

# In the order of a reader's day.
CONTENTS = {
    "Get started": [
        "install",
        "quickstart-training-loop",
        "quickstart-pretraining",
        "quickstart-finetuning",
        "quickstart-planning",
        "settings",
        "support-matrix",
        "comparison",
        "coming-from",
    ],
    "How-to guides": [
        "models",
        "nnx",
        "examples",
        "losses",
        "optimizers",
        "gradient-accumulation",
        "mixed-precision",
        "activation-checkpointing",
        "evaluation",
        "train-py",
        "multi-node",
        "checkpoints",
        "checkpoint-format",
        "finetuning",
        "chat-data",
        "interchange",
        "interchange-format",
        "profiling",
    ],
    "Memory and parallelism": [
        "out-of-memory",
        "plan",
        "offload",
        "states",
        "parallelism",
        "experts",
        "experts-estimates",
        "long-context",
        "pipelines",
    ],
    "Measurements": ["performance", "performance-tables", "plan-accuracy", "memory"],
    "Reference": ["reference/index", "glossary", "troubleshooting"],
    "Project": ["evidence", "architecture", "contributing", "changelog", "security"],
}
FROM_ABOVE = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "SECURITY.md": "security",
    "examples/README.md": "examples",
}
HERE = pathlib.Path(__file__).parent
_LINK = re.compile(r"(\]\()([^)#\s]+)")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["sphinx.ext.intersphinx", "sphinx_copybutton"]
autosummary_generate = False  # summaries are tables of names that other pages document
exclude_patterns = ["_build"]
html_theme, html_title, html_show_sphinx = "furo", "zero_jax", False
html_static_path, html_css_files = ["_static"], ["site.css"]
myst_heading_anchors = 3  # those that a forge makes
nb_execution_mode = "off"  # a notebook is kept with its outputs; tests/ runs it
# Docstrings say `x` for code.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints, autodoc_preserve_defaults = "description", True
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype, napoleon_use_ivar = False, True
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True


def _reachable(site):
    """True if a site serves its inventory. Without a network, pages are built without its links."""
    try:
        with urllib.request.urlopen(f"{site}objects.inv", timeout=5):
            return True
    except OSError:
        return False


_SITES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "flax": "https://flax.readthedocs.io/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
}
intersphinx_mapping = {name: (site, None) for name, site in _SITES.items() if _reachable(site)}


def setup(app):
    app.connect("config-inited", _write_pages)
    app.connect("source-read", _turn_links)


def _write_pages(app, config):
    for name, page in FROM_ABOVE.items():
        above = HERE.parent / name
        text = _turned(above.read_text(), above.parent)
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
        source[0] = _turned(source[0], (HERE / name).parent)


def _turned(text, folder):
    return _LINK.sub(lambda found: found[1] + _on_site(found[2], folder), text)


def _on_site(target, folder):
    """Where a link of a file in a folder of the repository leads from the same page of the site."""
    path = pathlib.Path(os.path.normpath(folder / target))
    if ":" in target or not path.is_relative_to(HERE.parent):
        return target
    page = FROM_ABOVE.get(str(path.relative_to(HERE.parent)))
    start = folder if folder.is_relative_to(HERE) else HERE
    return os.path.relpath(HERE / f"{page}.md" if page else path, start)
