"""Adapters in PEFT format: `save_adapter`, `load_adapter`, and `merge` into a model's folder.

    DIR/adapter_config.json
    DIR/adapter_model.safetensors     base_model.model.NAME.lora_A.weight (r, in), lora_B (out, r)

Ours stacks the adapters of all layers, A (L, in, r) and B (L, r, out). Their tensors follow from
those of the model in the tables of models/ (hf.py). Host memory: the adapters, and in a merge one
tensor. The format: https://github.com/huggingface/peft.
"""

import dataclasses
import math
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.adapters.lora import Lora
from zero_jax.interchange import folder_config
from zero_jax.interchange.folder_config import ADAPTER_CONFIG, CONFIG, Path
from zero_jax.interchange.hugging_face import Tensors, opened
from zero_jax.interchange.safetensor_files import MAX_FILE_BYTES, Files, Writer, write_part
from zero_jax.models import gpt, hf
from zero_jax.models.hf_places import TRANSPOSED, Place, Transposed
from zero_jax.names import few

_STEM = "adapter_model"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
# Initialisations that keep the base model; others (PiSSA, OLoRA, LoftQ) change it.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
# Settings that must be missing or off.
_UNSUPPORTED = (
    *("use_dora", "alora_invocation_tokens", "use_rslora", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "lora_bias", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "use_qalora"),
)
Adapters = Mapping[str, Mapping[str, np.ndarray]]


def save_adapter(
    adapters: Adapters, lora: Lora, config: hf.Config, folder: Path, base: str | None = None
) -> pathlib.Path:
    """Writes adapters in PEFT format.

    Args:
      adapters: Full arrays: {"a": (L, in, r), "b": (L, r, out)} by the path of their matrix.
      lora: Rank and scale.
      config: Config of the model.
      folder: Folder to create.
      base: Folder of the base model, which PEFT loads by that name.

    Raises:
      ValueError: The folder is not empty, or a matrix does not exist in the transformers model.
    """
    out = pathlib.Path(folder).absolute()
    by_path = _layout(config, lora.rank).by_path
    arrays = {f"{path}/{part}": x for path, own in adapters.items() for part, x in own.items()}
    for path in adapters:
        if f"{path}/a" not in by_path:
            raise ValueError(f"adapter {path!r} has no matrix in the transformers model")
    places = [place for path in arrays for place in by_path[path].values()]
    modules = [place.name.removeprefix(_PREFIX).rpartition(".lora_")[0] for place in places]
    known = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": [*dict.fromkeys(re.sub(r"^.*\.\d+\.", "", name) for name in modules)],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": isinstance(config, gpt.GPTConfig),
        "inference_mode": True,
    }
    with folder_config.atomic_folder(out) as partial:
        kinds = {place.name: (place.shape, "float32") for place in places}
        writer = Writer(partial, kinds, math.inf, _STEM)
        for path, array in arrays.items():
            write_part(writer, by_path[path], (0,) * array.ndim, np.asarray(array, np.float32))
        writer.finish()
        folder_config.write_json(partial / ADAPTER_CONFIG, known)
    return out


def adapter_config(folder: Path) -> Lora:
    """Returns the rank and scale of a folder's adapters; raises ValueError for other kinds."""
    path = pathlib.Path(folder) / ADAPTER_CONFIG
    known = folder_config.read_json(path)
    rank: Any = known.get("r")
    alpha: Any = known.get("lora_alpha", rank)
    is_unsupported = {
        "peft_type": known.get("peft_type") != "LORA",
        "r": type(rank) is not int or rank < 1,
        "lora_alpha": type(alpha) not in (int, float) or not math.isfinite(alpha),
        "bias": known.get("bias", "none") != "none",
        "init_lora_weights": known.get("init_lora_weights", True) not in _KEEPS_BASE,
        **{name: bool(known.get(name)) for name in _UNSUPPORTED},
    }
    for name, here in is_unsupported.items():
        if here:
            raise ValueError(
                f"{path}: {name} {known.get(name)!r} is unsupported: give a folder of LoRA adapters"
            )
    return Lora(rank, float(alpha))


def load_adapter(folder: Path, config: hf.Config) -> dict[str, dict[str, np.ndarray]]:
    """Reads adapters that PEFT or `save_adapter` wrote, and stacks those of all layers.

    Args:
      folder: Folder of the adapters.
      config: Config of the model.

    Returns:
      {"a": (L, in, r), "b": (L, r, out)} by the path of their matrix, fp32.

    Raises:
      ValueError: The adapters are those of another model, exist for some layers only, or have
        another rank than their config.
    """
    path = pathlib.Path(folder) / f"{_STEM}.safetensors"
    files, rank = Files([path]), adapter_config(folder).rank
    layout = _layout(config, rank)
    names = {layout.full_name(name) for name in files.kinds}
    adapted = {place.path[:-2] for place in layout.places if place.name in names}
    places = (place for place in layout.places if place.path[:-2] in adapted)
    layout = dataclasses.replace(layout, places=tuple(places))
    tensors = Tensors(path, files, layout)
    if tensors.problems:
        raise ValueError(
            f"{path}: adapters of one rank, for the matrices of the model, are required; `r` is "
            f"{rank} in {ADAPTER_CONFIG}: {few(tensors.problems)}"
        )
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, shape in layout.shapes.items():
        matrix, _, part = name.rpartition("/")
        read = tensors.reader(name, np.dtype(np.float32), rounded=True)
        found.setdefault(matrix, {})[part] = read((0,) * len(shape), shape)
    return found


def _layout(config: hf.Config, rank: int) -> hf.Layout:
    """Returns the tensors of adapters of every matrix of a model, A at PATH/a and B at PATH/b."""
    model, places = hf.layout(config), list[Place]()
    for place in model.places:
        if len(place.shape) == 2:
            inputs, outputs = place.turn.shape(place.shape)
            name = f"{_PREFIX}{place.name.removesuffix(_WEIGHT)}.lora_"
            turn = TRANSPOSED if place.turn is TRANSPOSED else Transposed(place.turn)
            a, b = (rank, inputs), (outputs, rank)
            places.append(Place(f"{name}A.weight", a, f"{place.path}/a", place.at, TRANSPOSED))
            places.append(Place(f"{name}B.weight", b, f"{place.path}/b", place.at, turn))

    def full_name(name: str) -> str:
        match = re.fullmatch(r"(?:base_model\.model\.)?(.*)(\.lora_[AB])\.weight", name)
        full = match and model.full_name(match[1] + _WEIGHT)
        return f"{_PREFIX}{full.removesuffix(_WEIGHT)}{match[2]}.weight" if match and full else name

    return hf.Layout(tuple(places), full_name)


def merge(
    folder: Path,
    adapter: Path,
    out: Path,
    *,
    max_file_bytes: float = MAX_FILE_BYTES,
    ends: Sequence[int] = (),
) -> list[pathlib.Path]:
    """Writes a model with its adapters added, W + s·A·B, in the dtype of its files.

    Args:
      folder: Folder of the model.
      adapter: Folder of the adapters, from `save_adapter` or PEFT.
      out: Folder to create; it appears when all files are written.
      max_file_bytes: Maximum bytes of tensors per file.
      ends: Tokens that end a text or a turn, at which generation stops; by default the model's.

    Raises:
      ValueError: See `load_adapter`.
    """
    target = pathlib.Path(out).absolute()
    lora, config = adapter_config(adapter), folder_config.config(folder)
    if folder_config.read(folder).get("model_type") != hf.json_of(config, "float32")["model_type"]:
        raise ValueError(
            f"{folder} is a model of text and images, and only its text model is supported: "
            "import and export it, and merge into the export"
        )
    adapters = load_adapter(adapter, config)
    tensors = opened(pathlib.Path(folder))
    files, full_name = tensors.files, tensors.layout.full_name
    by_name = {place.name: place for place in tensors.layout.places}
    full_names = {name: full for name in files.kinds if (full := full_name(name))}
    with folder_config.atomic_folder(target) as partial:
        writer = Writer(partial, {name: files.kinds[name] for name in full_names}, max_file_bytes)
        for name, full in full_names.items():
            shape = files.kinds[name][0]
            tensor = files.read(name, (0,) * len(shape), shape)
            place = by_name.get(full)
            if place is not None and place.path in adapters:
                tensor = _added(place, tensor, adapters[place.path], lora.scale)
            writer.write(name, (), tensor)
        writer.finish()
        shutil.copyfile(pathlib.Path(folder) / CONFIG, partial / CONFIG)
        folder_config.copy_tokenizer(pathlib.Path(folder), partial)
        folder_config.end_with(partial, ends)
    return sorted(target.iterdir())


def _added(
    place: Place, tensor: np.ndarray, adapter: Mapping[str, np.ndarray], scale: float
) -> np.ndarray:
    a, b = adapter["a"][place.at], adapter["b"][place.at]
    box, delta = place.turn.put((0, 0), a @ b)
    wide = tensor.astype(np.float32)
    wide[box] += np.float32(scale) * delta
    return wide.astype(tensor.dtype)
