"""Files of documents, one JSON object per line or one row of a table each, by number.

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      each a text, or messages

Beside messages `tools` lists the functions that the assistant may call, and `chat_template_kwargs`
gives further variables of the chat template. A message's `"weight": 0` or `"train": false` leaves
an answer out of the loss.

Every line is checked once, when a file is opened: an error names file and line before training.
Memory holds 20 bytes per document: the offset, number and checksum of its line, so that a line
that changes while a run reads it raises `DataChanged`. Tables and compressed files, whose rows
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training import tables
from training.data_files import (
    DIGEST,
    DataChanged,
    check_regular,
    difference,
    files_in,
    open_regular,
)

Record = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
_KINDS = ("text", "messages", "prompt")
_COLUMNS = (*_KINDS, "completion", "tools", "chat_template_kwargs")
_SUFFIXES = (*tables.LINES, *tables.TABLES)
_FLAGS = ("weight", "train", "training")  # of a message: 0 or false leaves it out of the loss
_HEAD = 1 << 24  # bytes of a file that are looked at, for documents under another name


def is_documents(path: Path) -> bool:
    """Returns True if the names of a file, or of the files of a folder, are those of documents.

    Raises:
        ValueError: A folder has documents and other files; or a file has documents or tables under
            another name, so that it would be learned as text with its braces and commas.

    >>> is_documents(Path("chat.JSONL")), is_documents(Path("book.txt"))
    (True, False)
    """
    files = _visible(path) if path.is_dir() else [path]
    if files and files[0].exists() and all(tables.kind(file) == ".json" for file in files):
        raise ValueError(
            f"{path} is JSON, which is unsupported: save each document as one line of a .jsonl "
            f"file (json.dumps), or rename it {files[0].stem}.txt to train on it as text"
        )
    documents = [file for file in files if tables.kind(file) in _SUFFIXES]
    others = [file for file in files if tables.kind(file) not in _SUFFIXES]
    if documents and others:
        raise ValueError(
            f"{path} holds documents ({documents[0].name}) and other files ({others[0].name}): "
            "move the other files to another folder"
        )
    for file in others:
        _check_text_file(file)
    return bool(documents)


def _check_text_file(path: Path) -> None:
    """Raises ValueError if a file would be learned as text and holds something else."""
    kind = tables.kind(path)
    if kind in tables.UNREAD:
        raise ValueError(
            f"{path}: {kind} files are unsupported. Save it as .jsonl, .parquet or .csv with the "
            "columns text, messages, or prompt and completion; or as .txt in UTF-8"
        )
    if tables.compression(path):
        raise ValueError(
            f"{path} is compressed, which is supported for documents only (.jsonl.gz): unpack it "
            "first"
        )
    if kind != ".txt" and path.is_file() and _holds_documents(path):
        raise ValueError(
            f"{path} holds JSON objects: rename it {path.stem}.jsonl to train on documents, one "
            f"per line, or {path.stem}.txt to train on it as text"
        )


def _holds_documents(path: Path) -> bool:
    """Returns True if a file begins with two JSON objects, or with a list of documents."""
    with open_regular(path) as file:
        for size in (64, _HEAD):
            file.seek(0)
            head = file.read(size).decode("utf-8-sig", errors="replace").lstrip()
            if not head.startswith(("{", "[")):
                return False
    decoder = json.JSONDecoder()
    try:
        first, end = decoder.raw_decode(head.removeprefix("[").lstrip())
        if head.startswith("["):
            check(first)
            return True
        second, _ = decoder.raw_decode(head[end:].lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and isinstance(second, dict)


def _visible(folder: Path) -> list[Path]:
    return [path for path in files_in(folder) if not path.name.startswith(".")]


class Records:
    """The documents of a file or a folder, by number.

    Args:
        path: A file of lines or a table, also compressed, or a folder of such files.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: A line is not a document (the message has file and line), there is no document
            at all, or a file is not regular.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: check the path")
        files = _visible(path) if path.is_dir() else [path]
        for file in files:
            check_regular(file)
        self.name = path.resolve().name
        self._files = [_Lines(file) for file in files]
        self._ends = np.cumsum([len(lines) for lines in self._files])
        if not len(self):
            raise ValueError(f"{path} holds no documents; at least one is needed")

    def __len__(self) -> int:
        return sum(map(len, self._files))

    def __getitem__(self, at: int) -> Record:
        file, line = self._locate(at)
        return file[line]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Checksum of all documents in their order, as hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=DIGEST)
        for file in self._files:
            digest.update(file.sums.tobytes())
        return digest.hexdigest()

    def where(self, at: int) -> str:
        """Returns file and line of a document."""
        file, line = self._locate(at)
        return file.where(line)

    def _locate(self, at: int) -> tuple[_Lines, int]:
        number = int(np.searchsorted(self._ends, at, side="right"))
        file = self._files[number]
        return file, at - int(self._ends[number]) + len(file)


class _Lines:
    """Documents of one file; several threads may read them."""

    def __init__(self, path: Path) -> None:
        self._path = self._lines = path
        self._unit = "row" if tables.kind(path) in tables.TABLES else "line"
        if self._unit == "row" or tables.compression(path):
            folder = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._lines = _copied(path, Path(folder))
        self._starts, self._numbers = array.array("q"), array.array("q")
        self.sums = array.array("I")  # of the lines, without white space around them
        start = 0
        # Opened for each reading: a folder may have more files than a process may have open.
        with open_regular(self._lines) as lines:
            self._status = os.fstat(lines.fileno())
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        check(json.loads(line))
                    except (ValueError, RecursionError) as error:
                        raise ValueError(f"{path}, {self._unit} {number}: {error}") from error
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
                now = os.fstat(lines.fileno())
                lines.seek(self._starts[at])
                line = lines.readline()
        except FileNotFoundError as error:
            raise DataChanged(self.where(at), f"{self._lines} is gone") from error
        if zlib.crc32(line.strip()) != self.sums[at]:
            raise DataChanged(self.where(at), difference(self._status, now))
        record: Record = json.loads(line)
        return record

    def where(self, at: int) -> str:
        return f"{self._path}, {self._unit} {self._numbers[at]}"


def _copied(path: Path, folder: Path) -> Path:
    """Copies a compressed file or a table to a folder as lines; returns the file of lines."""
    content = path
    if tables.compression(path):
        content = folder / "content"
        tables.unpack(path, content)
        if tables.kind(path) in tables.LINES:
            return content
    out = folder / "lines"
    with out.open("wb") as lines:
        for row in tables.rows(path, _COLUMNS, content=content):
            lines.write(json.dumps(_without_nulls(row)).encode() + b"\n")
    if content != path:
        content.unlink()
    return out


def _without_nulls(value: object) -> object:
    """Removes the fields of structs that are null because the row does not have them."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def check(record: Any) -> None:
    """Raises ValueError if a record is not a document.

    Raises:
        ValueError: It is of another kind, a role is unknown, or a conversation is empty.

    >>> check({"messages": [{"role": "usr", "content": "Hi"}]})
    Traceback (most recent call last):
    ValueError: role 'usr' must be one of system, developer, user, assistant, tool
    """
    if not isinstance(record, dict) or not any(kind in record for kind in _KINDS):
        raise ValueError(
            'a document must be an object with "text", with "messages", or with "prompt" and '
            f'"completion", and this is {_short(record)}'
        )
    template_options(record)
    if "messages" in record:
        _check_messages(record["messages"])
    elif "prompt" in record:
        parts = [record["prompt"], record.get("completion")]
        if {type(part) for part in parts} not in ({str}, {list}):
            raise ValueError(
                '"prompt" and "completion" must be two texts, or two lists of messages'
            )
        for part in parts:
            if isinstance(part, str):
                _check_text(part, "prompt")
            else:
                _check_messages(part)
    else:
        _check_text(record["text"], "text")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" is {_short(messages)}: give a list of at least one message')
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f'a message must have "role" and "content": {_short(message)}')
        if message["role"] not in ROLES:
            raise ValueError(f"role {message['role']!r} must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if content is not None:
            _check_text(content, "content")
        _check_flags(message)
        with_calls(message)


def _check_flags(message: Mapping[str, Any]) -> None:
    for name in _FLAGS:
        flag = message.get(name)
        if flag is not None and flag not in (0, 1):
            raise ValueError(
                f'"{name}" of a message is {_short(flag)}: use 0 or false to leave an answer out '
                "of the loss, 1 or true to include it"
            )
        if flag is True and message["role"] != "assistant":
            raise ValueError(
                f'"{name}" of a {message["role"]} message is true, which only assistant messages '
                "support: remove it, or train on all tokens (--loss-on all)"
            )
    if message.get("train_detail") is not None:
        raise ValueError('"train_detail" of a message is unsupported: use "train" instead')


def _check_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f'"{name}" is {_short(value)}, not a text')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'"{name}" has an unpaired surrogate ({error.reason})') from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def conversations(record: Record) -> Messages | None:
    """Returns the messages of a document, prompt and completion together; None if it has none.

    A message without content, such as a tool call, gets an empty text. Arguments of tool calls
    that are JSON text become objects, which chat templates encode.
    """
    if "messages" in record:
        messages = list(record["messages"])
    elif isinstance(record.get("prompt"), list):
        messages = [*record["prompt"], *record["completion"]]
    else:
        return None
    return [{**with_calls(m), "content": m.get("content") or ""} for m in messages]


def is_learned(message: Mapping[str, Any]) -> bool:
    """Returns False if a flag of the message leaves it out of the loss.

    >>> is_learned({"role": "assistant", "content": "a", "weight": 0})
    False
    """
    return all(message.get(name) in (None, 1) for name in _FLAGS)


def template_options(record: Record) -> dict[str, Any]:
    """Returns the variables that a document gives to its chat template.

    Raises:
        ValueError: `tools` or `chat_template_kwargs` is malformed.

    >>> template_options({"messages": [], "tools": '[{"name": "weather"}]'})
    {'tools': [{'name': 'weather'}]}
    """
    if record.get("functions") is not None and record.get("tools") is None:
        raise ValueError(
            '"functions" of a document is unsupported: use "tools", with {"type": "function", '
            '"function": {...}} for each'
        )
    tools = _decoded(record.get("tools"), "tools")
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        raise ValueError(f'"tools" is {_short(tools)}: give a list of objects, or its JSON text')
    more = _decoded(record.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(more, dict) or {"messages", "tools", "add_generation_prompt"} & set(more):
        raise ValueError(
            f'"chat_template_kwargs" is {_short(more)}: give an object without the keys '
            "messages, tools and add_generation_prompt"
        )
    return {**more, "tools": tools} if tools else more


def with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose tool calls have their arguments as objects.

    Raises:
        ValueError: A tool call, or its arguments, is not an object.
    """
    if message.get("function_call") is not None:
        raise ValueError('"function_call" of a message is unsupported: use "tool_calls"')
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f'"tool_calls" is {_short(calls)}: give a list of objects')
    return {**message, "tool_calls": [_call(call, _as_object) for call in calls]}


def calls_as_text(messages: Messages) -> Messages | None:
    """Returns the messages with arguments of tool calls as JSON text; None if no call has any."""
    if not _arguments(messages):
        return None
    as_text = functools.partial(json.dumps, ensure_ascii=False)
    return [
        {**message, "tool_calls": [_call(call, as_text) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def objects_written_by_python(messages: Messages, text: str) -> bool:
    """Returns True if a text has arguments of tool calls as Python shows them, {'a': 1}."""
    return any(repr(arguments) in text for arguments in _arguments(messages))


def _arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """Returns the arguments of all tool calls that have some."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    return [x for call in calls if (x := call.get("function", call).get("arguments"))]


def _call(call: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Changes the arguments of a call, {"function": {"name", "arguments"}} or its inner part."""
    inner = call.get("function", call)
    if not isinstance(inner, dict):
        raise ValueError(f'"function" of a tool call is {_short(inner)}: give an object')
    if inner.get("arguments") is None:
        return call
    inner = {**inner, "arguments": form(inner["arguments"])}
    return {**call, "function": inner} if "function" in call else inner


def _as_object(arguments: Any) -> Any:
    value = {} if arguments == "" else _decoded(arguments, "arguments")
    if not isinstance(value, dict):
        raise ValueError(
            f'"arguments" of a tool call is {_short(arguments)}: give an object, or its JSON text'
        )
    return value


def _decoded(value: Any, name: str) -> Any:
    """Returns a value, decoded if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'"{name}" is {_short(value)}, which is not JSON: {error}') from error
