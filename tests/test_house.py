"""Imports of the library: only downward, in no circle, private ones of JAX in one file."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import zero_jax

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "zero_jax"
BELOW = {name: set() for name in ("tracing", "distributed", "sharding", "models", "translate")}
BELOW |= {"collectives": {"sharding"}, "hlo": {"sharding"}}
BELOW |= {
    name: {"tracing", "sharding"} for name in ("matrix_updates", "adapters", "low_bit", "fp8")
}
BELOW["remat"] = BELOW["context_parallel"] = {"tracing", "sharding", "collectives"}
BELOW["offload"] = {"tracing", "sharding", "collectives", "low_bit"}
BELOW["checkpoint"] = {"distributed", "sharding", "offload"}
BELOW["interchange"] = BELOW["checkpoint"] | {"checkpoint", "models", "adapters"}
BELOW["engine"] = BELOW["offload"] | {"distributed", "remat", "offload", "matrix_updates"}
BELOW["engine"] |= {"context_parallel", "fp8"}
BELOW["plan"] = BELOW["engine"] | {"engine", "hlo", "models", "adapters"}
PACKAGES = {*BELOW, "commands"}
FACTS = {"_version", "names", "releases", "streams"}
BELOW |= {name: set() for name in (*FACTS, "__main__")}
BELOW["zero"] = BELOW["doctor"] = BELOW["plan"] | {"plan"}
BELOW["commands"] = BELOW["__init__"] = PACKAGES - {"commands"} | {"zero"}
MODULES = sorted([*LIBRARY.rglob("*.py"), *(LIBRARY / "models").glob("*.py")])
# A package's `__main__.py` may import the command line, which is above its package.
ENTRIES = {path for path in MODULES if path.name == "__main__.py" and path.parent != LIBRARY}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Only models import each other relatively: their package may have another name.
            own = path.parent.name == "models" and (ROOT / "models" / f"{node.module}.py").exists()
            assert (node.level > 0) == own, f"{path}: relative import"
            module = "zero_jax.models." + (node.module or "") if node.level else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
            if module != "zero_jax":  # `from zero_jax import releases` is that module alone
                found.add(module)
    return found


def package(path: Path) -> str:
    return path.relative_to(LIBRARY).with_suffix("").parts[0]


def used(path: Path) -> set[str]:
    """Returns imported packages and modules of the library; `zero_jax.Zero` is of `__init__`."""
    parts = [name.split(".") for name in imports(path) if name.split(".")[0] == "zero_jax"]
    names = {part[1] if len(part) > 1 else "__init__" for part in parts}
    return {name if name in BELOW else "__init__" for name in names} - {package(path)}


def test_packages_import_only_what_is_below_them_in_no_circle():
    assert used(LIBRARY / "zero.py") > {"engine", "plan"} and used(LIBRARY / "doctor.py")
    for path in MODULES:
        above = used(path) - FACTS - BELOW[package(path)]
        above -= {"commands", "doctor"} if path in ENTRIES else set()
        assert not above, f"{path} imports {above}"
    assert len(ENTRIES) == 4
    for path in ENTRIES:
        assert used(path) <= {"commands", "doctor", "streams"}, path
        kinds = ast.Expr | ast.Import | ast.ImportFrom
        assert all(isinstance(x, kinds) for x in tree(path).body), path
    own = set(MODULES) - ENTRIES
    packages = {name: set().union(*(used(p) for p in own if package(p) == name)) for name in BELOW}
    dotted = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in MODULES}
    modules = {name: imports(path) & set(dotted.values()) for path, name in dotted.items()}
    for graph in (BELOW, packages, modules):
        assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(graph)


def test_imports_by_string_and_jaxprs_have_one_place_and_every_package_says_what_it_imports():
    for path in MODULES:
        text = path.read_text()
        # An import by string would be in no graph; `zero_jax NAME` runs modules that way.
        entry = path == LIBRARY / "__main__.py"
        assert entry or not re.search("import_module|__import__|runpy", text), path
        # `new_jaxpr` gives jaxprs the debug info that JAX requires.
        assert ("jex.Jaxpr(" in text) == (path.name == "jaxpr.py"), path
        loops = re.search("for .* in .*eqns", text) and path.parent.name != "tracing"
        assert not loops, f"{path}: see zero_jax/tracing"
    assert {path.parent.name for path in LIBRARY.glob("*/__init__.py")} == PACKAGES
    for name in PACKAGES:
        assert "mport" in (ast.get_docstring(tree(LIBRARY / name / "__init__.py")) or ""), name
        assert isinstance(getattr(zero_jax, name, ast), type(ast)), f"{name} hides a function"


def test_models_import_nothing_from_the_library_and_one_file_imports_private_jax():
    for path in (ROOT / "models").glob("*.py"):
        found = {i for i in imports(path) if i.startswith("zero_jax")}
        assert all(i.startswith("zero_jax.models.") for i in found), path
        assert "ZeRO" not in path.read_text(), path
    private = re.compile(r"^ *(from|import) +(jax\._src|jaxlib|jax +import +_src)", re.MULTILINE)
    # cuDNN's kernel takes documents as offsets only there; else they are a mask of T² numbers.
    exempt = LIBRARY / "context_parallel" / "cudnn.py"
    paths = (
        p for top in ("zero_jax", "models", "training", "tests") for p in (ROOT / top).rglob("*.py")
    )
    assert [path for path in paths if private.search(path.read_text())] == [exempt]
