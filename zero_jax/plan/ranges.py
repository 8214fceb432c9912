"""Ranges of the numbers on the command lines of `python -m zero_jax.plan`."""

import argparse

# The least and the most of each flag. The most is far beyond any machine or model, and within the
# 32 and 64 bits in which shapes and their bytes are counted.
_RANGES: dict[str, tuple[float, float]] = {
    "devices": (1, 2**20),
    "replica": (1, 2**20),
    "experts": (1, 2**20),
    "model_parallel": (1, 2**20),
    "batch_per_device": (1, 2**20),
    "micro_batches": (1, 2**20),
    "seq": (1, 2**24),
    "vocab": (1, 2**24),
    "lora": (1, 2**20),
    "lora_alpha": (0, 1e6),
    "capacity": (0, 1e6),
    "bucket_bytes": (1, 2**40),
    "memory_limit": (0, 1e9),
}


def check(parsed: argparse.Namespace) -> None:
    """Checks every number that was given.

    Raises:
      ValueError: one is out of its range, with its flag and the range.

    >>> check(argparse.Namespace(seq=0))
    Traceback (most recent call last):
    ValueError: --seq 0: it must be at least 1 and at most 1.67772e+07
    """
    for name, (least, most) in _RANGES.items():
        given = getattr(parsed, name, None)
        if isinstance(given, int | float) and not least <= given <= most:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {given}: it must be at least {least:g} and at most {most:g}")
