"""Eight fake devices on the CPU for every test; tests that need more start a process."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
