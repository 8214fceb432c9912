"""A file of others beside what somebody who knows both sides says of it.

What is expected is checked on the `Zero` that the printed lines make on eight fake devices, and on
the settings that training's own parser reads from the printed command line.
"""

import pathlib
import re
import shlex

import optax

import zero_jax
from training import config, optimizers
from zero_jax.translate import printed
from zero_jax.translate.account import NO_EQUAL, NOT_NEEDED, TRANSLATED, UNKNOWN
from zero_jax.translate.command import shown, translate

DATA = pathlib.Path(__file__).parent / "data"
VERDICTS = (NO_EQUAL, UNKNOWN, NOT_NEEDED, TRANSLATED)


def translated(name, devices=None):
    """The translation of a file of `data`."""
    path = DATA / name
    return translate(path.read_text(), str(path), devices)


def keys(found, verdict):
    return {row.key for row in found.rows if row.verdict == verdict}


def made(found):
    """What the printed lines make: the Zero, the optimizer and the step, by name."""
    names = {"loss_fn": lambda params, rows: 0.0}
    exec(printed.python(found.asked), names)
    assert isinstance(names["zero"], zero_jax.Zero)
    assert isinstance(names["tx"], optax.GradientTransformation)
    return names


def line(found):
    """The settings of the printed command line, by training's parser, filled in and checked."""
    text = re.search(r"^# python train.py (--.*)$", shown(found), re.MULTILINE)
    assert text, "there is no command line"
    return config.resolve(config.parse(shlex.split(text[1])), optimizers.RATES)


def check(
    name,
    *,
    devices=None,
    stage,
    mesh,
    precision="fp32",
    reduce="fp32",
    micro_batches=1,
    batch=None,
    remat="none",
    offload=None,
    sequence_parallel=False,
    no_equal=(),
    unknown=(),
):
    """Translates a file and compares everything that matters; returns translation and settings."""
    found = translated(name, devices)
    zero = made(found)["zero"]
    settings = line(found)
    assert zero.stage == settings.stage == stage
    assert config.mesh_sizes(settings.mesh) == mesh
    assert {k: v for k, v in zero.mesh.shape.items() if k != "data"} == {
        k: v for k, v in mesh.items() if k != "data"
    }
    wire = zero_jax.Precision(precision, reduce)
    assert (zero.precision.compute, zero.precision.reduce) == (wire.compute, wire.reduce)
    assert (settings.compute, settings.reduce) == (precision, reduce)
    assert zero.micro_batches == settings.micro_batches == micro_batches
    assert zero.remat == settings.remat == remat
    assert str(zero.offload) == (offload or "none") and settings.offload == offload
    assert zero.sequence_parallel == settings.sequence_parallel == sequence_parallel
    assert found.asked.global_batch() == batch
    assert settings.batch == (config.Config().batch if batch is None else batch)
    assert keys(found, NO_EQUAL) == set(no_equal)
    assert keys(found, UNKNOWN) == set(unknown)
    return found, settings
