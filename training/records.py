"""Files of documents, one JSON object per line or one row of a Parquet table each, by number.

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      each a text, or messages

docs/chat-data.md describes their other fields. Every line is checked once, when a file is opened:
an error names file and line before training. Memory holds 20 bytes per document: file, offset,
number and checksum of its line, so that a line that changes while a run reads it raises
`DataChanged`. Tables and compressed files, whose rows can't be read one by one, are copied as lines
to a temporary folder.
"""

import array
import functools
import json
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training.data_files import (
    DataChanged,
    check_regular,
    checksum,
    difference,
    files_in,
    open_regular,
    reopen,
)

Record = Mapping[str, Any]
Message = Mapping[str, Any]
Messages = Sequence[Message]
ROLES = ("system", "developer", "user", "assistant", "tool")
LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
TABLE = ".parquet"
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")  # of lines; pyarrow reads them
# Formats with text that is not read; a small file of some could pass for text.
UNREAD = (
    *(".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".xls", ".ods", ".sqlite"),
    *(".db", ".pkl", ".docx", ".doc", ".odt", ".pdf", ".epub", ".zip", ".tar", ".tgz", ".xz"),
)
_COLUMNS = ("text", "messages", "prompt", "completion", "tools", "chat_template_kwargs")
_FLAGS = ("weight", "train", "training")  # of a message: 0 or false leaves it out of the loss
_RENAMED = {"functions": "tools", "function_call": "tool_calls", "train_detail": "train"}
_AT_ONCE = 1024  # rows of a table
_HEAD = 1 << 24  # bytes of a file that are searched for documents under another name


def is_documents(path: Path) -> bool:
    """Returns True if a file, or all files of a folder, are named as documents.

    Raises:
        ValueError: A folder has documents and other files; or a file has documents or tables under
            another name, so that it would be learned as text with its braces and commas.

    >>> is_documents(Path("chat.JSONL")), is_documents(Path("book.txt"))
    (True, False)
    """
    files = _visible(path) if path.is_dir() else [path]
    if files and files[0].exists() and all(file.suffix.lower() == ".json" for file in files):
        raise ValueError(
            f"{path} is JSON, which is unsupported: save each document as one line of a .jsonl "
            f"file (json.dumps), or rename it {files[0].stem}.txt to train on it as text"
        )
    documents = [file for file in files if _is_document_file(file)]
    if documents and len(documents) < len(files):
        other = next(file for file in files if file not in documents)
        raise ValueError(
            f"{path} holds documents ({documents[0].name}) and other files ({other.name}): "
            "move the other files to another folder"
        )
    return bool(documents)


def _is_document_file(path: Path) -> bool:
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    if last in (*LINES, TABLE) or (before in LINES and last in COMPRESSED):
        return True
    if last in (*COMPRESSED, *UNREAD):
        raise ValueError(
            f"{path}: {path.suffix} files are unsupported. Save documents as .jsonl (also "
            ".jsonl.gz) or .parquet, with the columns text, messages, or prompt and "
            "completion; or text as .txt in UTF-8"
        )
    if last != ".txt" and path.is_file() and _holds_documents(path):
        raise ValueError(
            f"{path} holds JSON objects: rename it {path.stem}.jsonl to train on documents, "
            f"one per line, or {path.stem}.txt to train on it as text"
        )
    return False


def _holds_documents(path: Path) -> bool:
    """Returns True if a file begins with two JSON objects, or with a list of documents."""
    with open_regular(path) as file:
        if not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
            return False
        file.seek(0)
        head = file.read(_HEAD).decode("utf-8-sig", errors="replace").lstrip()
    decoder = json.JSONDecoder()
    try:
        first, end = decoder.raw_decode(head.removeprefix("[").lstrip())
        if head.startswith("["):
            parse(first)
            return True
        second, _ = decoder.raw_decode(head[end:].lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and isinstance(second, dict)


def _visible(folder: Path) -> list[Path]:
    return [path for path in files_in(folder) if not path.name.startswith(".")]


class _Lines(NamedTuple):
    """The lines of a file: the file itself, or their copy."""

    path: Path
    copy: Path
    status: os.stat_result  # of the copy when it was indexed


class Records:
    """The documents of a file or a folder, by number; several threads may read them.

    Args:
        path: A file of lines, also compressed, a Parquet table, or a folder of such files.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: A line is not a document (the message has file and line), there is no document
            at all, or a file is not regular.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: check the path")
        self.name = path.resolve().name
        self._files: list[_Lines] = []
        self._file, self._start = array.array("I"), array.array("q")  # of each document
        self._number, self._sum = array.array("I"), array.array("I")
        for file in _visible(path) if path.is_dir() else [path]:
            check_regular(file)
            self._add(file)
        if not len(self):
            raise ValueError(f"{path} holds no documents; at least one is needed")

    def _add(self, path: Path) -> None:
        """Checks and indexes the documents of a file."""
        lines = path
        if path.suffix.lower() not in LINES:
            folder = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            lines = folder / "lines"
            _copy_lines(path, lines)
        start = 0
        # Opened for each reading: a folder may have more files than a process may have open.
        with open_regular(lines) as file:
            self._files.append(_Lines(path, lines, os.fstat(file.fileno())))
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._file.append(len(self._files) - 1)
                    self._start.append(start)
                    self._number.append(number)
                    self._sum.append(zlib.crc32(line.strip()))
                    try:
                        parse(json.loads(line))
                    except (ValueError, RecursionError) as error:
                        raise ValueError(f"{self.where(len(self) - 1)}: {error}") from error
                start += len(line)

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, at: int) -> Record:
        """Reads a document; raises DataChanged if its line is not the one that was checked."""
        lines = self._files[self._file[at]]
        with reopen(lines.copy, self.where(at)) as file:
            now = os.fstat(file.fileno())
            file.seek(self._start[at])
            line = file.readline()
        if zlib.crc32(line.strip()) != self._sum[at]:
            raise DataChanged(self.where(at), difference(lines.status, now))
        record: Record = json.loads(line)
        return record

    @functools.cached_property
    def fingerprint(self) -> str:
        """Checksum of all documents in their order."""
        return checksum(self._sum.tobytes())

    def where(self, at: int) -> str:
        """Returns file and line of a document."""
        path = self._files[self._file[at]].path
        unit = "row" if path.suffix.lower() == TABLE else "line"
        return f"{path}, {unit} {self._number[at]}"


def _copy_lines(path: Path, out: Path) -> None:
    """Writes the lines of a compressed file, or the rows of a table as lines of JSON."""
    suffix = path.suffix.lower()
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: reading {suffix} requires pyarrow: pip install 'zero_jax[chat]'"
        ) from error
    try:
        with out.open("wb") as lines:
            if suffix != TABLE:
                name = {".gz": "gzip", ".zst": "zstd"}.get(suffix, suffix[1:])
                with pyarrow.input_stream(str(path), compression=name) as packed:
                    shutil.copyfileobj(packed, lines)
                return
            with pyarrow.parquet.ParquetFile(path) as table:
                names = table.schema_arrow.names
                columns = [name for name in _COLUMNS if name in names]
                if not columns:
                    raise ValueError(
                        f"{path} has the columns {', '.join(map(repr, names[:20]))}: rename those "
                        "of the documents to text, messages, or prompt and completion"
                    )
                for batch in table.iter_batches(_AT_ONCE, columns=columns):
                    for row in batch.to_pylist():
                        lines.write(json.dumps(_without_nulls(row)).encode() + b"\n")
    except (pyarrow.ArrowException, TypeError, OSError) as error:
        raise ValueError(f"{path} can't be read as {suffix}: {error}") from error


def _without_nulls(value: object) -> object:
    """Removes the fields of structs that are null because the row does not have them."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


class Completion(NamedTuple):
    """A prompt and the text to learn after it; the prompt of a text is empty."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Messages as chat templates read them: texts, and arguments of tool calls as objects."""

    messages: Messages
    context: int  # number of messages at the beginning that are not learned
    options: Mapping[str, Any]  # `tools`, and further variables of the template


def parse(record: Any) -> Completion | Conversation:
    """Returns the content of a record; raises ValueError if it is not a document.

    >>> parse({"messages": [{"role": "usr", "content": "Hi"}]})
    Traceback (most recent call last):
    ValueError: role 'usr' must be one of system, developer, user, assistant, tool
    """
    if not isinstance(record, dict) or not {"text", "messages", "prompt"} & record.keys():
        raise ValueError(
            'a document must be an object with "text", with "messages", or with "prompt" and '
            f'"completion", and this is {_short(record)}'
        )
    prompt: Any = []
    messages = record.get("messages")
    if "messages" not in record:
        if "prompt" not in record:
            return Completion("", _text(record["text"], "text"))
        prompt, messages = record["prompt"], record.get("completion")
        if isinstance(prompt, str) and isinstance(messages, str):
            return Completion(_text(prompt, "prompt"), _text(messages, "completion"))
        if not (isinstance(prompt, list) and isinstance(messages, list) and prompt and messages):
            raise ValueError(
                '"prompt" and "completion" must be two texts, or two lists of messages'
            )
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" is {_short(messages)}: give a list of at least one message')
    _check_renamed(record)
    options = _decoded(record, "chat_template_kwargs", dict)
    if fixed := {"messages", "tools", "add_generation_prompt"} & set(options):
        raise ValueError(f'"chat_template_kwargs" can\'t have the key "{fixed.pop()}": remove it')
    if tools := _decoded(record, "tools", list):
        options = {**options, "tools": tools}
    return Conversation([_message(item) for item in [*prompt, *messages]], len(prompt), options)


def is_learned(message: Message) -> bool:
    """Returns False if a flag of the message leaves it out of the loss.

    >>> is_learned({"role": "assistant", "content": "a", "weight": 0})
    False
    """
    return all(message.get(name) in (None, 1) for name in _FLAGS)


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f'a message must have "role" and "content": {_short(message)}')
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"role {role!r} must be one of {', '.join(ROLES)}")
    for name in _FLAGS:
        flag = message.get(name)
        if flag not in (None, 0, 1) or (flag is True and role != "assistant"):
            raise ValueError(
                f'"{name}" of a {role} message is {_short(flag)}: use 0 or false to leave an '
                "answer out of the loss, 1 or true to include it"
            )
    _check_renamed(message)
    known = {name: value for name, value in message.items() if value is not None}
    known["content"] = _text(known.get("content", ""), "content")
    calls = _decoded(known, "tool_calls", list)
    known.pop("tool_calls", None)
    if calls:
        known["tool_calls"] = [_with_arguments(call, _as_object) for call in calls]
    return known


def _check_renamed(fields: Mapping[str, Any]) -> None:
    for name, other in _RENAMED.items():
        if fields.get(name) is not None:
            raise ValueError(f'"{name}" is unsupported: use "{other}"')


def _with_arguments(call: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Changes the arguments of a call, {"function": {"name", "arguments"}} or its inner part."""
    inner = call.get("function", call)
    if not isinstance(inner, dict):
        raise ValueError(f'"function" of a tool call is {_short(inner)}: give an object')
    if inner.get("arguments") is None:
        return call
    inner = {**inner, "arguments": form(inner)}
    return {**call, "function": inner} if "function" in call else inner


def _as_object(function: Mapping[str, Any]) -> Any:
    return _decoded(function, "arguments", dict)


def _as_text(function: Mapping[str, Any]) -> str:
    return json.dumps(function["arguments"], ensure_ascii=False)


def calls_as_text(messages: Messages) -> Messages:
    """Returns the messages with arguments of tool calls as JSON text."""
    return [
        {**message, "tool_calls": [_with_arguments(x, _as_text) for x in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def arguments_in(messages: Messages) -> list[Mapping[str, Any]]:
    """Returns the arguments of all tool calls that have some."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return [x for call in calls if (x := call.get("function", call).get("arguments"))]


def _decoded(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Returns an object or a list of objects, or that of a JSON text; an empty one for none."""
    empty: tuple[Any, ...] = (None, "")
    if name != "arguments":  # elsewhere an empty value of any type is none
        empty += ([], {}, 0)
    value = decoded = None if fields.get(name) in empty else fields[name]
    if isinstance(value, str):
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'"{name}" is {_short(value)}, which is not JSON: {error}') from error
    decoded = kind() if decoded is None else decoded
    parts = decoded if kind is list and isinstance(decoded, list) else [decoded]
    if not isinstance(decoded, kind) or not all(isinstance(part, dict) for part in parts):
        form = "an object" if kind is dict else "a list of objects"
        raise ValueError(f'"{name}" is {_short(value)}: give {form}, or its JSON text')
    return decoded


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'"{name}" is {_short(value)}, not a text')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'"{name}" has an unpaired surrogate ({error.reason})') from error
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
