"""Reading text as tokens.

A corpus is one flat array of token ids. Without a source it is the English text that every
CPython carries (`pydoc_data.topics`), so a first run needs no download; it differs a little from
one Python to the next. Text is read byte by byte (256 ids, one byte per token). Files are read by
slices, so they may be larger than memory.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data_files import IntArray, TokenFile, fingerprint

TokenArray = IntArray | TokenFile

CHUNK = 1 << 22  # tokens looked at in one go
TOKEN_FILES = (".bin", ".npy")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A corpus as token ids.

    Attributes:
        tokens: Token ids `(N,)` of any integer type; those of a file are a read-only `TokenFile`,
            of which a slice is an array.
        name: What to call the corpus in a report.
        bytes_per_token: 1.0 for byte-level text; None where a token file does not tell.
        byte_level: Whether a token is one byte of UTF-8 text, so that `decode` applies.
    """

    tokens: TokenArray
    name: str
    bytes_per_token: float | None
    byte_level: bool

    @property
    def fingerprint(self) -> str:
        """Checksum of the tokens, or of the whole file where there is one."""
        if isinstance(self.tokens, TokenFile):
            return self.tokens.fingerprint
        held = np.ascontiguousarray(self.tokens).view(np.uint8)
        return fingerprint(lambda at, size: held[at : at + size].tobytes(), held.size)


def load_tokens(
    source: str | os.PathLike[str] | None,
    vocab: int,
    *,
    token_dtype: npt.DTypeLike | None = None,
) -> Tokens:
    """Reads a corpus and makes sure that every token is in `[0, vocab)`.

    Args:
        source: None for the text inside CPython; a text file; a folder, all of whose files, also
            behind links, are joined in the order of their paths; a `.bin` file of raw little-endian
            uint16 ids (uint32 if named `.u32.bin`); or a one-dimensional integer `.npy` file.
        vocab: Number of token ids the model knows. Byte-level text needs at most 256.
        token_dtype: `uint16` or `uint32`: what a `.bin` file holds, whatever its name says.

    Returns:
        The corpus, a `Tokens`.

    Raises:
        FileNotFoundError: Nothing is at `source`.
        ValueError: The source is empty, not of a kind named above, or holds an id outside
            `[0, vocab)`.

    >>> corpus = load_tokens(None, vocab=256)
    >>> corpus.byte_level, corpus.tokens.size > 100_000
    (True, True)
    """
    if not 1 <= vocab < 2**31:
        raise ValueError(f"vocab={vocab}: it must be from 1 to 2**31 - 1, as batches are int32")
    if source is not None and not str(source):
        raise ValueError("source='': give a path, or leave it out for the built-in text")
    path = None if source is None else Path(source)
    suffix = "" if path is None else path.suffix.lower()
    if token_dtype is not None and suffix != ".bin":
        raise ValueError(f"token_dtype={token_dtype} is for .bin files, not {source}: leave it out")

    tokens: TokenArray
    if path is None:
        tokens = _read_builtin()
    elif not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: check the path, or leave it out for the built-in text"
        )
    elif path.is_dir():
        tokens = _read_folder(path)
    elif not path.is_file():  # to open a pipe would wait for somebody who writes to it
        raise ValueError(f"{path} is not a regular file: copy its contents to one")
    elif suffix == ".bin":
        tokens = _open_bin(path, token_dtype)
    elif suffix == ".npy":
        tokens = _open_npy(path)
    else:
        tokens = _open_text(path)
    if tokens.size == 0:
        raise ValueError(f"{source} is empty: give a text of at least one token")
    name = "pydoc_data.topics" if path is None else path.resolve().name
    check_range(tokens, vocab, name)
    byte_level = path is None or path.is_dir() or suffix not in TOKEN_FILES
    return Tokens(tokens, name, 1.0 if byte_level else None, byte_level)


def check_range(tokens: TokenArray, vocab: int, name: str = "tokens") -> None:
    """Raises ValueError, with the position and the value, if a token is outside `[0, vocab)`."""
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return  # no value of this type can be outside, so a file is not even read
    for start in range(0, tokens.size, CHUNK):
        chunk = tokens[start : start + CHUNK]
        outside = (chunk < 0) | (chunk >= vocab)
        if outside.any():
            where = int(outside.argmax())
            value = int(chunk[where])
            largest = max(int(tokens[i : i + CHUNK].max()) for i in range(0, tokens.size, CHUNK))
            remedy = "ids start at 0" if value < 0 else f"give --vocab-size {largest + 1} or more"
            raise ValueError(
                f"{name}: token {value} at position {start + where} is outside [0, {vocab}); "
                f"{remedy}, or check how the file was tokenized"
            )


def split(
    tokens: TokenArray, fraction: float = 0.1, *, seq: int = 1
) -> tuple[TokenArray, TokenArray]:
    """Holds out the last `fraction` of the tokens; both parts are views.

    Args:
        tokens: Token ids `(N,)`.
        fraction: Part to hold out, between 0 and 1.
        seq: Sequence length of the run; either part must fill one sequence of `seq + 1` tokens.

    Returns:
        The training tokens and the held-out tokens.

    Raises:
        ValueError: `fraction` is not between 0 and 1, or a part is too short.

    >>> [part.tolist() for part in split(np.arange(5), 0.4)]
    [[0, 1, 2], [3, 4]]
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction}: it must be above 0 and below 1")
    cut = tokens.size - round(tokens.size * fraction)
    train: TokenArray
    held_out: TokenArray
    if isinstance(tokens, TokenFile):
        train, held_out = tokens.part(0, cut), tokens.part(cut, tokens.size)
    else:
        train, held_out = tokens[:cut], tokens[cut:]
    if min(train.size, held_out.size) < seq + 1:
        raise ValueError(
            f"fraction={fraction:g} of {tokens.size} tokens leaves {train.size} to train on and "
            f"{held_out.size} held out, and each needs seq + 1 = {seq + 1}: "
            "use more text, a shorter --seq-len or another fraction"
        )
    return train, held_out


def decode(tokens: npt.ArrayLike) -> str:
    """Byte-level tokens as text that is safe to print.

    What is not UTF-8, and ids above 255, show as U+FFFD; control characters as escapes.

    >>> decode([72, 105, 27, 10])
    'Hi\\\\x1b\\n'
    """
    ids = np.asarray(tokens).astype(np.int64).ravel()
    as_bytes = np.where((ids >= 0) & (ids < 256), ids, 0xFF).astype(np.uint8)  # 0xFF is not UTF-8
    text = as_bytes.tobytes().decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def _read_builtin() -> IntArray:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python lacks pydoc_data, the built-in text: give --data FILE"
        ) from error
    return np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode(), np.uint8)


def files_in(folder: Path, note: Callable[[OSError], Any] | None = None) -> list[Path]:
    """All files of a folder, also behind links, in the order of their paths.

    Args:
        folder: Where to look.
        note: Told of folders that can't be read.

    Raises:
        ValueError: A link leads to a folder that it is in.
    """
    files: list[Path] = []
    above = {str(folder): frozenset([folder.resolve()])}  # what each folder is in, links followed
    for root, folders, names in os.walk(folder, onerror=note, followlinks=True):
        for name in folders:
            inside = Path(root, name).resolve()
            if inside in above[root]:
                raise ValueError(
                    f"{Path(root, name)} links to a folder that contains it: remove the link"
                )
            above[os.path.join(root, name)] = above[root] | {inside}
        files += [Path(root, name) for name in names]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _read_folder(folder: Path) -> IntArray:
    troubles: list[str] = []

    def note(error: OSError) -> None:
        troubles.append(str(error))

    parts = []
    for path in files_in(folder, note):
        try:
            tokens = _open_text(path)
            if path.suffix.lower() in TOKEN_FILES:
                raise ValueError(f"{path} has the name of a file of token ids")
            parts.append(tokens[:].tobytes())
        except (OSError, ValueError) as error:
            troubles.append(str(error))
    if troubles:
        raise ValueError(
            f"{folder} must hold readable text files only, and {len(troubles)} are not: move them "
            "elsewhere, or name one file: " + "\n".join(troubles[:3])
        )
    return np.frombuffer(b"".join(parts), np.uint8)


def _open(path: Path, dtype: np.dtype[Any]) -> TokenFile:
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: copy its contents to one")
    return TokenFile(path, dtype)


def _open_text(path: Path) -> TokenFile:
    tokens = _open(path, np.dtype(np.uint8))
    reader = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, tokens.size, CHUNK):
        part = tokens[start : start + CHUNK].tobytes()
        held = len(reader.getstate()[0])  # of a character that the part before it ends in
        try:
            nul = reader.decode(part).find("\0")  # what a cut leaves at the very end is let be
        except UnicodeDecodeError as error:
            raise ValueError(_no_text(path, f"byte {start - held + error.start}")) from error
        if nul >= 0:
            raise ValueError(_no_text(path, f"NUL byte at {start + part.find(0)}"))
    return tokens


def _no_text(path: Path, what: str) -> str:
    return (
        f"{path} is not UTF-8 text: {what}; convert text to UTF-8 (iconv), and name files of "
        "token ids .bin or .npy"
    )


def _open_bin(path: Path, token_dtype: npt.DTypeLike | None) -> TokenFile:
    named = np.uint32 if path.name.lower().endswith(".u32.bin") else np.uint16
    dtype = np.dtype(named if token_dtype is None else token_dtype)
    if dtype not in (np.dtype(np.uint16), np.dtype(np.uint32)):
        raise ValueError(
            f"{path}: token_dtype={dtype}, and a .bin file must hold uint16 or uint32: "
            "save other types as .npy"
        )
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which is not a multiple of {dtype.itemsize} as {dtype} ids "
            "need: the file is incomplete, or of another type (token_dtype)"
        )
    return _open(path, dtype.newbyteorder("<"))


def _open_npy(path: Path) -> TokenFile:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # whatever NumPy makes of a header that is wrong
        raise ValueError(f"{path} is not a .npy array without pickles: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        found = getattr(tokens, "dtype", "an archive"), getattr(tokens, "shape", "")
        raise ValueError(
            f"{path} holds {found[0]} {found[1]}, and a one-dimensional array of an integer type "
            "is required: save np.asarray(ids, np.uint32).ravel()"
        )
    assert isinstance(tokens, np.memmap)  # mapped to read its header alone
    return TokenFile(path, tokens.dtype, tokens.offset, tokens.size)
