"""The rules of the house: imports only downward, models that know nothing, no private JAX."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = ROOT / "zero_jax"
# What each package may import, as its `__init__` says. `zero` and `__init__` are the front door,
# `doctor` and a package's `command` and `__main__` command lines: these may import everything.
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
# What everybody may know: this release, those of JAX, and which name was meant.
FACTS = {"_version", "names", "releases"}
DOORS = {"zero.py", "doctor.py", "command.py", "__main__.py"}


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
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def _is_own(path: pathlib.Path, node: ast.ImportFrom) -> bool:
    own = {p.stem for p in (ROOT / "models").glob("*.py")}
    return path.parent.name == "models" and str(node.module) in own


def package(path: pathlib.Path) -> str:
    own = path.relative_to(LIBRARY)
    return own.parts[0] if len(own.parts) > 1 else own.stem


def library() -> list[pathlib.Path]:
    return sorted([*LIBRARY.rglob("*.py"), *(LIBRARY / "models").glob("*.py")])


def test_packages_import_only_what_is_below_them():
    for path in library():
        if path.name in DOORS or (path.parent == LIBRARY and path.name == "__init__.py"):
            continue
        used = {i.split(".")[1] for i in imports(path) if i.startswith("zero_jax.")}
        above = used - FACTS - {package(path)} - BELOW.get(package(path), set())
        assert not above, f"{path} imports {above}, which is not below it"


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
    assert folders == set(BELOW)
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


def test_files_stay_small():
    sizes = {p: len(p.read_text().splitlines()) for p in library()}
    assert max(sizes.values()) <= 400, {str(p): n for p, n in sizes.items() if n > 400}
