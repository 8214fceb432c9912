"""The config.json of a folder that transformers saved."""

import json
import os
import pathlib
from typing import Any

from zero_jax.models import hf

Path = str | os.PathLike[str]


def config(folder: Path) -> Any:
    """The config of a model that transformers saved: of `models.gpt` or `models.decoder`.

    Dropout is left off.

    Raises:
      ValueError: it is of no model that is in models/.
    """
    path = pathlib.Path(folder) / "config.json"
    try:
        return hf.config_of(read(folder))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is of no model that can be imported: {error}") from error


def read(folder: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises:
      ValueError: there is none, or it is no JSON object.
    """
    path = pathlib.Path(folder) / "config.json"
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        known = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError("it is missing: a model of transformers has one") from error
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(known, dict):
        raise ValueError("it holds no settings")
    return known
