"""Context parallelism: the tokens of a row are split over the mesh axis `context`.

`chunks.py` is the layout, `attention.py` the one operation that exchanges tokens, `token_dims.py`
the check that nothing else does, with the facts of `token_facts.py` and `token_operations.py`. May
import `tracing`, `sharding` and `collectives`.
"""
