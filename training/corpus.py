"""Data of a run: windows of one text, or documents."""

from pathlib import Path

import numpy as np

from training.config import Config
from training.documents import Documents, Source
from training.records import Records, is_documents
from training.text import Text, Tokens, load_tokens
from training.tokenizer import Tokenizer, has_tokenizer

Corpus = Text | Documents
_PIECE = 1 << 20  # characters that are tokenized at once


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
    folder, tokenizer = config.tokenizer, None
    if folder is None and config.init_from is not None and has_tokenizer(Path(config.init_from)):
        folder = config.init_from
    if folder is not None:
        tokenizer = Tokenizer(folder)
        tokenizer.check_fits(vocab)
    lacks = f"--init-from {config.init_from} has no tokenizer.json: " if config.init_from else ""
    paths = [] if config.data is None else sources_of(config.data)
    texts = [path for path, _ in paths if not is_documents(path)]
    if texts and len(paths) > 1:
        raise ValueError(
            f"--data {config.data}: {texts[0]} is text, and several sources must be documents "
            '(.jsonl, .parquet): save it as a .jsonl file, with {"text": "..."} on each line'
        )
    if texts or not paths:
        corpus = load_tokens(config.data, vocab)
        if corpus.byte_level and tokenizer is not None:
            corpus = _tokenized(corpus, tokenizer)
        elif corpus.byte_level and lacks and vocab != 256:
            raise ValueError(f"{lacks}--data has text, which needs it: give --tokenizer DIR")
        return Text(corpus, seq, config.global_batch_size, config.seed, tokenizer)
    if tokenizer is None:
        raise ValueError(
            f"{lacks}--data {config.data} has documents, which need a tokenizer: give --init-from "
            "DIR of a model with a tokenizer, or --tokenizer DIR"
        )
    return Documents(
        [Source(Records(path), weight) for path, weight in paths],
        tokenizer,
        *(seq, config.global_batch_size, config.seed, config.loss_on, config.long_documents),
    )


def _tokenized(corpus: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Returns a text of bytes in the tokens of a model."""
    # A text may end within a character.
    text = corpus.tokens[:].tobytes().decode(errors="ignore")
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(tokenizer.encode(text[start:end]))
        start = end
    return Tokens(np.concatenate(pieces), corpus.name, byte_level=False)
