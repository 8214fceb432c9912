"""A checkpoint as a model of Hugging Face's transformers: `export(checkpoint, folder)`.

Streams the parameters, chunk by chunk, to their places in safetensors files. Which tensor is which,
and the order of columns in qkv, is in models/hf_gpt2.py. Every bit that is exported has been
compared with the checksums of the checkpoint.

Host memory: one chunk, of about 64 MiB, whatever the size of the model and of the files.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zero_jax.checkpoint.checkpoints import ITEM, Checkpoints
from zero_jax.checkpoint.inspection import Chunk, read_checked
from zero_jax.checkpoint.manifest import Entry, Manifest
from zero_jax.checkpoint.writer import check_seal
from zero_jax.interchange.safetensor_files import DTYPES, Writer
from zero_jax.models import gpt_config, hf_gpt2

Path = str | os.PathLike[str]
MAX_FILE_BYTES = 2 * 10**9
# Where parameters are in a checkpoint of (params, opt_state), of params and of {"params": ...}.
PREFIXES = ("0/", "", "params/")
_EMBEDDING = "wte/embedding"


def export(
    directory: Path,
    out: Path,
    *,
    step: int | None = None,
    max_file_bytes: float = MAX_FILE_BYTES,
    heads: int | None = None,
    prefix: str | None = None,
) -> list[pathlib.Path]:
    """Writes the parameters of a checkpoint as a model of Hugging Face's transformers.

    Args:
      directory: of checkpoints, which is only read.
      out: folder to make; it appears once everything is in it.
      step: the latest by default.
      max_file_bytes: of tensors in one file; a larger tensor has a file of its own.
      heads: of attention, which no shape tells; by default from the config of the checkpoint:
        its "heads", those of its "model", or of the preset that "model" names.
      prefix: of the paths of parameters; by default "0/", none or "params/".

    Returns:
      The files.

    Raises:
      Damaged: something in the checkpoint is not as it was written.
      ValueError: there is no such checkpoint, it is no GPT of models/gpt.py, or `out` is in use.
    """
    if not 1 <= max_file_bytes < math.inf:
        raise ValueError(f"max_file_bytes={max_file_bytes}: give a number of at least 1")
    target = pathlib.Path(out).absolute()
    _check_free(target)
    with Checkpoints(directory, read_only=True) as checkpoints:
        manifest = checkpoints.manifest(step)
        folder = checkpoints.directory / str(manifest.step) / ITEM
    check_seal(folder.parent)
    arrays = _parameters(manifest, prefix, str(folder))
    config = _config_of(manifest, arrays, heads, str(folder))
    with _beside(target) as beside:
        _stream(folder, arrays, config, beside, int(max_file_bytes))
    return sorted(target.iterdir())


def _check_free(out: pathlib.Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already and not empty: choose another folder")


@contextlib.contextmanager
def _beside(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that becomes `out` in the end, and is gone after an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.partial")
    try:
        beside.mkdir()
    except FileExistsError as error:
        raise ValueError(
            f"{beside} is there: another export writes it, or was killed; remove it then"
        ) from error
    try:
        yield beside
        beside.rename(out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _parameters(manifest: Manifest, prefix: str | None, where: str) -> dict[str, Entry]:
    """The arrays under a prefix, without it."""
    held = manifest.arrays
    if prefix is None:
        found = [p for p in PREFIXES if p + _EMBEDDING in held]
        if not found:
            raise ValueError(f"{where} has no parameters of models/gpt.py{_elsewhere(held)}")
        prefix = found[0]
    arrays = {name[len(prefix) :]: held[name] for name in held if name.startswith(prefix)}
    if not arrays:
        raise ValueError(
            f"{where}: nothing in it begins with {prefix!r}; the first is {next(iter(held), None)}"
        )
    return arrays


def _elsewhere(held: Mapping[str, Entry]) -> str:
    ends = [name for name in held if name.endswith(f"/{_EMBEDDING}")]
    if not ends:
        return f": {_EMBEDDING} is missing, and nothing else can be exported"
    return (
        f" where a run keeps them: if they are those, give --prefix {ends[0][: -len(_EMBEDDING)]}"
    )


def _config_of(
    manifest: Manifest, arrays: Mapping[str, Entry], heads: int | None, where: str
) -> Any:
    """The GPTConfig of these arrays, all of which it must account for."""
    if heads is None:
        heads = _heads(manifest.config, arrays, where)
    known = {path: entry.shape for path, entry in arrays.items()}
    try:
        config = hf_gpt2.config_of_shapes(known, heads)
    except ValueError as error:
        raise ValueError(f"{where} is no GPT of models/gpt.py: {error}") from error
    wanted = hf_gpt2.shapes(config)
    problems = differences(wanted, known)
    dtypes = {entry.dtype for entry in arrays.values()}
    if not problems and (len(dtypes) > 1 or not dtypes <= set(DTYPES)):
        said = ", ".join(sorted(dtypes))
        problems = [f"its arrays are of {said}, but all must be one of {', '.join(DTYPES)}"]
    if problems:
        raise ValueError(f"{where} is no GPT of models/gpt.py: {few(problems)}")
    return config


def _heads(config: Any, arrays: Mapping[str, Entry], where: str) -> int:
    """The number of heads that a run noted with its checkpoint."""
    known = config if isinstance(config, Mapping) else {}
    model = known.get("model")
    inner = model if isinstance(model, Mapping) else {}
    for value in (known.get("heads"), inner.get("heads"), _of_preset(model, arrays)):
        if isinstance(value, int):
            return value
    raise ValueError(f"{where} does not say how many heads its model has: give --heads N")


def _of_preset(name: Any, arrays: Mapping[str, Entry]) -> int | None:
    preset = gpt_config.PRESETS.get(name) if isinstance(name, str) else None
    if preset is None or _EMBEDDING not in arrays:
        return None
    return preset.heads if arrays[_EMBEDDING].shape[-1:] == (preset.width,) else None


def _stream(
    folder: pathlib.Path,
    arrays: Mapping[str, Entry],
    config: Any,
    out: pathlib.Path,
    max_file_bytes: int,
) -> None:
    dtype = arrays[_EMBEDDING].dtype
    places = hf_gpt2.places(config)
    files = Writer(out, {place.name: (place.shape, dtype) for place in places}, max_file_bytes)
    names = {(place.path, place.layer): place.name for place in places}
    positions = hf_gpt2.positions(config.heads, config.width)
    for path, entry in arrays.items():
        for chunk, part in read_checked(folder, path, entry):
            for at, starts, tensor in _tensors(chunk, part, stacked=(path, None) not in names):
                box: list[Any] = [
                    slice(a, a + n) for a, n in zip(starts, tensor.shape, strict=True)
                ]
                if hf_gpt2.QKV in path:
                    box[-1] = positions[box[-1]]
                files.write(names[path, at], tuple(box), tensor)
    files.finish()
    text = json.dumps(hf_gpt2.to_json(config, dtype), indent=2)
    (out / "config.json").write_text(text + "\n")


def _tensors(
    chunk: Chunk, part: np.ndarray, stacked: bool
) -> Iterator[tuple[int | None, tuple[int, ...], np.ndarray]]:
    """A chunk as parts of tensors: which layer, where it begins there, and the part."""
    if not stacked:
        yield None, chunk.starts, part
        return
    for at, tensor in enumerate(part, start=chunk.starts[0]):
        yield at, chunk.starts[1:], tensor


def differences(
    wanted: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]]
) -> list[str]:
    said = [f"{n} {list(shape)} is missing" for n, shape in wanted.items() if n not in known]
    said += [f"{n} {list(s)} is not part of it" for n, s in known.items() if n not in wanted]
    return said + [
        f"{name} is {list(known[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in known and known[name] != shape
    ]


def few(problems: list[str]) -> str:
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more
