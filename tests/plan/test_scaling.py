"""Superlinear scaling: from the formulas alone, and within sight of what the paper ran."""

import dataclasses
import sys

import pytest

from zero_jax.hlo.targets import target
from zero_jax.models import gpt_config
from zero_jax.plan import paper, scaling

V100 = target("v100-32gb")
LAYERS, WIDTH, SEQ, VOCAB = 132, 6144, 1024, 50304  # 60B
PSI = (VOCAB + SEQ) * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH
# Bytes a row on each of 16 devices: with P_a the inputs of all blocks, then a block at work, of
# which 10 + 2 bytes a value are whole, 24 and the scores of 48 heads are split.
SAVED_ROW = LAYERS * WIDTH * SEQ * 2 / 16
WORK_ROW = SEQ * WIDTH * (10 + 2 + 24 / 16) + 5 * 48 * SEQ**2 / 16
GRADIENTS_OF_A_BLOCK = 12 * WIDTH**2 * 2 / 16


def predict(name, devices, **options):
    shape = gpt_config.preset(name)
    sizes = (shape.layers, shape.width, shape.seq, shape.vocab)
    options = {"device": V100, "heads": shape.heads, **options}
    return scaling.scaling(*sizes, devices=devices, **options)


def one(name, devices, **options):
    (point,) = predict(name, [devices], **options)
    return point


def test_60b_more_than_doubles_from_64_to_128_devices():
    few, many = predict("60b", [64, 128])
    assert few.memory_bound and many.memory_bound
    assert many.total_flops > 2 * few.total_flops


def test_60b_is_above_linear_up_to_400_devices():
    points = predict("60b", [64, 128, 256, 400])
    speeds = [p.flops_per_device for p in points]
    batches = [p.batch for p in points]
    assert speeds == sorted(speeds) and batches == sorted(batches)
    assert points[3].total_flops > 400 / 64 * points[0].total_flops


def test_with_an_equal_batch_it_does_not_double():
    few, many = predict("60b", [64, 128], max_batch=16)
    assert (few.batch, many.batch) == (16, 16) and not few.memory_bound
    assert many.total_flops < 2 * few.total_flops


@pytest.mark.parametrize("efficiency", [0.2, 0.5, 1.0])
def test_it_takes_seven_sixths_of_the_batch_to_break_even(efficiency):
    # A ring of 4 sends 3/4 of its words and one of 8 sends 7/8, at any share of the peak.
    few = one("60b", 64, max_batch=12, efficiency=efficiency)
    same = one("60b", 128, max_batch=14, efficiency=efficiency)
    more = one("60b", 128, max_batch=15, efficiency=efficiency)
    assert same.flops_per_device == pytest.approx(few.flops_per_device, rel=1e-12)
    assert more.flops_per_device > few.flops_per_device


def test_at_the_batches_of_the_paper_it_more_than_doubles_too():
    few, many = (one("60b", n, max_batch=paper.SCALING_BATCHES[n]) for n in (64, 128))
    assert (few.batch, many.batch) == (16, 48)
    assert many.total_flops > 2 * few.total_flops


def test_plain_data_parallelism_gains_no_batch_and_no_speed():
    few, many = predict("124m", [16, 128], stage=0, model_parallel=1)
    assert few.batch == many.batch > 0
    assert few.total_flops < many.total_flops < 8 * few.total_flops


def test_the_batch_is_the_largest_that_fits():
    for devices, n in ((64, 4), (128, 8), (400, 25)):
        point = one("60b", devices)
        states = (2 + 14 / n) * PSI / 16
        free = 0.9 * 32e9 - states - GRADIENTS_OF_A_BLOCK
        assert point.shards == n
        assert point.batch == free // (SAVED_ROW + WORK_ROW)
        assert point.states_bytes == pytest.approx(states)
        assert point.activation_bytes == pytest.approx(point.batch * SAVED_ROW)
        assert point.work_bytes == pytest.approx(GRADIENTS_OF_A_BLOCK + point.batch * WORK_ROW)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_prediction_fills_more_than_the_reserve_leaves(stage):
    for point in predict("60b", range(64, 1040, 16), stage=stage):
        used = point.states_bytes + point.activation_bytes + point.work_bytes
        assert used <= 0.9 * 32e9 < used + SAVED_ROW + WORK_ROW


def test_seconds_of_a_step_by_hand():
    point = one("60b", 128, max_batch=10)
    rows, tokens = 10, 10 * 1024
    blocks = 8 * 12 * LAYERS * WIDTH**2 + 4 * 4 * LAYERS * WIDTH * SEQ
    compute = tokens * (blocks + 6 * VOCAB * WIDTH) / 16 / (0.5 * 125e12)
    data = 2 * 2 * PSI / 16 * 7 / 8 / (800e9 / 8 / 16)  # 800 Gb/s for the 16 GPUs of a host
    model = 2 * 13 * LAYERS * WIDTH * SEQ * rows * 15 / 16 / 150e9
    assert point.compute_seconds == pytest.approx(compute)
    assert point.data_wire_seconds == pytest.approx(data)
    assert point.model_wire_seconds == pytest.approx(model)
    assert point.step_seconds == pytest.approx(compute + data + model)
    config = gpt_config.preset("60b")
    flops = 8 * tokens * gpt_config.flops_per_token(config, config.seq)  # of eight replicas
    assert point.total_flops == pytest.approx(flops / point.step_seconds)
    assert point.flops_per_device == pytest.approx(point.total_flops / 128)


@pytest.mark.parametrize("name", ["124m", "13b", "60b", "1t"])
def test_parameters_and_flops_are_those_of_the_model(name):
    config = gpt_config.preset(name)
    setting = scaling.Setting(config.layers, config.width, config.seq, config.vocab, V100)
    assert setting.psi == gpt_config.num_params(config)
    assert setting.flops(3) == 3 * config.seq * gpt_config.flops_per_token(config, config.seq)


def test_partitioned_activations_save_one_part_in_mp_and_send_one_word_more():
    split = one("60b", 400, max_batch=2)
    whole = one("60b", 400, max_batch=2, partition_activations=False)
    assert whole.activation_bytes == 16 * split.activation_bytes
    assert 12 * split.model_wire_seconds == pytest.approx(13 * whole.model_wire_seconds)


def test_the_logits_count_where_they_are_more_than_a_block():
    small = scaling.Setting(12, 768, 1024, 50304, V100, model_parallel=1, stage=0)
    assert small.work_bytes(4) == 4 * 1024 * 50304 * (2 + 4)
    wide = dataclasses.replace(small, vocab=256)
    assert wide.work_bytes(1) == 1024 * 768 * 36 + 5 * 6 * 1024**2


def test_stage_3_sends_half_as_much_again_and_gathers_a_block():
    two, three = (one("60b", 128, max_batch=1, stage=s) for s in (2, 3))
    assert three.data_wire_seconds == pytest.approx(1.5 * two.data_wire_seconds)
    assert three.work_bytes - two.work_bytes == pytest.approx(GRADIENTS_OF_A_BLOCK)
    assert three.states_bytes < two.states_bytes


def test_words_take_the_fast_wire_inside_a_host():
    inside = one("124m", 16, model_parallel=1, max_batch=1)
    psi = gpt_config.num_params(gpt_config.preset("124m"))
    assert inside.data_wire_seconds == pytest.approx(2 * 2 * psi * 15 / 16 / 150e9)
    assert inside.model_wire_seconds == 0
    # A ring through all 16 GPUs of each host has the whole 100 GB/s of the host.
    across = one("124m", 32, model_parallel=1, max_batch=1)
    assert across.data_wire_seconds == pytest.approx(2 * 2 * psi * 31 / 32 / 100e9)
    two_hosts = one("60b", 64, model_parallel=32, max_batch=1)
    one_host = one("60b", 64, model_parallel=16, max_batch=1)
    slower = (31 / 32) / (15 / 16) * 150 / 100
    assert two_hosts.model_wire_seconds == pytest.approx(slower * one_host.model_wire_seconds)
    assert one("60b", 16, model_parallel=16, stage=3).data_wire_seconds == 0


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("13b", 128, {"model_parallel": 1}),
        ("60b", 400, {"stage": 1}),
        *((name, 400, {}) for name in ("8b", "40b", "60b", "100b", "170b")),
    ],
)
def test_what_the_paper_trained_fits(name, devices, options):
    assert one(name, devices, **options).batch >= 1


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("8b", 128, {"model_parallel": 1, "stage": 0}),  # Table 2: at most 2B
        ("8b", 64, {"model_parallel": 1, "stage": 1}),  # Table 2: at most 7.6B
        ("170b", 400, {"stage": 1}),
    ],
)
def test_what_table_2_rules_out_does_not_fit(name, devices, options):
    assert one(name, devices, **options).batch == 0


def test_the_prediction_is_within_a_fifth_of_15_petaflops():
    # The paper's sustained figure for 8B to 100B on 400 devices; half of the peak is a round
    # number, so this is a check of magnitude, not of digits.
    assert one("60b", 400).total_flops == pytest.approx(15e15, rel=0.2)


def test_the_table_stands_beside_the_batches_of_the_paper():
    points = predict("60b", [64, 128, 256, 400])
    header, *rows = (line.split() for line in scaling.format_scaling(points).splitlines()[:5])
    assert header[:2] == ["devices", "N"]
    assert [row[6] for row in rows] == ["16", "48", "48", "64"]
    assert [row[5] for row in rows] == [str(p.batch) for p in points]
    assert float(rows[0][-1]) == 1 < float(rows[1][-1])
    other = scaling.format_scaling(predict("40b", [64])).splitlines()[1].split()
    assert other[6] == "-"


def test_the_assumptions_carry_their_numbers():
    text = scaling.format_scaling(predict("60b", [64], efficiency=0.4, max_batch=3))
    for number in ("3.2 of 32.0 GB", "40% of 125", "13 D·T", "150 GB/s", "6.25 GB/s", "3 (cap)"):
        assert number in text


def test_where_nothing_fits_the_point_is_empty_and_says_so(tmp_path):
    point = one("1t", 64)
    assert point.batch == point.step_seconds == point.total_flops == point.flops_per_device == 0
    assert point.memory_bound and point.states_bytes > 32e9
    assert "batch 0: not a row fits" in scaling.format_scaling([point])
    with pytest.raises(ValueError, match="fits on 64 devices; take more"):
        scaling.plot_scaling([point], tmp_path / "none.png")


def test_linear_starts_at_the_first_point_that_fits():
    points = predict("170b", [64, 400, 800])
    assert [p.batch > 0 for p in points] == [False, True, True]
    rows = [line.split() for line in scaling.format_scaling(points).splitlines()[1:4]]
    assert [row[-1] for row in rows[:2]] == ["-", "1.000"] and float(rows[2][-1]) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, r"devices=\[\].*multiples"),
        ({"devices": [64, 100]}, r"devices=\[64, 100\].*model_parallel=16.*16 or 128"),
        ({"devices": [0]}, r"devices=\[0\]"),
        ({"model_parallel": 0}, "model_parallel=0.*at least 1"),
        ({"stage": 4}, "stage=4"),
        ({"heads": 0}, "heads=0"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"efficiency": 1.5}, "efficiency=1.5.*between 0 and 1"),
        ({"reserve": 1.0}, "reserve=1.0"),
        ({"device": target("cpu")}, "'cpu'.*v100-32gb"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        predict("60b", **{"devices": [64], **options})


def test_the_picture_is_drawn(tmp_path):
    path = tmp_path / "scaling.png"
    scaling.plot_scaling(predict("60b", [400, 64, 128]), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'zero_jax\[train\]'"):
        scaling.plot_scaling(predict("60b", [64]), tmp_path / "none.png")
