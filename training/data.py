"""Windows of one text as batches, in the same order for any number of processes.

A sample is `S + 1` tokens: `S` inputs, and the same shifted by one as targets. Samples start `S`
tokens apart, so each token but the first is a target once per epoch. Training leaves out a last
sample that is shorter; evaluation pads it.

Batch `i` of `B` rows holds samples `i B` to `(i + 1) B`, and process `p` of `P` reads its `B / P`
consecutive rows. Resuming reads no earlier sample, because grain computes its shuffle by index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training.entropy import bigram_entropy, unigram_entropy
from training.show import human_count, printable
from training.text import IntArray, TokenArray, Tokens, decode, split
from training.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain  # at run time inside the functions: it imports jax

Batch = npt.NDArray[np.int32]
Mask = npt.NDArray[np.float32]
PROMPT = 16  # held-out tokens at the beginning of a generated sample


class Text:
    """One text as windows of `S + 1` tokens; the last tenth is held out.

    Args:
        corpus: Tokens of the text.
        seq: Sequence length `S`.
        batch: Rows `B` of the global batch.
        seed: Seed of the order.
        tokenizer: Tokenizer of the tokens, if they are not bytes.

    Raises:
        ValueError: A part does not fill one sample, or a number is out of range.

    >>> text = Text(Tokens(np.arange(40), "numbers", False), seq=2, batch=1, seed=0)
    >>> [(rows.tolist(), mask.tolist()) for rows, mask in text.held_out(0, 1)]
    [([[36, 37, 38]], [[1.0, 1.0]]), ([[38, 39, 0]], [[1.0, 0.0]])]
    """

    temperature = 0.8  # of generated samples
    counts = None  # no document is left out

    def __init__(
        self, corpus: Tokens, seq: int, batch: int, seed: int, tokenizer: Tokenizer | None = None
    ) -> None:
        self._corpus, self._tokenizer = corpus, tokenizer
        if batch < 1 or seq < 1 or seed < 0:
            raise ValueError(
                f"{batch=}, {seq=}, {seed=}: the first two must be above 0, seed 0 or more"
            )
        self._seq, self._batch, self._seed = seq, batch, seed
        self.train, self.rest = split(corpus.tokens, seq=seq)
        self.name, self.byte_level = corpus.name, corpus.byte_level
        self.unit = "byte" if corpus.byte_level else "token"
        self.facts: dict[str, Any] = {
            "train_tokens": self.train.size,
            "held_out_tokens": self.rest.size,
        }
        self.held_out_size = f"{self.rest.size:,} held-out {self.unit}s"
        self.order: dict[str, Any] = {  # settings that determine the order of samples
            "corpus": self.name,
            "train_tokens": self.train.size,
            "seq_len": seq,
            "seed": seed,
        }
        self.ends: list[int] = []  # a window ends anywhere

    @property
    def samples_per_epoch(self) -> int:
        """Number of full windows of the training text."""
        return (self.train.size - 1) // self._seq

    @property
    def contents(self) -> dict[str, str]:
        """Checksum of the text or its tokens, by the flag that names it."""
        return {"data": self._corpus.fingerprint}

    def outlook(self, steps: int) -> str:
        """Describes how many epochs a run of `steps` steps is."""
        epochs = steps * self._batch / self.samples_per_epoch
        return f"{steps:,} steps are {human_count(epochs)} epochs of {self.name}"

    def batches(self, place: Any, index: int, count: int) -> Iterator[tuple[tuple[Batch], int]]:
        """Yields this process's rows of an endless stream of batches, and the place after each.

        Every epoch has a new order, which depends on the seed and not on the number of processes.

        Args:
            place: Samples that the run has used before, over all processes; None for 0.
            index: Index of this process, in `[0, count)`.
            count: Number of processes `P`; must divide `B`.

        Returns:
            An iterator of (tokens,) of int32 `(B / P, S + 1)`, and the place.

        Raises:
            ValueError: `B` is not a multiple of `P`, or a number is out of range.
        """
        rows, start = self._rows_per_process(index, count), int(place or 0)
        import grain

        # grain shuffles epoch e with seed + e: neighbouring seeds would share their epochs.
        seed = int(np.random.SeedSequence(self._seed).generate_state(1)[0])
        source = _Samples(self.train, self._seq, self.samples_per_epoch)
        # 2**62 samples stand for endless: grain's own length, 2**63 - 1, overflows in batches of 1.
        endless = grain.MapDataset.source(source).shuffle(seed=seed).repeat()[start : 2**62]
        for tokens, _ in _iterate(endless.batch(rows)[index::count]):
            start += self._batch
            yield (tokens,), start

    def held_out(
        self, index: int, count: int, most: int | None = None
    ) -> Iterator[tuple[Batch, Mask]]:
        """Returns this process's rows of one pass, in order, over all held-out tokens.

        Each token but the first is a target once. The last batch is padded with token 0 under mask
        0. All processes get the same number of batches, so the exact mean loss is
        `sum(mask * loss) / sum(mask)` with both sums over all batches and processes.

        Args:
            index: Index of this process, in `[0, count)`.
            count: Number of processes `P`; must divide `B`.
            most: Number of batches to stop after; None for all.

        Returns:
            An iterator of int32 `(B / P, S + 1)` and its float32 mask over targets, `(B / P, S)`.

        Raises:
            ValueError: `B` is not a multiple of `P`, or a number is out of range.
        """
        rows = self._rows_per_process(index, count)
        if most is not None and most < 1:
            raise ValueError(f"most={most}: it must be at least 1, or None for all")
        import grain

        padded = self.held_out_batches() * self._batch
        samples = grain.MapDataset.source(_Samples(self.rest, self._seq, padded))
        return _iterate(samples.batch(rows)[index::count][:most])

    def held_out_batches(self) -> int:
        """Returns the number of batches of such a pass."""
        return -(-(self.rest.size - 1) // (self._seq * self._batch))

    def _rows_per_process(self, index: int, count: int) -> int:
        if not 0 <= index < count:
            raise ValueError(f"{index=}: it must be in [0, {count}), the range of `count`")
        if self._batch % count:
            lower = self._batch - self._batch % count
            raise ValueError(
                f"--global-batch-size {self._batch} must be a multiple of the {count} processes: "
                f"use --global-batch-size {lower + count}" + (f" or {lower}" if lower else "")
            )
        return self._batch // count

    def marks(self, vocab: int) -> dict[str, float]:
        """Returns the losses that counting tokens and pairs reaches, in nats per token."""
        return {
            "unigram entropy": unigram_entropy(self.rest, vocab),
            "bigram entropy": bigram_entropy(self.rest, vocab),
        }

    def prompt(self, most: int) -> IntArray:
        """Returns the first held-out tokens, at most `most`."""
        return self.rest[: min(PROMPT, most)]

    def show(self, tokens: Sequence[int], prompt_size: int) -> str:
        """Returns tokens as text; the first `prompt_size` tokens are the prompt."""
        if self.byte_level:
            return decode(tokens)
        if self._tokenizer is not None:
            return printable(self._tokenizer.decode(tokens))
        return str(list(map(int, tokens)))


class _Samples:
    """Samples by index, padded where the text ends, and the masks of their targets."""

    def __init__(self, tokens: TokenArray, seq: int, count: int) -> None:
        self._tokens, self._seq, self._count = tokens, seq, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Batch, Mask]:
        first = index * self._seq
        window = self._tokens[first : first + self._seq + 1]
        row = np.zeros(self._seq + 1, np.int32)
        row[: window.size] = window
        return row, (np.arange(1, self._seq + 1) < window.size).astype(np.float32)


def _iterate(dataset: grain.MapDataset[Any]) -> Iterator[Any]:
    import grain

    # One thread reads two batches ahead, while the devices work; the order does not change.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(dataset.to_iter_dataset(options))
