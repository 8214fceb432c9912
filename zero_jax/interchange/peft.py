"""Adapters in PEFT format: `save_adapter`, `load_adapter`, and `merge` into a model's folder.

    DIR/adapter_config.json
    DIR/adapter_model.safetensors     base_model.model.NAME.lora_A.weight (r, in), lora_B (out, r)

Ours stacks the adapters of all layers, A (L, in, r) and B (L, r, out). The tables of models/
(hf.py) map layers to modules. Host memory: the adapters, and in a merge one tensor.
The format: https://github.com/huggingface/peft.
"""

import math
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from zero_jax.adapters.lora import Lora
from zero_jax.interchange import folder_config
from zero_jax.interchange.exporter import (
    MAX_FILE_BYTES,
    atomic_folder,
    check_free,
    copy_tokenizer,
    end_with,
)
from zero_jax.interchange.folder_config import ADAPTER_CONFIG, CONFIG, Path, few, write_json
from zero_jax.interchange.safetensor_files import Folder, Writer, check_finite, safetensors
from zero_jax.models import gpt, hf
from zero_jax.models.hf_places import TRANSPOSED, Place

FILE = "adapter_model.safetensors"
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
    with atomic_folder(out) as partial:
        save = safetensors().numpy.save_file
        save(tensors, partial / FILE, metadata={"format": "pt"})
        write_json(partial / ADAPTER_CONFIG, known)
    return out


def adapter_config(folder: Path) -> Lora:
    """Returns the rank and scale of a folder's adapters.

    Raises:
      ValueError: The config is missing, or the adapters are of an unsupported kind.
    """
    path = pathlib.Path(folder) / ADAPTER_CONFIG
    try:
        known = folder_config.read_json(path)
        kind, rank = known["peft_type"], known["r"]
        alpha = float(known.get("lora_alpha", rank))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the config of an adapter: {error!r}") from error
    is_unsupported = {
        "peft_type": kind != "LORA",
        "bias": known.get("bias", "none") != "none",
        "init_lora_weights": known.get("init_lora_weights", True) not in _KEEPS_BASE,
        **{name: bool(known.get(name)) for name in _UNSUPPORTED},
        "r": isinstance(rank, bool) or not isinstance(rank, int) or rank < 1,
        "lora_alpha": not math.isfinite(alpha),
    }
    for name, here in is_unsupported.items():
        if here:
            raise ValueError(f"{path}: {name} {known[name]!r} is unsupported")
    return Lora(rank, alpha)


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
    found = _pairs(folder)
    _check_ranks(found, adapter_config(folder).rank, folder)
    layout = hf.layout(config)
    by_name: dict[str | None, Place] = {place.name: place for place in layout.places}
    stacks: dict[str, dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]] = {}
    problems = []
    for name, (a, b) in found.items():
        place = by_name.get(layout.full_name(name + _WEIGHT))
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
    layers = {path: len(places) for path, places in layout.by_path.items()}
    problems += [
        f"{path} has adapters in {len(own)} layers of {layers[path]}"
        for path, own in stacks.items()
        if len(own) != layers[path]
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
            f"{pathlib.Path(folder) / ADAPTER_CONFIG}: `r` is {rank}, and in {FILE} {len(odd)} of "
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
      folder: Folder of the model.
      adapter: Folder of the adapters, from `save_adapter` or PEFT.
      out: Folder to create; it appears when all files are written.
      max_file_bytes: Maximum bytes of tensors per file.
      ends: Tokens that end a text or a turn, at which generation stops; by default the model's.

    Raises:
      ValueError: See `load_adapter`.
    """
    target = pathlib.Path(out).absolute()
    check_free(target)
    lora, config = adapter_config(adapter), folder_config.config(folder)
    adapters = load_adapter(adapter, config)
    layout, files = hf.layout(config), Folder(pathlib.Path(folder))
    by_name: dict[str | None, Place] = {place.name: place for place in layout.places}
    if folder_config.read(folder).get("model_type") != hf.json_of(config, "float32")["model_type"]:
        raise ValueError(
            f"{folder} is a model of text and images, and only its text model is supported: "
            "import and export it, and merge into the export"
        )
    kinds = {n: kind for n, kind in files.kinds.items() if layout.full_name(n) is not None}
    with atomic_folder(target) as partial:
        writer = Writer(partial, kinds, int(max_file_bytes))
        for name, (shape, _) in kinds.items():
            tensor = files.read(name, (0,) * len(shape), shape)
            place = by_name.get(layout.full_name(name))
            if place is not None and place.path in adapters:
                tensor = _added(place, tensor, adapters[place.path], lora.scale)
            writer.write(name, (), tensor)
        writer.finish()
        shutil.copyfile(pathlib.Path(folder) / CONFIG, partial / CONFIG)
        copy_tokenizer(pathlib.Path(folder), partial)
        end_with(partial, ends)
    return sorted(target.iterdir())


def _added(
    place: Place, tensor: np.ndarray, adapter: Mapping[str, np.ndarray], scale: float
) -> np.ndarray:
    a, b = adapter["a"][place.at], adapter["b"][place.at]
    box, delta = place.turn.put((0, 0), (a @ b).astype(np.float32))
    wide = tensor.astype(np.float32)
    wide[box] += np.float32(scale) * delta
    return wide.astype(tensor.dtype)


def _places(config: hf.Config, adapters: Adapters) -> Iterator[tuple[str, Place]]:
    """Yields the path and the adapted tensor of each adapter and layer."""
    by_path = hf.layout(config).by_path
    for path in adapters:
        places = [*by_path.get(path, {}).values()]
        if not places or len(places[0].shape) != 2:
            raise ValueError(f"adapter {path!r} has no matrix in the transformers model")
        for place in places:
            yield path, place


def _theirs(place: Place, b: np.ndarray) -> np.ndarray:
    """Returns B (r, out) as theirs, (out, r)."""
    if place.turn is not TRANSPOSED:
        box, part = place.turn.put((0, 0), b)
        b = np.zeros_like(b)
        b[box] = part
    return np.ascontiguousarray(b.T)


def _ours(place: Place, b: np.ndarray) -> np.ndarray:
    """Returns theirs (out, r) as B, (r, out)."""
    if place.turn is TRANSPOSED:
        return b.T
    return place.turn.part(
        lambda starts, stops: b.T[tuple(map(slice, starts, stops))], (0, 0), b.T.shape
    )


def _stacked(
    own: Mapping[tuple[int, ...], tuple[np.ndarray, np.ndarray]],
) -> dict[str, np.ndarray]:
    if () in own:
        a, b = own[()]
        return {"a": a, "b": b}
    ordered = [own[at] for at in sorted(own)]
    return {"a": np.stack([a for a, _ in ordered]), "b": np.stack([b for _, b in ordered])}


def _pairs(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns A and B, as theirs, by the module's name."""
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
