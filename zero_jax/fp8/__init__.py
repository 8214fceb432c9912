"""Matrix products in 8-bit floats (fp8) for any traced loss.

Imports `tracing` and `sharding`.
"""
