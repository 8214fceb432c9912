"""Tensor parallelism in programs that the GPU compiler made for 64 H100 and more; needs no GPU.

Every count is Megatron's (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2), every byte a
formula. 7.5B: 36 layers of 4096 on 8 hosts of 8, N = 8, MP = 8, 4 rows of 1024 tokens.
"""

import functools

import pytest
from test_plan import case

from zero_jax.models import gpt

pytestmark = pytest.mark.compile
D, L, ROWS, T = 4096, 36, 4, 1024
RESIDUAL = ROWS * T * D  # b·s·h elements


@functools.cache
def planned(*more, model="7.5b", devices=64, mp=8, stage=3):
    args = ["--model", model, "--devices", devices, "--model-parallel", mp, "--stage", stage]
    args += ["--batch-per-device", ROWS, "--reduce", "bf16", *more]
    return case(*args).plan(stage, target="h100")


def along_model(*more):
    """Kind and dtype of what goes along `model`, one entry a residual stream and run; XLA sends
    two of them in one collective where it can."""
    found = [c for c in planned(*more).compiled.collectives if c.axis == "model"]
    large = [(c, c.runs * c.elements // RESIDUAL) for c in found if c.elements % RESIDUAL == 0]
    return [(c.kind, c.dtype) for c, times in large for _ in range(times)]


@pytest.mark.parametrize(("mp", "stage", "factor"), [(2, 3, 3), (8, 1, 2), (8, 3, 3)])
def test_states_and_temporaries_are_predicted(mp, stage, factor):
    found = planned(mp=mp, stage=stage)
    assert found.predicted.argument_bytes == found.compiled.argument_bytes
    assert found.predicted.alias_bytes == found.compiled.alias_bytes
    assert abs(found.error) < 0.05
    # Along data, for its part of the model. What is replicated on the model axis is a part in 1,300
    # of the model, but MP times that of Ψ / MP.
    assert found.words_per_param == pytest.approx(factor, rel=0.007)


def test_a_device_stores_one_part_in_n_times_mp():
    config = gpt.preset("7.5b")
    # Held by every device of the model axis: biases, norms and positions.
    whole = L * 13 * D + T * D + 2 * D
    split = gpt.num_params(config) - whole
    scalars, rows = 16 + 4 + 4, ROWS * (T + 1) * 4  # the guard, Adam's count and its schedule's
    want = 12 * (split // 64 + whole // 8) + scalars + rows
    assert planned().compiled.argument_bytes == want


def test_a_layer_sends_two_all_reduces_forward_two_backward_and_one_to_recompute():
    # The second sum of a layer is not needed again by its backward pass. One for the embedding.
    assert along_model() == [("all-reduce", "bf16")] * (5 * L + 1)


def test_sequence_parallelism_sends_their_halves_and_saves_one_part_in_mp():
    runs = along_model("--sequence-parallel")
    # Forward 2 and 2, recomputed 2 and 1, backward 2 and 2; embedding and head once each.
    assert runs.count(("reduce-scatter", "bf16")) == 5 * L + 1
    assert runs.count(("all-gather", "bf16")) == pytest.approx(6 * L, abs=4)
    assert set(runs) == {("reduce-scatter", "bf16"), ("all-gather", "bf16")}
    plain, split = (
        [t.bytes for t in planned(*more).compiled.peak.temporaries]
        for more in ((), ("--sequence-parallel",))
    )
    assert 2 * L * RESIDUAL in plain and 2 * L * RESIDUAL not in split
    assert 2 * L * RESIDUAL // 8 in split


@pytest.mark.parametrize("mp", [2, 8])
def test_partitioned_activations_take_saved_inputs_to_one_part_in_mp(mp):
    whole, split = planned(mp=mp), planned("--remat", "block@partitioned", mp=mp)
    fallen = whole.compiled.temp_bytes - split.compiled.temp_bytes
    assert fallen >= 0.9 * 2 * L * RESIDUAL * (1 - 1 / mp)
    more = split.compiled.words_along("model") - whole.compiled.words_along("model")
    assert more == L * RESIDUAL, "one gather a layer, in the backward pass"
    assert more < 0.1 * whole.compiled.words_along("model")
    if mp == 2:
        assert abs(split.error) < 0.06


def test_partitioned_activations_in_host_memory_are_not_on_the_device():
    found = planned("--remat", "block@partitioned+host")
    assert found.compiled.host_bytes == found.predicted.host == 2 * L * RESIDUAL // 8
    assert found.compiled.temp_bytes < planned().compiled.temp_bytes - 0.9 * 2 * L * RESIDUAL


def test_a_trillion_parameters_on_a_thousand_gpus():
    found = planned(model="1t", devices=1024, mp=16)
    assert found.compiled.total_bytes < 80e9
    assert abs(found.error) < 0.05
    assert found.words_per_param == pytest.approx(3, rel=0.002)
