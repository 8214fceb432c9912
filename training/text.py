"""Text and token files as one flat array of token ids.

Without a source it is the English text of every CPython (`pydoc_data.topics`), so a first run needs
no download; it differs a little between Python releases. A token of text is a byte (256 ids). Files
are read by slices, so they may be larger than memory.
"""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.data_files import IntArray, TokenFile, check_regular, files_in, fingerprint
from training.show import printable

TokenArray = IntArray | TokenFile

CHUNK = 1 << 22  # tokens that are checked at once
TOKEN_FILES = (".bin", ".npy")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A corpus as token ids.

    Attributes:
        tokens: Token ids `(N,)` of any integer type; those of a file are a read-only `TokenFile`,
            whose slices are arrays.
        name: Name of the corpus in a report.
        byte_level: True if a token is one byte of UTF-8 text, which `decode` requires.
    """

    tokens: TokenArray
    name: str
    byte_level: bool

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
    if source is not None and not str(source):
        raise ValueError("source='': give a path, or leave it out for the built-in text")
    path = None if source is None else Path(source)
    suffix = "" if path is None else path.suffix.lower()

    tokens: TokenArray
    if path is None:
        tokens = _read_builtin()
    elif not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: check the path, or leave it out for the built-in text"
        )
    elif path.is_dir():
        tokens = _read_folder(path)
    elif suffix == ".bin":
        tokens = _open_bin(path)
    else:
        tokens = _open_npy(path) if suffix == ".npy" else _open_text(path)
    if tokens.size == 0:
        raise ValueError(f"{source} is empty: give a text of at least one token")
    name = "pydoc_data.topics" if path is None else path.resolve().name
    check_range(tokens, vocab, name)
    byte_level = path is None or path.is_dir() or suffix not in TOKEN_FILES
    return Tokens(tokens, name, byte_level)


def check_range(tokens: TokenArray, vocab: int, name: str = "tokens") -> None:
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
    """Returns byte-level tokens as text that is safe to print.

    Bytes that are not UTF-8 and ids above 255 become U+FFFD; control characters become escapes.

    >>> decode([72, 105, 27, 10])
    'Hi\\\\x1b\\n'
    """
    ids = np.asarray(tokens).astype(np.int64).ravel()
    as_bytes = np.where((ids >= 0) & (ids < 256), ids, 0xFF).astype(np.uint8)  # 0xFF is not UTF-8
    return printable(as_bytes.tobytes().decode("utf-8", errors="replace"))


def _read_builtin() -> IntArray:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python lacks pydoc_data, the built-in text: give --data FILE"
        ) from error
    return np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode(), np.uint8)


def _read_folder(folder: Path) -> IntArray:
    errors: list[Exception] = []
    parts = []
    for path in files_in(folder, errors.append):
        try:
            tokens = _open_text(path)
            if path.suffix.lower() in TOKEN_FILES:
                raise ValueError(f"{path} has the name of a file of token ids")
            parts.append(tokens[:].tobytes())
        except (OSError, ValueError) as error:
            errors.append(error)
    if errors:
        raise ValueError(
            f"{folder} must hold readable text files only, and {len(errors)} are not: move them "
            "elsewhere, or name one file: " + "\n".join(map(str, errors[:3]))
        )
    return np.frombuffer(b"".join(parts), np.uint8)


def _open_text(path: Path) -> TokenFile:
    check_regular(path)
    tokens = TokenFile(path, np.uint8)
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, tokens.size, CHUNK):
        part = tokens[start : start + CHUNK].tobytes()
        pending = len(decoder.getstate()[0])  # bytes of a character that began in the last part
        try:
            nul = decoder.decode(part).find("\0")  # a file may end within a character
            problem = f"NUL byte at {start + part.find(0)}" if nul >= 0 else ""
        except UnicodeDecodeError as error:
            problem = f"byte {start - pending + error.start}"
        if problem:
            raise ValueError(
                f"{path} is not UTF-8 text: {problem}; convert text to UTF-8 (iconv), and name "
                "files of token ids .bin or .npy"
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
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind, shape = getattr(tokens, "dtype", "an archive"), getattr(tokens, "shape", "")
        raise ValueError(
            f"{path} holds {kind} {shape}, and a one-dimensional array of an integer type "
            "is required: save np.asarray(ids, np.uint32).ravel()"
        )
    assert isinstance(tokens, np.memmap)  # mapped to read its header alone
    return TokenFile(path, tokens.dtype, tokens.offset, tokens.size)
