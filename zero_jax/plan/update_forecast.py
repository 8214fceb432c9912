"""What a partitioned update holds and sends beside its states, foretold from its trace.

An elementwise transformation computes on shards and communicates nothing. An update that needs full
matrices (Muon, Shampoo, GaLore) sends each to its assigned device and receives the results, see
`matrix_updates`: a row to each device, in each direction, as long as the longest. Other products
over sharded dims (those of vectors) are partitioned by XLA.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax

from zero_jax.engine.config import Config
from zero_jax.engine.transformations import without_frozen
from zero_jax.low_bit.state import FP32
from zero_jax.matrix_updates.assign import Exchange
from zero_jax.matrix_updates.update import AssignedUpdate, assigned_update
from zero_jax.plan import forecast as temporaries
from zero_jax.sharding.partition import state_partitions

PyTree = Any


@dataclass(frozen=True)
class Update:
    """Of one device and step.

    Attributes:
      elements: that are sent, of whatever dtype, for products over what is cut.
      held: bytes of what is sent and received, and of what an owner works on, at the worst instant.
    """

    elements: float = 0
    held: int = 0

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term, as of `forecast.Forecast`."""
        return {"update": self.held}


def forecast(settings: Config, tx: optax.GradientTransformation, full: PyTree) -> Update:
    """Foretells the update of a transformation.

    Args:
      settings: of the run.
      tx: any optax transformation, not wrapped.
      full: the logical parameters.
    """
    if settings.shards == 1 or settings.offload.states or settings.optimizer_state_dtype != FP32:
        return Update()  # nothing is cut; or it is elementwise
    made = program(settings, tx, full)
    held = [temporaries.forecast(one.traced, 0).bytes for one in made.exchanges]
    sent = sum(one.sent for one in made.exchanges)
    return Update(elements=sent + made.left, held=max(held, default=0))


def program(settings: Config, tx: optax.GradientTransformation, full: PyTree) -> AssignedUpdate:
    """Returns the update of logical parameters, with its exchanges."""
    plain = without_frozen(tx, settings.frozen)
    state = jax.eval_shape(plain.init, full)
    cuts = settings.splitter(full)
    loss = jax.ShapeDtypeStruct((), "float32")
    traced = jax.make_jaxpr(lambda g, s, p, loss: plain.update(g, s, p, value=loss))(
        *(full, state, full, loss)
    )
    own = [*cuts, *state_partitions(state, full, cuts), *cuts]
    return assigned_update(traced, own, settings.mesh)


def exchanges(settings: Config, tx: optax.GradientTransformation, full: PyTree) -> list[Exchange]:
    """The exchanges of matrices in it, each with who owns how many."""
    return program(settings, tx, full).exchanges
