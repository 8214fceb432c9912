"""Host and device bytes of programs compiled for H100 when states stay in host memory; no GPU."""

import functools

import pytest

import zero_jax
from zero_jax.models import gpt
from zero_jax.offload.tiers import Offload
from zero_jax.plan.case import Case

pytestmark = pytest.mark.compile

N, MIB = 8, 2**20
PIECE = 4 * MIB
# Arrays of 4 bytes a parameter that are in host memory.
SETTINGS = {
    0: None,
    2: Offload(optimizer=True, piece_bytes=PIECE),
    3: Offload(optimizer=True, params=True, piece_bytes=PIECE),
}
# Scalars, tables of the runtime, pieces that are rounded up to XLA's 128 bytes.
SLACK = MIB // 8


@functools.cache
def plan_of(words, layers):
    config = gpt.GPTConfig(layers=layers, width=512, heads=8, vocab=2048, seq=128)
    settings = {"stage": 3, "precision": "bf16", "remat": "block", "offload": SETTINGS[words]}
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), **settings)
    return Case(config, zero, "adamw", N).plan(3, target="h100")


@pytest.mark.parametrize("words", [2, 3])
@pytest.mark.parametrize("layers", [8, 32])
def test_8_or_12_bytes_a_parameter_move_from_the_device_to_the_host(layers, words):
    plan, plain = plan_of(words, layers), plan_of(0, layers)
    found, without, stored = plan.compiled, plain.compiled, plain.predicted.parameters
    assert found.host_bytes == words * stored == plan.predicted.host and without.host_bytes == 0
    assert found.argument_bytes == without.argument_bytes - found.host_bytes
    assert found.argument_bytes == plan.predicted.argument_bytes
    assert found.alias_bytes == without.alias_bytes - found.host_bytes
    # Masters come to the device while the model uses them, which at stage 3 is the whole step.
    masters = stored if words == 3 else 0
    assert found.temp_bytes <= without.temp_bytes + masters + 2 * PIECE + SLACK
    assert abs(plan.error) < 0.15
