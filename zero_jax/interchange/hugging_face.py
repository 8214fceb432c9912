"""To and from Hugging Face's GPT-2: `export(checkpoint, folder)` and `load(folder, like)`.

`load` reads a folder of config.json and safetensors into parameters at rest on any mesh and stage;
each process reads what its devices hold, one leaf at a time. Which tensor is which, and the order
of columns in qkv, is in models/hf_gpt2.py; `export` is in exporter.py.
"""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.leaves import Leaf, Read, leaves, rebuilt
from zero_jax.interchange.exporter import Path, differences, few
from zero_jax.interchange.exporter import export as export
from zero_jax.interchange.safetensor_files import DTYPES, Folder
from zero_jax.models import hf_gpt2

PyTree = Any
_AT_ONCE = 1 << 24  # elements of two tensors that are compared


def config(folder: Path) -> Any:
    """The `models.gpt.GPTConfig` of a model that transformers saved; dropout is left off.

    Raises:
      ValueError: it is no GPT-2 that models/gpt.py can express.
    """
    path = pathlib.Path(folder) / "config.json"
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        known = json.loads(path.read_bytes())
        if not isinstance(known, dict):
            raise ValueError("it holds no settings")
        return hf_gpt2.from_json(known)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: a model of transformers has one") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is of no model that can be imported: {error}") from error


def load(folder: Path, like: PyTree) -> PyTree:
    """Reads a GPT-2 of Hugging Face's into the shape and place of `like`.

    Every process calls it; each reads what its devices hold. Half precision is widened to the
    dtype of `like`.

    Args:
      folder: with config.json and safetensors, as `export` or save_pretrained of transformers
        writes them; names with or without "transformer.".
      like: parameters of `models.gpt.GPT(config(folder))`: `zero.abstract(make)`, or arrays.

    Returns:
      The same tree at rest.

    Raises:
      ValueError: a tensor is missing, unknown or of another shape, or `like` is another model.
    """
    folder = pathlib.Path(folder)
    wanted, made_for = leaves(like), config(folder)
    _check_like(wanted, made_for, folder)
    model = _Model(Folder(folder), made_for, str(folder))
    return rebuilt(like, [leaf.build(model.reader(leaf)) for leaf in wanted])


def _check_like(wanted: list[Leaf], made_for: Any, folder: pathlib.Path) -> None:
    shapes = hf_gpt2.shapes(made_for)
    problems = differences(shapes, {leaf.name: leaf.shape for leaf in wanted})
    if problems:
        raise ValueError(
            f"`like` is not the model in {folder}: {few(problems)}. Build it by "
            f"models.gpt.GPT with zero_jax.interchange.config({str(folder)!r})"
        )


class _Model:
    """The tensors of a folder, by our paths."""

    def __init__(self, files: Folder, config: Any, where: str):
        self._config, self._where, self._files = config, where, files
        self._names: dict[str, str] = {}
        for name in files.kinds:
            full = hf_gpt2.full_name(name)
            if full in self._names:
                raise ValueError(f"{where} has both {name} and {self._names[full]}: remove one")
            if full is not None:
                self._names[full] = name
        places = hf_gpt2.places(config)
        self._check_head(f"{hf_gpt2.PREFIX}wte.weight", hf_gpt2.HEAD)
        known = {full: files.kinds[name][0] for full, name in self._names.items()}
        problems = differences({place.name: place.shape for place in places}, known)
        if problems:
            raise ValueError(
                f"{where} is not the model that its config.json describes: {few(problems)}. Save "
                "it anew by save_pretrained of transformers"
            )
        self._places = {(place.path, place.layer): place.name for place in places}

    def _check_head(self, embedding: str, head: str) -> None:
        """A tied head may be saved too; it must be the embedding."""
        if head not in self._names:
            return
        name = self._names.pop(head)
        tied = self._names.get(embedding)
        if tied is None or self._files.kinds[name] != self._files.kinds[tied]:
            raise ValueError(f"{self._where}: {name} differs from wte.weight, to which it is tied")
        rows, width = self._files.kinds[name][0]
        at_once = max(1, _AT_ONCE // max(1, width))
        for start in range(0, rows, at_once):
            box = (start, 0), (min(start + at_once, rows), width)
            a, b = (self._files.read(n, *box) for n in (name, tied))
            if a.tobytes() != b.tobytes():
                raise ValueError(
                    f"{self._where}: {name} differs from wte.weight, to which it is tied"
                )

    def reader(self, leaf: Leaf) -> Read:
        """Reads a part of our array, in the dtype of the leaf."""
        stacked = (leaf.name, None) not in self._places
        dtype = jnp.dtype(leaf.stored_dtype)
        for at in range(leaf.shape[0]) if stacked else (None,):
            self._check_dtype(self._places[leaf.name, at], dtype)

        def read(starts: tuple[int, ...], stops: tuple[int, ...]) -> np.ndarray:
            if not stacked:
                return self._part(leaf.name, None, starts, stops).astype(dtype, copy=False)
            out = np.empty([b - a for a, b in zip(starts, stops, strict=True)], dtype)
            for at in range(starts[0], stops[0]):
                out[at - starts[0]] = self._part(leaf.name, at, starts[1:], stops[1:])
            return out

        return read

    def _check_dtype(self, full: str, dtype: np.dtype) -> None:
        found = self._files.kinds[self._names[full]][1]
        if found not in DTYPES or jnp.promote_types(found, dtype) != dtype:
            raise ValueError(
                f"{self._where}: {self._names[full]} is {found}, which {dtype} does not hold "
                "exactly: save the model as float32"
            )

    def _part(
        self, path: str, layer: int | None, starts: tuple[int, ...], stops: tuple[int, ...]
    ) -> np.ndarray:
        name = self._names[self._places[path, layer]]
        if hf_gpt2.QKV not in path or starts[-1] == stops[-1]:
            return self._files.read(name, starts, stops)
        heads, width = self._config.heads, self._config.width
        wanted = hf_gpt2.columns(starts[-1], stops[-1], heads, width)
        parts = [
            self._files.read(name, (*starts[:-1], a), (*stops[:-1], b)) for a, b in wanted.ranges
        ]
        ordered = hf_gpt2.by_head(np.concatenate(parts, axis=-1), wanted.heads)
        return ordered[..., wanted.first : wanted.last]
