"""docs/settings.md: one name, type and default in `Zero`, `train.py` and the planner."""

import dataclasses
import importlib.util
import inspect
import itertools
from pathlib import Path

import pytest

from zero_jax import Precision, Zero, abstract_mesh
from zero_jax.commands.settings import ZeroSettings
from zero_jax.engine.config import Config

SCRIPT = Path(__file__).parent.parent / "docs" / "settings_table.py"
SPEC = importlib.util.spec_from_file_location("settings_table", SCRIPT)
table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)
SETTINGS: dict[str, list] = {}
for source in table.sources():
    SETTINGS.setdefault(source.name, []).append(source)


def test_the_page_is_the_scripts():
    assert table.PAGE.read_text() == table.page()
    assert all(f"`{name}`" in table.tables() for name in SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_name_has_one_type_and_default_and_a_number_a_unit(name):
    python, *others = SETTINGS[name]
    for one in others if name != "mesh" else ():  # made from the text of --mesh
        assert one.default == python.default
        known, kinds = table.members(python.kind), table.members(one.kind)
        assert all(kind in known or (type(kind) is str and known == [str]) for kind in kinds)
    for one, two in itertools.combinations(others, 2):
        assert (one.kind, one.default, one.help) == (two.kind, two.default, two.help)
    if {int, float} & set(table.members(python.kind)):
        assert table.unit_of(SETTINGS[name])


def test_zero_has_the_fields_of_its_config_and_flags_the_defaults_of_precision():
    fields = [field.name for field in dataclasses.fields(Config)]
    assert list(inspect.signature(Zero).parameters) == fields
    mesh = abstract_mesh(2)
    assert Zero(mesh).config == Config(mesh) == Zero(mesh, **ZeroSettings().zero_settings()).config
    assert ZeroSettings().zero_settings()["precision"] == Precision()
