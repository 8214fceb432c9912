"""Comparison of a tree with the arrays of a checkpoint."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from zero_jax.checkpoint.leaves import Leaf
from zero_jax.checkpoint.manifest import Entry, Manifest
from zero_jax.sharding import paths


def matched(
    wanted: Sequence[Leaf], manifest: Manifest, may_differ: str | None, where: str
) -> dict[str, tuple[str, ...]]:
    """Returns the paths that are restored, missing, extra and changed.

    Raises:
      ValueError: A missing, extra or changed path is not allowed by `may_differ`.
    """
    known = {leaf.name: leaf for leaf in wanted}
    held = manifest.arrays
    missing = [name for name in known if name not in held]
    extra = [name for name in held if name not in known]
    changed = [
        name
        for name, leaf in known.items()
        if name in held and (held[name].shape, held[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    other = [*missing, *extra, *changed]
    allowed = paths.matches(may_differ, other, "may_differ") if may_differ and other else []
    refused = [n for n, ok in zip(other, allowed or [False] * len(other), strict=True) if not ok]
    if refused:
        raise ValueError(f"{where} does not match: {_differences(refused, known, held)}")
    for name in [*missing, *changed]:
        if not isinstance(known[name].value, (jax.Array, np.ndarray, int, float)):
            raise ValueError(
                f"{name} is not restored, and `like` has no value for it: give an array"
            )
    left = {*missing, *changed}
    return {
        "restored": tuple(name for name in known if name not in left),
        "missing": tuple(missing),
        "extra_arrays": tuple(extra),
        "changed": tuple(changed),
    }


def _differences(names: Sequence[str], known: Mapping[str, Leaf], held: Mapping[str, Entry]) -> str:
    said = []
    for name in names[:5]:
        if name not in held:
            said.append(f"{name} is missing")
        elif name not in known:
            said.append(f"{name} is not in `like`")
        else:
            mine, theirs = known[name], held[name]
            said.append(
                f"{name} is {theirs.dtype}{list(theirs.shape)}, not {mine.dtype}{list(mine.shape)}"
            )
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        "; ".join(said) + more + ". Build the same model and optimizer, or set `may_differ` to a "
        "pattern of these paths"
    )
