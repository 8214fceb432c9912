"""Batches of token sequences, the same for any number of processes.

A sample is a window of `S + 1` tokens: `S` inputs, and the same shifted by one as targets.
Windows start `S` apart, so each token but the first of a split is a target once per epoch; a tail
shorter than `S` is left out of training, never of evaluation.

The stream is indexed by one number, the global sample index: batch `i` of `B` rows is samples
`i B` to `(i + 1) B`, of which process `p` of `P` reads only its own `B / P` consecutive rows. A
run in four processes sees the data of a run in one, and going on from sample `start` costs
nothing, since grain's shuffle is a permutation computed per index, not a shuffled list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training.text import TokenArray

if TYPE_CHECKING:
    import grain  # at run time inside the functions: it imports jax

Batch = npt.NDArray[np.int32]
Mask = npt.NDArray[np.float32]


def samples_per_epoch(num_tokens: int, seq: int) -> int:
    """How many training windows of `seq + 1` tokens, `seq` apart, the tokens hold.

    >>> samples_per_epoch(9, seq=4), samples_per_epoch(12, seq=4)
    (2, 2)
    """
    return max(0, (num_tokens - 1) // seq)


def batches(
    tokens: TokenArray,
    *,
    batch: int,
    seq: int,
    seed: int,
    shard_index: int,
    shard_count: int,
    start: int = 0,
) -> Iterator[Batch]:
    """This process's rows of an endless stream of shuffled batches.

    Every epoch is a new order. The same `seed` gives the same stream, whatever `shard_count` is.

    Args:
        tokens: Token ids `(N,)`, possibly a `TokenFile`.
        batch: Rows `B` of the global batch.
        seq: Sequence length `S`.
        seed: Any non-negative integer.
        shard_index: This process, in `[0, shard_count)`.
        shard_count: Number of processes `P`; must divide `B`.
        start: Samples the run has consumed before, over all processes: steps done times `B`.

    Returns:
        An iterator of int32 `(B / P, S + 1)`: rows `shard_index B / P` and on of each batch.

    Raises:
        ValueError: `B` is not a multiple of `P`, the text is shorter than one sample, or a number
            is out of range.

    >>> rows = batches(np.arange(9), batch=2, seq=4, seed=0, shard_index=0, shard_count=1)
    >>> sorted(next(rows).tolist())
    [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    """
    rows = _rows_per_shard(batch, seq, shard_index, shard_count)
    if seed < 0 or start < 0:
        raise ValueError(f"seed={seed}, start={start}: both must be 0 or more")
    if samples_per_epoch(tokens.size, seq) == 0:
        raise ValueError(
            f"{tokens.size} tokens do not fill one sample of seq + 1 = {seq + 1} tokens: "
            "use more text, or a shorter --seq-len"
        )
    import grain

    # grain shuffles epoch e with seed + e, so that neighbouring seeds would share their epochs.
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    samples = grain.MapDataset.source(_Windows(tokens, seq)).shuffle(seed=mixed).repeat()
    # 2**62 samples stand for endless: grain's own length, 2**63 - 1, overflows in batches of one.
    return _iterate(samples[start : 2**62].batch(rows)[shard_index::shard_count])


def eval_batches(
    tokens: TokenArray,
    *,
    batch: int,
    seq: int,
    shard_index: int,
    shard_count: int,
    max_batches: int | None = None,
) -> Iterator[tuple[Batch, Mask]]:
    """This process's rows of one pass, in order, over all held-out tokens.

    Each token but the first is a target exactly once. What is missing in the last batch is
    padding: token 0 under mask 0. All processes get the same number of batches, so the exact mean
    loss is `sum(mask * loss) / sum(mask)` with both sums over all batches and processes.

    Args:
        tokens: Token ids `(N,)`, at least two.
        batch: Rows `B` of the global batch.
        seq: Sequence length `S`.
        shard_index: This process, in `[0, shard_count)`.
        shard_count: Number of processes `P`; must divide `B`.
        max_batches: Stop after so many batches; None for all.

    Returns:
        An iterator of int32 `(B / P, S + 1)` and its float32 mask over targets, `(B / P, S)`.

    Raises:
        ValueError: As for `batches`; two tokens are enough here.

    >>> it = eval_batches(np.arange(4), batch=1, seq=2, shard_index=0, shard_count=1)
    >>> [(rows.tolist(), mask.tolist()) for rows, mask in it]
    [([[0, 1, 2]], [[1.0, 1.0]]), ([[2, 3, 0]], [[1.0, 0.0]])]
    """
    rows = _rows_per_shard(batch, seq, shard_index, shard_count)
    if tokens.size < 2:
        raise ValueError(
            f"evaluation needs at least 2 tokens, and {tokens.size} are held out: hold out more"
        )
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches={max_batches}: it must be at least 1, or None for all")
    import grain

    windows = grain.MapDataset.source(_PaddedWindows(tokens, seq, multiple_of=batch))
    return _iterate(windows.batch(rows)[shard_index::shard_count][:max_batches])


class _Windows:
    """Full windows only; grain reads them by index."""

    def __init__(self, tokens: TokenArray, seq: int) -> None:
        self._tokens, self._seq = tokens, seq

    def __len__(self) -> int:
        return samples_per_epoch(self._tokens.size, self._seq)

    def __getitem__(self, index: int) -> Batch:
        first = index * self._seq
        return np.asarray(self._tokens[first : first + self._seq + 1], np.int32)


class _PaddedWindows:
    """All windows and their masks; the last partial one is padded, and so is their number."""

    def __init__(self, tokens: TokenArray, seq: int, multiple_of: int) -> None:
        self._tokens, self._seq = tokens, seq
        windows = -(-(tokens.size - 1) // seq)
        self._len = -(-windows // multiple_of) * multiple_of

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> tuple[Batch, Mask]:
        first = index * self._seq
        found = self._tokens[first : first + self._seq + 1]
        row, mask = np.zeros(self._seq + 1, np.int32), np.zeros(self._seq, np.float32)
        row[: found.size] = found
        mask[: max(0, found.size - 1)] = 1
        return row, mask


def _rows_per_shard(batch: int, seq: int, shard_index: int, shard_count: int) -> int:
    if batch < 1 or seq < 1 or shard_count < 1:
        raise ValueError(f"{batch=}, {seq=}, {shard_count=}: all must be above 0")
    if not 0 <= shard_index < shard_count:
        raise ValueError(
            f"{shard_index=}: it must be in [0, {shard_count}), the range of shard_count"
        )
    if batch % shard_count:
        lower = batch - batch % shard_count
        raise ValueError(
            f"--global-batch-size {batch} must be a multiple of the {shard_count} processes: "
            f"use --global-batch-size {lower + shard_count}" + (f" or {lower}" if lower else "")
        )
    return batch // shard_count


def _iterate(dataset: grain.MapDataset[Any]) -> Iterator[Any]:
    import grain

    # One thread reads two batches ahead, while the devices work; the order does not change.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(dataset.to_iter_dataset(options))
