"""Compiled programs: their text, what they send, hold, compute and hide, for which device.

Compiles for devices that need not be there. Knows nothing of ZeRO; may import `sharding`.
"""
