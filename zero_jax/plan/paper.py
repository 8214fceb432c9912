"""The paper's closed forms and its two tables, computed beside printed.

Ψ is the number of parameters, N the data-parallel degree, MP the model-parallel degree, K the
bytes of optimizer state per parameter: 12 for mixed-precision Adam, the fp32 masters included.
A device holds 16Ψ, 4Ψ + KΨ/N, 2Ψ + (2+K)Ψ/N or (4+K)Ψ/N bytes at stages 0 to 3, all over MP, and
sends 2Ψ, 2Ψ, 2Ψ or 3Ψ words a step, over MP. GB is 1e9 bytes.
Source: ZeRO (arXiv:1910.02054v3), sections 3, 5, 7 and 8, tables 1 and 2.
"""

import dataclasses
import textwrap
from collections.abc import Sequence

from zero_jax.plan.tables import table

STAGES = ("baseline", "P_os", "P_os+g", "P_os+g+p")

# Table 1: GB per device for P_os, P_os+g and P_os+g+p, digit for digit as printed. Some cells of
# three and more digits are cut off where the rest are rounded: 513.5 and 257.75 stand as 513 and
# 257, and in the column of 1T 4187.5, 2218.75, 4046.9, 2054.7, 4011.7 and 2013.7 lose theirs.
TABLE_1: dict[tuple[float, int], tuple[str, str, str]] = {
    (7.5e9, 1): ("120", "120", "120"),
    (7.5e9, 4): ("52.5", "41.3", "30"),
    (7.5e9, 16): ("35.6", "21.6", "7.5"),
    (7.5e9, 64): ("31.4", "16.6", "1.88"),
    (7.5e9, 256): ("30.4", "15.4", "0.47"),
    (7.5e9, 1024): ("30.1", "15.1", "0.12"),
    (128e9, 1): ("2048", "2048", "2048"),
    (128e9, 4): ("896", "704", "512"),
    (128e9, 16): ("608", "368", "128"),
    (128e9, 64): ("536", "284", "32"),
    (128e9, 256): ("518", "263", "8"),
    (128e9, 1024): ("513", "257", "2"),
    (1e12, 1): ("16000", "16000", "16000"),
    (1e12, 4): ("7000", "5500", "4000"),
    (1e12, 16): ("4750", "2875", "1000"),
    (1e12, 64): ("4187", "2218", "250"),
    (1e12, 256): ("4046", "2054", "62.5"),
    (1e12, 1024): ("4011", "2013", "15.6"),
}

# Table 2: by MP, the largest model on N = 64 devices of 32 GB for each of STAGES, then what was
# measured for the first two. The theory of MP > 1 is MP times the *printed* first row: 4 x 7.6B =
# 30.4B stands where the formula gives 30.57B. 0.5T, 1T and 2T are 512B, 1024B and 2048B.
TABLE_2_MEMORY, TABLE_2_SHARDS = 32e9, 64
TABLE_2: dict[int, tuple[tuple[str, str, str, str], tuple[str, str]]] = {
    1: (("2B", "7.6B", "14.4B", "128B"), ("1.3B", "6.2B")),
    2: (("4B", "15.2B", "28.8B", "256B"), ("2.5B", "12.5B")),
    4: (("8B", "30.4B", "57.6B", "0.5T"), ("5B", "25B")),
    8: (("16B", "60.8B", "115.2B", "1T"), ("10B", "50B")),
    16: (("32B", "121.6B", "230.4B", "2T"), ("20B", "100B")),
}

# Figure 3, superlinear scaling of 60B: layers, width, MP, stage and device; then, by devices, the
# batch of each model replica.
SCALING_SETTING = (132, 6144, 16, 2, "v100-32gb")
SCALING_BATCHES = {64: 16, 128: 48, 256: 48, 400: 64}


@dataclasses.dataclass(frozen=True)
class Table1Row:
    """GB per device of one model on N devices: P_os, P_os+g, P_os+g+p."""

    psi: float
    shards: int
    computed: tuple[float, ...]
    printed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table2Row:
    """The largest model, in parameters, at one MP: theory for STAGES, measured for two."""

    model_parallel: int
    devices: int
    computed: tuple[float, ...]
    printed: tuple[str, ...]
    measured: tuple[str, ...]


def model_states(
    psi: float, shards: int, stage: int, state_bytes: float = 12, model_parallel: int = 1
) -> float:
    """Model states: 16Ψ, 4Ψ + KΨ/N, 2Ψ + (2+K)Ψ/N or (4+K)Ψ/N bytes, over MP.

    Args:
      psi: Ψ, of the whole model.
      shards: N.
      stage: 0 to 3.
      state_bytes: K; stage 0 holds (4+K)Ψ.
      model_parallel: MP.

    Returns:
      Bytes per device. Source: section 5 and table 1.

    Raises:
      ValueError: no such stage, or a degree below 1.

    >>> [round(model_states(7.5e9, 64, stage) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    return psi * _bytes_per_parameter(shards, stage, state_bytes) / _degree("MP", model_parallel)


def largest_model(
    memory_bytes: float, shards: int, stage: int, state_bytes: float = 12, model_parallel: int = 1
) -> float:
    """The inverse of `model_states`: the Ψ whose model states alone fill a device.

    Args:
      memory_bytes: of one device.
      shards, stage, state_bytes, model_parallel: as for `model_states`.

    Returns:
      Parameters of the whole model. Source: the theory columns of table 2.

    >>> [round(largest_model(32e9, 64, stage) / 1e9, 1) for stage in range(4)]
    [2.0, 7.6, 14.4, 128.0]
    """
    per_parameter = _bytes_per_parameter(shards, stage, state_bytes)
    return memory_bytes * _degree("MP", model_parallel) / per_parameter


def words(stage: int) -> int:
    """Words a device sends in a step for each of its parameters: 2, 2, 2, 3.

    A reduce-scatter and an all-gather are one each, an all-reduce two; stage 3 gathers twice.
    Source: section 7. A ring's factor (N-1)/N is left out, as there.

    >>> [words(stage) for stage in range(4)]
    [2, 2, 2, 3]
    """
    return (2, 2, 2, 3)[_stage(stage)]


def activations(layers: int, width: int, seq: int, batch: int, word_bytes: int = 2) -> float:
    """Activations without checkpointing: about 12 · width · batch · seq · layers values, in bytes.

    Source: section 3.2, which makes this 60 GB for GPT-2 of 1.5B:

    >>> round(activations(layers=48, width=1600, seq=1024, batch=32) / 1e9)
    60
    """
    return 12 * checkpoints(layers, width, seq, batch, word_bytes=word_bytes)


def checkpoints(
    layers: int, width: int, seq: int, batch: int, model_parallel: int = 1, word_bytes: int = 2
) -> float:
    """Checkpointed activations: width · batch · seq · layers values, over MP with P_a, in bytes.

    Leave `model_parallel` at 1 without P_a: then each device keeps all of them.
    Source: sections 3.2 and 6.1.

    >>> checkpoints(132, 6144, 1024, 16, model_parallel=16) == 132 * 6144 * 1024 * 2
    True
    """
    return layers * width * seq * batch * word_bytes / _degree("MP", model_parallel)


def block_words(width: int, seq: int, batch: int, partition_activations: bool = False) -> int:
    """Words a device sends in a step to its model-parallel peers, for each block.

    Six all-reduces of seq · width values for each row, two in the forward pass, two in its
    recomputation and two in the backward pass, are 12 · seq · width; P_a adds an all-gather of
    the block's input, under a tenth. Source: section 8.

    >>> block_words(6144, 1024, 1, partition_activations=True) / (6144 * 1024)
    13.0
    """
    return (12 + partition_activations) * width * seq * batch


def table_1() -> list[Table1Row]:
    """Table 1, computed beside printed, in GB.

    >>> table_1()[3].computed, table_1()[3].printed
    ((31.40625, 16.640625, 1.875), ('31.4', '16.6', '1.88'))
    """
    return [
        Table1Row(psi, n, tuple(model_states(psi, n, s) / 1e9 for s in (1, 2, 3)), cells)
        for (psi, n), cells in TABLE_1.items()
    ]


def table_2() -> list[Table2Row]:
    """Table 2, computed beside printed, in parameters.

    >>> table_2()[0].computed[3], table_2()[0].printed[3]
    (128000000000.0, '128B')
    """
    return [
        Table2Row(mp, TABLE_2_SHARDS * mp, tuple(_theory(s, mp) for s in range(4)), *cells)
        for mp, cells in TABLE_2.items()
    ]


def format_table_1() -> str:
    """Table 1 as text, the paper's figure in brackets beside ours.

    >>> print(*format_table_1().splitlines()[5].split())
    7.5B 64 31.41 [31.4] 16.64 [16.6] 1.88 [1.88]
    """
    rows = [
        [f"{r.psi / 1e9:g}B", r.shards, *map(_beside, r.computed, r.printed)] for r in table_1()
    ]
    title = "Table 1: model states in GB per device, computed [printed]\n"
    return title + shown([["model", "N", *STAGES[1:]], *rows])


def format_table_2() -> str:
    """Table 2 as text, in billions of parameters, the paper's figure in brackets beside ours.

    >>> print(*format_table_2().splitlines()[4].split())
    4 256 8.00 [8B] 30.57 [30.4B] 57.69 [57.6B] 512.00 [0.5T] 5B / 25B
    """
    rows = []
    for row in table_2():
        theory = map(_beside, (psi / 1e9 for psi in row.computed), row.printed)
        rows.append([row.model_parallel, row.devices, *theory, " / ".join(row.measured)])
    title = "Table 2: largest model on 32 GB, N = 64, in 1e9 parameters, computed [printed]\n"
    return title + shown([["MP", "devices", *STAGES, "measured"], *rows])


def shown(rows: Sequence[Sequence[object]]) -> str:
    """A table of figures as it is printed: indented, all to the right."""
    return textwrap.indent(table(rows, ">"), "  ")


def _theory(stage: int, model_parallel: int) -> float:
    return largest_model(TABLE_2_MEMORY, TABLE_2_SHARDS, stage, model_parallel=model_parallel)


def _beside(computed: float, printed: str) -> str:
    return f"{computed:.2f} [{printed}]"


def _bytes_per_parameter(shards: int, stage: int, state_bytes: float) -> float:
    whole = (4 + state_bytes, 4, 2, 0)[_stage(stage)]
    return whole + (4 + state_bytes - whole) / _degree("N", shards)


def _stage(stage: int) -> int:
    if stage not in range(4):
        raise ValueError(f"stage={stage!r}, but ZeRO has stages 0, 1, 2 and 3; 2 is the paper's.")
    return stage


def _degree(name: str, degree: int) -> int:
    if degree < 1:
        raise ValueError(f"{name}={degree}, but a degree of parallelism is at least 1; 1 is none.")
    return degree
