"""The command line of `train.py`: every setting once, in groups."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from training.config import Config, flag, parse
from training.stop import Stopped
from zero_jax.plan.options import Options

TITLES = ["basic", "data", "device", "optimizer", "look", "checkpoint", "process"]
TITLES += ["adapter", "zero"]


def shown(capsys, *args):
    with pytest.raises(SystemExit):
        parse(args)
    caught = capsys.readouterr()
    return caught.out + caught.err


def test_help_shows_every_setting_once_in_short_groups_that_say_what_they_are(capsys):
    text = shown(capsys, "--help")
    groups = re.split(r"^\W*(\w+) options\W*$", text, flags=re.MULTILINE)[1:]
    assert groups[::2] == TITLES
    flags = [re.findall(r"^\W{2,4}(--[a-z][a-z-]+)", group, re.MULTILINE) for group in groups[1::2]]
    assert sorted(itertools.chain(*flags)) == sorted(
        flag(f.name) for f in dataclasses.fields(Config)
    )
    assert max(map(len, flags[:-1])) <= 8
    assert set(flags[-1]) == {flag(f.name) for f in dataclasses.fields(Options)}


def test_what_is_given_arrives_whatever_group_it_is_in():
    words = "--steps 50 --mesh data=2 --lr 0.1 --no-debug --keep 5 --process-id 1 --stage auto"
    config = parse(words.split())
    assert (config.steps, config.mesh, config.lr, config.keep) == (50, "data=2", 0.1, 5)
    assert (config.process_id, config.stage, config.model) == (1, "auto", Config.model)


def test_an_unknown_flag_is_refused_by_name(capsys):
    assert "--stepz" in shown(capsys, "--stepz", "5")


@pytest.mark.parametrize(
    ("given", "on"),
    [
        ("--from-step 6 --lr 0.1 --out a b --fresh", "--lr 0.1 --out a b"),
        ("--from_step=6 --no-fresh --steps 9", "--steps 9 --out runs/001"),
        ("--coordinator h:1 --num-processes 4 --process-id=0", "--out runs/001"),
    ],
)
def test_the_command_that_goes_on_takes_over_what_holds_for_it_too(given, on):
    stopped = Stopped(130, Path("runs/001"), 37)
    assert stopped.said(given.split()).endswith(f"\npython train.py {on}")
