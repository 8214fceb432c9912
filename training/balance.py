"""Rows of a batch dealt to devices by their attention work.

A token of a packed row attends to the tokens of its document up to itself, so rows of long
documents take longer. Devices wait for each other in each micro-batch: a step takes as long as the
devices with most work in each.

No process knows the rows of another. Each sorts its rows by work, so that the micro-batches of all
processes are alike, and deals those of a micro-batch to its devices. The tokens of a row that
several devices share are balanced in `zero_jax.attention`.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from zero_jax.models.families import Config


def work_of(positions: np.ndarray | jax.Array, config: Config) -> np.ndarray | jax.Array:
    """Returns the keys that the tokens of each row see, summed over tokens and layers, (B,).

    Args:
      positions: Positions (B, S) in documents, from 0.
      config: The model, whose layers may have windows.

    >>> from zero_jax.models.families import preset
    >>> work_of(np.array([[0, 1, 2, 3], [0, 1, 0, 1]]), preset("nano")) / preset("nano").layers
    array([10.,  6.])
    """
    window, slides = getattr(config, "window", None), sum(getattr(config, "slides", ()))
    seen = positions + 1
    work = (config.layers - slides) * seen.sum(axis=1)
    return work + slides * seen.clip(max=window).sum(axis=1) if slides else work


def order_of(work: Sequence[float] | np.ndarray, devices: int, micro_batches: int) -> np.ndarray:
    """Returns the order of rows in which devices have similar work in each micro-batch.

    Args:
      work: Work of each row; devices x micro-batches divide their number.
      devices: Number of devices; the first rows are those of the first device.
      micro_batches: Number of micro-batches; the first rows of a device are those of its first.

    >>> order_of([1, 2, 3, 4, 5, 6, 7, 8], devices=2, micro_batches=2).reshape(2, 2, 2).tolist()
    [[[7, 4], [3, 0]], [[6, 5], [2, 1]]]
    """
    work = np.asarray(work)
    heaviest = np.argsort(-work, kind="stable").reshape(micro_batches, -1, devices)
    rows = np.empty((devices, *heaviest.shape[:2]), int)
    for at, rounds in enumerate(heaviest):
        load = np.zeros(devices)
        for number, dealt in enumerate(rounds):  # the most work to the device with least
            to = np.argsort(load, kind="stable")
            rows[to, at, number] = dealt
            load[to] += work[dealt]
    return rows.reshape(-1)


def imbalance(work: ArrayLike, devices: int, micro_batches: int) -> jax.Array:
    """Returns how much longer a step's attention takes than with equal work on all devices.

    >>> round(float(imbalance(np.array([3, 1, 1, 1]), devices=2, micro_batches=2)), 3)
    1.333
    """
    each = jax.numpy.reshape(work, (devices, micro_batches, -1)).sum(axis=2)
    return each.max(axis=0).sum() / each.mean(axis=0).sum()
