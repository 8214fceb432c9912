"""Tables 1 and 2 of the ZeRO paper, computed beside printed, and the closed forms behind them.

    python benchmarks/paper/tables.py

Ψ is the number of parameters, N the data-parallel degree, MP the model-parallel degree, K the bytes
of optimizer state per parameter: 12 for mixed-precision Adam, fp32 master parameters included. GB
is 1e9 bytes. Source: ZeRO (arXiv:1910.02054v3), sections 3, 5, 7 and 8, tables 1 and 2.
"""

import pathlib
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from zero_jax.plan.tables import table

STAGES = ("baseline", "P_os", "P_os+g", "P_os+g+p")
# Elements a device sends in a step per parameter, by stage: a reduce-scatter and an all-gather are
# one each, an all-reduce two; stage 3 gathers twice. A ring's factor (N-1)/N is left out, as in
# section 7.
ELEMENTS_SENT = (2, 2, 2, 3)

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

# Table 2: by MP, the largest model on N = 64 devices of 32 GB for each of STAGES, then the measured
# ones for the first two. The theory of MP > 1 is MP times the *printed* first row: 4 x 7.6B = 30.4B
# stands where the formula gives 30.57B. 0.5T, 1T and 2T are 512B, 1024B and 2048B.
TABLE_2: dict[int, tuple[tuple[str, str, str, str], tuple[str, str]]] = {
    1: (("2B", "7.6B", "14.4B", "128B"), ("1.3B", "6.2B")),
    2: (("4B", "15.2B", "28.8B", "256B"), ("2.5B", "12.5B")),
    4: (("8B", "30.4B", "57.6B", "0.5T"), ("5B", "25B")),
    8: (("16B", "60.8B", "115.2B", "1T"), ("10B", "50B")),
    16: (("32B", "121.6B", "230.4B", "2T"), ("20B", "100B")),
}


def model_states(psi: float, n: int, stage: int, k: float = 12, mp: int = 1) -> float:
    """Returns bytes per device: 16Ψ, 4Ψ + KΨ/N, 2Ψ + (2+K)Ψ/N or (4+K)Ψ/N, over MP.

    Stage 0 holds (4+K)Ψ. Source: section 5 and table 1.
    """
    unsharded = (4 + k, 4, 2, 0)[stage]
    return psi * (unsharded + (4 + k - unsharded) / n) / mp


def largest_model(memory_bytes: float, n: int, stage: int, k: float = 12, mp: int = 1) -> float:
    """Returns the Ψ whose model states fill a device: the theory columns of table 2."""
    return memory_bytes / model_states(1, n, stage, k, mp)


def checkpoints(layers: int, width: int, seq: int, batch: int, mp: int = 1) -> float:
    """Returns bytes of checkpointed activations in fp16: width · batch · seq · layers values.

    P_a divides them by MP; without it leave `mp` at 1. Source: sections 3.2 and 6.1.
    """
    return 2 * layers * width * seq * batch / mp


def activations(layers: int, width: int, seq: int, batch: int) -> float:
    """Returns bytes of activations without checkpointing: about 12 times the checkpoints.

    Source: section 3.2, which gives 60 GB for GPT-2 of 1.5B (48 x 1600) and a batch of 32.
    """
    return 12 * checkpoints(layers, width, seq, batch)


def block_elements(width: int, seq: int, batch: int, partition_activations: bool = False) -> int:
    """Returns elements a device sends in a step to its model-parallel peers, for each block.

    Six all-reduces of seq · width values a row, two in the forward pass, two in its recomputation
    and two in the backward pass, are 12 · seq · width; P_a adds an all-gather of the block's input.
    Source: section 8.
    """
    return (12 + partition_activations) * width * seq * batch


def table_1() -> str:
    """Returns table 1 as text, the printed figure in brackets beside the computed one."""
    rows: list[list[object]] = [["model", "N", *STAGES[1:]]]
    for (psi, n), printed in TABLE_1.items():
        computed = (model_states(psi, n, stage) / 1e9 for stage in (1, 2, 3))
        rows.append([f"{psi / 1e9:g}B", n, *map(_beside, computed, printed)])
    return "Table 1: model states in GB per device, computed [printed]\n" + indented(rows)


def table_2() -> str:
    """Returns table 2 as text, in billions of parameters, printed in brackets beside computed."""
    rows: list[list[object]] = [["MP", "devices", *STAGES, "measured"]]
    for mp, (printed, measured) in TABLE_2.items():
        computed = (largest_model(32e9, 64, stage, mp=mp) / 1e9 for stage in range(4))
        rows.append([mp, 64 * mp, *map(_beside, computed, printed), " / ".join(measured)])
    title = "Table 2: largest model on 32 GB, N = 64, in 1e9 parameters, computed [printed]\n"
    return title + indented(rows)


def indented(rows: list[list[object]]) -> str:
    """Returns an indented table whose columns are aligned to the right."""
    return textwrap.indent(table(rows, ">"), "  ")


def _beside(computed: float, printed: str) -> str:
    return f"{computed:.2f} [{printed}]"


if __name__ == "__main__":
    print(table_1(), table_2(), sep="\n\n")
