"""Eight fake devices on the CPU for every test; tests that need more start a process."""

import os

# Tests compile hundreds of small programs and run each for a moment: without LLVM's expensive
# passes they compile in half the time. What XLA itself does to a program stays as it is.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
