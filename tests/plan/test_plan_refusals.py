"""Refusals of the planner: each names what was given, and is made before a step is traced."""

import functools
import importlib.util

import jax.numpy as jnp
import optax
import pytest

import zero_jax
from training import generate
from zero_jax.commands import plan as command
from zero_jax.engine import grads
from zero_jax.hlo import aot
from zero_jax.translate import command as translate

HUGE, TX = "99999999999999999999", optax.adamw(1e-3)
ROWS = {  # first words of the command, then further ones and words of its message
    "memory --model nano": [
        ("--target h10", "'h10' 'h100'"), ("--optimizer lyon", "'lyon' lion"),
        ("--remat blocks", "'blocks' 'block'"), ("--reduce-dtype fp16", "fp16 bf16"),
        ("--devices 6 --mesh model=4", "--devices 6 4"), ("--sequence-parallel", "model=..."),
        ("--global-batch-size 12 --grad-accum-steps 2", "--global-batch-size 12 8 16"),
        ("--batch 3", "--global-batch-size"), ("--memory-limit -1", "memory_limit '-1' 80GB"),
        ("--latencies step.pbtxt", "--latencies"), ("--stage auto", "--stage zero_jax.plan auto"),
        ("--expert-capacity-factor nan", "--expert-capacity-factor nan 0"),
        ("--context-parallel 4 --seq-len 60", "--seq-len 60 4 8 56 64"),
        ("--context-parallel 2 --mesh context=4", "--context-parallel 2 context=4 leave"),
        ("--context-parallel 2 --mesh model=2", "`context`=2 `model`=2"),
        ("--context-parallel 4 --devices 6", "--devices 6 context=4"),
        ("--context-parallel 2 --model nano-experts", "context 2 experts --context-parallel"),
        *((x, f"{x} 1") for x in (  # numbers out of range
            "--devices 0", "--mesh replica=0", "--mesh experts=0", "--grad-accum-steps 0",
            "--vocab-size 0", "--lora-rank -1", "--bucket-bytes 0", "--mesh model=-1",
            "--global-batch-size -1", f"--devices {HUGE}", f"--seq-len {HUGE}",
            "--seq-len 2147483647", "--vocab-size 2147483647", "--lora-rank 2147483647"))],
    "auto --model nano": [
        ("--memory-limit 0", "memory_limit '0' 80GB"), ("--latencies step.pbtxt", "--latencies"),
        ("--stage 2", "auto --stage")],
    "compile --model nano": [
        ("--target v100-32gb", "v100-32gb h100"), ("--latencies step.txt", "step.txt step.pbtxt"),
        ("--devices 12 --global-batch-size 12", "12 devices 16 topology"),
        ("--devices 8 --topology 2x1x8", "2x1x8 16 devices 8"), ("--topology 8-1", "8-1 8x1x8"),
        ("--latencies none/step.pbtxt", "folder none"),
        ("--latencies step.pbtxt --target cpu", "cpu h100")],
    "meshes --model nano --devices 4": [
        ("--latencies step.pbtxt", "--latencies"), ("--target cpu", "--target cpu h100"),
        ("--mesh model=2", "--mesh model=2 meshes"), ("--context-parallel 2", "--context-parallel"),
        ("--mesh context=2", "--mesh context=2 meshes"), ("--seq-len -1", "--seq-len -1 1")],
    "memory --model llama-3.1-8b --devices 8": [
        *((f"--lora-{x}", f"--lora-{x} --lora-rank") for x in ("base-dtype nf4", "alpha 2")),
        ("--lora-rank 16 --lora-targets attn/qq", "attn/qq"),
        ("--lora-rank 16 --lora-targets attn/q,", "pattern"),
        ("--lora-rank 16 --lora-alpha inf", "--lora-alpha inf 0")],
    "memory --devices 8 --model": [
        ("mixtral-8x7b --mesh experts=3 --devices 6 --global-batch-size 6", "experts=2 4 8"),
        ("mixtral-8x7b --mesh experts=3", "--devices 8 experts 3"), ("7b", "'7b' 7.5b"),
        ("mixtral-8x7b --expert-capacity-factor 0", "capacity 0"),
        ("llama-3.1-8", "'llama-3.1-8b'"), ("qwen3-8b --seq-len 50000", "50000 40960"),
        ("nano --init-from nowhere", "nowhere/config.json"), ("nano --mesh experts=2", "experts")],
    "": [("mesh", "'mesh' 'meshes'"), ("scaling", "'scaling' memory meshes"),
         ("--model nano", "before --model memory compile")],
}  # fmt: skip


@pytest.mark.parametrize("first", ROWS)
def test_the_command_names_what_is_wrong(first, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for args, words in ROWS[first]:
        with pytest.raises(SystemExit, match="2"):
            raise SystemExit(command.main([*first.split(), *args.split()]))
        error = capsys.readouterr().err
        assert error.startswith("error: ") and all(word in error for word in words.split()), error
    with_space = ["compile", "--model", "nano", "--latencies", "a step.pbtxt"]
    assert command.main(with_space) == 2 and "a step.pbtxt" in capsys.readouterr().err


def traced(*_, **__):
    pytest.fail("a step is traced")


@pytest.mark.parametrize("what", ["compile", "auto"])
def test_a_missing_plugin_is_named_with_its_install_line_before_tracing(what, monkeypatch, capsys):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    assert command.main([what, "--model", "nano"]) == 2
    error = capsys.readouterr().err
    assert "jax_cuda12_plugin" in error and "pip install jax-cuda12-plugin==" in error


def test_counts_of_other_commands_are_named_too(tmp_path, capsys):
    (file := tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 3}}')
    for value in ("0", "-1", HUGE):
        assert translate.main([str(file), f"--devices={value}"]) == 2
        assert f"--devices {value}" in capsys.readouterr().err
        assert generate.main([str(tmp_path), "why?", f"--length={value}"]) == 2
        assert f"length={value}" in capsys.readouterr().err


def loss(params, x):
    return jnp.mean(x @ params["w"])


def called(how, mesh=None, stage=3, **options):
    zero = zero_jax.Zero(mesh or zero_jax.abstract_mesh(4), stage)
    params = zero.eval_shape(lambda: {"w": jnp.zeros((8, 8))})
    return getattr(zero, how)(loss, zero.optimizer(TX), params, jnp.ones((8, 8)), **options)


def auto(limit):
    return zero_jax.Zero(zero_jax.make_mesh(), "auto", memory_limit=limit)


CPUS = zero_jax.make_mesh
CALLS = {
    "topology": [lambda: called("plan", target="h100", topology="8-1"),
                 lambda: called("plan", topology="1x1x4")],
    "target": [lambda: called("plan", compile=True)],
    "latencies": [lambda: called("plan", latencies="step.pbtxt"),
                  lambda: called("plan", CPUS(), compile=True, latencies="step.pbtxt")],
    "memory_limit": [lambda: called("choose", CPUS(), "auto"),
                     lambda: called("choose", stage="auto"),
                     lambda: called("choose", stage="auto", target="cpu"),
                     *(functools.partial(auto, x) for x in (0, -1.0, "60XB", 1e999, True, 0.5))],
    "zero.choose": [lambda: auto(1e9).value_and_grad(loss),
                    lambda: auto(1e9).plan(loss, optax.sgd(1.0), {}, jnp.ones(8))],
    "tx": [lambda: auto(1e9).choose(loss, optax.sgd(1.0), {}, jnp.ones(8))]}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_named_before_a_step_is_traced(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    if name != "target":
        monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    for call in CALLS[name]:
        with pytest.raises(ValueError, match=name):
            call()
