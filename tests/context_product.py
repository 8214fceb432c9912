"""Every mesh with a context axis, stage, exchange and model: equal to one device.

python tests/context_product.py      # 224 cases, 35 minutes on one core
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent / "context_parallel"))

import conftest  # noqa: F401  (eight devices, and a fast compiler)
import numpy as np
from test_context_step import check_gradients, model_of, rows, ten_losses

MESHES = [(data, context) for data in (1, 2) for context in (2, 3, 4, 8) if data * context <= 8]
# Name of the model, packed rows, LoRA.
CASES = [
    ("gpt", False, False),
    ("llama", True, False),
    ("chunks", True, False),
    ("gpt", True, True),
]

count = 0
for name, packed, lora in CASES:
    model, batch = model_of(name, lora), rows(packed)
    one = ten_losses(model, batch, 1, 1, stage=3)
    for (data, context), stage in itertools.product(MESHES, range(4)):
        for exchange in ("all_gather", "all_to_all"):
            settings = {"context_exchange": exchange}
            check_gradients(model, batch, data, context, stage, settings)
            losses = ten_losses(model, batch, data, context, stage=stage, **settings)
            np.testing.assert_allclose(losses, one, rtol=1e-4)
            count += 1
    print(f"{name}, packed {packed}, LoRA {lora}: {count} cases so far are equal", flush=True)
