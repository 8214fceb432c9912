"""Scanned layers that the engine unrolls on GPUs: gradients, the rule, the plan, bytes moved."""

import functools

import jax
import optax
import pytest
import test_layers as layers
from one_device import check_gradients, zero_on
from problems import equations_of
from test_layers import TOKENS, make

import zero_jax
from zero_jax.commands.case import Case
from zero_jax.context_parallel import cudnn
from zero_jax.engine import scans
from zero_jax.models import families, gpt
from zero_jax.plan import plans

FOR_GPU = functools.partial(cudnn.compiling_for, "cuda", (9, 0))


def read(loss=layers.scanned, params=lambda: make(4), batch=TOKENS, devices=2, **settings):
    """The layers and the jaxpr of a step."""
    zero = zero_on(devices, **{"remat": "none"} | settings)
    params, tx = zero.eval_shape(params), zero.optimizer(optax.sgd(0.1))
    step = zero.train_step(loss, tx)
    args = params, tx.init(params), batch
    return step.read(*args).layers, step.trace(*args).jaxpr.jaxpr


def loops(jaxpr):
    """The number of loops with matrix products, of both passes."""
    found = [e for e in equations_of(jaxpr) if e.primitive.name == "scan"]
    bodies = [e.params["jaxpr"].jaxpr for e in found]
    return sum(any(e.primitive.name == "dot_general" for e in equations_of(b)) for b in bodies)


CASES = [
    *((layers.scanned, 5, 2, True, {"remat": r}) for r in ("none", "dots", "names:h", layers.DOTS)),
    (layers.reversed_order, 5, 3, False, {}), (layers.scanned, 1, 2, True, {}),
    (layers.reversed_order, 4, 2, True, {"remat": "dots"}),
    (layers.sharing, 4, 2, False, {"remat": "dots"}), (layers.sharing, 3, 1, True, {}),
    (layers.two_scans, 4, 2, True, {}), (layers.scanned, 2, 4, False, {"frozen": "up|words"}),
    (layers.scanned, 5, 2, False, {"frozen": "down|bias", "remat": "dots"}),
    (layers.of_experts, 4, 2, False, {"precision": "fp32"}),
    (layers.scanned, 5, 1, True, {"stage": 0}), (layers.scanned, 4, 2, False, {"stage": 1}),
    (layers.scanned, 5, 3, True, {"stage": 2, "grad_accum_steps": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "count", "devices", "tied", "settings"), CASES)
def test_gradients_equal_those_of_plain_jax(loss, count, devices, tied, settings):
    params, settings = make(count, tied), {"remat": "none"} | settings
    frozen = settings.get("frozen", "").split("|")

    def plain(params, x):
        return loss({n: jax.lax.stop_gradient(p) if n in frozen else p
                     for n, p in params.items()}, x)  # fmt: skip

    with FOR_GPU():
        found, jaxpr = read(loss, lambda: params, TOKENS, devices, **settings)
        assert all(own.scanned and own.unrolled for own in found)
        assert loops(jaxpr) == (settings.get("grad_accum_steps", 1) > 1)
        check_gradients(loss, params, TOKENS, devices, plain=plain, **settings)


def test_layers_are_unrolled_for_gpus_where_more_than_inputs_is_saved():
    def unrolled(**settings):
        return read(**settings)[0][0].unrolled

    assert not unrolled()
    with FOR_GPU():
        for policy in ("none", "dots", "names:h", layers.DOTS):
            assert unrolled(remat=policy), policy
        for policy in ("block", "block@host", "block_sqrt", "names@host:h", "names:h@host"):
            assert not unrolled(remat=policy), policy
        assert not unrolled(bucket_bytes=64), "run by jax.lax.scan"
    with cudnn.compiling_for("tpu"):
        assert not unrolled()


def test_models_of_few_layers_are_unrolled_and_those_of_7b_are_not():
    def unrolled(model):
        zero = zero_jax.Zero(zero_jax.abstract_mesh(8), 3, precision="bf16", remat="dots")
        case = Case(families.preset(model), zero, "adamw", 8, 1024)
        with FOR_GPU():
            return [own.unrolled for own in case.plan(3).layers]

    assert unrolled("124m") == [True]
    for model in ("1.5b", "7.5b", "llama-3.1-8b"):
        assert unrolled(model) == [False], model


def test_an_evaluation_keeps_the_loop_and_its_value():
    zero, params = zero_on(2, remat="none"), make(5)
    with FOR_GPU():
        evaluate = jax.jit(zero.evaluate(layers.scanned))
        shards = zero.shard(params)
        assert loops(evaluate.trace(shards, TOKENS).jaxpr.jaxpr) == 1
        value = evaluate(shards, TOKENS)[0]
    assert float(value) == pytest.approx(float(layers.scanned(params, TOKENS)), rel=1e-5)


def test_a_plan_says_that_layers_are_unrolled():
    zero = zero_on(2, remat="dots")
    params, tx = zero.eval_shape(lambda: make(4)), zero.optimizer(optax.sgd(0.1))
    said = functools.partial(zero.plan, layers.scanned, tx, params, TOKENS)
    assert "4 scanned" in plans.format_layers(said()) and "unrolled" not in str(said())
    with FOR_GPU():
        assert "4 scanned" in plans.format_layers(said()) and "(unrolled: " in str(said())


# Compiled for an H100. 12 x 1024 tokens of width 256 dominate all that is moved and held.
CONFIG = gpt.GPTConfig(layers=6, width=256, heads=4, vocab=512, seq=1024)


def compiled(remat, devices):
    zero = zero_jax.Zero(zero_jax.abstract_mesh(devices), 3, precision="bf16", remat=remat)
    return Case(CONFIG, zero, "adamw", 12 * devices).plan(3, target="h100")


@pytest.mark.compile
@pytest.mark.parametrize(("remat", "devices", "most"), [("none", 4, 0.8), ("dots", 1, 0.9)])
def test_fewer_bytes_are_moved_and_held(remat, devices, most, monkeypatch):
    unrolled = compiled(remat, devices)
    assert abs(unrolled.error) < 0.1
    monkeypatch.setattr(scans, "MOST_EQUATIONS", 0)
    looped = compiled(remat, devices)
    assert abs(looped.error) < 0.1
    assert unrolled.time.traffic_bytes < most * looped.time.traffic_bytes
    assert unrolled.total_bytes < 1.02 * looped.total_bytes
    assert unrolled.compiled.flops == looped.compiled.flops
    assert unrolled.elements_per_param == looped.elements_per_param, "gathers are not merged"
