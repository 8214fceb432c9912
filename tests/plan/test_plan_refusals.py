"""Refusals of the planner: each names what was given, and is made before a step is traced."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from training import ask
from zero_jax.commands import plan as command
from zero_jax.engine import grads
from zero_jax.hlo import prove
from zero_jax.translate import command as translate

TX = optax.adamw(1e-3)
HUGE = "99999999999999999999"
NANO, DENSE, EXPERTS = "--model nano", "--model llama-3.1-8b", "--model mixtral-8x7b"
LORA = f"{DENSE} --devices 8 --lora 16"

# Arguments of the command, and words of its message.
ROWS = [
    ("--model 7b", "'7b' 7.5b"),
    (f"{NANO} --target h10", "'h10' 'h100'"),
    (f"{NANO} --optimizer lyon", "'lyon' 'lion'"),
    (f"{NANO} --remat blocks", "'blocks' 'block'"),
    (f"{NANO} --reduce fp16", "fp16 bf16"),
    (f"{NANO} --memory-limit 0 --auto", "memory_limit=0 80e9"),
    (f"{NANO} --devices 6 --model-parallel 4", "--devices 6 4"),
    (f"{NANO} --batch-per-device 3 --micro-batches 2", "--batch-per-device 3 2"),
    (f"{NANO} --sequence-parallel", "none model=..."),
    (f"{NANO} --target v100-32gb --compile", "v100-32gb h100"),
    (f"{NANO} --devices 12 --compile", "12 devices 16 topology"),
    (f"{NANO} --topology 2x1x8 --compile", "2x1x8 16 devices 8"),
    (f"{NANO} --topology 8-1 --compile", "8-1 8x1x8"),
    (f"{NANO} --latencies step.pbtxt", "--latencies --compile"),
    (f"{NANO} --latencies step.pbtxt --auto", "--latencies --auto"),
    (f"{NANO} --latencies step.txt --compile", "step.txt step.pbtxt"),
    (f"{NANO} --latencies none/step.pbtxt --compile", "folder none"),
    (f"{NANO} --latencies step.pbtxt --compile --target cpu", "cpu h100"),
    (f"{NANO} --latencies a\tstep.pbtxt --compile", "a\tstep.pbtxt"),
    (f"meshes {NANO} --latencies step.pbtxt", "--latencies meshes"),
    (f"meshes {NANO} --devices 4 --model-parallel 2", "--model-parallel meshes"),
    (f"meshes {NANO} --devices 4 --target cpu --memory-limit 1", "--target cpu h100"),
    ("meshes --seq -1", "--seq -1 1"),
    ("mesh", "'mesh' 'meshes'"),
    ("scaling", "'scaling' plan meshes"),
    (f"{DENSE} --base nf4", "--base nf4 --lora"),
    (f"{DENSE} --lora-alpha 2", "--lora-alpha 2 --lora"),
    ("--model llama-3.1-8", "'llama-3.1-8b'"),
    ("--model qwen3-8b --seq 50000", "50000 40960"),
    ("--hf nowhere", "nowhere/config.json"),
    (f"{LORA} --lora-targets attn/qq", "attn/qq"),
    (f"{LORA} --lora-targets attn/q,", "pattern"),
    (f"{EXPERTS} --experts 3 --devices 6", "experts=2 4 8"),
    (f"{EXPERTS} --devices 8 --experts 3", "--devices 8 experts 3"),
    ("--model qwen3-4b --devices 8 --experts 2", "experts"),
    (f"{EXPERTS} --devices 8 --capacity 0", "capacity 0"),
    # Numbers out of range.
    *(
        (f"{NANO} {flag} {value}", f"{flag} {value} 1")
        for value, flags in {
            "0": "--devices --replica --experts --micro-batches --vocab --bucket-bytes",
            "-1": "--model-parallel --batch-per-device --lora",
            HUGE: "--devices --seq",
        }.items()
        for flag in flags.split()
    ),
    (f"{NANO} --capacity nan", "--capacity nan 0"),
    (f"{LORA} --lora-alpha inf", "--lora-alpha inf 0"),
    (f"{NANO} --memory-limit -1", "--memory-limit -1 0"),
]


@pytest.mark.parametrize(("args", "words"), ROWS)
def test_the_command_names_what_is_wrong(args, words, capsys, monkeypatch):
    monkeypatch.setattr(prove, "_check_installed", lambda target: None)
    assert command.main([x.replace("\t", " ") for x in args.split(" ")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(word.replace("\t", " ") in error for word in words.split(" ")), error


def traced(*_, **__):
    pytest.fail("a step is traced")


@pytest.mark.parametrize("what", ["--compile", "--auto"])
def test_a_missing_plugin_is_named_with_its_install_line_before_tracing(what, monkeypatch, capsys):
    monkeypatch.setattr(prove.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    assert command.main([*NANO.split(), what]) == 2
    error = capsys.readouterr().err
    assert "jax_cuda12_plugin" in error and "pip install jax-cuda12-plugin==" in error


@pytest.mark.parametrize("value", ["0", "-1", HUGE])
def test_counts_of_other_commands_are_named_too(tmp_path, capsys, value):
    file = tmp_path / "a.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert translate.main([str(file), f"--devices={value}"]) == 2
    assert f"--devices {value}" in capsys.readouterr().err
    assert ask.main([str(tmp_path), "why?", f"--length={value}"]) == 2
    assert f"length={value}" in capsys.readouterr().err


def loss(params, x):
    return jnp.mean(x @ params["w"])


def until_large(params, x):
    return jnp.mean(jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ params["w"], x))


def called(how, mesh=None, stage=3, f=loss, **options):
    zero = zero_jax.Zero(
        mesh or zero_jax.abstract_mesh(4), stage, memory_limit=options.pop("limit", None)
    )
    params = zero.abstract(lambda: {"w": jnp.zeros((8, 8))})
    return getattr(zero, how)(f, TX, params, jnp.ones((8, 8)), **options)


def auto(limit):
    return zero_jax.Zero(zero_jax.make_mesh(), "auto", memory_limit=limit)


CPUS = zero_jax.make_mesh
FOLDER = pathlib.Path("none/step.pbtxt")
CALLS = [
    ("topology", lambda: called("plan", target="h100", topology="8-1")),
    ("topology", lambda: called("plan", topology="1x1x4")),
    ("target", lambda: called("plan", compile=True)),
    ("latencies", lambda: called("plan", latencies="step.pbtxt")),
    ("latencies", lambda: called("plan", CPUS(), compile=True, latencies="step.pbtxt")),
    ("memory_limit", lambda: called("choose", CPUS(), "auto")),
    ("memory_limit", lambda: called("choose", stage="auto")),
    ("memory_limit", lambda: called("choose", stage="auto", target="cpu")),
    ("zero.choose", lambda: auto(1e9).value_and_grad(loss)),
    ("zero.choice", lambda: auto(1e9).plan(loss, TX, {}, jnp.ones(8))),
    *(
        ("memory_limit", functools.partial(auto, limit))
        for limit in (0, -1.0, "60e9", float("inf"), True, 0.5)
    ),
]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_arguments_are_named_before_a_step_is_traced(name, call, monkeypatch):
    monkeypatch.setattr(prove, "_check_installed", lambda target: None)
    if name != "target":
        monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    with pytest.raises(ValueError, match=name):
        call()
