"""Every mesh with every stage and every remat policy: ten steps equal those of one device.

    python tests/cross_product.py [gpt|linen ...]      # 264 trainings, some 15 minutes

Prints the largest difference of each mesh.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent / "sharding"))

import conftest  # noqa: F401  (eight devices, and a fast compiler)
import jax.numpy as jnp
from problems import ulps
from test_model_axis import MESHES, ULPS, plain, train

REMAT = ("none", "dots", "block", "block_sqrt", "block@host")
SPLIT = (*REMAT, "block@partitioned", "block@partitioned+host")

for name, (n, mp) in itertools.product(sys.argv[1:] or ["gpt", "linen"], [(8, 1), *MESHES]):
    want, differences = plain(name), []
    for stage, remat in itertools.product(range(4), SPLIT if mp > 1 else REMAT):
        losses, params, _ = train(name, n, mp, stage=stage, remat=remat)
        found = max(ulps(jnp.array(losses), jnp.array(want[0])), ulps(params, want[1]))
        assert found < ULPS, f"{name}, {n} x {mp}, stage {stage}, {remat}: {found:.0f} ulps"
        differences.append(found)
    print(f"{name}, {n} x {mp}: {len(differences)} runs, {max(differences):.0f} ulps", flush=True)
