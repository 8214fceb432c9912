"""Multi-process runs: joining, comparing settings, locking files, and ending after a failure.

Imports nothing of zero_jax.
"""
