"""Tensor parallelism in programs that the GPU compiler made for 64 H100 and more; needs no GPU.

Every count is Megatron's (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2), every byte a
formula. 7.5B: 36 layers of 4096 on 8 hosts of 8, N = 8, MP = 8, 4 rows of 1024 tokens.
"""

import functools

import pytest

from zero_jax.commands import plan as command
from zero_jax.models import gpt

pytestmark = pytest.mark.compile
D, L, ROWS, T = 4096, 36, 4, 1024
RESIDUAL = ROWS * T * D  # b·s·h elements


@functools.cache
def planned(*more, model="7.5b", devices=64, mp=8, stage=3, rows=ROWS):
    args = ["--model", model, "--devices", devices, "--model-parallel", mp, "--stage", stage]
    args += ["--batch-per-device", rows, "--reduce", "bf16", *more]
    parsed = command.parser().parse_args([str(a) for a in args])
    return command.case_of(parsed).plan(stage, target="h100")


def along_model(*more, **options):
    """Kind and dtype of what goes along `model`, one entry a residual stream and run; XLA sends
    two of them in one collective where it can."""
    found = [c for c in planned(*more, **options).compiled.collectives if c.axis == "model"]
    large = [(c, c.runs * c.elements // RESIDUAL) for c in found if c.elements % RESIDUAL == 0]
    return [(c.kind, c.dtype) for c, times in large for _ in range(times)]


@pytest.mark.parametrize("mp", [2, 4, 8])
def test_states_and_temporaries_are_foretold(mp):
    for stage in (1, 3) if mp == 8 else (3,):
        found = planned(mp=mp, stage=stage)
        assert found.predicted.argument_bytes == found.compiled.argument_bytes
        assert found.predicted.alias_bytes == found.compiled.alias_bytes
        assert abs(found.error) < 0.05


def test_everything_rests_on_one_part_in_n_times_mp():
    config = gpt.preset("7.5b")
    # Held by every device of the model axis: biases, norms and positions.
    whole = L * 13 * D + T * D + 2 * D
    split = gpt.num_params(config) - whole
    scalars, rows = 16 + 4 + 4, ROWS * (T + 1) * 4  # the guard, Adam's count and its schedule's
    want = 12 * (split // 64 + whole // 8) + scalars + rows
    assert planned().compiled.argument_bytes == want


def test_a_layer_sends_two_all_reduces_forward_two_backward_and_one_to_recompute():
    runs = along_model()
    # The second sum of a layer is not needed again by its backward pass. One for the embedding.
    assert runs == [("all-reduce", "bf16")] * (5 * L + 1)


def test_sequence_parallelism_sends_their_halves():
    runs = along_model("--sequence-parallel")
    # Forward 2 and 2, recomputed 2 and 1, backward 2 and 2; embedding and head once each.
    assert runs.count(("reduce-scatter", "bf16")) == 5 * L + 1
    assert runs.count(("all-gather", "bf16")) == pytest.approx(6 * L, abs=4)
    assert set(runs) == {("reduce-scatter", "bf16"), ("all-gather", "bf16")}


def test_sequence_parallelism_saves_one_part_in_mp_of_each_block_input():
    def saved(*more):
        return [t.bytes for t in planned(*more).compiled.peak.temporaries]

    assert 2 * L * RESIDUAL in saved()
    assert 2 * L * RESIDUAL not in saved("--sequence-parallel")
    assert 2 * L * RESIDUAL // 8 in saved("--sequence-parallel")


@pytest.mark.parametrize(("stage", "factor"), [(1, 2), (3, 3)])
def test_zero_sends_its_words_along_data_for_its_part_of_the_model(stage, factor):
    # What is whole on the model axis is a part in 1,300 of the model, but MP times that of Ψ / MP.
    assert planned(stage=stage).words_per_param == pytest.approx(factor, rel=0.007)


@pytest.mark.parametrize("mp", [2, 4, 8])
def test_partitioned_activations_take_saved_inputs_to_one_part_in_mp(mp):
    whole, split = planned(mp=mp), planned("--remat", "block@partitioned", mp=mp)
    saved = 2 * L * RESIDUAL
    fallen = whole.compiled.temp_bytes - split.compiled.temp_bytes
    assert fallen >= 0.9 * saved * (1 - 1 / mp)
    more = split.compiled.words_along("model") - whole.compiled.words_along("model")
    assert more == L * RESIDUAL, "one gather a layer, in the backward pass"
    assert more < 0.1 * whole.compiled.words_along("model")


def test_partitioned_activations_are_foretold(every_pass):
    found = [planned.__wrapped__("--remat", "block@partitioned", mp=8)]
    found += [planned("--remat", "block@partitioned", mp=mp) for mp in (2, 4)]
    assert all(abs(own.error) < 0.06 for own in found)


def test_partitioned_activations_in_host_memory_are_not_on_the_device():
    found = planned("--remat", "block@partitioned+host")
    assert found.compiled.host_bytes == found.predicted.host == 2 * L * RESIDUAL // 8
    assert found.compiled.temp_bytes < planned().compiled.temp_bytes - 0.9 * 2 * L * RESIDUAL


def test_a_trillion_parameters_on_a_thousand_gpus():
    found = planned(model="1t", devices=1024, mp=16)
    assert found.compiled.total_bytes < 80e9
    assert abs(found.error) < 0.05
    assert found.words_per_param == pytest.approx(3, rel=0.002)
