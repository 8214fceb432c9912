"""Export of a checkpoint as a Hugging Face transformers model: `export(checkpoint, folder)`.

Streams the parameters, chunk by chunk, into safetensors files. The tables of models/ (hf.py) map
parameters to tensors. Every exported bit is verified with the checksums of the checkpoint.

Host memory: one chunk, of about 64 MiB, whatever the size of the model and of the files.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence

from zero_jax.checkpoint.arrays import StoredArray
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.manifest import ITEM, check_seal
from zero_jax.interchange import folder_config
from zero_jax.interchange.folder_config import CONFIG, Path
from zero_jax.interchange.safetensor_files import DTYPES, MAX_FILE_BYTES, Writer, write_part
from zero_jax.models import families, hf, hf_gpt2
from zero_jax.names import few

# Where parameters are in a checkpoint of (params, opt_state), of params and of {"params": ...}.
PREFIXES = ("0/", "", "params/")
_EMBEDDINGS = ("wte/embedding", "embed/embedding")


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
      heads: Number of attention heads of a GPT-2, which shapes do not determine. The default is in
        the config of the checkpoint: its "heads", those of its "model" (a mapping, or the name of
        a preset), or of its "hf_config", a config.json.
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
    folder_config.check_free(target)
    with Checkpoints(directory, read_only=True) as checkpoints:
        manifest = checkpoints.manifest(step)
        folder = checkpoints.directory / str(manifest.step) / ITEM
    check_seal(folder.parent)
    recorded = manifest.config if isinstance(manifest.config, Mapping) else {}
    origin = None if like is None else pathlib.Path(like)
    try:
        arrays = _parameters(manifest.arrays, prefix)
        config = folder_config.config(origin) if origin else _config(recorded, arrays, heads)
        dtype = _dtype(arrays, config)
        known = hf.json_of(config, dtype)
        theirs = folder_config.read(origin) if origin else {}
        # Only the text model of a model with images is exported.
        if theirs.get("model_type") == known["model_type"]:
            names = [name for name in ("torch_dtype", "dtype") if name in theirs] or ["torch_dtype"]
            known = theirs | dict.fromkeys(names, dtype)
    except ValueError as error:
        raise ValueError(f"{folder} can't be exported: {error}") from error
    with folder_config.atomic_folder(target) as partial:
        layout = hf.layout(config)
        kinds = {place.name: (place.shape, dtype) for place in layout.places}
        writer = Writer(partial, kinds, max_file_bytes)
        for path, places in layout.by_path.items():
            for starts, part in arrays[path].read_checked(folder):
                write_part(writer, places, starts, part)
        writer.finish()
        folder_config.write_json(partial / CONFIG, known)
        if origin is not None:
            folder_config.copy_tokenizer(origin, partial)
        ends = folder_config.tokens(recorded.get("eos_token_id")) if ends is None else ends
        folder_config.end_with(partial, ends)
    return sorted(target.iterdir())


def _parameters(held: Mapping[str, StoredArray], prefix: str | None) -> dict[str, StoredArray]:
    """Returns the arrays under a prefix, without it."""
    if prefix is None:
        ends = ((name, end) for name in held for end in _EMBEDDINGS)
        prefixes = [name.removesuffix(end) for name, end in ends if f"/{name}".endswith(f"/{end}")]
        prefix = next((known for known in PREFIXES if known in prefixes), None)
        if prefix is None:
            raise ValueError(
                f"it has no parameters of models/ ({' or '.join(_EMBEDDINGS)}) under the usual "
                "paths, and other models can't be exported. For another path give "
                f"--prefix {few(prefixes, ' or --prefix ') or 'PREFIX'}"
            )
    arrays = {name[len(prefix) :]: held[name] for name in held if name.startswith(prefix)}
    if not arrays:
        raise ValueError(
            f"no path begins with prefix={prefix!r}; the first path is {next(iter(held), None)}"
        )
    return arrays


def _config(
    recorded: Mapping[str, object], arrays: Mapping[str, StoredArray], heads: object
) -> hf.Config:
    """Returns the config of shapes and heads, or that which a run recorded with its checkpoint."""
    heads = recorded.get("heads") if heads is None else heads
    hf_config, model = recorded.get("hf_config"), recorded.get("model")
    preset = families.PRESETS.get(model) if isinstance(model, str) else None
    is_gpt = _EMBEDDINGS[0] in arrays
    if isinstance(model, Mapping):  # as earlier imports recorded a GPT-2
        heads = model.get("heads") if heads is None else heads
    elif is_gpt and preset and arrays[_EMBEDDINGS[0]].shape[-1:] == (preset.width,):
        heads = preset.heads if heads is None else heads
    if is_gpt and isinstance(heads, int):
        return hf_gpt2.config_of_shapes({path: x.shape for path, x in arrays.items()}, heads)
    if isinstance(hf_config, Mapping):
        return hf.config_of(hf_config)
    if preset and not is_gpt:
        return preset
    if is_gpt:
        raise ValueError("it does not record the number of attention heads: give --heads N")
    raise ValueError("shapes do not determine its config: give --like DIR with a config.json")


def _dtype(arrays: Mapping[str, StoredArray], config: hf.Config) -> str:
    """Returns the dtype of all arrays; raises ValueError if they are not those of the config."""
    shapes = {path: entry.shape for path, entry in arrays.items()}
    dtypes = sorted({entry.dtype for entry in arrays.values()})
    if problems := differences(hf.layout(config).shapes, shapes):
        raise ValueError(few(problems))
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        raise ValueError(
            f"its arrays are {', '.join(dtypes)}, and all must be one of {', '.join(DTYPES)}"
        )
    return dtypes[0]


def differences(
    wanted: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Returns sentences about shapes by name that are missing, unknown or differ."""
    said = [f"{n} {list(shape)} is missing" for n, shape in wanted.items() if n not in known]
    said += [f"{n} {list(s)} is not part of the model" for n, s in known.items() if n not in wanted]
    changed = (name for name, shape in wanted.items() if known.get(name, shape) != shape)
    return said + [f"{n} is {list(known[n])}, not {list(wanted[n])}" for n in changed]
