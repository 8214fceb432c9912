"""Whether there is device memory left for what a run would like to do at its end."""

from types import SimpleNamespace

import jax
import pytest

from training.room import room_for


@pytest.mark.parametrize(("size", "room"), [(600, True), (601, False)])
def test_whole_parameters_are_asked_for_only_where_there_is_room(monkeypatch, capsys, size, room):
    stats = {"bytes_limit": 1000, "bytes_in_use": 400}
    devices = [
        SimpleNamespace(memory_stats=lambda s=s: s) for s in (stats, {**stats, "bytes_limit": 2000})
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert room_for(size, "sample", print) == room
    assert ("no sample: it takes" in capsys.readouterr().out) != room


def test_devices_that_count_no_memory_have_room(capsys):
    assert room_for(10**18, "sample", print) and not capsys.readouterr().out
