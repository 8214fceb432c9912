"""Analysis of compiled programs: HLO text, communication, memory, FLOPs, overlap and targets.

Compiles ahead of time without the target's devices. Independent of ZeRO; may import `sharding`.
"""
