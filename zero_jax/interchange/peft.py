"""Adapters as PEFT keeps them: `save_adapter`, `load_adapter`, and `merge` into a model's folder.

    DIR/adapter_config.json
    DIR/adapter_model.safetensors     base_model.model.NAME.lora_A.weight (r, in), lora_B (out, r)

Ours stacks the adapters of all layers, A (L, in, r) and B (L, r, out); which layer is which module
of theirs is in the tables of models/ (hf.py). Host memory: the adapters, and of a merge one tensor.
The format: https://github.com/huggingface/peft.
"""

import collections
import json
import math
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.adapters.lora import Lora
from zero_jax.interchange import folder_config
from zero_jax.interchange.exporter import (
    MAX_FILE_BYTES,
    check_free,
    copy_tokenizer,
    end_with,
    few,
    made_whole,
)
from zero_jax.interchange.folder_config import Path
from zero_jax.interchange.safetensor_files import Folder, Writer, check_finite, safetensors
from zero_jax.models import gpt, hf
from zero_jax.models.hf_places import TRANSPOSED, Place

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
# Ways to begin that leave the base as it is; others (PiSSA, OLoRA, LoftQ) change it.
_OF_THE_BASE_AS_IT_IS = (True, False, "gaussian", "eva", "orthogonal")
Adapters = Mapping[str, Mapping[str, np.ndarray]]


def save_adapter(
    adapters: Adapters, lora: Lora, config: hf.Config, folder: Path, base: str | None = None
) -> pathlib.Path:
    """Writes adapters as PEFT reads them.

    Args:
      adapters: whole arrays: {"a": (L, in, r), "b": (L, r, out)} by the path of their matrix.
      lora: what they are.
      config: of the model.
      folder: to make.
      base: the model's folder, which PEFT looks for by that name.

    Raises:
      ValueError: there is something in the folder, or an adapter is of no module of theirs.
    """
    out = pathlib.Path(folder).absolute()
    check_free(out)
    tensors: dict[str, np.ndarray] = {}
    modules: dict[str, None] = {}
    for path, place in _places(config, adapters):
        name = place.name.removesuffix(_WEIGHT)
        a, b = (adapters[path][part][place.at] for part in ("a", "b"))
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = np.ascontiguousarray(np.asarray(a).T)
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = _theirs(place, np.asarray(b))
        modules[re.sub(r"^.*\.\d+\.", "", name)] = None
    known = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": list(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": isinstance(config, gpt.GPTConfig),
        "inference_mode": True,
    }
    with made_whole(out) as beside:
        save = safetensors().numpy.save_file
        save(tensors, beside / FILE, metadata={"format": "pt"})
        (beside / CONFIG).write_text(json.dumps(known, indent=2) + "\n")
    return out


def adapter_config(folder: Path) -> Lora:
    """Returns the rank and scale of a folder's adapters.

    Raises:
      ValueError: The config is missing, or the adapters are of an unsupported kind.
    """
    path = pathlib.Path(folder) / CONFIG
    try:
        known = folder_config.read_json(path, folder_config.MOST_CONFIG_BYTES)
        kind, rank = known["peft_type"], known["r"]
        alpha = float(known.get("lora_alpha", rank))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the config of an adapter: {error!r}") from error
    odd = {
        "peft_type": kind != "LORA",
        "bias": known.get("bias", "none") != "none",
        "init_lora_weights": known.get("init_lora_weights", True) not in _OF_THE_BASE_AS_IT_IS,
        "use_dora": bool(known.get("use_dora")),
        "alora_invocation_tokens": bool(known.get("alora_invocation_tokens")),
        "use_rslora": bool(known.get("use_rslora")),
        "modules_to_save": bool(known.get("modules_to_save")),
        "rank_pattern": bool(known.get("rank_pattern")),
        "alpha_pattern": bool(known.get("alpha_pattern")),
        "lora_bias": bool(known.get("lora_bias")),
        "layer_replication": bool(known.get("layer_replication")),
        "trainable_token_indices": bool(known.get("trainable_token_indices")),
        "target_parameters": bool(known.get("target_parameters")),
        "use_qalora": bool(known.get("use_qalora")),
        "r": isinstance(rank, bool) or not isinstance(rank, int) or rank < 1,
        "lora_alpha": not math.isfinite(alpha),
    }
    for name, here in odd.items():
        if here:
            raise ValueError(f"{path}: {name} {known[name]!r} is unsupported")
    return Lora(rank, alpha)


def load_adapter(folder: Path, config: hf.Config) -> dict[str, dict[str, np.ndarray]]:
    """Reads adapters that PEFT or `save_adapter` wrote, all of a model's layers stacked.

    Args:
      folder: of the adapters.
      config: of the model.

    Returns:
      {"a": (L, in, r), "b": (L, r, out)} by the path of their matrix, fp32.

    Raises:
      ValueError: they are adapters of another model, stand beside some layers only, or have
        another rank than their config.
    """
    found = _pairs(folder)
    _check_ranks(found, adapter_config(folder).rank, folder)
    places = {
        p.name.removesuffix(_WEIGHT): p
        for p in hf.layout(config).places
        if p.name.endswith(_WEIGHT)
    }
    stacks: dict[str, dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]] = {}
    problems = []
    full_name = hf.layout(config).full_name
    for name, (a, b) in found.items():
        place = places.get((full_name(name + _WEIGHT) or "").removesuffix(_WEIGHT))
        if place is None or len(place.shape) != 2 or len(place.at) > 1:
            problems.append(f"{name} is not a matrix of the model")
            continue
        own = _ours(place, b)
        inputs, outputs = place.turn.shape(place.shape)
        if (a.shape[1], own.shape[1]) != (inputs, outputs):
            problems.append(
                f"{name} is {inputs} x {outputs}, its adapter {a.shape[1]} x {own.shape[1]}"
            )
            continue
        stacks.setdefault(place.path, {})[place.at] = (a.T, own)
    every = collections.Counter(place.path for place in places.values())
    problems += [
        f"{path} has adapters in {len(own)} layers of {every[path]}"
        for path, own in stacks.items()
        if len(own) != every[path]
    ]
    if problems:
        raise ValueError(f"the adapters in {folder} do not fit the model: {few(problems)}")
    return {path: _stacked(own) for path, own in stacks.items()}


def _check_ranks(
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], rank: int, folder: Path
) -> None:
    """Raises ValueError if a pair has another rank than `r` of the config, which sets its scale."""
    odd = [f"{name} has {a.shape[0]}" for name, (a, _) in pairs.items() if a.shape[0] != rank]
    if odd:
        raise ValueError(
            f"{pathlib.Path(folder) / CONFIG}: `r` is {rank}, and in {FILE} {len(odd)} of "
            f"{len(pairs)} adapters have another rank ({few(odd)}). Give the config that was saved "
            "with these tensors; adapters of several ranks are unsupported"
        )


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
      folder: the model's.
      adapter: the adapters', of `save_adapter` or PEFT.
      out: folder to make; it appears once everything is in it.
      max_file_bytes: of tensors in one file.
      ends: tokens that end a text or a turn, at which generation stops; by default the model's.

    Raises:
      ValueError: as `load_adapter`.
    """
    target = pathlib.Path(out).absolute()
    check_free(target)
    lora, config = adapter_config(adapter), folder_config.config(folder)
    adapters = load_adapter(adapter, config)
    layout, files = hf.layout(config), Folder(pathlib.Path(folder))
    by_name = {place.name: place for place in layout.places}
    if folder_config.read(folder).get("model_type") != hf.json_of(config, "float32")["model_type"]:
        raise ValueError(
            f"{folder} is a model of text and images, and only its text model is supported: "
            "import and export it, and merge into the export"
        )
    kinds = {n: kind for n, kind in files.kinds.items() if layout.full_name(n) is not None}
    with made_whole(target) as beside:
        writer = Writer(beside, kinds, int(max_file_bytes))
        for name, (shape, _) in kinds.items():
            tensor = files.read(name, (0,) * len(shape), shape)
            place = by_name.get(layout.full_name(name) or "")
            if place is not None and place.path in adapters:
                tensor = _added(place, tensor, adapters[place.path], lora.scale)
            writer.write(name, (), tensor)
        writer.finish()
        shutil.copyfile(pathlib.Path(folder) / "config.json", beside / "config.json")
        copy_tokenizer(pathlib.Path(folder), beside)
        end_with(beside, ends)
    return sorted(target.iterdir())


def _added(
    place: Place, tensor: np.ndarray, adapter: Mapping[str, np.ndarray], scale: float
) -> np.ndarray:
    a, b = adapter["a"], adapter["b"]
    a, b = a[place.at], b[place.at]
    box, delta = place.turn.put((0, 0), (a @ b).astype(np.float32))
    wide = tensor.astype(np.float32)
    wide[box] += np.float32(scale) * delta
    return wide.astype(tensor.dtype)


def _places(config: hf.Config, adapters: Adapters) -> Iterator[tuple[str, Place]]:
    """Of each adapter and layer the tensor of theirs that it stands beside."""
    known: dict[str, list[Place]] = {}
    for place in hf.layout(config).places:
        known.setdefault(place.path, []).append(place)
    for path in adapters:
        if path not in known or len(known[path][0].shape) != 2:
            raise ValueError(f"adapter {path!r} has no matrix in the transformers model")
        for place in known[path]:
            yield path, place


def _theirs(place: Place, b: np.ndarray) -> np.ndarray:
    """B (r, out) as theirs, (out, r)."""
    box, part = place.turn.put((0, 0), b)
    made = np.zeros(b.T.shape if place.turn is TRANSPOSED else b.shape, b.dtype)
    made[box] = part
    return np.ascontiguousarray(made if place.turn is TRANSPOSED else made.T)


def _ours(place: Place, b: np.ndarray) -> np.ndarray:
    """Theirs (out, r) as B, (r, out)."""
    given = b if place.turn is TRANSPOSED else b.T

    def read(starts: Any, stops: Any) -> np.ndarray:
        return given[tuple(slice(i, j) for i, j in zip(starts, stops, strict=True))]

    return place.turn.part(read, (0, 0), place.turn.shape(given.shape))


def _stacked(
    own: Mapping[tuple[int, ...], tuple[np.ndarray, np.ndarray]],
) -> dict[str, np.ndarray]:
    if () in own:
        a, b = own[()]
        return {"a": a, "b": b}
    ordered = [own[at] for at in sorted(own)]
    return {"a": np.stack([a for a, _ in ordered]), "b": np.stack([b for _, b in ordered])}


def _pairs(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B, as theirs, by the module's name."""
    path = pathlib.Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: give a folder of PEFT adapters")
    try:
        tensors = safetensors().numpy.load_file(path)
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:base_model\.model\.)?(.*)\.lora_([AB])\.weight", name)
        if match is None:
            raise ValueError(f"{path}: {name} is not part of a LoRA adapter")
        check_finite(path, name, np.asarray(tensor))
        found.setdefault(match[1], {})[match[2]] = np.asarray(tensor).astype(jnp.float32)
    for name, pair in sorted(found.items()):
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise ValueError(f"{path}: {name} lacks A and B of the same rank")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}
