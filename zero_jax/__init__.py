"""ZeRO for JAX and Flax: optimizer state, gradients and parameters partitioned over devices."""

from zero_jax._version import __version__
from zero_jax.adapters.lora import Lora
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.collectives import manual
from zero_jax.collectives.precision import Precision
from zero_jax.distributed.agreement import check_agreement
from zero_jax.distributed.initialize import initialize
from zero_jax.distributed.rendezvous import JoinError
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.engine.losses import Weighted
from zero_jax.engine.partitioned import partition_specs, partitioned
from zero_jax.engine.step import Metrics, NonFiniteError, TrainStep, first_nonfinite
from zero_jax.hlo.auditor import assert_communication, audit
from zero_jax.offload.host import Offload
from zero_jax.plan import model_states as memory
from zero_jax.plan.plans import Plan
from zero_jax.remat.policies import Remat
from zero_jax.sharding.layout import unpad
from zero_jax.sharding.mesh import abstract_mesh, batch_share, global_batch, make_mesh
from zero_jax.zero import Zero, paper_config

__all__ = [
    "Checkpoints",
    "JoinError",
    "Lora",
    "Metrics",
    "NonFiniteError",
    "Offload",
    "Plan",
    "Precision",
    "Remat",
    "TrainStep",
    "Watchdog",
    "Weighted",
    "Zero",
    "__version__",
    "abstract_mesh",
    "assert_communication",
    "audit",
    "batch_share",
    "check_agreement",
    "first_nonfinite",
    "global_batch",
    "initialize",
    "make_mesh",
    "manual",
    "memory",
    "paper_config",
    "partition_specs",
    "partitioned",
    "unpad",
]
