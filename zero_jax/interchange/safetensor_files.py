"""A folder of safetensors files: written in any order and in parts, read in parts.

A file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each
tensor), and the tensors one after the other. All sizes are known in advance, so files are created
in full size, and parts are written to their place through mapped memory.

    DIR/model-00001-of-00003.safetensors
    DIR/model.safetensors.index.json        the file of each tensor

The format: https://github.com/huggingface/safetensors.
"""

import json
import math
import os
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.checksum import as_unsigned
from zero_jax.interchange.folder_config import (
    MOST_INDEX_BYTES,
    check_regular,
    few,
    read_json,
    write_json,
)
from zero_jax.models.hf_places import Box

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_OTHERS = {"F64": "float64", "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool"}
_NAMES = {**{theirs: ours for ours, theirs in DTYPES.items()}, **_OTHERS}
# The bits of the exponent; all of them are set only in infinities and NaNs.
_EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
_AT_ONCE = 1 << 20  # elements that are checked together
Kinds = Mapping[str, tuple[Sequence[int], str]]


def grouped(kinds: Kinds, max_file_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in the given order; a larger tensor has its own file.

    >>> grouped({n: ((4,), "float32") for n in "abc"}, 32)
    [['a', 'b'], ['c']]
    """
    files: list[list[str]] = []
    held = 0
    for name, kind in kinds.items():
        size = _nbytes(*kind)
        if not files or held + size > max_file_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


class Writer:
    """Writes tensors in parts.

    Args:
      folder: An existing folder.
      kinds: Shape and dtype by name; no tensor is empty.
      max_file_bytes: Maximum bytes of tensors per file.
    """

    def __init__(self, folder: pathlib.Path, kinds: Kinds, max_file_bytes: int):
        self._folder = folder
        self._kinds = kinds
        self._left = {name: _nbytes(*kind) for name, kind in kinds.items()}
        self._places: dict[str, tuple[pathlib.Path, int]] = {}
        groups = grouped(kinds, max_file_bytes)
        self._is_single = len(groups) == 1
        for at, names in enumerate(groups, start=1):
            file = f"model-{at:05d}-of-{len(groups):05d}.safetensors"
            self._allocate(folder / (ONE if self._is_single else file), names)

    def _allocate(self, path: pathlib.Path, names: Sequence[str]) -> None:
        """Creates a file in full size, with its header."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, end = dict[str, int](), 0
        for name in names:
            shape, dtype = self._kinds[name]
            begins[name], end = end, end + self._left[name]
            span = [begins[name], end]
            entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": span}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        header = len(text).to_bytes(8, "little") + text
        for name, begin in begins.items():
            self._places[name] = path, len(header) + begin
        with open(path, "wb") as out:
            out.write(header)
            # Mapped memory without space on the disk would end the process.
            out.flush()
            os.posix_fallocate(out.fileno(), 0, len(header) + end)

    def write(self, name: str, box: Box, part: np.ndarray) -> None:
        """Writes a part of a tensor to `tensor[box]`; no element twice."""
        shape, dtype = self._kinds[name]
        assert str(part.dtype) == dtype, f"{name} is {dtype}, not {part.dtype}"
        path, begin = self._places[name]
        value = as_unsigned(part)
        np.memmap(path, value.dtype, mode="r+", offset=begin, shape=tuple(shape))[box] = value
        self._left[name] -= part.nbytes

    def finish(self) -> None:
        """Writes the index, once every tensor is there."""
        left = [name for name, count in self._left.items() if count]
        assert not left, f"not fully written: {left[:5]}"
        if not self._is_single:
            total = sum(_nbytes(*kind) for kind in self._kinds.values())
            files = {name: path.name for name, (path, _) in self._places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            write_json(self._folder / INDEX, index)


class Folder:
    """Reads tensors in parts, by safetensors, which maps files into memory.

    model.safetensors takes precedence over an index beside it, as in transformers.

    Args:
      folder: A folder with a single file model.safetensors, or with an index and its files.

    Attributes:
      kinds: Shape and dtype by name.
      unused: The index, if there is one that is not read; or None.

    Raises:
      ValueError: Files are missing or damaged, or safetensors is not installed.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        # The file of each tensor: its path, and the open file of safetensors.
        self._files: dict[str, tuple[pathlib.Path, Any]] = {}
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        self.unused: pathlib.Path | None = None
        if os.path.lexists(folder / ONE):
            self.unused = folder / INDEX if os.path.lexists(folder / INDEX) else None
            self._open(folder / ONE)
            return
        listed = self._listed()
        for file in sorted(set(listed.values())):
            self._open(folder / file)
        if lost := [name for name in listed if name not in self.kinds]:
            raise ValueError(f"{folder / INDEX} names missing tensors: {few(lost, ', ')}")

    def _listed(self) -> dict[str, str]:
        """Returns the file of each tensor in the index."""
        index = self._folder / INDEX
        if not os.path.lexists(index):
            instead = _instead(self._folder)
            raise ValueError(f"{self._folder} has no {ONE} and no {INDEX}: {instead}")
        listed = read_json(index, MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{index} is not an index of safetensors: save the model again")
        for file in listed.values():
            if not isinstance(file, str) or pathlib.PurePath(file).name != file:
                raise ValueError(f"{index} names {file!r}, which is not a file in its folder")
        lost = [file for file in sorted({*listed.values()}) if not (self._folder / file).exists()]
        if lost:
            raise ValueError(
                f"{index} names missing files, {few(lost, ', ')}: copy all files of the folder"
            )
        return listed

    def _open(self, path: pathlib.Path) -> None:
        check_regular(path)
        library = safetensors()
        try:
            file = library.safe_open(path, framework="numpy")
        except (library.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        for name in file.keys():  # noqa: SIM118 - it is no dict
            if not name.isprintable():
                raise ValueError(f"{path} is damaged: it has a tensor named {name!r}")
            if name in self._files:
                raise ValueError(
                    f"{name} is in two files of {self._folder}, {self._files[name][0].name} and "
                    f"{path.name}: remove one"
                )
            part = file.get_slice(name)
            dtype = part.get_dtype()
            self.kinds[name] = tuple(part.get_shape()), _NAMES.get(dtype, dtype)
            self._files[name] = path, file

    def read(self, name: str, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        """Returns the part of a tensor between starts and stops.

        Raises:
          ValueError: It has NaN or infinite values.
        """
        shape = tuple(b - a for a, b in zip(starts, stops, strict=True))
        if 0 in shape:
            return np.zeros(shape, jnp.dtype(self.kinds[name][1]))
        path, file = self._files[name]
        part = np.asarray(file.get_slice(name)[tuple(map(slice, starts, stops))])
        check_finite(path, name, part)
        return part


def check_finite(path: pathlib.Path, name: str, part: np.ndarray) -> None:
    """Raises ValueError if weights read from a file are not finite."""
    if str(part.dtype) not in _EXPONENTS:
        return
    bits = np.ascontiguousarray(part).reshape(-1).view(f"u{part.itemsize}")
    exponent = bits.dtype.type(_EXPONENTS[str(part.dtype)])
    for start in range(0, bits.size, _AT_ONCE):
        if np.any((bits[start : start + _AT_ONCE] & exponent) == exponent):
            raise ValueError(
                f"{path}: {name} has NaN or infinite values: the run diverged, or the file is "
                "damaged. Use an earlier checkpoint"
            )


def _instead(folder: pathlib.Path) -> str:
    """Describes the files of a folder without readable weights, and the way out."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    parts = [name for name in names if "-of-" in name and name.endswith(".safetensors")]
    others = [name for name in names if name.endswith(".safetensors")]
    if parts:
        return f"its parts ({few(parts, ', ')}) require the index, so copy it too"
    if "adapter_model.safetensors" in others:
        return (
            "adapter_model.safetensors holds adapters. Give the folder of their base model, and "
            "this one as `adapter` (train.py: --lora-init-from)"
        )
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    named = f"{few(others, ', ')} has an unsupported name; " if others else ""
    named += "pickle files (.bin) are unsupported; " if pickled else ""
    return f"{named}save the model as safetensors with save_pretrained of transformers"


def safetensors() -> types.ModuleType:
    """Imports the library; raises ValueError if it is not installed."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ValueError(
            "reading such files requires safetensors: pip install safetensors, or "
            "pip install 'zero_jax[train]'"
        ) from error
    return safetensors


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize
