"""What a run is trained on: windows of one text, or documents; the same face for both.

name, facts                 for reports
ends                        tokens that end a learned text or turn, for exported models
order, contents             to compare with those of a checkpoint before a run resumes from it
batches, held_out           this process's rows, as (tokens, ...) for the loss of a model
prompt, show                for a sample
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from training.config import Config
from training.data import batches, eval_batches, samples_per_epoch
from training.documents import Documents, Source, sources_of
from training.entropy import bigram_entropy, unigram_entropy
from training.records import Records, is_documents
from training.show import human_count, printable
from training.text import IntArray, Tokens, decode, load_tokens, split
from training.tokenizer import Tokenizer, has_tokenizer

PROMPT = 16  # held-out tokens that a sample begins with
_PIECE = 1 << 20  # characters that are tokenised at once


class Corpus(Protocol):
    """See above."""

    unit: str
    byte_level: bool
    temperature: float

    @property
    def name(self) -> str: ...
    @property
    def facts(self) -> dict[str, Any]: ...
    @property
    def held_out_size(self) -> str: ...
    @property
    def counts(self) -> Any: ...
    @property
    def order(self) -> dict[str, Any]: ...
    @property
    def contents(self) -> dict[str, str]: ...
    @property
    def ends(self) -> list[int]: ...
    def outlook(self, steps: int) -> str: ...
    def batches(self, place: Any, index: int, count: int) -> Iterator[tuple[Any, Any]]: ...
    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Any]: ...
    def held_out_batches(self) -> int | None: ...
    def marks(self, vocab: int) -> dict[str, float]: ...
    def prompt(self, most: int) -> np.ndarray | None: ...
    def show(self, tokens: Sequence[int], given: int) -> str: ...


class Text:
    """One text as windows of S + 1 tokens, S apart; the last tenth is held out.

    Args:
        corpus: All of it.
        seq: S.
        batch: B, rows of the global batch.
        seed: Of the order.
        tokenizer: Of the tokens, if they are not bytes.
    """

    temperature = 0.8  # of a sample

    def __init__(
        self, corpus: Tokens, seq: int, batch: int, seed: int, tokenizer: Tokenizer | None = None
    ) -> None:
        self._corpus, self._tokenizer = corpus, tokenizer
        self._seq, self._batch, self._seed = seq, batch, seed
        self.train, self.rest = split(corpus.tokens, seq=seq)
        self.byte_level = corpus.byte_level
        self.unit = "byte" if corpus.byte_level else "token"

    @property
    def name(self) -> str:
        return self._corpus.name

    @property
    def facts(self) -> dict[str, Any]:
        return {"train_tokens": self.train.size, "held_out_tokens": self.rest.size}

    @property
    def held_out_size(self) -> str:
        """Describes the amount of held-out data."""
        return f"{self.rest.size:,} held-out {self.unit}s"

    @property
    def counts(self) -> None:
        """Nothing is left out."""
        return None

    @property
    def order(self) -> dict[str, Any]:
        own = {"corpus": self.name, "train_tokens": self.train.size}
        return {**own, "seq_len": self._seq, "seed": self._seed}

    @property
    def ends(self) -> list[int]:
        """None: a window ends anywhere."""
        return []

    @property
    def contents(self) -> dict[str, str]:
        """Checksum of the text or its tokens, by the flag that names it."""
        return {"data": self._corpus.fingerprint}

    def outlook(self, steps: int) -> str:
        """Says how often a run of so many steps trains on it."""
        times = steps * self._batch / samples_per_epoch(self.train.size, self._seq)
        return f"{steps:,} steps are {human_count(times)} epochs of {self.name}"

    def batches(self, place: Any, index: int, count: int) -> Iterator[tuple[Any, Any]]:
        """This process's rows of each batch, and the sample that comes after it, without end."""
        start = int(place or 0)
        share: dict[str, int] = {"shard_index": index, "shard_count": count}
        found = batches(
            *(self.train,), batch=self._batch, seq=self._seq, seed=self._seed, start=start, **share
        )
        for rows in found:
            start += self._batch
            yield (rows,), start

    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Any]:
        """This process's rows of one pass: tokens and weights."""
        share: dict[str, int] = {"shard_index": index, "shard_count": count}
        return eval_batches(
            *(self.rest,), batch=self._batch, seq=self._seq, max_batches=most, **share
        )

    def held_out_batches(self) -> int | None:
        windows = -(-(self.rest.size - 1) // self._seq)
        return -(-windows // self._batch)

    def marks(self, vocab: int) -> dict[str, float]:
        """What counting alone would reach, nats a token."""
        return {
            "unigram entropy": unigram_entropy(self.rest, vocab),
            "bigram entropy": bigram_entropy(self.rest, vocab),
        }

    def prompt(self, most: int) -> IntArray:
        """The first held-out tokens."""
        return self.rest[: min(PROMPT, most)]

    def show(self, tokens: Sequence[int], given: int) -> str:
        """Text, of which the first `given` tokens were given."""
        if self.byte_level:
            return decode(tokens)
        if self._tokenizer is not None:
            return printable(self._tokenizer.decode(tokens))
        return str(list(map(int, tokens)))


def tokenizer_of(config: Config) -> Tokenizer | None:
    """That of `--tokenizer`, or of the folder that the model comes from; None if it has none."""
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
        if (
            corpus.byte_level
            and tokenizer is None
            and config.init_from is not None
            and vocab != 256
        ):
            raise ValueError(
                f"--init-from {config.init_from} has no tokenizer.json, which --data of text "
                "needs: give --tokenizer DIR"
            )
        if tokenizer is not None and corpus.byte_level:
            corpus = _tokenised(corpus, tokenizer)
        return Text(corpus, seq, config.global_batch_size, config.seed, tokenizer)
    if tokenizer is None:
        lacks = (
            ""
            if config.init_from is None
            else f"--init-from {config.init_from} has no tokenizer.json: "
        )
        raise ValueError(
            f"{lacks}--data {config.data} has documents, which need a tokenizer: give --init-from "
            "DIR of a model with a tokenizer, or --tokenizer DIR"
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


def _tokenised(corpus: Tokens, tokenizer: Tokenizer) -> Tokens:
    """The same text in the tokens of a model, a piece at a time."""
    # A text may be cut within a character.
    text = np.asarray(corpus.tokens, np.uint8).tobytes().decode(errors="ignore")
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(tokenizer.encode(text[start:end]))
        start = end
    tokens = np.concatenate(pieces)
    return Tokens(tokens, corpus.name, len(corpus.tokens) / max(1, tokens.size), False)
