"""Rematerialisation: policies for saved activations and where to store them, and recomputed layers.

Layers are functions of arrays, independent of stages and shards. May import `tracing`, `sharding`
and `collectives`.
"""
