"""Leaves of scanned layers that XLA for GPUs lays out anew: those not cut along their first dim.

A gather along a later dim needs that dim first in memory. XLA turns the fp32 masters of all layers
ahead of the loop, once for both passes; gradients it turns one by one (`under_way.py`). The experts
of a layer (E, D, F) are cut along D where N does not divide E.
"""

import math
from collections.abc import Sequence

from zero_jax.engine.lifetimes import Leaf
from zero_jax.sharding.cuts import Split


def turned_bytes(leaves: Sequence[Leaf]) -> int:
    """Bytes of those copies, of the leaves of a traced loss."""
    cuts = [leaf.cut for leaf in leaves if leaf.opens and _is_turned(leaf.cut)]
    return sum(4 * math.prod(cut.device_shape) for cut in cuts)


def _is_turned(cut: Split) -> bool:
    if not cut.stacked or cut.dim is None:
        return False
    return math.prod(cut.device_shape[1 : len(cut.shape) + cut.dim]) > 1
