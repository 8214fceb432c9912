"""ZeRO for JAX and Flax: optimizer state, gradients and parameters partitioned over devices."""

from zero_jax import memory as memory
from zero_jax._version import __version__ as __version__
from zero_jax.checkpoints import Checkpoints as Checkpoints
from zero_jax.configurations import CONFIGURATIONS as CONFIGURATIONS
from zero_jax.configurations import configuration as configuration
from zero_jax.hlo import assert_communication as assert_communication
from zero_jax.hlo import audit as audit
from zero_jax.mesh import abstract_mesh as abstract_mesh
from zero_jax.mesh import batch_share as batch_share
from zero_jax.mesh import check_agreement as check_agreement
from zero_jax.mesh import global_batch as global_batch
from zero_jax.mesh import initialize as initialize
from zero_jax.mesh import make_mesh as make_mesh
from zero_jax.partitioned import partition_specs as partition_specs
from zero_jax.partitioned import partitioned as partitioned
from zero_jax.planned import Plan as Plan
from zero_jax.precision import Precision as Precision
from zero_jax.step import Metrics as Metrics
from zero_jax.step import NonFiniteError as NonFiniteError
from zero_jax.step import TrainStep as TrainStep
from zero_jax.step import first_nonfinite as first_nonfinite
from zero_jax.tiers import Offload as Offload
from zero_jax.touch import gather as gather
from zero_jax.touch import shard as shard
from zero_jax.watchdog import Watchdog as Watchdog
from zero_jax.zero import Zero as Zero
