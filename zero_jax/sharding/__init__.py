"""How a leaf is cut and rests: its split as a function of its shape, meshes, the model axis.

Leaves have names here, and a tree of them one split each. May import nothing of zero_jax.
"""
