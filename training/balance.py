"""Rows of a batch assigned to devices by their attention work.

A token of a packed row attends to the tokens of its document up to itself, so with cuDNN's kernel
rows of long documents take longer (attention in blocks takes as long for all rows). Devices wait
for each other in each micro-batch: a step takes as long as the devices with most work in each.

No process knows the rows of another. Each sorts its rows by work, so that the micro-batches of all
processes are alike, and assigns those of a micro-batch to its devices. `zero_jax.attention`
balances the tokens of a row that several devices share.
"""

from collections.abc import Sequence

import jax
import numpy as np

from zero_jax.models.families import Config


def work_of(segments: np.ndarray, config: Config) -> np.ndarray:
    """Returns the pairs of tokens that attend in each row, over all layers, float64 (B,).

    Args:
      segments: Document numbers (B, S). Padding is a document too, as in the kernel.
      config: The model, whose layers may have windows.

    >>> from zero_jax.models.families import preset
    >>> config = preset("nano")
    >>> work_of(np.array([[1, 1, 1, 1], [1, 1, 0, 0]]), config) / config.layers
    array([10.,  6.])
    """
    places = np.arange(segments.shape[1])
    begins = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    seen = 1 + places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    window, slides = getattr(config, "window", None), sum(getattr(config, "slides", ()))
    work = (config.layers - slides) * seen.sum(axis=1, dtype=float)
    return work + slides * seen.clip(max=window).sum(axis=1, dtype=float) if slides else work


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
        for number, given in enumerate(rounds):  # the most work to the device with least
            to = np.argsort(load, kind="stable")
            rows[to, at, number] = given
            load[to] += work[given]
    return rows.reshape(-1)


def imbalance(work: jax.Array, devices: int, micro_batches: int) -> jax.Array:
    """Returns how much longer a step's attention takes than with equal work on all devices.

    Other arguments as for `order_of`; the rows are in that order.

    >>> round(float(imbalance(jax.numpy.array([3.0, 1, 1, 1]), devices=2, micro_batches=2)), 3)
    1.333
    """
    each = work.reshape(devices, micro_batches, -1).sum(axis=2)
    return each.max(axis=0).sum() / each.mean(axis=0).sum()
