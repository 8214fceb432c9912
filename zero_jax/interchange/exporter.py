"""Export of a checkpoint as a Hugging Face transformers model: `export(checkpoint, folder)`.

Streams the parameters, chunk by chunk, into safetensors files. The tables of models/ (hf.py) map
parameters to tensors. Every exported bit is verified with the checksums of the checkpoint.

Host memory: one chunk, of about 64 MiB, whatever the size of the model and of the files.
"""

import contextlib
import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.checkpoint.arrays import Chunk, StoredArray
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.inspection import read_checked
from zero_jax.checkpoint.manifest import ITEM, Manifest, check_seal
from zero_jax.interchange import folder_config
from zero_jax.interchange.folder_config import Path
from zero_jax.interchange.safetensor_files import DTYPES, Writer
from zero_jax.models import decoder_presets, gpt_config, hf, hf_gpt2

MAX_FILE_BYTES = 2 * 10**9
# Where parameters are in a checkpoint of (params, opt_state), of params and of {"params": ...}.
PREFIXES = ("0/", "", "params/")
_EMBEDDINGS = ("wte/embedding", "embed/embedding")
GENERATION = "generation_config.json"
# What else a folder of theirs has, besides config.json and the weights.
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    GENERATION,
)


def export(
    directory: Path,
    out: Path,
    *,
    step: int | None = None,
    max_file_bytes: float = MAX_FILE_BYTES,
    heads: int | None = None,
    prefix: str | None = None,
    like: Path | None = None,
    ends: Sequence[int] | None = None,
) -> list[pathlib.Path]:
    """Exports the parameters of a checkpoint as a Hugging Face transformers model.

    Args:
      directory: Directory of checkpoints, opened read-only.
      out: Folder to create; it appears when all files are written.
      step: Step of the checkpoint; the newest by default.
      max_file_bytes: Maximum bytes of tensors per file; a larger tensor gets its own file.
      heads: Number of attention heads, which shapes do not determine. The default is in the config
        of the checkpoint: its "heads", those of its "model", or of the preset that "model" names.
      prefix: Prefix of the paths of parameters; by default "0/", none or "params/".
      like: A folder of the same model, such as the one it was loaded from. Its config.json
        provides fields that shapes do not determine, and its tokenizer is copied.
      ends: Tokens that end a text or a turn, at which generation stops. The default is the
        "eos_token_id" in the config of the checkpoint, or else those of `like`.

    Returns:
      The paths of the files.

    Raises:
      Damaged: A file of the checkpoint differs from its checksum.
      ValueError: There is no such checkpoint, its model is not in models/, or `out` is in use.
    """
    if not 1 <= max_file_bytes < math.inf:
        raise ValueError(f"`max_file_bytes`={max_file_bytes}: it must be finite and at least 1")
    target = pathlib.Path(out).absolute()
    check_free(target)
    with Checkpoints(directory, read_only=True) as checkpoints:
        manifest = checkpoints.manifest(step)
        folder = checkpoints.directory / str(manifest.step) / ITEM
    check_seal(folder.parent)
    arrays = _parameters(manifest, prefix, str(folder))
    origin = None if like is None else pathlib.Path(like)
    config, known = _config_of(manifest, arrays, heads, origin, str(folder))
    with made_whole(target) as beside:
        _stream(folder, arrays, hf.layout(config), beside, int(max_file_bytes))
        (beside / "config.json").write_text(json.dumps(known, indent=2) + "\n")
        if origin is not None:
            copy_tokenizer(origin, beside)
        end_with(beside, _noted_ends(manifest) if ends is None else ends)
    return sorted(target.iterdir())


def copy_tokenizer(origin: pathlib.Path, out: pathlib.Path, *, replace: bool = False) -> None:
    """Copies the tokenizer, the chat template and generation_config.json of a folder.

    Args:
      origin: folder to read.
      out: folder of a model.
      replace: removes the tokenizer that is there first, and keeps generation_config.json.
    """
    for name in _BESIDE[:-1] if replace else _BESIDE:
        if replace:
            (out / name).unlink(missing_ok=True)
        if (origin / name).is_file():
            shutil.copyfile(origin / name, out / name)


def end_with(folder: pathlib.Path, ends: Sequence[int]) -> None:
    """Sets `eos_token_id`, at which generation stops, in config.json and generation_config.json.

    config.json gets the first of the tokens, or the list if it has a list. generation_config.json
    gets all, and those that it had; one is made if more than one token ends a text. Tokens that
    pad and begin a text stay. Without `ends` nothing changes.

    Args:
      folder: of a model.
      ends: tokens that end what a run learned.
    """
    if not ends:
        return
    path, beside = folder / "config.json", folder / GENERATION
    known, made = folder_config.read(folder), _generation(folder)
    every = [*dict.fromkeys([*ends, *ends_of(folder)])]
    is_list = isinstance(known.get("eos_token_id"), list)
    known = known | {"eos_token_id": every if is_list else every[0]}
    path.write_text(json.dumps(known, indent=2) + "\n")
    if made or len(every) > 1:
        names = ("bos_token_id", "pad_token_id")
        others = {name: known[name] for name in names if known.get(name) is not None}
        made = others | made | {"eos_token_id": every if len(every) > 1 else every[0]}
        beside.write_text(json.dumps(made, indent=2) + "\n")


def ends_of(folder: pathlib.Path) -> list[int]:
    """Returns the tokens at which generation with a model's folder stops."""
    known, made = folder_config.read(folder), _generation(folder)
    ends = made.get("eos_token_id", known.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    return [end for end in ends if isinstance(end, int)]


def _generation(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / GENERATION
    return folder_config.read_json(path, folder_config.MOST_CONFIG_BYTES) if path.exists() else {}


def _noted_ends(manifest: Manifest) -> list[int]:
    """The tokens that a run noted with its checkpoint."""
    noted = manifest.config.get("eos_token_id") if isinstance(manifest.config, Mapping) else None
    ends = noted if isinstance(noted, list) else []
    return [end for end in ends if isinstance(end, int) and end >= 0]


def check_free(out: pathlib.Path) -> None:
    """Raises ValueError if there is something in a folder that is to be made."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty: use another folder")


@contextlib.contextmanager
def made_whole(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that becomes `out` in the end, and is gone after an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.partial")
    try:
        beside.mkdir()
    except FileExistsError as error:
        raise ValueError(
            f"{beside} exists: another export writes it, or was killed. Remove it in the latter "
            "case"
        ) from error
    try:
        yield beside
        beside.rename(out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _parameters(manifest: Manifest, prefix: str | None, where: str) -> dict[str, StoredArray]:
    """The arrays under a prefix, without it."""
    held = manifest.arrays
    if prefix is None:
        found = [p for p in PREFIXES if any(p + name in held for name in _EMBEDDINGS)]
        if not found:
            raise ValueError(f"{where} has no parameters of models/{_elsewhere(held)}")
        prefix = found[0]
    arrays = {name[len(prefix) :]: held[name] for name in held if name.startswith(prefix)}
    if not arrays:
        raise ValueError(
            f"{where}: no path begins with prefix={prefix!r}; the first path is "
            f"{next(iter(held), None)}"
        )
    return arrays


def _elsewhere(held: Mapping[str, StoredArray]) -> str:
    ends = [(name, own) for name in held for own in _EMBEDDINGS if name.endswith(f"/{own}")]
    if not ends:
        return f": {' and '.join(_EMBEDDINGS)} are missing, and no other models can be exported"
    name, own = ends[0]
    return f" under the usual paths. If {name} is one, give --prefix {name[: -len(own)]}"


def _config_of(
    manifest: Manifest,
    arrays: Mapping[str, StoredArray],
    heads: int | None,
    origin: pathlib.Path | None,
    where: str,
) -> tuple[hf.Config, dict[str, Any]]:
    """The config of these arrays, all of which it must account for, and what theirs says."""
    known = {path: entry.shape for path, entry in arrays.items()}
    dtypes = {entry.dtype for entry in arrays.values()}
    try:
        config = folder_config.config(origin) if origin else _noted(manifest, arrays, heads, where)
    except ValueError as error:
        raise ValueError(f"{where} does not hold a model of models/: {error}") from error
    problems = differences(hf.layout(config).shapes, known)
    if not problems and (len(dtypes) > 1 or not dtypes <= set(DTYPES)):
        said = ", ".join(sorted(dtypes))
        problems = [f"its arrays are {said}, and all must be one of {', '.join(DTYPES)}"]
    if problems:
        raise ValueError(f"{where} can't be exported: {few(problems)}")
    written = hf.json_of(config, next(iter(dtypes)))
    theirs = folder_config.read(origin) if origin else {}
    # Of a model with images the text alone goes out.
    if theirs.get("model_type") == written["model_type"]:
        dtype = {
            name: written["torch_dtype"] for name in ("torch_dtype", "dtype") if name in theirs
        }
        written = theirs | (dtype or {"torch_dtype": written["torch_dtype"]})
    return config, written


def _noted(
    manifest: Manifest, arrays: Mapping[str, StoredArray], heads: int | None, where: str
) -> hf.Config:
    """The config that a run noted with its checkpoint, or that shapes and heads tell."""
    if _EMBEDDINGS[0] in arrays:
        known = {path: entry.shape for path, entry in arrays.items()}
        if heads is None:
            heads = _heads(manifest.config, arrays, where)
        return hf_gpt2.config_of_shapes(known, heads)
    noted = manifest.config if isinstance(manifest.config, Mapping) else {}
    if isinstance(noted.get("hf_config"), Mapping):
        return hf.config_of(noted["hf_config"])
    name = noted.get("model")
    if isinstance(name, str) and name in decoder_presets.PRESETS:
        return decoder_presets.PRESETS[name]
    raise ValueError("shapes do not determine its config: give --like DIR with a config.json")


def _heads(config: Any, arrays: Mapping[str, StoredArray], where: str) -> int:
    """The number of heads that a run noted with its checkpoint."""
    known = config if isinstance(config, Mapping) else {}
    model = known.get("model")
    inner = model if isinstance(model, Mapping) else {}
    for value in (known.get("heads"), inner.get("heads"), _of_preset(model, arrays)):
        if isinstance(value, int):
            return value
    raise ValueError(f"{where} does not record the number of attention heads: give --heads N")


def _of_preset(name: Any, arrays: Mapping[str, StoredArray]) -> int | None:
    preset = gpt_config.PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return None
    return preset.heads if arrays[_EMBEDDINGS[0]].shape[-1:] == (preset.width,) else None


def _stream(
    folder: pathlib.Path,
    arrays: Mapping[str, StoredArray],
    layout: hf.Layout,
    out: pathlib.Path,
    max_file_bytes: int,
) -> None:
    dtype = next(iter(arrays.values())).dtype
    kinds = {place.name: (place.shape, dtype) for place in layout.places}
    files = Writer(out, kinds, max_file_bytes)
    places = {(place.path, place.at): place for place in layout.places}
    stacks = {place.path: len(place.at) for place in layout.places}
    for path, entry in arrays.items():
        for chunk, part in read_checked(folder, entry):
            for at, starts, tensor in _tensors(chunk, part, stacks[path]):
                place = places[path, at]
                files.write(place.name, *place.turn.put(starts, tensor))
    files.finish()


def _tensors(
    chunk: Chunk, part: np.ndarray, stacks: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]:
    """A chunk as parts of tensors: which of the stack, where it begins there, and the part."""
    for index in np.ndindex(part.shape[:stacks]):
        at = tuple(a + i for a, i in zip(chunk.starts, index, strict=False))
        yield at, chunk.starts[stacks:], part[index]


def differences(
    wanted: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]]
) -> list[str]:
    said = [f"{n} {list(shape)} is missing" for n, shape in wanted.items() if n not in known]
    said += [f"{n} {list(s)} is not part of the model" for n, s in known.items() if n not in wanted]
    return said + [
        f"{name} is {list(known[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in known and known[name] != shape
    ]


def few(problems: list[str]) -> str:
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more
