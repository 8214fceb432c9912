"""GPT-2 as Hugging Face's transformers store it, beside models/gpt.py: names, shapes, config.

Both keep a matrix as (inputs, outputs), so but for the stack of layers one thing differs: columns
of our qkv are ordered (heads, 3, H), theirs (3, heads, H): all of q, then all of k, then all of v.

Shapes: D width, N heads, H head dim, V vocab, T positions, L layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .gpt_config import GPTConfig
from .hf_defaults import check_tensors, size
from .hf_places import SAME, Box, Layout, Place, Read

PREFIX = "transformer."
HEAD = "lm_head.weight"
EMBEDDING = f"{PREFIX}wte.weight"
QKV = "attn/qkv/"
# Of one layer: ours, theirs, and the shape in units of D.
_LAYER = (
    ("ln1/scale", "ln_1.weight", (1,)),
    ("ln1/bias", "ln_1.bias", (1,)),
    ("attn/qkv/kernel", "attn.c_attn.weight", (1, 3)),
    ("attn/qkv/bias", "attn.c_attn.bias", (3,)),
    ("attn/proj/kernel", "attn.c_proj.weight", (1, 1)),
    ("attn/proj/bias", "attn.c_proj.bias", (1,)),
    ("ln2/scale", "ln_2.weight", (1,)),
    ("ln2/bias", "ln_2.bias", (1,)),
    ("mlp/up/kernel", "mlp.c_fc.weight", (1, 4)),
    ("mlp/up/bias", "mlp.c_fc.bias", (4,)),
    ("mlp/down/kernel", "mlp.c_proj.weight", (4, 1)),
    ("mlp/down/bias", "mlp.c_proj.bias", (1,)),
)
# Masks that old versions saved with every layer.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
# What models/gpt.py computes, in the words of their config; the first is what we write.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # GELU by tanh, both of them
    "layer_norm_epsilon": (1e-5,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_SIZES = {
    "n_layer": "layers",
    "n_embd": "width",
    "n_head": "heads",
    "vocab_size": "vocab",
    "n_positions": "seq",
}
_END_OF_TEXT = 50256  # of GPT-2's tokens, where the vocabulary has it


def layout(config: GPTConfig) -> Layout:
    """Every tensor.

    >>> layout(GPTConfig(layers=1, width=4, heads=2, vocab=7, seq=3)).places[0].name
    'transformer.wte.weight'
    """
    width, by_head = config.width, ByHead(config.heads, config.width)
    first = [
        Place(EMBEDDING, (config.vocab, width), "wte/embedding"),
        Place(f"{PREFIX}wpe.weight", (config.seq, width), "wpe/embedding"),
    ]
    layers = [
        Place(
            *(f"{PREFIX}h.{at}.{theirs}", tuple(n * width for n in dims), f"blocks/{ours}", (at,)),
            turn=by_head if ours.startswith(QKV) else SAME,
        )
        for at in range(config.layers)
        for ours, theirs, dims in _LAYER
    ]
    last = [
        Place(f"{PREFIX}ln_f.weight", (width,), "ln_f/scale"),
        Place(f"{PREFIX}ln_f.bias", (width,), "ln_f/bias"),
    ]
    return Layout((*first, *layers, *last), full_name, (HEAD, EMBEDDING))


def config_of_shapes(known: Mapping[str, Sequence[int]], heads: int) -> GPTConfig:
    """Returns the config of parameters of models/gpt.py, whose shapes do not depend on `heads`.

    Raises:
      ValueError: A parameter is missing, or has an unsupported shape.
    """
    for path, dims in (("wte/embedding", 2), ("wpe/embedding", 2), ("blocks/ln1/scale", 2)):
        if path not in known:
            raise ValueError(f"{path} is missing")
        if len(known[path]) != dims:
            raise ValueError(f"{path} is {list(known[path])}, but it must have {dims} dims")
    (vocab, width), seq = known["wte/embedding"], known["wpe/embedding"][0]
    layers = known["blocks/ln1/scale"][0]
    return GPTConfig(layers=layers, width=width, heads=heads, vocab=vocab, seq=seq)


def to_json(config: GPTConfig, dtype: str) -> dict[str, Any]:
    """The content of their config.json.

    Dropout is off: it is a setting of training, and attention has one there that ours lacks.
    """
    end = _END_OF_TEXT if config.vocab > _END_OF_TEXT else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{name: values[0] for name, values in _FIXED.items()},
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "n_inner": None,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        "torch_dtype": dtype,
    }


def from_json(known: Mapping[str, Any]) -> GPTConfig:
    """Returns the config of models/gpt.py for the content of a config.json, without dropout.

    Raises:
      ValueError: models/gpt.py computes something else, or a size is missing.
    """
    for name, values in _FIXED.items():
        if known.get(name, values[0]) not in values:
            said = " or ".join(map(repr, values))
            raise ValueError(f"{name} is {known[name]!r}, but models/gpt.py supports only {said}")
    known = {**dict.fromkeys(_SIZES), **known}
    sizes = {ours: size(known, theirs) for theirs, ours in _SIZES.items()}
    check_tensors("n_layer", sizes["layers"])
    config = GPTConfig(**sizes)  # type: ignore[arg-type]
    if known.get("n_inner") not in (None, 4 * config.width):
        raise ValueError(
            f"n_inner is {known['n_inner']!r}, but models/gpt.py supports only 4 * n_embd = "
            f"{4 * config.width}"
        )
    return config


def full_name(name: str) -> str | None:
    """A tensor's name with "transformer."; None for a mask, which no model of today needs.

    >>> full_name("h.0.attn.c_attn.bias"), full_name("transformer.h.0.attn.bias")
    ('transformer.h.0.attn.c_attn.bias', None)
    """
    if name.endswith(_BUFFERS):
        return None
    known = ("wte.", "wpe.", "h.", "ln_f.")
    return PREFIX + name if name.startswith(known) else name


def positions(heads: int, width: int) -> np.ndarray:
    """Where each column of our qkv is in theirs.

    >>> positions(heads=2, width=2).tolist()  # q0 k0 v0 q1 k1 v1 of q0 q1 k0 k1 v0 v1
    [0, 2, 4, 1, 3, 5]
    """
    return by_head(np.arange(3 * width), heads)


def by_head(qkv: np.ndarray, heads: int) -> np.ndarray:
    """Theirs to ours: the last dim from (3, heads, H) to (heads, 3, H).

    >>> by_head(np.array(["q0", "q1", "k0", "k1", "v0", "v1"]), heads=2).tolist()
    ['q0', 'k0', 'v0', 'q1', 'k1', 'v1']
    """
    split = qkv.reshape(*qkv.shape[:-1], 3, heads, -1)
    return split.swapaxes(-3, -2).reshape(qkv.shape)


@dataclasses.dataclass(frozen=True)
class Columns:
    """What to read of their qkv for some columns of ours.

    Attributes:
      ranges: start and stop of q, k and v of the heads that those columns touch.
      heads: how many heads that is.
      first: of the wanted columns, once those three, side by side, are ordered by head.
      last: their end.
    """

    ranges: tuple[tuple[int, int], ...]
    heads: int
    first: int
    last: int


def columns(start: int, stop: int, heads: int, width: int) -> Columns:
    """What to read for columns start to stop of ours, rounded up to whole heads.

    >>> columns(6, 12, heads=2, width=4).ranges
    ((2, 4), (6, 8), (10, 12))
    """
    size = width // heads
    low, high = start // (3 * size), -(-stop // (3 * size))
    ranges = tuple((kind * width + low * size, kind * width + high * size) for kind in range(3))
    skipped = low * 3 * size
    return Columns(ranges, high - low, start - skipped, stop - skipped)


@dataclasses.dataclass(frozen=True)
class ByHead:
    """A turn: the last dim, (3, heads, H) in theirs, is (heads, 3, H) in ours."""

    heads: int
    width: int

    def shape(self, theirs: Sequence[int]) -> tuple[int, ...]:
        return tuple(theirs)

    def part(self, read: Read, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        if starts[-1] == stops[-1]:
            return read(tuple(starts), tuple(stops))
        wanted = columns(starts[-1], stops[-1], self.heads, self.width)
        parts = [read((*starts[:-1], a), (*stops[:-1], b)) for a, b in wanted.ranges]
        ordered = by_head(np.concatenate(parts, axis=-1), wanted.heads)
        return ordered[..., wanted.first : wanted.last]

    def put(self, starts: Sequence[int], part: np.ndarray) -> tuple[Box, np.ndarray]:
        box: list[Any] = [slice(a, a + n) for a, n in zip(starts, part.shape, strict=True)]
        box[-1] = positions(self.heads, self.width)[box[-1]]
        return tuple(box), part
