"""The JSON files of a folder of transformers, such as config.json."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from zero_jax.checkpoint.arrays import check_regular
from zero_jax.models import hf

Path = str | os.PathLike[str]
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
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
    """Returns the content of config.json.

    Raises:
      ValueError: It is missing, or is not a JSON object.
    """
    path = pathlib.Path(folder) / CONFIG
    if not os.path.lexists(path):
        raise ValueError(
            f"{path} is missing: transformers models have one. For adapters give the folder of "
            "their base model, and this one as `adapter` (train.py: --lora-init-from)"
        )
    return read_json(path)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ValueError: It is missing, a pipe or a folder, longer, or no JSON object.
    """
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
                f"`{name}` declares quantised weights, and only fp32, bf16 and fp16 are supported: "
                "use the original folder (LoRA quantises its base model itself, `base`=nf4). It is "
                f"{given!r}"
            )
