"""Files of documents, one JSON object a line or one row of a table each, by number.

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      each a text, or messages

Every line is checked once, when a file is opened: an error names file and line before anything is
trained. Memory holds 20 bytes a document: the offset, number and checksum of its line, so that a
line that changes while a run reads it raises `DataChanged`. Tables and compressed files, whose rows
can't be read one by one, are copied as lines to a temporary folder.
"""

from __future__ import annotations

import array
import functools
import hashlib
import json
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training import tables
from training.data_files import DIGEST, DataChanged, Stamp, open_regular
from training.text import files_in

Record = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_KINDS = ("text", "messages", "prompt")
_COLUMNS = (*_KINDS, "completion")
_HEAD = 1 << 24  # bytes of a file that are looked at, for documents under another name


def is_documents(path: Path) -> bool:
    """Whether a file, or the files of a folder, are of documents by their names.

    Raises:
        ValueError: Some files of a folder are, and some are not; or a file has documents or tables
            under another name, so that it would be learned as text, braces and commas and all.

    >>> is_documents(Path("chat.JSONL")), is_documents(Path("book.txt"))
    (True, False)
    """
    files = _shown(path) if path.is_dir() else [path]
    if files and files[0].exists() and all(tables.kind(file) == ".json" for file in files):
        raise ValueError(
            f"{path}: as text a model would learn JSON's braces and quotes. Write each document as "
            f"one line of a .jsonl file, by json.dumps; or name it {files[0].stem}.txt to have it "
            "as text"
        )
    others = [file for file in files if tables.kind(file) not in (*tables.LINES, *tables.TABLES)]
    if others and len(others) < len(files):
        named = next(file for file in files if file not in others)
        raise ValueError(
            f"{path} holds documents ({named.name}) and other files, {others[0].name} among "
            "them: move those elsewhere"
        )
    for file in others:
        _check_text_file(file)
    return bool(files) and not others


def _check_text_file(path: Path) -> None:
    """Raises ValueError if a file would be learned as text and holds something else."""
    kind = tables.kind(path)
    if kind in tables.UNREAD:
        raise ValueError(
            f"{path}: {kind} files are not read. Save it as .jsonl, .parquet or .csv with the "
            "columns text, messages, or prompt and completion; or as .txt in UTF-8"
        )
    if tables.compression(path):
        raise ValueError(
            f"{path} is compressed, and its name does not say that it has documents (as .jsonl.gz "
            "does): unpack it first"
        )
    if kind != ".txt" and path.is_file() and _holds_documents(path):
        raise ValueError(
            f"{path} holds JSON objects, whose braces and quotes a model would learn as text. Name "
            f"it {path.stem}.jsonl, with one document a line, to have them as documents; or "
            f"{path.stem}.txt to have it as text"
        )


def _holds_documents(path: Path) -> bool:
    """Whether a file begins with two JSON objects, or with a list whose first is a document."""
    with open_regular(path) as file:
        head = file.read(64).decode("utf-8-sig", errors="replace").lstrip()
        if not head.startswith(("{", "[")):
            return False
        file.seek(0)
        head = file.read(_HEAD).decode("utf-8-sig", errors="replace").lstrip()
    listed = head.startswith("[")
    try:
        first, end = json.JSONDecoder().raw_decode(head.removeprefix("[").lstrip())
        if listed:
            check(first)
            return True
        second, _ = json.JSONDecoder().raw_decode(head[end:].lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and isinstance(second, dict)


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
        path: A file of lines or a table, also compressed, or a folder of such files.

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

    @functools.cached_property
    def fingerprint(self) -> str:
        """A checksum of all documents in their order, as hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=DIGEST)
        for file in self._files:
            digest.update(file.sums.tobytes())
        return digest.hexdigest()

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
        if tables.kind(path) in tables.TABLES or tables.compression(path):
            folder = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._lines = _put_down(path, Path(folder))
        self._starts, self._numbers = array.array("q"), array.array("q")
        self.sums = array.array("I")  # of the lines, without white space around them
        start = 0
        # Opened for each reading: a folder may have more files than a process may have open.
        with open_regular(self._lines) as lines:
            self._stamp = Stamp.from_stat(os.fstat(lines.fileno()))
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        check(json.loads(line))
                    except (ValueError, RecursionError) as error:
                        raise ValueError(f"{self._said(number)}: {error}") from error
                    self._starts.append(start)
                    self._numbers.append(number)
                    self.sums.append(zlib.crc32(line.strip()))
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, at: int) -> Record:
        """Reads a document.

        Raises:
            DataChanged: Its line is not the one that was checked.
        """
        try:
            with open_regular(self._lines) as lines:
                now = Stamp.from_stat(os.fstat(lines.fileno()))
                lines.seek(self._starts[at])
                line = lines.readline()
        except FileNotFoundError as error:
            raise DataChanged(self.where(at), f"{self._lines} is gone") from error
        if zlib.crc32(line.strip()) != self.sums[at]:
            raise DataChanged(self.where(at), self._stamp.difference(now))
        record: Record = json.loads(line)
        return record

    def where(self, at: int) -> str:
        return self._said(self._numbers[at])

    def _said(self, number: int) -> str:
        return (
            f"{self.path}, {'row' if tables.kind(self.path) in tables.TABLES else 'line'} {number}"
        )


def _put_down(path: Path, folder: Path) -> Path:
    """Copies a compressed file or a table to a folder, as lines; returns their file."""
    content = path
    if tables.compression(path):
        content = folder / "content"
        tables.unpack(path, content)
        if tables.kind(path) in tables.LINES:
            return content
    out = folder / "lines"
    with out.open("wb") as lines:
        for row in tables.rows(path, _COLUMNS, content=content):
            known = {name: value for name, value in row.items() if value is not None}
            lines.write(json.dumps(_plain(known)).encode() + b"\n")
    if content != path:
        content.unlink()
    return out


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
