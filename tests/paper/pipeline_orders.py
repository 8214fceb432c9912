"""In which order the devices of a pipeline run their passes, as the papers draw it.

GPipe, arXiv:1811.06965, figure 2; 1F1B and interleaved, arXiv:2104.04473, figure 4, with the
warm-up of Megatron-LM; ZB-H1 and ZB-H2, arXiv:2401.10241, figure 3. Passes are those of
`pipeline_simulator`.
"""

from pipeline_simulator import Orders, Pass


def gpipe(p: int, m: int) -> Orders:
    order = [("F", 0, x) for x in range(m)] + [("B", 0, x) for x in reversed(range(m))]
    return [order] * p


def one_f_one_b(p: int, m: int) -> Orders:
    return [turns(m, p - 1 - i) for i in range(p)]


def interleaved(p: int, m: int, v: int) -> Orders:
    """Megatron's: groups of p micro-batches go through one chunk after the other."""
    groups = range(0, m, p)
    ahead = [("F", c, g + x) for g in groups for c in range(v) for x in range(p)]
    back = [("B", c, g + x) for g in groups for c in reversed(range(v)) for x in range(p)]
    return [woven(ahead, back, (p - i - 1) * 2 + (v - 1) * p) for i in range(p)]


def zero_bubble(p: int, m: int, ahead: int) -> Orders:
    """ZB-H1 with `ahead` 1, ZB-H2 with 2: in turn x of device i F of x, B of x - ahead·(p-1-i) and
    W of x - ahead·(p-1), those that there are."""
    lags = [{"F": 0, "B": ahead * (p - 1 - i), "W": ahead * (p - 1)} for i in range(p)]
    last = m + ahead * (p - 1)
    return [
        [(k, 0, x - n) for x in range(last) for k, n in lag.items() if 0 <= x - n < m]
        for lag in lags
    ]


def turns(m: int, warm_up: int) -> list[Pass]:
    return woven([("F", 0, x) for x in range(m)], [("B", 0, x) for x in range(m)], warm_up)


def woven(ahead: list[Pass], back: list[Pass], warm_up: int) -> list[Pass]:
    n = min(warm_up, len(ahead))
    pairs = [one for pair in zip(ahead[n:], back, strict=False) for one in pair]
    return ahead[:n] + pairs + back[len(ahead) - n :]
