"""The rules of the house: imports only downward, models that know nothing, no private JAX."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = [
    {"paths", "precision", "mesh", "hlo_text", "targets", "paper", "_version"}
    | {"configurations", "buckets", "jaxprs", "tiers", "operations", "store"}
    | {"checksum", "lock", "discarded", "watchdog", "compiler", "losses", "barriers"},
    {"arrays", "tensorfiles"},
    {"manifest"},
    {"model_axis", "spread", "policies", "weights", "marks"},
    {"derivatives"},
    {"flat"},
    {"traced"},
    {"layout", "micro_batch", "trips", "groups", "liveness", "spans", "scaling", "streaming"}
    | {"activations", "repeats", "quantised"},
    {"flops", "forecast", "splitter"},
    {"sent"},
    {"hlo"},
    {"prove", "roofline"},
    {"collectives", "elementwise"},
    {"stored", "touch", "recompute", "piecewise", "lifetimes", "linear"},
    {"grouped", "hosted", "chain", "replay", "regathered"},
    {"loops", "unrolled"},
    {"rewrite", "streamed", "nvme"},
    {"optimizer", "partitioned", "leaves"},
    {"writing", "comparing", "replicas"},
    {"checkpoints"},
    {"inspecting"},
    {"exporting"},
    {"interchange"},
    {"settings"},
    {"trace", "memory"},
    {"device_step"},
    {"grads"},
    {"step"},
    {"planned", "auto", "selfcheck", "nvme_step"},
    {"candidates"},
    {"choose"},
    {"zero", "plan_text", "offload"},
    {"plan", "checkpoint"},
    {"__init__"},
]


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_only_downward():
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    files = {p.stem: p for p in (ROOT / "zero_jax").glob("*.py")}
    assert set(files) == set(floor), "every module has its floor"
    for name, path in files.items():
        used = {i.split(".")[1] for i in imports(path) if i.startswith("zero_jax.")}
        for other in used & set(floor):
            assert floor[other] < floor[name], f"{name} imports {other}, which is not below it"


def test_models_import_nothing_from_the_library():
    for path in (ROOT / "models").glob("*.py"):
        assert not any(i.split(".")[0] == "zero_jax" for i in imports(path)), path
        assert "ZeRO" not in path.read_text(), path


def test_nothing_is_imported_from_private_jax():
    for folder in ("zero_jax", "models", "training", "tests"):
        for path in (ROOT / folder).glob("*.py"):
            private = [i for i in imports(path) if i.startswith(("jax._src", "jaxlib"))]
            assert not private, f"{path}: {private}"


def test_files_stay_small():
    sizes = {p: len(p.read_text().splitlines()) for p in (ROOT / "zero_jax").glob("*.py")}
    assert max(sizes.values()) <= 330, {str(p): n for p, n in sizes.items() if n > 330}
