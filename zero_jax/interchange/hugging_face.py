"""Import and export of Hugging Face transformers models: `load(folder, like)`, `export(...)`.

`load` reads a folder of config.json and safetensors into sharded parameters on any mesh and stage.
Each process reads the shards of its devices, one leaf at a time, and quantises leaves that are
quantised in `like` (`adapters.quantised`). `export` streams the parameters of a checkpoint into
safetensors files, and verifies every bit with its checksums; its host memory is one chunk, of about
64 MiB. The tables of models/ (hf.py) map tensors to parameters, and back.
"""

import dataclasses
import functools
import math
import operator
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.adapters.quantised import BLOCK, Quantised, named, quantise
from zero_jax.checkpoint.arrays import StoredArray
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.leaves import NamedLeaf, Read, leaves, unflatten
from zero_jax.checkpoint.manifest import ITEM, check_seal
from zero_jax.interchange import folder_config, safetensor_files
from zero_jax.interchange.folder_config import ADAPTER_CONFIG, CONFIG, Path
from zero_jax.interchange.folder_config import config as config
from zero_jax.interchange.safetensor_files import DTYPES, INDEX, MAX_FILE_BYTES, ONE, Files
from zero_jax.models import families, hf, hf_gpt2
from zero_jax.names import few
from zero_jax.sharding.paths import PyTree

# Where parameters are in a checkpoint of (params, opt_state), of params and of {"params": ...}.
PREFIXES = ("0/", "", "params/")
_EMBEDDINGS = ("wte/embedding", "embed/embedding")
Bounds = tuple[int, ...]


class Tensors:
    """The tensors of files, by the paths of our parameters; `where` names the files in errors.

    Attributes:
      files, layout: As given.
      left_out: Names that no model of the layout needs.
      problems: Sentences about tensors that are missing, unknown, twice, or of another shape.
    """

    def __init__(self, where: pathlib.Path, files: Files, layout: hf.Layout):
        self.files, self.layout = files, layout
        self._where, self._places = where, layout.by_path
        self._names: dict[str, str] = {}  # in the files, by full name
        self.left_out, self.problems = list[str](), list[str]()
        for name in files.kinds:
            full = layout.full_name(name)
            if full is None:
                self.left_out.append(name)
            elif (other := self._names.setdefault(full, name)) != name:
                self.problems.append(f"{name} and {other} are the same tensor: remove one")
        self._copies: dict[str, str] = {}  # a saved head, by the embedding that it must equal
        if layout.tied is not None and layout.tied[0] in self._names:
            head = self._names.pop(layout.tied[0])
            embedding = self._names.setdefault(layout.tied[1], head)
            if files.kinds[head] != files.kinds[embedding]:
                self.problems.append(f"tied {head} differs from {embedding}")
            self._copies = {embedding: head} if embedding != head else {}
        known = {full: files.kinds[name][0] for full, name in self._names.items()}
        self.problems += differences({place.name: place.shape for place in layout.places}, known)

    def reader(self, path: str, dtype: np.dtype, *, rounded: bool) -> Read:
        """Returns a function that reads a part of our array in a dtype, perhaps a narrower one."""
        places = self._places[path]
        for place in places.values():
            name = self._names[place.name]
            kind = self.files.kinds[name][1]
            if kind not in DTYPES or not (rounded or jnp.promote_types(kind, dtype) == dtype):
                raise ValueError(
                    f"{self._where}: {name} is {kind}, which {dtype} can't represent exactly: "
                    "save the model as float32"
                )
        stacks = len(next(iter(places)))

        def tensor(at: Bounds, starts: Bounds, stops: Bounds) -> np.ndarray:
            name = self._names[places[at].name]
            part = places[at].turn.part(functools.partial(self.files.read, name), starts, stops)
            head = self._copies.get(name)  # of an embedding, which is stored alike
            if head and not np.array_equal(self.files.read(head, starts, stops), part):
                raise ValueError(f"{self._where}: tied {head} differs from {name}")
            return part

        def read(starts: Bounds, stops: Bounds) -> np.ndarray:
            shape = tuple(map(operator.sub, stops, starts))
            if not stacks and 0 not in shape:  # without a copy of an embedding, the largest leaf
                return tensor((), starts, stops).astype(dtype, copy=False)
            out = np.empty(shape, dtype)
            for index in np.ndindex(shape[:stacks]) if out.size else ():
                at = tuple(map(operator.add, starts, index))
                out[index] = tensor(at, starts[stacks:], stops[stacks:])
            return out

        return read


def packed_part(
    quantised: Callable[[Bounds, Bounds], Quantised],
    leaf: Quantised,
    name: str,
    starts: Bounds,
    stops: Bounds,
) -> np.ndarray:
    """Returns a part of the codes or scales of a quantised leaf.

    Blocks follow logical indices, so rows are extended to whole blocks, which `quantised` returns.

    >>> matrix = np.linspace(-1, 1, 256, dtype=np.float32).reshape(128, 2)
    >>> like = quantise(matrix, "nf4", -2)
    >>> part = lambda a, b: quantise(matrix[a[0] : b[0], a[1] : b[1]], "nf4", -2)
    >>> codes = packed_part(part, like, "codes", (40, 1), (64, 2))
    >>> bool((codes == like.codes[40:64, 1:]).all())
    True
    """
    at = leaf.dim % len(starts)
    each = getattr(leaf, name).shape[at] // max(1, leaf.scales.shape[at])  # rows of a block
    first, last = starts[at] // each, -(-stops[at] // each)
    begin, end = list(starts), list(stops)
    begin[at] = first * BLOCK
    end[at] = max(begin[at], min(last * BLOCK, leaf.rows))
    skipped = first * each
    box = (slice(None),) * at + (slice(starts[at] - skipped, stops[at] - skipped),)
    array: np.ndarray = getattr(quantised(tuple(begin), tuple(end)), name)
    return array[box]


def _quantised(read: Read, leaf: Quantised, starts: Bounds, stops: Bounds) -> Quantised:
    """Reads a stack one layer after the other: only one is in fp32 at a time."""
    if leaf.dim == -len(starts) or starts[0] == stops[0]:
        return quantise(read(starts, stops), leaf.kind, leaf.dim)
    layers = [
        quantise(read((at, *starts[1:]), (at + 1, *stops[1:])), leaf.kind, leaf.dim)
        for at in range(starts[0], stops[0])
    ]
    codes, scales = (np.concatenate([getattr(x, n) for x in layers]) for n in ("codes", "scales"))
    return dataclasses.replace(layers[0], codes=codes, scales=scales)


def load(
    folder: Path,
    like: PyTree,
    report: Callable[[str], object] | None = None,
    *,
    rounded: bool = False,
) -> PyTree:
    """Loads a Hugging Face model with the structure and shardings of `like`.

    Every process calls it. Each process reads the shards of its devices. Half precision is widened
    to the dtype of `like`.

    Args:
      folder: Folder with config.json and safetensors, from `export` or `save_pretrained` of
        transformers.
      like: Parameters of the model of `config(folder)`, for example `models.decoder.Decoder(...)`:
        the result of `zero.eval_shape(make)`, or arrays.
      report: Called with the tensors and files that are not used. By default the first process
        prints them.
      rounded: If True, `like` may be narrower than the files, such as a frozen base in bf16.

    Returns:
      The tree of sharded parameters.

    Raises:
      ValueError: A tensor is missing, unknown, of another shape or not finite, or `like` is another
        model.
    """
    folder = pathlib.Path(folder)
    tensors, nodes = opened(folder), dict(named(like))
    shapes = {name: tuple(x.shape) for name, x in nodes.items()}
    if problems := differences(tensors.layout.shapes, shapes):
        raise ValueError(
            f"`like` is not the model in {folder}: {few(problems)}. Build it with models.gpt.GPT "
            f"or models.decoder.Decoder from zero_jax.interchange.config({str(folder)!r})"
        )
    report = report or (print if jax.process_index() == 0 else lambda _: None)
    if left_out := tensors.left_out:
        report(f"{folder}: {len(left_out)} tensors are not of the text model: {few(left_out)}")
    if all(os.path.lexists(folder / name) for name in (ONE, INDEX)):
        report(f"{folder}: reads {ONE}, as transformers does, and ignores {INDEX}")

    @functools.lru_cache(maxsize=1)  # codes and scales of a leaf follow each other
    def quantised(path: str) -> Callable[[Bounds, Bounds], Quantised]:
        read = tensors.reader(path, np.dtype("float32"), rounded=rounded)
        return functools.cache(functools.partial(_quantised, read, nodes[path]))

    def reader(leaf: NamedLeaf) -> Read:
        path, _, part = leaf.name.rpartition("/")
        if path in nodes:
            return functools.partial(packed_part, quantised(path), nodes[path], part)
        return tensors.reader(leaf.name, jnp.dtype(leaf.array.stored), rounded=rounded)

    return unflatten(like, [leaf.build(reader(leaf)) for leaf in leaves(like)])


def check(folder: Path) -> None:
    """Raises ValueError if `load` would, before it reads a weight.

    A folder without weights passes, because a checkpoint may have them.
    """
    folder = pathlib.Path(folder)
    if any(os.path.lexists(folder / name) for name in (ONE, INDEX)):
        opened(folder)


def opened(folder: pathlib.Path) -> Tensors:
    """Opens the files of a model; all tensors exist, with the shapes of config.json."""
    model, known = config(folder), folder_config.read(folder)
    paths = safetensor_files.model_files(folder)
    explicit = known.get("transformers_weights")
    if explicit not in (None, ONE if paths == [folder / ONE] else INDEX):
        raise ValueError(
            f"{folder}: `transformers_weights`={explicit!r} in config.json is unsupported: rename "
            f"the file to {ONE}, and remove the key"
        )
    if os.path.lexists(folder / ADAPTER_CONFIG):
        raise ValueError(
            f"{folder}: with `{ADAPTER_CONFIG}` transformers would add adapters to the model. Move "
            "it to another folder, and give that as `adapter` (train.py: --lora-init-from)"
        )
    files = Files(paths)
    problems = [f"{model.layers} layers, and its files have {len(files.kinds)} tensors"]
    if model.layers <= len(files.kinds):  # else no table of its tensors is made
        tensors = Tensors(folder, files, hf.layout(model))
        if not tensors.problems:
            return tensors
        problems = tensors.problems
    raise ValueError(
        f"{folder}: the model does not match its config.json: {few(problems)}. Save it again with "
        "save_pretrained of transformers"
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
        writer = safetensor_files.Writer(partial, kinds, max_file_bytes)
        for path, places in layout.by_path.items():
            for starts, part in arrays[path].read_checked(folder):
                safetensor_files.write_part(writer, places, starts, part)
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
        usual = (p for p in PREFIXES if any(p + path in held for path in _EMBEDDINGS))
        prefix = next(usual, None)
        if prefix is None:
            raise ValueError(
                f"it has no {' or '.join(_EMBEDDINGS)}, of a model of models/, under the usual "
                f"paths: if it has one elsewhere, give its --prefix. It holds {few([*held])}"
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
