"""Who owns which matrix."""

import numpy as np
import pytest

from zero_jax.owners.deal import deal


@pytest.mark.parametrize("owners", [1, 2, 3, 5, 8, 64])
def test_every_matrix_has_one_owner_and_nobody_has_much_more_than_another(owners):
    kinds = [(36, 206), (36, 481), (36, 618), (36, 618), (1, 40)]
    counts = np.array(deal(kinds, owners))
    assert counts.sum(0).tolist() == [total for total, _ in kinds]
    loads = counts @ [cost for _, cost in kinds]
    assert loads.max() - loads.min() <= 618, "the dearest matrix makes the difference at most"
    assert loads.max() / loads.mean() < 1.15


def test_an_owner_may_have_nothing():
    assert deal([(2, 5)], 3) == [[1], [1], [0]]
