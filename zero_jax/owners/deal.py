"""Who owns which matrix: all kinds dealt out together, so that no device waits for long.

Every owner gets as many of a kind as there are for all; what is left over goes, the dearest first,
to who has least to do. Matrices of a kind that are owned by one device follow each other, so that
they are sent as one piece.
"""

from collections.abc import Sequence


def deal(kinds: Sequence[tuple[int, int]], owners: int) -> list[list[int]]:
    """How many matrices of each kind each owner gets.

    Args:
      kinds: of each kind how many there are, and what one costs.
      owners: N.

    >>> deal([(5, 10), (1, 7), (3, 4)], 2)
    [[3, 0, 1], [2, 1, 2]]
    """
    counts = [[total // owners for total, _ in kinds] for _ in range(owners)]
    load = [sum(total // owners * cost for total, cost in kinds)] * owners
    left = [(cost, kind) for kind, (total, cost) in enumerate(kinds) for _ in range(total % owners)]
    for cost, kind in sorted(left, key=lambda one: (-one[0], one[1])):
        owner = min(range(owners), key=load.__getitem__)
        counts[owner][kind] += 1
        load[owner] += cost
    return counts
