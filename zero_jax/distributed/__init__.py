"""Multi-process runs: joining, settings, locks, the watchdog. Imports nothing of zero_jax."""
