"""Windows of one text or token file.

Without a file it is the English text of every CPython (`pydoc_data.topics`), so a first run needs
no download; it differs a little between Python releases. A token of text is a byte (256 ids), or
one of a tokenizer. Files are read by slices, so they may be larger than memory.
"""

import codecs
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from training.data_files import IntArray, TokenFile, files_in, fingerprint
from training.packing import Batches, Document
from training.show import human_count, printable
from training.tokenizer import Tokenizer

TokenArray = IntArray | TokenFile

CHUNK = 1 << 22  # tokens that are checked at once
COUNTED = 1 << 24  # tokens of which entropies are computed: 2 s
HELD_OUT = 0.1  # of the tokens
PIECE = 1 << 20  # characters that are tokenized at once
PROMPT = 16  # held-out tokens at the beginning of a generated sample
TOKEN_FILES = (".bin", ".npy")


class Tokens(NamedTuple):
    """A corpus as token ids."""

    tokens: TokenArray  # (N,), of any integer type
    name: str  # in a report
    byte_level: bool  # a token is one byte of UTF-8 text, which `decode` requires


def load_tokens(
    source: str | os.PathLike[str] | None, vocab: int, tokenizer: Tokenizer | None = None
) -> Tokens:
    """Reads a corpus and checks that every token is in `[0, vocab)`.

    Args:
        source: None for the text inside CPython; a text file; a folder of text files, which are
            joined in the order of their paths; a `.bin` file of raw little-endian uint16 ids
            (uint32 if named `.u32.bin`); or a one-dimensional integer `.npy` file.
        vocab: Number of token ids of the model. Byte-level text needs at most 256.
        tokenizer: Makes the tokens of text; without one they are bytes.
    """
    if not 1 <= vocab < 2**31:
        raise ValueError(f"vocab={vocab}: it must be from 1 to 2**31 - 1, as batches are int32")
    tokens: TokenArray
    path = Path(source or "pydoc_data.topics")
    name, is_ids = path.resolve().name, path.suffix.lower() in TOKEN_FILES and not path.is_dir()
    if source is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[key] for key in sorted(topics))
        tokens = np.frombuffer(text.encode(), np.uint8)
    elif path.is_dir():
        files = files_in(path)
        if ids := [file for file in files if file.suffix.lower() in TOKEN_FILES]:
            raise ValueError(f"{ids[0]} has the name of token ids: a folder may hold text only")
        texts = [_open_text(file)[:] for file in files]
        tokens = np.concatenate([np.zeros(0, np.uint8), *texts])
    else:
        (path,) = files_in(path)
        tokens = _open_ids(path) if is_ids else _open_text(path)
    if tokens.size == 0:
        raise ValueError(f"{source} is empty: give a text of at least one token")
    if tokenizer is not None and not is_ids:
        tokens = _tokenized(tokens, tokenizer)
    check_range(tokens, vocab, name)
    return Tokens(tokens, name, byte_level=tokenizer is None and not is_ids)


def _tokenized(tokens: TokenArray, tokenizer: Tokenizer) -> IntArray:
    """Returns a text of bytes in the tokens of a model."""
    text = tokens[:].tobytes().decode(errors="ignore")  # it may end within a character
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        pieces.append(tokenizer.encode(text[start:end]))
        start = end
    return np.concatenate(pieces)


def _open_text(path: Path) -> TokenFile:
    tokens = TokenFile(path, np.uint8)
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, tokens.size, CHUNK):
        part = tokens[start : start + CHUNK].tobytes()
        try:
            is_text = "\0" not in decoder.decode(part)  # a file may end within a character
        except UnicodeDecodeError:
            is_text = False
        if not is_text:
            raise ValueError(
                f"{path} is not UTF-8 text in bytes {start} to {start + len(part)}: convert text "
                "to UTF-8 (iconv), and name files of token ids .bin or .npy"
            )
    return tokens


def _open_ids(path: Path) -> TokenFile:
    content = TokenFile(path, np.uint8)
    if path.suffix.lower() == ".bin":
        dtype = np.dtype("<u4" if path.name.lower().endswith(".u32.bin") else "<u2")
        if content.size % dtype.itemsize:
            raise ValueError(
                f"{path} has {content.size} bytes, which are no {dtype} ids: it is incomplete, or "
                "of another type (uint32 ids need the name .u32.bin)"
            )
        return TokenFile(path, dtype)
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # for its header alone
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it holds {array.dtype} {array.shape}")
    except Exception as error:  # NumPy raises many types for a malformed header
        raise ValueError(
            f"{path} can't be read as a one-dimensional .npy array of an integer type: {error}. "
            "Save np.asarray(ids, np.uint32).ravel()"
        ) from error
    return TokenFile(path, array.dtype, array.offset, array.size)


def check_range(tokens: TokenArray, vocab: int, name: str) -> None:
    """Raises ValueError, with the position and the value, if a token is outside `[0, vocab)`."""
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return  # no value of this type is outside: the file is not read
    for start in range(0, tokens.size, CHUNK):
        chunk = tokens[start : start + CHUNK]
        outside = np.flatnonzero((chunk < 0) | (chunk >= vocab))
        if len(outside):
            most = max(int(tokens[i : i + CHUNK].max()) for i in range(0, tokens.size, CHUNK))
            raise ValueError(
                f"{name}: token {chunk[outside[0]]} at position {start + outside[0]} is outside "
                f"[0, {vocab}): give --vocab-size {most + 1} or more, or check how the file was "
                "tokenized"
            )


def split(tokens: TokenArray, seq: int) -> tuple[TokenArray, TokenArray]:
    """Returns the training tokens and the last tenth, which is held out; both are views."""
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
    """Returns byte-level tokens as text that is safe to print; others become U+FFFD."""
    ids = np.asarray(tokens).ravel()
    as_bytes = np.where((ids >= 0) & (ids < 256), ids, 0xFF).astype(np.uint8)  # 0xFF is not UTF-8
    return printable(as_bytes.tobytes().decode("utf-8", errors="replace"))


def entropies(tokens: TokenArray, vocab: int) -> dict[str, float]:
    """Returns the entropies `H(x)` and `H(x_t | x_{t-1})` of a text, in nats per token.

    A model with a loss below the bigram entropy of its text has learned more than pairs of tokens.
    Where most pairs are rare (a large vocabulary, a short text), no model could reach it.

    Source: Shannon, Prediction and Entropy of Printed English (1951), F1 and F2.
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
class Text(Batches):
    """One text as windows of `S + 1` tokens, each a row; the last tenth is held out.

    Windows start `S` tokens apart, so each token but the first is a target once. Training leaves
    out a last window that is shorter; evaluation pads it.

    >>> text = Text(Tokens(np.arange(40), "numbers", False), seq=2, batch=1, seed=0)
    >>> [(rows.tolist(), mask.tolist()) for rows, mask in text.held_out(0, 1)]
    [([[36, 37, 38]], [[1.0, 1.0]]), ([[38, 39, 0]], [[1.0, 0.0]])]
    """

    corpus: Tokens
    seq: int
    batch: int
    seed: int
    tokenizer: Tokenizer | None = None

    packed: ClassVar[bool] = False
    temperature: ClassVar[float] = 0.8  # of generated samples
    ends: ClassVar[list[int]] = []  # a window ends anywhere

    def __post_init__(self) -> None:
        tokens, self.name, self.byte_level = self.corpus
        self.train, self.rest = split(tokens, self.seq)
        self.sizes = [((self.train.size - 1) // self.seq, -(-(self.rest.size - 1) // self.seq))]
        self.unit = "byte" if self.byte_level else "token"
        self.facts = {"train_tokens": self.train.size, "held_out_tokens": self.rest.size}
        self.held_out_size = f"{self.rest.size:,} held-out {self.unit}s"
        self.order = {"corpus": self.name, "train_tokens": self.train.size}
        self.order |= {"seq_len": self.seq, "seed": self.seed}

    def read(self, source: int, at: int) -> Document:
        """Returns a window."""
        train = self.sizes[0][0]
        tokens, number = (self.train, at) if at < train else (self.rest, at - train)
        first = number * self.seq
        ids = tokens[first : first + self.seq + 1].astype(np.int32)
        return Document("whole", ids, np.ones(len(ids), bool), len(ids))

    @property
    def contents(self) -> dict[str, str]:
        """Checksum of the text or its tokens, or of the full file if there is one."""
        tokens = self.corpus.tokens
        if isinstance(tokens, TokenFile):
            return {"data": tokens.fingerprint}
        content = np.ascontiguousarray(tokens).view(np.uint8)
        checksum = fingerprint(lambda at, size: content[at : at + size].tobytes(), content.size)
        return {"data": checksum}

    def outlook(self, steps: int) -> str:
        """Describes how many epochs a run of `steps` steps is."""
        epochs = steps * self.batch / self.sizes[0][0]
        return f"{steps:,} steps are {human_count(epochs)} epochs of {self.name}"

    def marks(self, vocab: int) -> dict[str, float]:
        """Returns the losses that counting tokens and pairs reaches."""
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
