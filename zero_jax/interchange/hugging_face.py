"""Import of Hugging Face transformers models: `load(folder, like)`; `export` is in exporter.py.

`load` reads a folder of config.json and safetensors into sharded parameters on any mesh and stage.
Each process reads the shards of its devices, one leaf at a time, and quantises leaves that are
quantised in `like` (`adapters.quantised`). The tables of models/ (hf.py) map tensors to parameters.
"""

import dataclasses
import functools
import operator
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.adapters.quantised import BLOCK, Quantised, named, quantise
from zero_jax.checkpoint.leaves import NamedLeaf, Read, leaves, unflatten
from zero_jax.interchange import folder_config
from zero_jax.interchange.exporter import differences
from zero_jax.interchange.exporter import export as export
from zero_jax.interchange.folder_config import ADAPTER_CONFIG, Path
from zero_jax.interchange.folder_config import config as config
from zero_jax.interchange.safetensor_files import DTYPES, INDEX, ONE, Files, model_files
from zero_jax.models import hf
from zero_jax.names import few
from zero_jax.sharding.paths import PyTree

Bounds = tuple[int, ...]


class Tensors:
    """The tensors of files, by the paths of our parameters.

    Args:
      where: Names the files in errors.
      files: The files.
      layout: The tensors of a model.

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
                self.problems.append(f"{head} differs from {embedding}, but they are tied")
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

        def read(starts: Bounds, stops: Bounds) -> np.ndarray:
            out = np.empty([b - a for a, b in zip(starts, stops, strict=True)], dtype)
            for index in np.ndindex(out.shape[:stacks]) if out.size else ():
                place = places[tuple(map(operator.add, starts, index))]
                name = self._names[place.name]
                tensor = functools.partial(self.files.read, name)
                part = place.turn.part(tensor, starts[stacks:], stops[stacks:])
                head = self._copies.get(name)  # of an embedding, which is stored alike
                if head and not np.array_equal(self.files.read(head, starts, stops), part):
                    raise ValueError(
                        f"{self._where}: {head} differs from {name}, but they are tied"
                    )
                out[index] = part
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

    Blocks follow logical indices, so rows are extended to whole blocks.

    Args:
      quantised: Returns a part of the leaf.
      leaf: The leaf, or its shapes.
      name: "codes" or "scales".
      starts, stops: Bounds of the part, in rows of these.

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
    """Compares the shapes of a folder's tensors with its config.json, without reading weights.

    A folder without weights passes, because a checkpoint may have them.

    Args:
      folder: Folder of a model.

    Raises:
      ValueError: `load` would fail before it reads a weight.
    """
    folder = pathlib.Path(folder)
    if any(os.path.lexists(folder / name) for name in (ONE, INDEX)):
        opened(folder)


def opened(folder: pathlib.Path) -> Tensors:
    """Opens the files of a model; all tensors exist, with the shapes of config.json."""
    model, known = config(folder), folder_config.read(folder)
    paths = model_files(folder)
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
