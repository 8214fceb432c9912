"""Data of a run: windows of one text, or documents."""

from pathlib import Path

from training.config import Config
from training.documents import Documents, Source
from training.records import Records, is_documents
from training.text import Text, load_tokens
from training.tokenizer import Tokenizer, has_tokenizer

Corpus = Text | Documents


def sources_of(data: str) -> list[tuple[Path, float]]:
    """Splits the value of `--data` into paths and weights, which must be numbers above 0.

    >>> sources_of("chat.jsonl=3,more=1")
    [(PosixPath('chat.jsonl'), 3.0), (PosixPath('more'), 1.0)]
    """
    if data and (Path(data).exists() or "=" not in data):
        return [(Path(data), 1.0)]
    sources = []
    for part in data.split(","):
        path, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0  # raises below
        if not path or not 0 < weight < float("inf"):
            raise ValueError(
                f"--data {data}: {part!r} must be a path and a weight above 0, for example "
                "chat.jsonl=3,more.parquet=1"
            )
        sources.append((Path(path), weight))
    return sources


def load(config: Config, vocab: int, seq: int) -> Corpus:
    """Loads the data of `--data` for rows of `seq` tokens and an embedding of `vocab` rows."""
    folder, base = config.tokenizer, config.init_from
    if folder is None and base is not None and has_tokenizer(Path(base)):
        folder = base
    tokenizer = None if folder is None else Tokenizer(folder, vocab)
    paths = [] if config.data is None else sources_of(config.data)
    texts = [path for path, _ in paths if not is_documents(path)]
    if texts and len(paths) > 1:
        raise ValueError(
            f"--data {config.data}: {texts[0]} is text, and several sources must be documents "
            '(.jsonl, .parquet): save it as a .jsonl file, with {"text": "..."} on each line'
        )
    rows = seq, config.global_batch_size, config.seed
    if texts or not paths:
        corpus = load_tokens(config.data, vocab, tokenizer)
        if not corpus.byte_level or base is None or vocab == 256:
            return Text(corpus, *rows, tokenizer)
    elif tokenizer is not None:
        sources = [Source(Records(path), weight) for path, weight in paths]
        return Documents(sources, tokenizer, *rows, config.loss_on, config.long_documents)
    lacks = "" if base is None else f"--init-from {base} has no tokenizer.json: "
    raise ValueError(
        f"{lacks}--data {config.data} needs a tokenizer: give --init-from DIR of a model with a "
        "tokenizer, or --tokenizer DIR"
    )
