"""Processes: how they join a run, agree, lock what is theirs, and end when one is gone.

Imports nothing of zero_jax.
"""
