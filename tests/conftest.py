"""Eight fake devices on the CPU for every test; tests that need more start a process."""

import importlib.metadata
import os
import tempfile

# Tests compile hundreds of small programs and run each for a moment: without LLVM's expensive
# passes they compile in half the time, and without the newer kernel emitters, which can still be
# switched off in 0.10, in a quarter; nor is it worth while to hand them out to threads. What XLA
# itself does to a program stays as it is.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10.")
)

# The check of offload is remembered beside the tests' own files, and not in the user's cache.
os.environ.setdefault("ZERO_JAX_CACHE", os.path.join(tempfile.gettempdir(), "zero_jax_tests"))

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# What needs PyTorch is an extra; see there.
FIXTURES = {"interchange": "gpt2_models", "prove": "compiled_once"}
NEED_TORCH = (
    "test_adapters_peers",
    "test_export",
    "test_finetune_peers",
    "test_families",
    "test_import",
    "test_import_refused",
    "test_masks_of_trl",
    "test_peers",
)


def pytest_configure(config):
    """Fixtures that are for some tests alone, if -m asks for those."""
    for marker, module in FIXTURES.items():
        if marker in config.option.markexpr:
            config.pluginmanager.import_plugin(module)


def pytest_ignore_collect(collection_path, config):
    """Leaves out what needs PyTorch, unless -m asks for it."""
    torch = collection_path.stem in NEED_TORCH
    return True if torch and "interchange" not in config.option.markexpr else None


def pytest_collection_modifyitems(config, items):
    """Without -m leaves out what takes long; and what compiles for GPUs, or starts launchers, which
    need more to be installed, unless -m names it."""
    asked = config.option.markexpr
    own = [name for name in ("prove", "launchers") if name not in asked]
    left_out = [*["heavy"] * (not asked), *own]
    chosen = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
        items[:] = chosen
    # What takes longest comes first, or the last of it runs alone.
    first = {"test_chaos", "test_fuzz", "cluster", "training", "plan"}
    items.sort(key=lambda item: first.isdisjoint({item.path.stem, item.path.parent.name}))
