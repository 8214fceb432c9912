"""Files of documents by their names: lines of JSON, tables, and both compressed.

Names are compared without regard to upper and lower case. Tables are read by column with pyarrow.
Values of `.csv` and `.tsv` are texts, so these can't hold conversations.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (".parquet", *DELIMITERS, ".arrow", ".feather")
# By the standard library; the others by pyarrow.
_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = (*_OPEN, ".zst", ".lz4")
# Formats with text that is not read; a small file of some could pass for text.
UNREAD = (
    *(".xlsx", ".xls", ".ods", ".orc", ".avro", ".tfrecord", ".sqlite", ".db", ".h5", ".hdf5"),
    *(".pkl", ".pickle", ".msgpack", ".docx", ".doc", ".odt", ".pdf", ".epub"),
    *(".zip", ".tar", ".tgz", ".7z", ".rar"),
)
Choose = Callable[[Sequence[str]], list[str]]  # of the names of columns, those to read
_AT_ONCE = 1024  # rows
_BLOCK = 1 << 26  # bytes of a .csv that are parsed at once; no row may be longer


def kind(path: Path) -> str:
    """Returns the suffix of a name in lower case, without that of a compression.

    >>> kind(Path("chat.JSONL.gz")), kind(Path("book.txt")), kind(Path("README"))
    ('.jsonl', '.txt', '')
    """
    return Path(path.stem).suffix.lower() if compression(path) else path.suffix.lower()


def compression(path: Path) -> str:
    """Returns the suffix of a compression; empty if the name has none."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def unpack(path: Path, out: Path) -> None:
    """Writes the content of a compressed file.

    Raises:
        ValueError: The file is damaged, or pyarrow is needed and not installed.
    """
    suffix = compression(path)
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    with contextlib.ExitStack() as stack:
        try:
            if suffix in _OPEN:
                packed = stack.enter_context(_OPEN[suffix](path, "rb"))
            else:
                pyarrow = _pyarrow(path)
                errors = (*errors, pyarrow.ArrowException)
                name = {".zst": "zstd"}.get(suffix, suffix[1:])
                packed = stack.enter_context(pyarrow.input_stream(path, compression=name))
            shutil.copyfileobj(packed, stack.enter_context(out.open("wb")))
        except errors as error:
            raise ValueError(f"{path} can't be unpacked as {suffix}: {error}") from error


def rows(path: Path, columns: Sequence[str], *, content: Path) -> Iterator[Mapping[str, Any]]:
    """Reads the rows of a table as dictionaries.

    Args:
        path: The table's name, which says how it is read.
        columns: Those to read; others are left out.
        content: The file to read: the same, or an unpacked copy.

    Raises:
        ValueError: The table can't be read, has none of the columns, or pyarrow is not installed.
    """
    pyarrow = _pyarrow(path)
    suffix = kind(path)

    def choose(names: Sequence[str]) -> list[str]:
        known = [name for name in columns if name in names]
        if not known:
            raise ValueError(
                f"{path} has the columns {', '.join(map(repr, names[:20]))}: rename those of the "
                "documents to text, messages, or prompt and completion"
            )
        return known

    try:
        with contextlib.ExitStack() as stack:
            if suffix == ".parquet":
                batches = _parquet(content, choose, stack)
            elif suffix in DELIMITERS:
                batches = _delimited(content, DELIMITERS[suffix], choose, stack)
            else:
                batches = _arrow(content, choose, stack)
            for batch in batches:
                for start in range(0, batch.num_rows, _AT_ONCE):
                    yield from batch.slice(start, _AT_ONCE).to_pylist()
    except (pyarrow.ArrowException, TypeError, OSError) as error:
        name = {".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}.get(suffix, suffix)
        raise ValueError(f"{path} can't be read as {name}: {error}") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        name = {".parquet": "Parquet"}.get(path.suffix, path.suffix)
        raise ValueError(
            f"{path}: reading {name} requires pyarrow: pip install 'zero_jax[chat]'"
        ) from error
    return pyarrow


def _parquet(path: Path, choose: Choose, stack: contextlib.ExitStack) -> Iterator[Any]:
    import pyarrow.parquet

    file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
    columns = choose(file.schema_arrow.names)
    batches: Iterator[Any] = file.iter_batches(_AT_ONCE, columns=columns)
    return batches


def _arrow(path: Path, choose: Choose, stack: contextlib.ExitStack) -> Iterator[Any]:
    import pyarrow

    source = stack.enter_context(pyarrow.OSFile(str(path)))
    try:
        file = stack.enter_context(pyarrow.ipc.open_file(source))
        batches = (file.get_batch(at) for at in range(file.num_record_batches))
    except pyarrow.ArrowInvalid:  # the streaming format, which Hugging Face's datasets write
        source.seek(0)
        file = batches = stack.enter_context(pyarrow.ipc.open_stream(source))
    columns = choose(file.schema.names)
    return (batch.select(columns) for batch in batches)


def _delimited(
    path: Path, delimiter: str, choose: Choose, stack: contextlib.ExitStack
) -> Iterator[Any]:
    import pyarrow.csv

    how: dict[str, Any] = {
        "read_options": pyarrow.csv.ReadOptions(block_size=_BLOCK),
        "parse_options": pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    }
    with pyarrow.csv.open_csv(path, **how) as header:
        columns = choose(header.schema.names)
    # Every value is text: "007", "NA" and "true" stay as they are.
    types = {name: pyarrow.string() for name in columns}
    convert = pyarrow.csv.ConvertOptions(column_types=types, include_columns=columns)
    batches: Iterator[Any] = stack.enter_context(
        pyarrow.csv.open_csv(path, **how, convert_options=convert)
    )
    return batches
