"""Unsupported arguments of processes raise errors that name them."""

import json

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import zero_jax
from zero_jax.cluster import agreement
from zero_jax.cluster.watchdog import Watchdog


def agree(**settings):
    """Three processes compare settings; the last one has another `seed`."""

    def gathered(mine):
        other = np.zeros_like(mine)
        text = json.dumps({"seed": "7"}).encode()
        other[: len(text)] = np.frombuffer(text, np.uint8)
        return np.stack([mine, mine, other])

    def call(folder, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
        agreement.check_agreement(settings)

    return call


def initialize(*args, **more):
    return lambda folder, _: zero_jax.initialize(*args, **more)


def watchdog(**limits):
    return lambda folder, _: Watchdog(folder, **limits)


# fmt: off
REFUSALS = [
    *((f"coordinator='{at}'", initialize(at, 2, 0))
      for at in ("10.0.0.1", "10.0.0.1:", ":80", "host:0", "host:99999", "h:a")),
    ("num_processes=None", initialize("h:1", process_id=0)),
    ("process_id=2 of num_processes=2", initialize("h:1", 2, 2)),
    ("wait_seconds=0", initialize("h:1", 2, 1, wait_seconds=0)),
    ("settings take 700", agree(long_name="x" * 70_000)),
    ("seed.*'1'.*process 2.*'7'", agree(seed=1)),
    ("dead_after=0", watchdog(dead_after=0)), ("slow_factor=-1", watchdog(slow_factor=-1)),
    ("slow_after=0", watchdog(slow_after=0)),
]
# fmt: on


@pytest.mark.parametrize(("name", "call"), REFUSALS)
def test_refusals(tmp_path, monkeypatch, name, call):
    with pytest.raises(ValueError, match=name):
        call(tmp_path, monkeypatch)
