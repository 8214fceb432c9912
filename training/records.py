"""Files of documents, one JSON object per line or one row of a Parquet table each, by number.

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      each a text, or messages

docs/chat-data.md describes their other fields. Every line is checked once, when a file is opened:
an error names file and line before training. Memory holds 20 bytes per document. Tables and
compressed files, whose rows can't be read one by one, are copied as lines to a temporary folder.
"""

import array
import contextlib
import copy
import functools
import json
import re
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training.data_files import DataChanged, checksum, files_in, open_regular, reopen

Record = Mapping[str, Any]
Message = Mapping[str, Any]
Messages = Sequence[Message]
ROLES = ("system", "developer", "user", "assistant", "tool")
LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
TABLE = ".parquet"
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}  # names in pyarrow
# Formats with text that is not read; a small file of some could pass for text.
UNREAD = {
    *(".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".xls", ".ods", ".sqlite"),
    *(".db", ".pkl", ".docx", ".doc", ".odt", ".pdf", ".epub", ".zip", ".tar", ".tgz", ".xz"),
    *COMPRESSED,
}
# The beginning of two JSON objects, or of a list of documents.
_JSON = re.compile(
    rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*(?:".*?)?\}\s*\{\s*["}]|\[\s*\{.*?"(?:text|messages|prompt)"\s*:)',
    re.DOTALL,
)
_HEAD = 1 << 24  # bytes of a file that are searched for them
_COLUMNS = ("text", "messages", "prompt", "completion", "tools", "chat_template_kwargs")
_FLAGS = ("weight", "train", "training")  # of a message: 0 or false leaves it out of the loss
_RENAMED = {"functions": "tools", "function_call": "tool_calls", "train_detail": "train"}
_AT_ONCE = 1024  # rows of a table


def is_documents(path: Path) -> bool:
    """Returns True if a file, or all files of a folder, are named as documents.

    Raises ValueError if a folder has documents and other files; or a file has documents or tables
    under another name, so that it would be learned as text with its braces and commas.
    """
    files, documents = files_in(path), []
    only_json = all(file.suffix.lower() == ".json" for file in files)
    for file in files:
        *_, before, last = ["", "", *(suffix.lower() for suffix in file.suffixes)]
        if last in (*LINES, TABLE) or (before in LINES and last in COMPRESSED):
            documents.append(file)
        elif only_json or last in UNREAD or (last != ".txt" and _JSON.match(_head(file))):
            raise ValueError(
                f"{file} is neither text nor documents: save documents as lines of JSON in .jsonl "
                "(also .jsonl.gz) or in .parquet, with text, messages, or prompt and completion. "
                f"Text is UTF-8: name it {file.stem}.txt"
            )
    if documents and (others := [file.name for file in files if file not in documents]):
        raise ValueError(f"{path} holds documents and {others[0]}: move it to another folder")
    return bool(documents)


def _head(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(_HEAD)


class Records:
    """The documents of a file or a folder, by number; several threads may read them.

    Raises ValueError if a line is not a document (the message has file and line), or there is none.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self._files: list[tuple[Path, Path]] = []  # each with its lines: itself, or their copy
        self._file, self._start = array.array("I"), array.array("q")  # of each document
        self._number, self._sum = array.array("I"), array.array("I")
        for file in files_in(path):
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
        self._files.append((path, lines))
        start = 0
        # Opened for each reading: a folder may have more files than a process may have open.
        with open_regular(lines) as file:
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
        _, lines = self._files[self._file[at]]
        with reopen(lines, self.where(at)) as file:
            file.seek(self._start[at])
            line = file.readline()
        if zlib.crc32(line.strip()) != self._sum[at]:
            raise DataChanged(lines, self.where(at))
        record: Record = json.loads(line)
        return record

    @functools.cached_property
    def fingerprint(self) -> str:
        """Checksum of all documents in their order."""
        return checksum(self._sum.tobytes())

    def where(self, at: int) -> str:
        """Returns file and line of a document."""
        path, _ = self._files[self._file[at]]
        unit = "row" if path.suffix.lower() == TABLE else "line"
        return f"{path}, {unit} {self._number[at]}"


def _copy_lines(path: Path, out: Path) -> None:
    """Writes the lines of a compressed file, or the rows of a table as lines of JSON."""
    suffix = path.suffix.lower()
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path} requires pyarrow: pip install 'zero_jax[chat]'") from error
    with open_regular(path) as file, out.open("wb") as lines:
        try:
            if suffix != TABLE:
                with pyarrow.input_stream(file, compression=COMPRESSED[suffix]) as packed:
                    shutil.copyfileobj(packed, lines)
                return
            with pyarrow.parquet.ParquetFile(file) as table:
                # Without a known column all are read, so that the error shows the first row.
                columns = [name for name in _COLUMNS if name in table.schema_arrow.names] or None
                for batch in table.iter_batches(_AT_ONCE, columns=columns):
                    for row in batch.to_pylist():
                        line = json.dumps(_without_nulls(row), default=None if columns else str)
                        lines.write(line.encode() + b"\n")
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
    """Returns the content of a record; raises ValueError if it is not a document."""
    prompt: Any = []
    known = record if isinstance(record, dict) else {}
    if "messages" in known:
        answer = known["messages"]
    elif "prompt" in known:
        prompt, answer = known["prompt"], known.get("completion")
        if isinstance(prompt, str) and isinstance(answer, str):
            return Completion(_text(prompt, "prompt"), _text(answer, "completion"))
    elif "text" in known:
        return Completion("", _text(known["text"], "text"))
    else:
        answer = None
    lists = isinstance(prompt, list) and isinstance(answer, list)
    if not lists or not answer or not (prompt or "messages" in known):
        raise ValueError(
            'a document must be an object with "text", with a list of "messages", or with "prompt" '
            f'and "completion", two texts or two such lists; and this is {_short(record)}'
        )
    _check_renamed(known)
    options = _decoded(known, "chat_template_kwargs", dict)
    if fixed := {"messages", "tools", "add_generation_prompt"} & options.keys():
        raise ValueError(f'"chat_template_kwargs" can\'t have the key "{fixed.pop()}": remove it')
    if tools := _decoded(known, "tools", list):
        options = {**options, "tools": tools}
    return Conversation([_message(item) for item in [*prompt, *answer]], len(prompt), options)


def is_learned(message: Message) -> bool:
    """Returns False if a flag of the message leaves it out of the loss."""
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
    known.pop("tool_calls", None)
    if calls := copy.deepcopy(_decoded(message, "tool_calls", list)):
        known["tool_calls"] = calls
        for function in functions([known]):
            function["arguments"] = _decoded(function, "arguments", dict)
    return known


def _check_renamed(fields: Mapping[str, Any]) -> None:
    for name, other in _RENAMED.items():
        if fields.get(name) is not None:
            raise ValueError(f'"{name}" is unsupported: use "{other}"')


def functions(messages: Messages) -> list[dict[str, Any]]:
    """Returns the functions of all tool calls that have arguments, each with its name."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    called = [call.get("function", call) for call in calls]
    if wrong := [each for each in called if not isinstance(each, dict)]:
        raise ValueError(f'"function" of a tool call is {_short(wrong[0])}: give an object')
    return [each for each in called if each.get("arguments") is not None]


def _decoded(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Returns an object or a list of objects, or that of a JSON text; an empty one for none."""
    value = decoded = fields.get(name)
    if isinstance(value, str) and value:
        with contextlib.suppress(ValueError, RecursionError):
            decoded = json.loads(value)
    if decoded in (None, "") or (name != "arguments" and not decoded):
        return kind()
    parts = decoded if isinstance(decoded, list) else [decoded]
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
    return json.dumps(value)[:60]
