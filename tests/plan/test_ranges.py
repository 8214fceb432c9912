"""Numbers on the command lines of `python -m zero_jax.plan` that can't be."""

import pytest

from training import ask
from zero_jax.commands.plan import main
from zero_jax.translate import command as translate

HUGE = "99999999999999999999"
WHOLE = "--devices --replica --experts --model-parallel --batch-per-device --micro-batches --seq"
WHOLE += " --vocab --lora --bucket-bytes"


@pytest.mark.parametrize("value", ["0", "-1", HUGE])
@pytest.mark.parametrize("flag", WHOLE.split())
def test_a_count_out_of_range_is_named(capsys, flag, value):
    assert main(["--model", "124m", f"{flag}={value}"]) == 2
    assert f"error: {flag} {value}: it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("flag", ["--capacity", "--lora-alpha", "--memory-limit"])
def test_a_number_that_is_none_is_named(capsys, flag, value):
    assert main(["--model", "124m", "--lora=8", f"{flag}={value}"]) == 2
    assert f"error: {flag} {float(value)}: it must be at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", HUGE])
def test_meshes_checks_its_counts(capsys, value):
    for flag in ("--devices", "--seq"):
        assert main(["meshes", f"{flag}={value}"]) == 2
        assert f"error: {flag} {value}: it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", HUGE])
def test_counts_of_other_commands_are_named_too(tmp_path, capsys, value):
    file = tmp_path / "a.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert translate.main([str(file), f"--devices={value}"]) == 2
    assert f"error: --devices {value}" in capsys.readouterr().err
    assert ask.main([str(tmp_path), "why?", f"--length={value}"]) == 2
    assert f"length={value}" in capsys.readouterr().err
