"""How a setting of offload is read, and devices that have no host memory beside their own."""

import numpy as np
import pytest
from test_offload import zero_on

from zero_jax.offload import tiers
from zero_jax.offload.tiers import Offload, parse


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("optimiser", "'optimiser' is none of.*nearest: 'optimizer'"),
        ("optimizer,param", "nearest: 'params'"),
        ("cpu", 'offload="optimizer" rests in host memory'),
        ("optimizer:hots", "nearest: 'host'"),
        ("optimizer:nvme", "needs one: optimizer:nvme=/path"),
        ("optimizer:host=/x", "only the nvme tier has a directory"),
        ("params", "offload the optimizer state first"),
        (3, "offload=3: write optimizer,params"),
    ],
)
def test_settings_that_can_not_be_read_name_the_nearest(given, message):
    with pytest.raises(ValueError, match=message):
        zero_on(2, offload=given)


def test_a_piece_has_at_least_a_page():
    with pytest.raises(ValueError, match="at least 4096 bytes"):
        Offload(optimizer=True, piece_bytes=100)


def test_the_grammar_of_the_command_line():
    assert parse("optimizer,params,activations:host") == Offload(True, True, True)
    assert parse("optimizer:auto").auto and str(parse("optimizer,params")) == "optimizer,params"
    assert parse(None) == parse("none") and not parse("activations").states


class _Bare:
    """A mesh of devices that have their own memory only."""

    device_kind = "Bare 1"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "device"})]

    @property
    def devices(self):
        return np.array([self])


def test_devices_without_host_memory_raise_or_with_auto_say_so():
    with pytest.raises(ValueError, match="Bare 1 has no pinned_host memory.*optimizer:auto"):
        tiers.settle(parse("optimizer"), _Bare())
    with pytest.warns(UserWarning, match="so states stay on the device"):
        assert not tiers.settle(parse("optimizer:auto"), _Bare()).states
