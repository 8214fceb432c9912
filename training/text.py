"""Windows of one text or token file as batches, in the same order for any number of processes.

Without a file it is the English text of every CPython (`pydoc_data.topics`), so a first run needs
no download; it differs a little between Python releases. A token of text is a byte (256 ids), or
one of a tokenizer. Files are read by slices, so they may be larger than memory.

A sample is `S + 1` tokens: `S` inputs, and the same shifted by one as targets. Samples start `S`
tokens apart, so each token but the first is a target once per epoch. Training leaves out a last
sample that is shorter; evaluation pads it.

Batch `i` of `B` rows holds samples `i B` to `(i + 1) B`, and process `p` of `P` reads its `B / P`
consecutive rows. Resuming reads no earlier sample, because grain computes its shuffle by index.
"""

import codecs
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from training.data_files import (
    Arrays,
    IntArray,
    TokenFile,
    check_regular,
    files_in,
    fingerprint,
    read_ahead,
    stacked,
)
from training.show import human_count, printable
from training.tokenizer import Tokenizer

TokenArray = IntArray | TokenFile

CHUNK = 1 << 22  # tokens that are checked at once
COUNTED = 1 << 24  # tokens of which entropies are computed: 2 s
HELD_OUT = 0.1  # of the tokens
PROMPT = 16  # held-out tokens at the beginning of a generated sample
TOKEN_FILES = (".bin", ".npy")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A corpus as token ids."""

    tokens: TokenArray  # (N,), of any integer type
    name: str  # in a report
    byte_level: bool  # a token is one byte of UTF-8 text, which `decode` requires

    @property
    def fingerprint(self) -> str:
        """Checksum of the tokens, or of the full file if there is one."""
        if isinstance(self.tokens, TokenFile):
            return self.tokens.fingerprint
        content = np.ascontiguousarray(self.tokens).view(np.uint8)
        return fingerprint(lambda at, size: content[at : at + size].tobytes(), content.size)


def load_tokens(source: str | os.PathLike[str] | None, vocab: int) -> Tokens:
    """Reads a corpus and checks that every token is in `[0, vocab)`.

    Args:
        source: None for the text inside CPython; a text file; a folder of text files, also behind
            links, which are joined in the order of their paths; a `.bin` file of raw little-endian
            uint16 ids (uint32 if named `.u32.bin`); or a one-dimensional integer `.npy` file.
        vocab: Number of token ids of the model. Byte-level text needs at most 256.

    Raises:
        FileNotFoundError: `source` does not exist.
        ValueError: The source is empty, of another kind, or has an id outside `[0, vocab)`.

    >>> corpus = load_tokens(None, vocab=256)
    >>> corpus.byte_level, corpus.tokens.size > 100_000
    (True, True)
    """
    if not 1 <= vocab < 2**31:
        raise ValueError(f"vocab={vocab}: it must be from 1 to 2**31 - 1, as batches are int32")
    if source == "":
        raise ValueError("the path of the text is empty: give a file or a folder")
    corpus = _builtin() if source is None else _opened(Path(source))
    if corpus.tokens.size == 0:
        raise ValueError(f"{source} is empty: give a text of at least one token")
    check_range(corpus.tokens, vocab, corpus.name)
    return corpus


def _builtin() -> Tokens:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python lacks pydoc_data, the built-in text: give --data FILE"
        ) from error
    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    return Tokens(np.frombuffer(text, np.uint8), "pydoc_data.topics", byte_level=True)


def _opened(path: Path) -> Tokens:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: check the path, or leave it out for the built-in text"
        )
    name, suffix = path.resolve().name, path.suffix.lower()
    if path.is_dir():
        files = files_in(path)
        if ids := next((file for file in files if file.suffix.lower() in TOKEN_FILES), None):
            raise ValueError(
                f"{ids} has the name of a file of token ids, and a folder holds text files "
                "only: name one file, or move it elsewhere"
            )
        texts = [_open_text(file)[:] for file in files]
        return Tokens(np.concatenate([np.zeros(0, np.uint8), *texts]), name, byte_level=True)
    if suffix not in TOKEN_FILES:
        return Tokens(_open_text(path), name, byte_level=True)
    return Tokens(_open_bin(path) if suffix == ".bin" else _open_npy(path), name, byte_level=False)


def _open_text(path: Path) -> TokenFile:
    check_regular(path)
    tokens = TokenFile(path, np.uint8)
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, tokens.size, CHUNK):
        part = tokens[start : start + CHUNK].tobytes()
        pending = len(decoder.getstate()[0])  # bytes of a character that began in the last part
        problem = start + part.find(0) if 0 in part else None
        try:
            decoder.decode(part)  # a file may end within a character
        except UnicodeDecodeError as error:
            problem = start - pending + error.start
        if problem is not None:
            raise ValueError(
                f"{path} is not UTF-8 text at byte {problem}: convert text to UTF-8 (iconv), and "
                "name files of token ids .bin or .npy"
            )
    return tokens


def _open_bin(path: Path) -> TokenFile:
    check_regular(path)
    dtype = np.dtype("<u4" if path.name.lower().endswith(".u32.bin") else "<u2")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which is not a multiple of {dtype.itemsize} as {dtype} ids "
            "need: the file is incomplete, or of another type (uint32 ids need the name .u32.bin)"
        )
    return TokenFile(path, dtype)


def _open_npy(path: Path) -> TokenFile:
    check_regular(path)
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy raises many types for a malformed header
        raise ValueError(f"{path} is not a .npy array without pickles: {error}") from error
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind, shape = getattr(tokens, "dtype", "an archive"), getattr(tokens, "shape", "")
        raise ValueError(
            f"{path} holds {kind} {shape}, and a one-dimensional array of an integer type "
            "is required: save np.asarray(ids, np.uint32).ravel()"
        )
    return TokenFile(path, tokens.dtype, tokens.offset, tokens.size)  # mapped for its header alone


def check_range(tokens: TokenArray, vocab: int, name: str) -> None:
    """Raises ValueError, with the position and the value, if a token is outside `[0, vocab)`."""
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return  # no value of this type is outside: the file is not read
    for start in range(0, tokens.size, CHUNK):
        chunk = tokens[start : start + CHUNK]
        outside = (chunk < 0) | (chunk >= vocab)
        if outside.any():
            index = int(outside.argmax())
            value = int(chunk[index])
            largest = max(int(tokens[i : i + CHUNK].max()) for i in range(0, tokens.size, CHUNK))
            remedy = "ids start at 0" if value < 0 else f"give --vocab-size {largest + 1} or more"
            raise ValueError(
                f"{name}: token {value} at position {start + index} is outside [0, {vocab}); "
                f"{remedy}, or check how the file was tokenized"
            )


def split(tokens: TokenArray, seq: int) -> tuple[TokenArray, TokenArray]:
    """Returns the training tokens and the last tenth, which is held out; both are views.

    Raises:
        ValueError: A part does not fill one sequence of `seq + 1` tokens.

    >>> [part.size for part in split(np.arange(50), seq=4)]
    [45, 5]
    """
    cut = tokens.size - round(tokens.size * HELD_OUT)
    if min(cut, tokens.size - cut) < seq + 1:
        raise ValueError(
            f"{tokens.size} tokens leave {cut} to train on and {tokens.size - cut} held out, and "
            f"each needs seq + 1 = {seq + 1}: use more text, or a shorter --seq-len"
        )
    if isinstance(tokens, TokenFile):
        return tokens.part(0, cut), tokens.part(cut, tokens.size)
    return tokens[:cut], tokens[cut:]


def decode(tokens: npt.ArrayLike) -> str:
    """Returns byte-level tokens as text that is safe to print.

    Bytes that are not UTF-8 and ids above 255 become U+FFFD; control characters become escapes.

    >>> decode([72, 105, 27, 10])
    'Hi\\\\x1b\\n'
    """
    ids = np.asarray(tokens).astype(np.int64).ravel()
    as_bytes = np.where((ids >= 0) & (ids < 256), ids, 0xFF).astype(np.uint8)  # 0xFF is not UTF-8
    return printable(as_bytes.tobytes().decode("utf-8", errors="replace"))


def entropies(tokens: TokenArray, vocab: int) -> dict[str, float]:
    """Returns the entropies `H(x)` and `H(x_t | x_{t-1})` of a text, in nats per token.

    A model with a loss below the bigram entropy of its text has learned more than pairs of tokens.
    The counts are of the first `COUNTED` tokens of the same text. Where most pairs are rare (a
    large vocabulary, a short text) the result is lower than any model could reach on new text.

    Source: Shannon, Prediction and Entropy of Printed English (1951), F1 and F2.

    >>> entropies(np.array([0, 1, 0, 1, 0]), vocab=2)["bigram entropy"]
    0.0
    """
    ids = tokens[:COUNTED].astype(np.int64)
    _, counts = np.unique(ids, return_counts=True)
    pairs, pair_counts = np.unique(ids[:-1] * vocab + ids[1:], return_counts=True)
    _, first = np.unique(pairs // vocab, return_inverse=True)  # tokens of the pairs
    totals = np.bincount(first, weights=pair_counts)[first]
    bigrams = np.sum(pair_counts * np.log(totals / pair_counts)) / (ids.size - 1)
    unigrams = np.sum(counts * np.log(ids.size / counts)) / ids.size
    return {"unigram entropy": float(unigrams), "bigram entropy": float(bigrams)}


@dataclass(eq=False)
class Text:
    """One text as windows of `S + 1` tokens; the last tenth is held out.

    It has the interface of `documents.Documents`, which describes the arguments.

    Raises:
        ValueError: A part does not fill one sample.

    >>> text = Text(Tokens(np.arange(40), "numbers", False), seq=2, batch=1, seed=0)
    >>> [(rows.tolist(), mask.tolist()) for rows, mask in text.held_out(0, 1)]
    [([[36, 37, 38]], [[1.0, 1.0]]), ([[38, 39, 0]], [[1.0, 0.0]])]
    """

    corpus: Tokens
    seq: int
    batch: int
    seed: int
    tokenizer: Tokenizer | None = None

    temperature: ClassVar = 0.8  # of generated samples
    counts: ClassVar = None  # no document is left out

    def __post_init__(self) -> None:
        self.train, self.rest = split(self.corpus.tokens, self.seq)
        self.name, self.byte_level = self.corpus.name, self.corpus.byte_level
        self.unit = "byte" if self.byte_level else "token"
        self.facts = {"train_tokens": self.train.size, "held_out_tokens": self.rest.size}
        self.held_out_size = f"{self.rest.size:,} held-out {self.unit}s"
        self.order = {
            "corpus": self.name,
            "train_tokens": self.train.size,
            "seq_len": self.seq,
            "seed": self.seed,
        }
        self.ends: list[int] = []  # a window ends anywhere

    @property
    def samples_per_epoch(self) -> int:
        """Number of full windows of the training text."""
        return (self.train.size - 1) // self.seq

    @property
    def contents(self) -> dict[str, str]:
        """Checksum of the text or its tokens, by the flag that names it."""
        return {"data": self.corpus.fingerprint}

    def outlook(self, steps: int) -> str:
        """Describes how many epochs a run of `steps` steps is."""
        epochs = steps * self.batch / self.samples_per_epoch
        return f"{steps:,} steps are {human_count(epochs)} epochs of {self.name}"

    def batches(self, place: int | None, index: int, count: int) -> Iterator[tuple[Arrays, int]]:
        """Yields rows of process `index` of `count`, (tokens,) of `(B / P, S + 1)`, without end.

        The place after each batch is the number of samples that all processes have used; None is
        0. Every epoch has a new order, which depends on the seed and not on the processes.
        """
        return read_ahead(self._windows(place or 0, index, count))

    def _windows(self, start: int, index: int, count: int) -> Iterator[tuple[Arrays, int]]:
        import grain  # here: it imports jax

        # grain shuffles epoch e with seed + e: neighbouring seeds would share their epochs.
        seed = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        order = grain.MapDataset.range(self.samples_per_epoch).shuffle(seed=seed).repeat()
        each = self.batch // count
        while True:
            first = start + index * each
            windows = [self._sample(self.train, order[first + at]) for at in range(each)]
            start += self.batch
            yield stacked(windows)[:1], start

    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Arrays]:
        """Yields this process's rows of one pass over the held-out tokens, at most `most` batches.

        Rows are int32 `(B / P, S + 1)`, with a float32 mask over targets, `(B / P, S)`. Each token
        but the first is a target once. The last batch is padded with token 0 under mask 0. All
        processes get the same number of batches, so the exact mean loss is
        `sum(mask * loss) / sum(mask)` with both sums over all batches and processes.
        """
        each = self.batch // count
        for batch in range(self.held_out_batches())[:most]:
            first = batch * self.batch + index * each
            yield stacked([self._sample(self.rest, first + at) for at in range(each)])

    def held_out_batches(self) -> int:
        """Returns the number of batches of such a pass."""
        return -(-(self.rest.size - 1) // (self.seq * self.batch))

    def _sample(self, tokens: TokenArray, index: int) -> Arrays:
        """Returns a sample, padded where the text ends, and the mask of its targets."""
        first = int(index) * self.seq
        window = tokens[first : first + self.seq + 1]
        row = np.zeros(self.seq + 1, np.int32)
        row[: window.size] = window
        return row, (np.arange(1, self.seq + 1) < window.size).astype(np.float32)

    def marks(self, vocab: int) -> dict[str, float]:
        """Returns the losses that counting tokens and pairs reaches, in nats per token."""
        return entropies(self.rest, vocab)

    def prompt(self, most: int) -> IntArray:
        """Returns the first held-out tokens, at most `most`."""
        return self.rest[: min(PROMPT, most)]

    def show(self, tokens: Sequence[int], prompt_size: int) -> str:
        """Returns tokens as text; the first `prompt_size` tokens are the prompt."""
        if self.byte_level:
            return decode(tokens)
        if self.tokenizer is not None:
            return printable(self.tokenizer.decode(tokens))
        return str(list(map(int, tokens)))
