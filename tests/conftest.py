"""Eight simulated devices on the CPU for every test, and the tiers of tests."""

import ctypes
import datetime
import gc
import importlib.metadata
import os
import platform
import zlib

# Without LLVM's expensive passes and the newer kernel emitters (optional in 0.10), small programs
# compile in a quarter of the time. XLA's own passes are unchanged.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10.")
)

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# With Python's default thresholds, garbage collection takes 15 % of the tests' CPU time.
gc.set_threshold(200_000, 20, 1000)

SYSTEM = platform.system()

FIXTURES = {"interchange": "families", "compile": "compiled_once"}
NEED_TORCH = ("test_families", "test_masks_of_trl", "test_peers")


def pytest_addoption(parser):
    parser.addoption(
        "--days", type=int, default=1,
        help="run one part of the chosen tests, another each day, and all within so many days",
    )  # fmt: skip


def pytest_configure(config):
    """Imports the fixtures of some tests only if -m asks for those."""
    for marker, module in FIXTURES.items():
        if marker in config.option.markexpr.replace(f"not {marker}", ""):
            config.pluginmanager.import_plugin(module)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each file to one worker, so that its programs are compiled once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(autouse=True, scope="module")
def _the_programs_of_a_file_are_of_no_use_to_the_next():
    yield
    _free_memory()


@pytest.fixture(autouse=True)
def _a_worker_stays_small():
    yield
    if _resident_bytes() > max(1.1e9, _after_freeing[0] + 0.3e9):
        _free_memory()


_after_freeing = [0.0]  # resident bytes


def _free_memory():
    """Drops compiled programs, and returns what malloc keeps of them: gigabytes in some files."""
    jax.clear_caches()
    gc.collect()
    if SYSTEM == "Linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        if trim is not None:
            trim(0)
    _after_freeing[0] = _resident_bytes()


def _resident_bytes():
    if SYSTEM != "Linux":
        return 0.0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_collection_finish(session):
    """Excludes modules and collected tests from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Names the test as the coverage context of the processes that it starts (`pytest --cov`)."""
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage

        config = coverage.Coverage.current().config
        config.context = f"{item.nodeid}|run"
        os.environ["COVERAGE_PROCESS_CONFIG"] = config.serialize()


def pytest_ignore_collect(collection_path, config):
    """Leaves out modules that need PyTorch, unless -m asks for them."""
    torch = collection_path.stem in NEED_TORCH
    return True if torch and "interchange" not in config.option.markexpr else None


def pytest_collection_modifyitems(config, items):
    """Leaves out slow tests without -m, and those that need more installed unless -m names them."""
    asked = config.option.markexpr
    extra = [name for name in ("compile", "launchers") if name not in asked]
    left_out = [*["slow"] * (not asked), *extra]
    chosen = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    if (days := config.option.days) > 1:
        today = datetime.date.today().toordinal() % days
        chosen = [x for x in chosen if zlib.crc32(x.nodeid.encode()) % days == today]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
        items[:] = chosen
    first = {"test_fuzz", "cluster", "training", "plan"}
    items.sort(key=lambda item: first.isdisjoint({item.path.stem, item.path.parent.name}))
