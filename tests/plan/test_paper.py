"""The paper's closed forms against every digit of its tables 1 and 2."""

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from zero_jax.plan import paper

# The cells of table 1 that the paper cuts off: model, N, column (P_os, P_os+g, P_os+g+p).
TRUNCATED = {
    *((128e9, 1024, 0), (128e9, 1024, 1)),
    *((1e12, n, column) for n in (64, 256, 1024) for column in (0, 1)),
}
DEGREES = (1, 4, 16, 64, 256, 1024)
CELLS = [(row, column) for row in paper.table_1() for column in range(3)]


def bytes_held(psi, shards, stage, state_bytes=12):
    """The definition: fp16 parameters and gradients and the state, `stage` of them split."""
    held = [state_bytes * psi, 2 * psi, 2 * psi]  # in the order in which stages split them
    return sum(held[:stage]) / shards + sum(held[stage:])


def as_printed(value, cell, rounding):
    """`value` with as many digits behind the point as `cell` has."""
    return str(Decimal(value).quantize(Decimal(cell), rounding=rounding))


def test_table_1_has_every_model_and_degree():
    assert [(row.psi, row.shards) for row in paper.table_1()] == [
        (psi, n) for psi in (7.5e9, 128e9, 1e12) for n in DEGREES
    ]
    assert len(CELLS) == 54


@pytest.mark.parametrize(
    ("row", "column"), CELLS, ids=[f"{r.psi:.0e}-{r.shards}-{c}" for r, c in CELLS]
)
def test_table_1_digit_for_digit(row, column):
    exact = bytes_held(row.psi, row.shards, column + 1) / 1e9
    assert row.computed[column] == pytest.approx(exact, rel=1e-12)
    cut_off = (row.psi, row.shards, column) in TRUNCATED
    cell = row.printed[column]
    assert as_printed(exact, cell, ROUND_DOWN if cut_off else ROUND_HALF_UP) == cell


def test_only_cells_that_rounding_would_change_are_called_truncated():
    for row in paper.table_1():
        for column, cell in enumerate(row.printed):
            exact = bytes_held(row.psi, row.shards, column + 1) / 1e9
            rounds = as_printed(exact, cell, ROUND_HALF_UP) == cell
            assert rounds != ((row.psi, row.shards, column) in TRUNCATED)


@pytest.mark.parametrize("column", range(4), ids=paper.STAGES)
def test_table_2_prints_the_first_row_times_mp(column):
    first = paper.table_2()[0]
    exact = 32e9 / bytes_held(1, 64, column) / 1e9
    base = as_printed(exact, first.printed[column].rstrip("B"), ROUND_HALF_UP)
    assert base + "B" == first.printed[column]
    for row in paper.table_2():
        assert row.devices == 64 * row.model_parallel
        assert row.computed[column] == pytest.approx(1e9 * exact * row.model_parallel, rel=1e-12)
        billions, cell = Decimal(base) * row.model_parallel, row.printed[column]
        if cell.endswith("T"):
            assert as_printed(billions / 1000, cell.rstrip("T"), ROUND_HALF_UP) + "T" == cell
        else:
            assert f"{billions}B" == cell


def test_table_2_has_every_degree_and_measured_less_than_theory():
    assert [row.model_parallel for row in paper.table_2()] == [1, 2, 4, 8, 16]
    for row in paper.table_2():
        for theory, measured in zip(row.computed, row.measured, strict=False):
            assert 0.6 * theory < 1e9 * float(measured.rstrip("B")) < theory


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("shards", "mp", "state_bytes"), [(1, 1, 12), (64, 16, 12), (7, 3, 8)])
def test_model_states_split_in_the_order_of_the_stages(stage, shards, mp, state_bytes):
    held = paper.model_states(5e9, shards, stage, state_bytes, mp)
    assert held == pytest.approx(bytes_held(5e9, shards, stage, state_bytes) / mp)
    assert paper.largest_model(held, shards, stage, state_bytes, mp) == pytest.approx(5e9)


def test_words_are_a_reduce_scatter_and_a_gather_and_at_stage_3_one_more():
    reduce_scatter = all_gather = 1
    assert [paper.words(stage) for stage in (0, 1, 2)] == [reduce_scatter + all_gather] * 3
    assert paper.words(3) == reduce_scatter + 2 * all_gather


def test_checkpointing_brings_60_gb_of_activations_below_8():
    shape = {"layers": 48, "width": 1600, "seq": 1024, "batch": 32}  # GPT-2 of 1.5B
    assert round(paper.activations(**shape) / 1e9) == 60
    one_block = paper.activations(**shape | {"layers": 1})  # at work while it is recomputed
    assert 5e9 < paper.checkpoints(**shape) + one_block < 8e9


def test_partitioned_activations_keep_one_part_in_mp():
    shape = {"layers": 132, "width": 6144, "seq": 1024, "batch": 3}
    assert paper.checkpoints(**shape, model_parallel=16) * 16 == paper.checkpoints(**shape)
    assert paper.checkpoints(**shape, word_bytes=4) == 4 * 132 * 6144 * 1024 * 3


def test_partitioned_activations_send_less_than_a_tenth_more():
    plain = paper.block_words(6144, 1024, 8)
    assert plain == 12 * 6144 * 1024 * 8
    assert paper.block_words(6144, 1024, 8, True) - plain == 6144 * 1024 * 8 < plain / 10


def test_text_tables_show_computed_beside_printed():
    one, two = paper.format_table_1(), paper.format_table_2()
    assert "4011.72 [4011]" in one and "30.57 [30.4B]" in two
    for text, rows in ((one, paper.table_1()), (two, paper.table_2())):
        lines = text.splitlines()
        assert len(lines) == 2 + len(rows) and len({len(line) for line in lines[1:]}) == 1
        for line, row in zip(lines[2:], rows, strict=True):
            assert all(f"[{cell}]" in line for cell in row.printed)
    assert "20B / 100B" in two.splitlines()[-1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paper.model_states(1e9, 64, 4), "stage=4.*0, 1, 2 and 3"),
        (lambda: paper.largest_model(32e9, 64, -1), "stage=-1"),
        (lambda: paper.words(4), "stage=4"),
        (lambda: paper.model_states(1e9, 0, 1), "N=0.*at least 1"),
        (lambda: paper.checkpoints(1, 1, 1, 1, model_parallel=0), "MP=0.*at least 1"),
    ],
)
def test_bad_degrees_and_stages_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
