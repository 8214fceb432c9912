"""Files of documents, one JSON object a line or one row of Parquet each, by number.

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      each a text, or messages

Every line is looked at once, when a file is opened: what is wrong is told with file and line before
anything is trained. In memory is where each line begins, 8 bytes a document. Parquet, of which one
can't read a row alone, is put down as lines in a folder of its own.
"""

from __future__ import annotations

import array
import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.text import files_in

Record = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
_KINDS = ("text", "messages", "prompt")
_COLUMNS = (*_KINDS, "completion")
_AT_ONCE = 1024  # rows of Parquet


def is_documents(path: Path) -> bool:
    """Whether a file, or the files of a folder, are of documents by their names.

    Raises:
        ValueError: Some of a folder's are, and some are not; or all are JSON, but not a line each.

    >>> is_documents(Path("chat.jsonl")), is_documents(Path("book.txt"))
    (True, False)
    """
    found = _shown(path) if path.is_dir() else [path]
    if found and found[0].exists() and all(own.suffix == ".json" for own in found):
        raise ValueError(
            f"{path}: as text a model would learn JSON's braces and quotes. Write each document as "
            f"one line of a .jsonl file, by json.dumps; or name it {found[0].stem}.txt to have it "
            "as text"
        )
    others = [own for own in found if own.suffix not in (*LINES, PARQUET)]
    if others and len(others) < len(found):
        raise ValueError(
            f"{path} holds documents (.jsonl, .parquet) and other files, {others[0].name} among "
            "them: move those elsewhere"
        )
    return bool(found) and not others


def _shown(folder: Path) -> list[Path]:
    return [own for own in files_in(folder) if not own.name.startswith(".")]


def files_of(path: Path) -> list[Path]:
    """The file, or those of a folder in the order of their paths.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: One is no regular file.
    """
    if not path.exists():
        raise FileNotFoundError(f"no file or folder at {path}; check the path")
    found = _shown(path) if path.is_dir() else [path]
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
        self.path = self._lines = path
        if path.suffix == PARQUET:
            folder = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._lines = Path(folder, "lines")
            _put_down(path, self._lines)
        self._starts, self._numbers = array.array("q"), array.array("q")
        start = 0
        # Opened for each reading: a folder may have more files than a process may have open.
        with self._lines.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
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
        with self._lines.open("rb") as lines:
            lines.seek(self._starts[at])
            record: Record = json.loads(lines.readline())
        return record

    def where(self, at: int) -> str:
        return self._said(self._numbers[at])

    def _said(self, number: int) -> str:
        return f"{self.path}, {'row' if self.path.suffix == PARQUET else 'line'} {number}"


def _put_down(path: Path, out: Path) -> None:
    """Writes the rows of a Parquet file as lines."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: pyarrow is not installed, which reads Parquet: pip install 'zero_jax[chat]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file, out.open("wb") as lines:
            known_columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
            for rows in file.iter_batches(_AT_ONCE, columns=known_columns):
                for row in rows.to_pylist():
                    known = {name: value for name, value in row.items() if value is not None}
                    lines.write(json.dumps(_plain(known)).encode() + b"\n")
    except (pyarrow.ArrowException, TypeError, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error


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
            for part in parts:
                _check_text(part, "prompt")
            return
        if not all(isinstance(part, list) for part in parts):
            raise ValueError('"prompt" and "completion" are two texts, or two lists of messages')
        for part in parts:
            _check_messages(part)
    else:
        _check_text(record["text"], "text")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" is {_short(messages)}, not a list of at least one message')
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f'a message has "role" and "content"; this is {_short(message)}')
        if message["role"] not in ROLES:
            raise ValueError(f"role {message['role']!r} is none of {', '.join(ROLES)}")
        content = message.get("content")
        if content is not None:
            _check_text(content, "content")


def _check_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f'"{name}" is {_short(value)}, not a text')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'"{name}" has half of a character ({error.reason})') from error


def _short(value: Any) -> str:
    said = json.dumps(value)
    return said if len(said) <= 60 else said[:57] + "..."


def conversations(record: Record) -> Sequence[Mapping[str, Any]] | None:
    """The messages of a document that has some; those of prompt and completion together.

    One without content, which calls a tool say, has an empty one.
    """
    if "messages" in record:
        found = list(record["messages"])
    elif isinstance(record.get("prompt"), list):
        found = [*record["prompt"], *record["completion"]]
    else:
        return None
    return [{**message, "content": message.get("content") or ""} for message in found]
