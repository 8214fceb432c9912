"""Unigram and bigram entropy of a text in nats per token: reference levels for a loss curve.

A model with a loss below the bigram entropy of its text has learned more than pairs of tokens. The
computation is one pass over the tokens, and holds one chunk and the counts in memory.

Source: Shannon, Prediction and Entropy of Printed English (1951), F1 and F2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from training.text import CHUNK, TokenArray, check_range

CountArray = npt.NDArray[np.int64]

DENSE_VOCAB = 1024  # up to here a dense array holds all vocab**2 pair counts: 8 MB


def unigram_entropy(tokens: TokenArray, vocab: int) -> float:
    """Returns the entropy of one token drawn from the text, `H(x)`, in nats.

    >>> round(unigram_entropy(np.array([0, 1, 0, 1]), vocab=2), 4)  # log 2
    0.6931
    """
    if tokens.size < 1:
        raise ValueError("the unigram entropy of 0 tokens is not defined; give at least 1")
    check_range(tokens, vocab)
    counts = np.zeros(vocab, np.int64)
    for start in range(0, tokens.size, CHUNK):
        counts += np.bincount(tokens[start : start + CHUNK].astype(np.int64), minlength=vocab)
    counts = counts[counts > 0]
    return float(np.sum(counts * np.log(tokens.size / counts)) / tokens.size)


def bigram_entropy(tokens: TokenArray, vocab: int) -> float:
    """Returns the entropy of a token given the previous one, `H(x_t | x_{t-1})`, in nats.

    The counts are of the same text, so where most pairs are rare (a large vocabulary, a short
    text) the result is lower than any model could reach on new text.

    >>> bigram_entropy(np.array([0, 1, 0, 1]), vocab=2)
    0.0
    """
    if tokens.size < 2:
        raise ValueError(f"the bigram entropy needs at least 2 tokens, got {tokens.size}")
    check_range(tokens, vocab)
    chunks = _pairs(tokens, vocab)
    dense = vocab <= DENSE_VOCAB
    pairs, counts = _count_dense(chunks, vocab**2) if dense else _count_sparse(chunks)
    _, previous = np.unique(pairs // vocab, return_inverse=True)
    totals = np.bincount(previous, weights=counts)[previous]
    return float(np.sum(counts * np.log(totals / counts)) / (tokens.size - 1))


def _pairs(tokens: TokenArray, vocab: int) -> Iterator[CountArray]:
    for start in range(0, tokens.size - 1, CHUNK):
        chunk = tokens[start : start + CHUNK + 1].astype(np.int64)
        yield chunk[:-1] * vocab + chunk[1:]


def _count_dense(chunks: Iterator[CountArray], size: int) -> tuple[CountArray, CountArray]:
    counts = np.zeros(size, np.int64)
    for chunk in chunks:
        counts += np.bincount(chunk, minlength=size)
    keys = np.flatnonzero(counts)
    return keys, counts[keys]


def _count_sparse(chunks: Iterator[CountArray]) -> tuple[CountArray, CountArray]:
    total = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[tuple[CountArray, CountArray]] = []
    for chunk in chunks:
        waiting.append(np.unique(chunk, return_counts=True))
        # Merging when the parts are as large as the total keeps sorting at O(N log N).
        if sum(keys.size for keys, _ in waiting) >= max(CHUNK, total[0].size):
            total, waiting = _merge([total, *waiting]), []
    return _merge([total, *waiting])


def _merge(parts: Sequence[tuple[CountArray, CountArray]]) -> tuple[CountArray, CountArray]:
    keys, where = np.unique(np.concatenate([keys for keys, _ in parts]), return_inverse=True)
    counts = np.bincount(where, weights=np.concatenate([counts for _, counts in parts]))
    return keys, counts.astype(np.int64)
