"""Updates that need full matrices, such as Muon: each matrix is updated on its assigned device.

Finds such updates in the trace, assigns the matrices of all leaves to devices, sends them there
and back, and leaves the rest of the update sharded. May import `tracing` and `sharding`.
"""
