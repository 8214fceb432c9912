"""The rules of the house: imports only downward, models that know nothing, no private JAX."""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = ROOT / "zero_jax"
# What each package, and each module beside them, may import, as its `__init__` says.
BELOW = {"jaxpr": set(), "cluster": set(), "sharding": set(), "models": set()}
BELOW["translate"] = set()
BELOW["collectives"] = {"sharding"}
BELOW["owners"] = {"jaxpr", "sharding"}
BELOW["adapters"] = {"jaxpr", "sharding"}
BELOW["hlo"] = {"sharding"}
BELOW["remat"] = {"jaxpr", "sharding", "collectives"}
BELOW["states"] = {"jaxpr", "sharding"}
BELOW["offload"] = {"jaxpr", "sharding", "collectives", "states"}
BELOW["checkpoint"] = {"cluster", "sharding", "offload"}
BELOW["interchange"] = BELOW["checkpoint"] | {"checkpoint", "models", "adapters"}
BELOW["engine"] = {"jaxpr", "cluster", "sharding", "collectives", "remat", "offload", "owners"}
BELOW["engine"] |= {"states"}
BELOW["plan"] = BELOW["engine"] | {"engine", "hlo", "models", "adapters"}
PACKAGES = set(BELOW) | {"commands"}
# What everybody may know: this release, those of JAX, which name was meant, and how to print.
FACTS = {"_version", "names", "releases", "streams"}
BELOW |= {name: set() for name in FACTS}
# The front door; above it are the command lines and the diagnosis, which nothing imports.
BELOW["zero"] = BELOW["plan"] | {"plan"}
BELOW["commands"] = PACKAGES - {"commands"} | {"zero"}
BELOW["doctor"] = BELOW["zero"]
BELOW["__init__"] = BELOW["commands"]
BELOW["__main__"] = set()


def imports(path: pathlib.Path) -> set[str]:
    """Modules, and what is imported from them, dotted."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # The models stand by themselves, under whatever name they are imported.
            assert (node.level > 0) == _is_own(path, node), f"{path}: relative import"
            module = "zero_jax.models." + (node.module or "") if node.level else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
            if module != "zero_jax":  # `from zero_jax import releases` is that module alone
                found.add(module)
    return found


def _is_own(path: pathlib.Path, node: ast.ImportFrom) -> bool:
    own = {p.stem for p in (ROOT / "models").glob("*.py")}
    return path.parent.name == "models" and str(node.module) in own


def package(path: pathlib.Path) -> str:
    own = path.relative_to(LIBRARY)
    return own.parts[0] if len(own.parts) > 1 else own.stem


def library() -> list[pathlib.Path]:
    return sorted([*LIBRARY.rglob("*.py"), *(LIBRARY / "models").glob("*.py")])


def is_entry(path: pathlib.Path) -> bool:
    """Whether it is a package's `__main__.py`: Python runs `python -m zero_jax.plan` from there,
    so it alone may import the command line, which is above its package."""
    return path.name == "__main__.py" and path.parent != LIBRARY


def used(path: pathlib.Path) -> set[str]:
    """Packages and modules of the library that a file imports, inside functions too.

    `import zero_jax` and `from zero_jax import Zero` import `__init__`.
    """
    parts = [i.split(".") for i in imports(path) if i.split(".")[0] == "zero_jax"]
    names = {part[1] if len(part) > 1 else "__init__" for part in parts}
    return {name if name in BELOW else "__init__" for name in names} - {package(path)}


def test_packages_import_only_what_is_below_them():
    for path in library():
        above = used(path) - FACTS - BELOW[package(path)]
        if is_entry(path):
            above -= {"commands"}
        assert not above, f"{path} imports {above}, which is not below it"


def test_an_entry_only_starts_its_command_line():
    entries = [path for path in library() if is_entry(path)]
    assert len(entries) == 4
    for path in entries:
        assert used(path) <= {"commands", "streams"}, path
        lines = ast.parse(path.read_text()).body
        assert all(isinstance(x, ast.Expr | ast.Import | ast.ImportFrom) for x in lines), path


def test_packages_import_each_other_in_no_circle():
    """Neither as they may (`BELOW`) nor as they do."""
    really = {name: set() for name in BELOW}
    for path in library():
        if not is_entry(path):
            really[package(path)] |= used(path)
    for graph in (BELOW, really):
        assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(BELOW)


@pytest.mark.parametrize(
    ("line", "above"),
    [
        ("from zero_jax.engine.step import TrainStep", {"engine"}),
        ("import zero_jax.zero", {"zero"}),
        ("from zero_jax.commands import plan", {"commands"}),
        ("from zero_jax import doctor", {"doctor"}),
        ("import zero_jax", {"__init__"}),
        ("from zero_jax import Zero", {"__init__"}),
        ("from zero_jax.sharding import layout\nimport zero_jax", {"__init__"}),
        ("def later():\n    from zero_jax.plan import memory", {"plan"}),
        ("from zero_jax import releases", set()),
    ],
)
def test_an_import_upward_is_seen(line, above, tmp_path, monkeypatch):
    monkeypatch.setattr("test_house.LIBRARY", tmp_path)
    path = tmp_path / "checkpoint" / "command.py"
    path.parent.mkdir()
    path.write_text(line)
    assert used(path) - FACTS - BELOW["checkpoint"] == above


def test_nothing_is_imported_by_a_name_in_a_string():
    """Such an import would be in no graph; `zero_jax NAME` runs modules that nothing imports."""
    for path in library():
        if path != LIBRARY / "__main__.py":
            calls = ("import_module", "__import__", "runpy")
            assert not any(call in path.read_text() for call in calls), path


def test_nothing_is_imported_in_a_circle():
    names = {
        ".".join(("zero_jax", *p.relative_to(LIBRARY).with_suffix("").parts)): p for p in library()
    }
    arrows = {name: imports(path) & set(names) for name, path in names.items()}
    while True:
        ends = {name for name, uses in arrows.items() if not uses & set(arrows)}
        if not ends:
            break
        arrows = {name: uses for name, uses in arrows.items() if name not in ends}
    assert not arrows, f"these import each other in circles: {sorted(arrows)}"


def test_every_package_says_what_it_is_for_and_what_it_may_import():
    folders = {p.name for p in LIBRARY.iterdir() if (p / "__init__.py").exists()}
    assert folders == PACKAGES
    for name in folders:
        said = ast.get_docstring(ast.parse((LIBRARY / name / "__init__.py").read_text())) or ""
        assert "mport" in said, name


def test_no_module_has_the_name_of_a_public_function():
    import zero_jax

    for name in {p.name for p in LIBRARY.iterdir() if p.is_dir()} & set(dir(zero_jax)):
        assert type(getattr(zero_jax, name)).__name__ == "module", name


def test_models_import_nothing_from_the_library():
    for path in (ROOT / "models").glob("*.py"):
        others = {i for i in imports(path) if not i.startswith("zero_jax.models.")}
        assert not any(i.split(".")[0] == "zero_jax" for i in others), path
        assert "ZeRO" not in path.read_text(), path


def test_nothing_is_imported_from_private_jax():
    for folder in ("zero_jax", "models", "training", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            private = [i for i in imports(path) if i.startswith(("jax._src", "jaxlib"))]
            assert not private, f"{path}: {private}"


def test_one_function_builds_jaxprs():
    """`equations.new_jaxpr` gives them the debug info that JAX asks for."""
    using = [p.name for p in library() if "jex.Jaxpr(" in p.read_text()]
    assert using == ["equations.py"]
