"""Refusals of the planner: each names what was given, and is made before a step is traced."""

import functools

import jax.numpy as jnp
import optax
import pytest

import zero_jax
from training import ask
from zero_jax.commands import plan as command
from zero_jax.engine import grads
from zero_jax.hlo import prove
from zero_jax.translate import command as translate

HUGE = "99999999999999999999"
# fmt: off
ROWS = {  # arguments of the command, and words of its message
    "--model nano": [
        ("--target h10", "'h10' 'h100'"), ("--optimizer lyon", "'lyon' 'lion'"),
        ("--remat blocks", "'blocks' 'block'"), ("--reduce fp16", "fp16 bf16"),
        ("--memory-limit 0 --auto", "memory_limit=0 80e9"),
        ("--devices 6 --model-parallel 4", "--devices 6 4"),
        ("--batch-per-device 3 --grad-accum-steps 2", "--batch-per-device 3 2"),
        ("--sequence-parallel", "none model=..."),
        ("--target v100-32gb --compile", "v100-32gb h100"),
        ("--devices 12 --compile", "12 devices 16 topology"),
        ("--topology 2x1x8 --compile", "2x1x8 16 devices 8"),
        ("--topology 8-1 --compile", "8-1 8x1x8"),
        ("--latencies step.pbtxt", "--latencies --compile"),
        ("--latencies step.pbtxt --auto", "--latencies --auto"),
        ("--latencies step.txt --compile", "step.txt step.pbtxt"),
        ("--latencies none/step.pbtxt --compile", "folder none"),
        ("--latencies step.pbtxt --compile --target cpu", "cpu h100"),
        ("--capacity nan", "--capacity nan 0"), ("--memory-limit -1", "--memory-limit -1 0"),
        *((x, f"{x} 1") for x in (  # numbers out of range
            "--devices 0", "--replica 0", "--experts 0", "--grad-accum-steps 0", "--vocab 0",
            "--lora -1", "--bucket-bytes 0", "--model-parallel -1", "--batch-per-device -1",
            f"--devices {HUGE}", f"--seq {HUGE}")),
    ],
    "meshes --model nano --devices 4": [
        ("--latencies step.pbtxt", "--latencies meshes"), ("--target cpu", "--target cpu h100"),
        ("--model-parallel 2", "--model-parallel meshes")],
    "--model llama-3.1-8b": [
        ("--base nf4", "--base nf4 --lora"), ("--lora-alpha 2", "--lora-alpha 2 --lora")],
    "--model llama-3.1-8b --devices 8 --lora 16": [
        ("--lora-targets attn/qq", "attn/qq"), ("--lora-targets attn/q,", "pattern"),
        ("--lora-alpha inf", "--lora-alpha inf 0")],
    "--model mixtral-8x7b": [
        ("--experts 3 --devices 6", "experts=2 4 8"), ("--devices 8 --capacity 0", "capacity 0"),
        ("--devices 8 --experts 3", "--devices 8 experts 3")],
    "": [("--model 7b", "'7b' 7.5b"), ("--model llama-3.1-8", "'llama-3.1-8b'"),
         ("--model qwen3-8b --seq 50000", "50000 40960"), ("--hf nowhere", "nowhere/config.json"),
         ("--model qwen3-4b --devices 8 --experts 2", "experts"), ("meshes --seq -1", "--seq -1 1"),
         ("mesh", "'mesh' 'meshes'"), ("scaling", "'scaling' plan meshes")],
}
# fmt: on


@pytest.mark.parametrize("first", ROWS)
def test_the_command_names_what_is_wrong(first, capsys, monkeypatch):
    monkeypatch.setattr(prove, "_check_installed", lambda target: None)
    for args, words in ROWS[first]:
        assert command.main([*first.split(), *args.split()]) == 2, args
        error = capsys.readouterr().err
        assert error.startswith("error: ") and all(word in error for word in words.split()), error
    with_space = ["--model", "nano", "--latencies", "a step.pbtxt", "--compile"]
    assert command.main(with_space) == 2 and "a step.pbtxt" in capsys.readouterr().err


def traced(*_, **__):
    pytest.fail("a step is traced")


@pytest.mark.parametrize("what", ["--compile", "--auto"])
def test_a_missing_plugin_is_named_with_its_install_line_before_tracing(what, monkeypatch, capsys):
    monkeypatch.setattr(prove.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    assert command.main(["--model", "nano", what]) == 2
    error = capsys.readouterr().err
    assert "jax_cuda12_plugin" in error and "pip install jax-cuda12-plugin==" in error


def test_counts_of_other_commands_are_named_too(tmp_path, capsys):
    file = tmp_path / "a.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    for value in ("0", "-1", HUGE):
        assert translate.main([str(file), f"--devices={value}"]) == 2
        assert f"--devices {value}" in capsys.readouterr().err
        assert ask.main([str(tmp_path), "why?", f"--length={value}"]) == 2
        assert f"length={value}" in capsys.readouterr().err


def loss(params, x):
    return jnp.mean(x @ params["w"])


def called(how, mesh=None, stage=3, **options):
    zero = zero_jax.Zero(mesh or zero_jax.abstract_mesh(4), stage)
    params = zero.eval_shape(lambda: {"w": jnp.zeros((8, 8))})
    return getattr(zero, how)(loss, optax.adamw(1e-3), params, jnp.ones((8, 8)), **options)


def auto(limit):
    return zero_jax.Zero(zero_jax.make_mesh(), "auto", memory_limit=limit)


CPUS = zero_jax.make_mesh
# fmt: off
CALLS = {
    "topology": [lambda: called("plan", target="h100", topology="8-1"),
                 lambda: called("plan", topology="1x1x4")],
    "target": [lambda: called("plan", compile=True)],
    "latencies": [lambda: called("plan", latencies="step.pbtxt"),
                  lambda: called("plan", CPUS(), compile=True, latencies="step.pbtxt")],
    "memory_limit": [lambda: called("choose", CPUS(), "auto"),
                     lambda: called("choose", stage="auto"),
                     lambda: called("choose", stage="auto", target="cpu"),
                     *(functools.partial(auto, x) for x in (0, -1.0, "60e9", 1e999, True, 0.5))],
    "zero.choose": [lambda: auto(1e9).value_and_grad(loss)],
    "zero.choice": [lambda: auto(1e9).plan(loss, optax.sgd(1.0), {}, jnp.ones(8))],
}
# fmt: on


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_named_before_a_step_is_traced(name, monkeypatch):
    monkeypatch.setattr(prove, "_check_installed", lambda target: None)
    if name != "target":
        monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    for call in CALLS[name]:
        with pytest.raises(ValueError, match=name):
            call()
