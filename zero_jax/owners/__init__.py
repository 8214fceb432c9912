"""Matrices by owner: what an update computes of whole matrices, each on one device.

Finds it in the update's trace, deals the matrices of all leaves out to devices, sends them there
and back, and leaves the rest of the update where it is. May import `jaxpr` and `sharding`.
"""
