"""The paper's configurations by name: `Zero(mesh, **zero_jax.CONFIGURATIONS["c4"])`.

  c1         P_os + CB + MD              stage 1
  c2         c1 + P_a                    and what remat saves is split over `model`
  c3         P_os+g + CB + MD            stage 2
  c4         c3 + P_a
  c5         c4 + P_a+cpu                and rests in host memory
  zero-100b  P_os+g + ZeRO-R             what the paper implemented: c4

Constant-size buffers (CB) and static memory planning (MD) are always on. P_a needs a `model` axis;
the paper's is 16. Source: ZeRO (arXiv:1910.02054), section 10.1 and table 3.
"""

import types
from collections.abc import Mapping
from typing import Any

from zero_jax.names import unknown

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "c1": {"stage": 1, "remat": "block"},
        "c2": {"stage": 1, "remat": "block@partitioned"},
        "c3": {"stage": 2, "remat": "block"},
        "c4": {"stage": 2, "remat": "block@partitioned"},
        "c5": {"stage": 2, "remat": "block@partitioned+host"},
        "zero-100b": {"stage": 2, "remat": "block@partitioned"},
    }
)


def configuration(name: str) -> Mapping[str, Any]:
    """The settings of a configuration of the paper.

    Raises:
      ValueError: for an unknown name; names the nearest.

    >>> configuration("c5")["remat"]
    'block@partitioned+host'
    """
    if name not in CONFIGURATIONS:
        raise ValueError(unknown("configuration", name, CONFIGURATIONS))
    return CONFIGURATIONS[name]
