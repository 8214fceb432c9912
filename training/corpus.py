"""Data of a run: windows of one text, or documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.config import Config
from training.data import Text
from training.documents import Documents, Source, sources_of
from training.records import Records, is_documents
from training.text import Tokens, load_tokens
from training.tokenizer import Tokenizer, has_tokenizer

Corpus = Text | Documents
_PIECE = 1 << 20  # characters that are tokenized at once


def tokenizer_of(config: Config) -> Tokenizer | None:
    """Returns the tokenizer of `--tokenizer` or else of the model's folder; None without one."""
    if config.tokenizer is not None:
        return Tokenizer(config.tokenizer)
    if config.init_from is None or not has_tokenizer(Path(config.init_from)):
        return None
    return Tokenizer(config.init_from)


def load(config: Config, vocab: int | None, seq: int) -> Corpus:
    """Loads the data of `--data`.

    Args:
        config: The settings.
        vocab: Rows of the model's embedding; None if the data decide it.
        seq: Sequence length S.

    Raises:
        ValueError: The data can't be read, or do not fit the model.
        FileNotFoundError: There is no such file or folder.
    """
    tokenizer = tokenizer_of(config)
    if tokenizer is not None and vocab is not None:
        tokenizer.check_fits(vocab)
    lacks = f"--init-from {config.init_from} has no tokenizer.json"
    paths = [] if config.data is None else sources_of(config.data)
    kinds = {path: is_documents(path) for path, _ in paths}
    if len(set(kinds.values())) > 1:
        text = next(path for path, documents in kinds.items() if not documents)
        raise ValueError(
            f"--data {config.data}: {text} is text, and the other files are documents: save it as "
            'a .jsonl file, with {"text": "..."} on each line'
        )
    if not any(kinds.values()):
        if len(paths) > 1:
            raise ValueError(
                f"--data {config.data}: weights require documents (.jsonl, .parquet, .csv), and "
                "these files are text: save them as documents"
            )
        corpus = load_tokens(config.data, vocab or 256)
        if corpus.byte_level and tokenizer is not None:
            corpus = _tokenized(corpus, tokenizer)
        elif corpus.byte_level and config.init_from is not None and vocab != 256:
            raise ValueError(f"{lacks}, which --data of text needs: give --tokenizer DIR")
        return Text(corpus, seq, config.global_batch_size, config.seed, tokenizer)
    if tokenizer is None:
        raise ValueError(
            (f"{lacks}: " if config.init_from else "")
            + f"--data {config.data} has documents, which need a tokenizer: give --init-from DIR "
            "of a model with a tokenizer, or --tokenizer DIR"
        )
    return Documents(
        [Source(Records(path), weight) for path, weight in paths],
        tokenizer,
        seq=seq,
        batch=config.global_batch_size,
        seed=config.seed,
        loss_on=config.loss_on,
        long=config.long_documents,
    )


def _tokenized(corpus: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Returns a text of bytes in the tokens of a model."""
    # A text may end within a character.
    text = np.asarray(corpus.tokens, np.uint8).tobytes().decode(errors="ignore")
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(tokenizer.encode(text[start:end]))
        start = end
    tokens = np.concatenate(pieces)
    return Tokens(tokens, corpus.name, byte_level=False)
