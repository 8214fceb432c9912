"""Folders of transformers: their JSON files, tokenizer and end tokens, and new folders."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zero_jax.checkpoint.arrays import check_regular
from zero_jax.models import hf

Path = str | os.PathLike[str]
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
GENERATION = "generation_config.json"
# Files of a tokenizer in a folder of transformers.
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
# The longest file that is parsed. The index of 100,000 tensors has 10 MB, and parsed JSON takes up
# to 20 times its length in memory.
_MOST_BYTES = 64 << 20
_QUANTISED = ("quantization_config", "compression_config")
_MOST_SAID = 1000  # letters of an error, because it may repeat a value of the file


def config(folder: Path) -> hf.Config:
    """Returns the config of a model saved by transformers: of `models.gpt` or `models.decoder`.

    Dropout is disabled.

    Args:
      folder: Folder with config.json.

    Raises:
      ValueError: The model is not supported by models/.
    """
    known = read(folder)
    try:
        _check_not_quantised(known)
        return hf.config_of(known)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        path, said = pathlib.Path(folder) / CONFIG, str(error)[:_MOST_SAID]
        raise ValueError(f"{path} describes an unsupported model: {said}") from error


def read(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json; raises ValueError if it is missing or no JSON object."""
    path = pathlib.Path(folder) / CONFIG
    if not os.path.lexists(path):
        raise ValueError(
            f"{path} is missing: transformers models have one. For adapters give the folder of "
            "their base model, and this one as `adapter` (train.py: --lora-init-from)"
        )
    return read_json(path)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError if it is missing, long or no object."""
    check_regular(path)
    length = path.stat().st_size
    if length > _MOST_BYTES:
        raise ValueError(f"{path} has {length:,} bytes, more than {_MOST_BYTES:,}: it is damaged")
    try:
        known = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {str(error)[:_MOST_SAID]}") from error
    if not isinstance(known, dict):
        raise ValueError(f"{path} is not a JSON object: it is damaged")
    return known


def write_json(path: pathlib.Path, value: Mapping[str, object]) -> None:
    """Writes a JSON file as transformers does."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def _check_not_quantised(known: Mapping[str, object]) -> None:
    text = known.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    for name in _QUANTISED:
        if given := known.get(name) or inner.get(name):
            raise ValueError(
                "quantised weights are unsupported: use the original folder (LoRA quantises its "
                f"base model itself, `base`=nf4). `{name}` is {given!r}"
            )


def copy_tokenizer(origin: pathlib.Path, out: pathlib.Path, *, replace: bool = False) -> None:
    """Copies the tokenizer, the chat template and generation_config.json of a folder.

    With `replace`, removes the tokenizer of `out` first, and keeps its generation_config.json.
    """
    for name in _TOKENIZER if replace else (*_TOKENIZER, GENERATION):
        if replace:
            (out / name).unlink(missing_ok=True)
        if (origin / name).is_file():
            shutil.copyfile(origin / name, out / name)


def end_with(folder: pathlib.Path, ends: Sequence[int]) -> None:
    """Sets `eos_token_id`, at which generation stops, in config.json and generation_config.json.

    config.json gets the first of the tokens, or the list if it has a list. generation_config.json
    gets all, besides those that it had; it is created if more than one token ends a text. Other
    tokens stay. Without `ends` nothing changes.
    """
    if not ends:
        return
    known, generation = read(folder), _generation(folder)
    every = [*dict.fromkeys([*ends, *ends_of(folder)])]
    is_list = isinstance(known.get("eos_token_id"), list)
    write_json(folder / CONFIG, known | {"eos_token_id": every if is_list else every[0]})
    if generation or len(every) > 1:
        names = ("bos_token_id", "pad_token_id")
        others = {name: known[name] for name in names if known.get(name) is not None}
        end = {"eos_token_id": every if len(every) > 1 else every[0]}
        write_json(folder / GENERATION, others | generation | end)


def ends_of(folder: pathlib.Path) -> list[int]:
    """Returns the tokens at which generation with a model's folder stops."""
    known, generation = read(folder), _generation(folder)
    return tokens(generation.get("eos_token_id", known.get("eos_token_id")))


def tokens(ends: object) -> list[int]:
    """Returns the tokens of an `eos_token_id`, which is a token, a list of them, or missing."""
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _generation(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / GENERATION
    return read_json(path) if path.exists() else {}


def check_free(out: pathlib.Path) -> None:
    """Raises ValueError if a folder to create exists and is not empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty: use another folder")


@contextlib.contextmanager
def atomic_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to fill, which then becomes `out`, or is removed after an error.

    Raises ValueError if `out` is in use.
    """
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.mkdir()
    except FileExistsError as error:
        message = f"{partial} exists: another export writes it, or was killed and you can remove it"
        raise ValueError(message) from error
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
