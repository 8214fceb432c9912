"""Files of documents, one JSON object a line or one row of Parquet each, by number.

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      each a text, or messages

Every line is looked at once, when a file is opened: what is wrong is told with file and line before
anything is trained. In memory is where each line begins, 8 bytes a document. Parquet, of which one
can't read a row alone, is put down as lines in a file without a name.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

Record = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
LINES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
_KINDS = ("text", "messages", "prompt")
_AT_ONCE = 1024  # rows of Parquet


def is_documents(path: Path) -> bool:
    """Whether a file, or every file in a folder, is of documents by its name.

    >>> is_documents(Path("chat.jsonl")), is_documents(Path("book.txt"))
    (True, False)
    """
    if path.is_dir():
        inside = [own for own in path.rglob("*") if not own.is_dir()]
        return bool(inside) and all(is_documents(own) for own in inside)
    return path.suffix in (*LINES, PARQUET)


def files_of(path: Path) -> list[Path]:
    """The file, or those of a folder in the order of their paths.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: One is no regular file.
    """
    if not path.exists():
        raise FileNotFoundError(f"no file or folder at {path}; check the path")
    found = sorted(own for own in path.rglob("*") if not own.is_dir()) if path.is_dir() else [path]
    for own in found:
        if not own.is_file():  # to open a pipe would wait for somebody who writes to it
            raise ValueError(f"{own} is not a regular file; save its contents to one first")
    return found


class Records:
    """The documents of a file or a folder, by number.

    Args:
        path: A file of lines or of Parquet, or a folder of such files.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: A line is no document, with its file and number; or there is none at all.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self._files = [_Lines(own) for own in files_of(path)]
        self._ends = np.cumsum([len(own) for own in self._files])
        if not len(self):
            raise ValueError(f"{path} holds no documents; at least one is needed")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, at: int) -> Record:
        file, own = self._place(at)
        return self._files[file][own]

    def where(self, at: int) -> str:
        """File and line of a document."""
        file, own = self._place(at)
        return self._files[file].where(own)

    def _place(self, at: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, at, side="right"))
        return file, at - (int(self._ends[file - 1]) if file else 0)


class _Lines:
    """Documents of one file; several threads may read them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = _mapped(path)
        self._starts, self._numbers = array.array("q"), array.array("q")
        start = 0
        for number, line in enumerate(iter(self._lines.readline, b""), start=1):
            if line.strip():
                try:
                    check(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{self._said(number)}: {error}") from error
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, at: int) -> Record:
        start = self._starts[at]
        end = self._lines.find(b"\n", start)
        record: Record = json.loads(self._lines[start : end if end >= 0 else None])
        return record

    def where(self, at: int) -> str:
        return self._said(self._numbers[at])

    def _said(self, number: int) -> str:
        return f"{self.path}, {'row' if self.path.suffix == PARQUET else 'line'} {number}"


def _mapped(path: Path) -> mmap.mmap:
    """A file's lines, mapped into memory."""
    with tempfile.TemporaryFile() if path.suffix == PARQUET else path.open("rb") as file:
        if path.suffix == PARQUET:
            _put_down(path, file)
        if os.fstat(file.fileno()).st_size == 0:
            empty = mmap.mmap(-1, 1)  # nothing can't be mapped
            empty[:] = b"\n"
            return empty
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _put_down(path: Path, lines: IO[bytes]) -> None:
    """Writes the rows of a Parquet file as lines."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: pyarrow is not installed, which reads Parquet: pip install 'zero_jax[chat]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for rows in file.iter_batches(_AT_ONCE):
                for row in rows.to_pylist():
                    known = {name: value for name, value in row.items() if value is not None}
                    lines.write(json.dumps(_plain(known)).encode() + b"\n")
    except (pyarrow.ArrowException, TypeError, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error
    lines.flush()


def _plain(value: Any) -> Any:
    """Without the fields of a struct that a row does not have, which Parquet gives as null."""
    if isinstance(value, dict):
        return {name: _plain(own) for name, own in value.items() if own is not None}
    return [_plain(own) for own in value] if isinstance(value, list) else value


def check(record: Any) -> None:
    """Complains of what is no document.

    Raises:
        ValueError: It is none of the three kinds; a role is none, or a conversation is empty.

    >>> check({"messages": [{"role": "usr", "content": "Hi"}]})
    Traceback (most recent call last):
    ValueError: role 'usr' is none of system, developer, user, assistant, tool
    """
    if not isinstance(record, dict) or not any(kind in record for kind in _KINDS):
        raise ValueError(
            'a document is an object with "text", with "messages", or with "prompt" and '
            f'"completion"; this is {_short(record)}'
        )
    if "messages" in record:
        _check_messages(record["messages"])
    elif "prompt" in record:
        parts = [record["prompt"], record.get("completion")]
        if all(isinstance(part, str) for part in parts):
            return
        if not all(isinstance(part, list) for part in parts):
            raise ValueError('"prompt" and "completion" are two texts, or two lists of messages')
        for part in parts:
            _check_messages(part)
    elif not isinstance(record["text"], str):
        raise ValueError(f'"text" is {_short(record["text"])}, not a text')


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" is {_short(messages)}, not a list of at least one message')
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f'a message has "role" and "content"; this is {_short(message)}')
        if message["role"] not in ROLES:
            raise ValueError(f"role {message['role']!r} is none of {', '.join(ROLES)}")
        if not isinstance(message.get("content", ""), str):
            raise ValueError(f'"content" is {_short(message["content"])}, not a text')


def _short(value: Any) -> str:
    said = json.dumps(value)
    return said if len(said) <= 60 else said[:57] + "..."


def conversations(record: Record) -> Sequence[Mapping[str, Any]] | None:
    """The messages of a document that has some; those of prompt and completion together."""
    if "messages" in record:
        return list(record["messages"])
    if isinstance(record.get("prompt"), list):
        return [*record["prompt"], *record["completion"]]
    return None


def numbered(records: Records) -> Iterator[tuple[int, Record]]:
    """All documents with their numbers."""
    for at in range(len(records)):
        yield at, records[at]
