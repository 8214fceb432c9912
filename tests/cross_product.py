"""Every mesh with every stage and every remat policy: ten steps equal those of one device.

    python tests/cross_product.py [gpt|linen ...]      # 264 trainings, some 15 minutes

The test suite takes a part of this product: every mesh with every stage, every policy with every
stage, and some of all together. This is all of it; it prints the worst difference of each mesh.
"""

import itertools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import conftest  # noqa: F401  (eight devices, and a fast compiler)
import jax.numpy as jnp
from problems import ulps
from test_model_axis import MESHES, ULPS, mesh_of, plain, train

WHOLE = ("none", "dots", "block", "block_sqrt", "block@host")
SPLIT = (*WHOLE, "block@partitioned", "block@partitioned+host")


def main(names: list[str]) -> None:
    for name, (n, mp) in itertools.product(names, [(8, 1), *MESHES]):
        worst, runs = 0.0, 0
        for stage, remat in itertools.product(range(4), SPLIT if mp > 1 else WHOLE):
            losses, params = train(name, mesh_of(n, mp), stage=stage, remat=remat)
            want = plain(name)
            off = max(ulps(jnp.array(losses), jnp.array(want[0])), ulps(params, want[1]))
            assert off < ULPS, f"{name}, {n} x {mp}, stage {stage}, {remat}: {off:.0f} ulps"
            worst, runs = max(worst, off), runs + 1
        print(f"{name}, {n} x {mp}: {runs} trainings, at most {worst:.0f} ulps", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["gpt", "linen"])
