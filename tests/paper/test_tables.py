"""The paper's closed forms against every digit of its tables 1 and 2."""

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from benchmarks.paper import tables

# The cells of table 1 that the paper cuts off: model, N, column (P_os, P_os+g, P_os+g+p).
TRUNCATED = {
    *((128e9, 1024, 0), (128e9, 1024, 1)),
    *((1e12, n, column) for n in (64, 256, 1024) for column in (0, 1)),
}


def bytes_held(psi, shards, stage, state_bytes=12):
    """The definition: fp16 parameters and gradients and the state, `stage` of them sharded."""
    held = [state_bytes * psi, 2 * psi, 2 * psi]  # in the order in which stages shard them
    return sum(held[:stage]) / shards + sum(held[stage:])


def as_printed(value, cell, rounding=ROUND_HALF_UP):
    """`value` with as many digits behind the point as `cell` has."""
    return str(Decimal(value).quantize(Decimal(cell), rounding=rounding))


def test_table_1_digit_for_digit():
    degrees = (1, 4, 16, 64, 256, 1024)
    assert list(tables.TABLE_1) == [(psi, n) for psi in (7.5e9, 128e9, 1e12) for n in degrees]
    for (psi, n), cells in tables.TABLE_1.items():
        for column, cell in enumerate(cells):
            exact = bytes_held(psi, n, column + 1) / 1e9
            assert tables.model_states(psi, n, column + 1) / 1e9 == pytest.approx(exact, rel=1e-12)
            cut_off = (psi, n, column) in TRUNCATED  # exactly those that rounding would change
            assert (as_printed(exact, cell) != cell) == cut_off
            assert not cut_off or as_printed(exact, cell, ROUND_DOWN) == cell


@pytest.mark.parametrize("column", range(4), ids=tables.STAGES)
def test_table_2_prints_the_first_row_times_mp(column):
    assert list(tables.TABLE_2) == [1, 2, 4, 8, 16]
    exact = 32e9 / bytes_held(1, 64, column) / 1e9
    first = tables.TABLE_2[1][0][column]
    base = as_printed(exact, first.rstrip("B"))
    assert base + "B" == first
    for mp, (printed, measured) in tables.TABLE_2.items():
        theory = tables.largest_model(32e9, 64, column, mp=mp)
        assert theory == pytest.approx(1e9 * exact * mp, rel=1e-12)
        billions, cell = Decimal(base) * mp, printed[column]
        if cell.endswith("T"):
            assert as_printed(billions / 1000, cell.rstrip("T")) + "T" == cell
        else:
            assert f"{billions}B" == cell
        if column < 2:
            assert 0.6 * theory < 1e9 * float(measured[column].rstrip("B")) < theory


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("shards", "mp", "state_bytes"), [(1, 1, 12), (64, 16, 12), (7, 3, 8)])
def test_model_states_are_sharded_in_the_order_of_the_stages(stage, shards, mp, state_bytes):
    held = tables.model_states(5e9, shards, stage, state_bytes, mp)
    assert held == pytest.approx(bytes_held(5e9, shards, stage, state_bytes) / mp)
    assert tables.largest_model(held, shards, stage, state_bytes, mp) == pytest.approx(5e9)


def test_checkpointing_brings_60_gb_of_activations_below_8():
    shape = {"layers": 48, "width": 1600, "seq": 1024, "batch": 32}  # GPT-2 of 1.5B
    assert round(tables.activations(**shape) / 1e9) == 60
    one_block = tables.activations(**shape | {"layers": 1})  # at work while it is recomputed
    assert 5e9 < tables.checkpoints(**shape) + one_block < 8e9
    assert tables.checkpoints(**shape, mp=16) * 16 == tables.checkpoints(**shape)


def test_partitioned_activations_send_less_than_a_tenth_more():
    plain = tables.block_elements(6144, 1024, 8)
    assert plain == 12 * 6144 * 1024 * 8
    assert tables.block_elements(6144, 1024, 8, True) - plain == 6144 * 1024 * 8 < plain / 10


def test_text_tables_show_computed_beside_printed():
    one, two = tables.table_1(), tables.table_2()
    assert "4011.72 [4011]" in one and "30.57 [30.4B]" in two
    for line, cells in zip(one.splitlines()[2:], tables.TABLE_1.values(), strict=True):
        assert all(f"[{cell}]" in line for cell in cells)
    for line, (cells, measured) in zip(two.splitlines()[2:], tables.TABLE_2.values(), strict=True):
        assert all(f"[{cell}]" in line for cell in cells) and line.endswith(" / ".join(measured))
