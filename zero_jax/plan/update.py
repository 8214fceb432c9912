"""Communication and temporaries of a partitioned optimizer update, predicted from its trace.

An elementwise transformation communicates nothing. An update that needs full matrices (Muon,
Shampoo, GaLore) sends each to its assigned device and receives the results, see `matrix_updates`.
Other products over sharded dims (those of vectors) are partitioned by XLA.
"""

from typing import NamedTuple

import jax
import optax

from zero_jax.engine.config import Config
from zero_jax.engine.transformations import without_frozen
from zero_jax.low_bit.state import FP32
from zero_jax.matrix_updates.update import AssignedUpdate, assigned_update
from zero_jax.plan.peak_memory import temporaries
from zero_jax.sharding.layout import state_partitions
from zero_jax.sharding.paths import PyTree


class Update(NamedTuple):
    """Elements that a device sends, of any dtype, and the temporaries at the peak in bytes."""

    elements: float = 0
    bytes: int = 0


def predict(config: Config, tx: optax.GradientTransformation, full: PyTree) -> Update:
    """Predicts the update of a plain transformation, given the full parameters."""
    if config.shards == 1 or config.offload.optimizer or config.optimizer_state_dtype != FP32:
        return Update()  # nothing is sharded; or it is elementwise
    update = assigned(config, tx, full)
    traced = [jax.make_jaxpr(one)(*(v.aval for v in one.reads)) for one in update.exchanges]
    peaks = [temporaries(one).bytes for one in traced]
    sent = sum(one.sent for one in update.exchanges)
    return Update(sent + update.left, max(peaks, default=0))


def assigned(config: Config, tx: optax.GradientTransformation, full: PyTree) -> AssignedUpdate:
    """Returns the traced update of full parameters, with its exchanges of matrices."""
    plain = without_frozen(tx, config.frozen)
    state, loss = jax.eval_shape(plain.init, full), jax.ShapeDtypeStruct((), "float32")
    cuts = config.splitter(full)
    traced = jax.make_jaxpr(lambda g, s, p, loss: plain.update(g, s, p, value=loss))(
        *(full, state, full, loss)
    )
    partitions = [*cuts, *state_partitions(state, full, cuts), *cuts]
    return assigned_update(traced, partitions, config.mesh)
