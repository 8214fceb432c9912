"""A folder of safetensors files: written in any order and in parts, read in parts.

A file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each
tensor), and the tensors one after the other. All sizes are known before the first byte, so files
are made at once in full size, and parts go straight to their place through mapped memory.

    DIR/model-00001-of-00003.safetensors
    DIR/model.safetensors.index.json        which tensor is in which file

The format: https://github.com/huggingface/safetensors.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.checksum import as_unsigned
from zero_jax.interchange.folder_config import MOST_INDEX_BYTES, check_regular, read_json

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_OTHERS = {"F64": "float64", "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool"}
_NAMES = {**{theirs: ours for ours, theirs in DTYPES.items()}, **_OTHERS}
# The bits of the exponent: all of them are set in infinities and NaNs alone.
_EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
_AT_ONCE = 1 << 20  # elements that are looked at together
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
      folder: is there.
      kinds: shape and dtype by name, none of them empty.
      max_file_bytes: of the tensors of one file.
    """

    def __init__(self, folder: pathlib.Path, kinds: Kinds, max_file_bytes: int):
        self._folder = folder
        self._kinds = kinds
        self._left = {name: _nbytes(*kind) for name, kind in kinds.items()}
        self._places: dict[str, tuple[pathlib.Path, int]] = {}
        self._files = self._begin(grouped(kinds, max_file_bytes))

    def _begin(self, groups: list[list[str]]) -> list[pathlib.Path]:
        many = len(groups) > 1
        files = []
        for at, names in enumerate(groups, start=1):
            file = f"model-{at:05d}-of-{len(groups):05d}.safetensors" if many else ONE
            files.append(self._folder / file)
            header, begin = self._header(names), 0
            with open(files[-1], "wb") as out:
                out.write(header)
                for name in names:
                    self._places[name] = (files[-1], len(header) + begin)
                    begin += self._left[name]
                # Mapped memory without space on the disk would end the process.
                out.flush()
                os.posix_fallocate(out.fileno(), 0, len(header) + begin)
        return files

    def _header(self, names: Sequence[str]) -> bytes:
        known: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for name in names:
            shape, dtype = self._kinds[name]
            end = begin + self._left[name]
            known[name] = {
                "dtype": DTYPES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(known, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        return len(text).to_bytes(8, "little") + text

    def write(self, name: str, box: Any, part: np.ndarray) -> None:
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
        if len(self._files) == 1:
            return
        total = sum(_nbytes(*kind) for kind in self._kinds.values())
        where = {name: path.name for name, (path, _) in self._places.items()}
        known = {"metadata": {"total_size": total}, "weight_map": where}
        (self._folder / INDEX).write_text(json.dumps(known, indent=2) + "\n")


class Folder:
    """Reads tensors in parts, by safetensors, which maps files into memory.

    transformers prefers model.safetensors to an index beside it, and so does this.

    Args:
      folder: with a single file model.safetensors, or with an index and its files.

    Attributes:
      kinds: shape and dtype by name.
      unused: the index, if there is one that is not read; or None.

    Raises:
      ValueError: files are missing or damaged, or safetensors is not installed.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._where: dict[str, Any] = {}
        self._paths: dict[str, pathlib.Path] = {}
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        self.unused: pathlib.Path | None = None
        listed = self._listed()
        for file in sorted(set(listed.values())):
            self._open(folder / file)
        lost = [name for name in listed if name not in self._where and name != ONE]
        if lost:
            raise ValueError(f"{folder / INDEX} names missing tensors: {_few(lost)}")

    def _listed(self) -> dict[str, str]:
        """The file of each tensor that the index knows; of the only file, itself."""
        one, index = self._folder / ONE, self._folder / INDEX
        if os.path.lexists(one):
            self.unused = index if os.path.lexists(index) else None
            return {ONE: ONE}
        if not os.path.lexists(index):
            raise ValueError(f"{self._folder} has no {ONE} and no {INDEX}: {_instead(one.parent)}")
        listed = read_json(index, MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{index} is not an index of safetensors: save the model again")
        for file in listed.values():
            if not isinstance(file, str) or pathlib.PurePath(file).name != file:
                raise ValueError(f"{index} names {file!r}, which is not a file in its folder")
        lost = [file for file in sorted({*listed.values()}) if not (self._folder / file).exists()]
        if lost:
            raise ValueError(
                f"{index} names missing files, {_few(lost)}: copy all files of the folder"
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
            if name in self._where:
                raise ValueError(
                    f"{name} is in two files of {self._folder}, {self._paths[name].name} and "
                    f"{path.name}: remove one"
                )
            part = file.get_slice(name)
            dtype = part.get_dtype()
            self.kinds[name] = tuple(part.get_shape()), _NAMES.get(dtype, dtype)
            self._where[name] = file
            self._paths[name] = path

    def read(self, name: str, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        """The part of a tensor between starts and stops.

        Raises:
          ValueError: It has NaN or infinite values.
        """
        shape = tuple(b - a for a, b in zip(starts, stops, strict=True))
        if 0 in shape:
            return np.zeros(shape, jnp.dtype(self.kinds[name][1]))
        box = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
        part = np.asarray(self._where[name].get_slice(name)[box])
        check_finite(self._paths[name], name, part)
        return part


def check_finite(path: pathlib.Path, name: str, part: np.ndarray) -> None:
    """Checks that weights out of a file are finite.

    Raises:
      ValueError: Some are not.
    """
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
        return f"its parts ({_few(parts)}) require the index, so copy it too"
    if "adapter_model.safetensors" in others:
        return (
            "adapter_model.safetensors holds adapters. Give the folder of their base model, and "
            "this one as `adapter` (train.py: --lora-init-from)"
        )
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    named = f"{_few(others)} has an unsupported name; " if others else ""
    named += "pickle files (.bin) are unsupported; " if pickled else ""
    return f"{named}save the model as safetensors with save_pretrained of transformers"


def safetensors() -> Any:
    """The library."""
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


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
