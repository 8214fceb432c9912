"""ZeRO for JAX and Flax: optimizer state, gradients and parameters partitioned over devices."""

from zero_jax._version import __version__ as __version__
from zero_jax.adapters.lora import Lora as Lora
from zero_jax.checkpoint.checkpoints import Checkpoints as Checkpoints
from zero_jax.collectives import manual as manual
from zero_jax.collectives.precision import Precision as Precision
from zero_jax.context_parallel.attention import attention as attention
from zero_jax.distributed.agreement import check_agreement as check_agreement
from zero_jax.distributed.initialize import initialize as initialize
from zero_jax.distributed.rendezvous import JoinError as JoinError
from zero_jax.distributed.watchdog import Watchdog as Watchdog
from zero_jax.engine.losses import Weighted as Weighted
from zero_jax.engine.partitioned import partition_specs as partition_specs
from zero_jax.engine.partitioned import partitioned as partitioned
from zero_jax.engine.step import Metrics as Metrics
from zero_jax.engine.step import NonFiniteError as NonFiniteError
from zero_jax.engine.step import TrainStep as TrainStep
from zero_jax.engine.step import first_nonfinite as first_nonfinite
from zero_jax.hlo.auditor import assert_communication as assert_communication
from zero_jax.hlo.auditor import audit as audit
from zero_jax.offload.host import Offload as Offload
from zero_jax.plan import model_states as _model_states
from zero_jax.plan.plans import Plan as Plan
from zero_jax.remat.policies import Remat as Remat
from zero_jax.sharding.layout import unpad as unpad
from zero_jax.sharding.mesh import abstract_mesh as abstract_mesh
from zero_jax.sharding.mesh import batch_share as batch_share
from zero_jax.sharding.mesh import global_batch as global_batch
from zero_jax.sharding.mesh import make_mesh as make_mesh
from zero_jax.zero import Zero as Zero
from zero_jax.zero import paper_config as paper_config

memory = _model_states
