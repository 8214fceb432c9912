"""Safetensors files of a folder: written in any order and in parts, read in parts.

A file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each
tensor), and the tensors one after the other. All sizes are known in advance, so files are created
in full size, and parts are written to their place through mapped memory.

    DIR/model-00001-of-00003.safetensors
    DIR/model.safetensors.index.json        the file of each tensor

The format: https://github.com/huggingface/safetensors.
"""

import json
import math
import operator
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.arrays import check_regular
from zero_jax.interchange.folder_config import read_json, write_json
from zero_jax.models.hf_places import Box, Places
from zero_jax.names import few

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 2 * 10**9
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_AT_ONCE = 1 << 20  # elements that are checked together
Kinds = Mapping[str, tuple[Sequence[int], str]]


class Writer:
    """Writes tensors in parts.

    Args:
      folder: An existing folder.
      kinds: Shape and dtype by name, in the order of the files; no tensor is empty.
      max_file_bytes: Maximum bytes of tensors per file; a larger tensor gets its own file.
      stem: Beginning of the names of the files.
    """

    def __init__(
        self, folder: pathlib.Path, kinds: Kinds, max_file_bytes: float, stem: str = "model"
    ):
        self._kinds, self._index = kinds, folder / f"{stem}.safetensors.index.json"
        self._left = {n: math.prod(s) * jnp.dtype(d).itemsize for n, (s, d) in kinds.items()}
        self._total = sum(self._left.values())
        self._places: dict[str, tuple[pathlib.Path, int]] = {}
        groups: list[list[str]] = []
        room = 0.0
        for name, size in self._left.items():
            if not groups or size > room:
                groups.append([])
                room = max_file_bytes
            groups[-1].append(name)
            room -= size
        for at, names in enumerate(groups, start=1):
            part = f"-{at:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            self._allocate(folder / f"{stem}{part}.safetensors", names)

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
        self._places |= {name: (path, len(header) + begin) for name, begin in begins.items()}
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
        np.memmap(path, part.dtype, mode="r+", offset=begin, shape=tuple(shape))[box] = part
        self._left[name] -= part.nbytes

    def finish(self) -> None:
        """Writes the index, once every tensor is there."""
        left = [name for name, count in self._left.items() if count]
        assert not left, f"not fully written: {left[:5]}"
        files = {name: path.name for name, (path, _) in self._places.items()}
        if len({*files.values()}) > 1:
            write_json(self._index, {"metadata": {"total_size": self._total}, "weight_map": files})


def write_part(writer: Writer, places: Places, starts: Sequence[int], part: np.ndarray) -> None:
    """Writes a part of our array, which begins at `starts`, to the tensors that have it."""
    stacks = len(next(iter(places)))
    for index in np.ndindex(part.shape[:stacks]):
        at = tuple(map(operator.add, starts, index))
        box, turned = places[at].turn.put(starts[stacks:], part[index])
        writer.write(places[at].name, box, turned)


def model_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a model: model.safetensors, or else those of the index.

    model.safetensors takes precedence over an index beside it, as in transformers.
    """
    index = folder / INDEX
    if os.path.lexists(folder / ONE):
        return [folder / ONE]
    if not os.path.lexists(index):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
        raise ValueError(
            f"{folder} has no {ONE} and no {INDEX}, but {few(others, ', ') or 'no weights'}. "
            "Parts require the index. Pickle files (.bin) are unsupported: save the model as "
            "safetensors with save_pretrained of transformers. For adapters give the folder of "
            "their base model, and this one as `adapter` (train.py: --lora-init-from)"
        )
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} is not an index of safetensors: save the model again")
    for file in listed.values():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is not a file in its folder")
    return [folder / file for file in sorted({*listed.values()})]


class Files:
    """Reads tensors in parts, by safetensors, which maps files into memory.

    Attributes:
      kinds: Shape and dtype by name; a dtype not in `DTYPES` has the name of the format.
    """

    def __init__(self, paths: Sequence[pathlib.Path]):
        try:
            import safetensors
        except ImportError as error:
            raise ValueError("such files need safetensors: pip install safetensors") from error
        # The file of each tensor: its path, and the open file of safetensors.
        self._files: dict[str, tuple[pathlib.Path, Any]] = {}
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        ours = {theirs: name for name, theirs in DTYPES.items()}
        for path in paths:
            check_regular(path)
            try:
                file = safetensors.safe_open(path, framework="numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if not name.isprintable():
                    raise ValueError(f"{path} is damaged: it has a tensor named {name!r}")
                if name in self._files:
                    raise ValueError(f"{name} is in {self._files[name][0]} and {path}: remove one")
                part = file.get_slice(name)
                dtype = part.get_dtype()
                self.kinds[name] = tuple(part.get_shape()), ours.get(dtype, dtype)
                self._files[name] = path, file

    def read(self, name: str, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        """Returns a part that is not empty; raises ValueError if it has NaN or infinite values."""
        path, file = self._files[name]
        part = np.asarray(file.get_slice(name)[tuple(map(slice, starts, stops))])
        flat = part.reshape(-1)
        checked = (flat[at : at + _AT_ONCE] for at in range(0, flat.size, _AT_ONCE))
        if not all(np.isfinite(piece).all() for piece in checked):
            raise ValueError(f"{path}: {name} has NaN or inf values: use an earlier checkpoint")
        return part
