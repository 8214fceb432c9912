"""What one device will hold at the worst instant of a step, by what it is for."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Bytes of one device at the worst instant of a step, by what they are for.

    Attributes:
      parameters: fp32 masters at rest, 4Ψ/N, padding included (stage 0: 4Ψ); on the device.
      optimizer_state: of any optax transformation, by its shapes; Adam 8Ψ/N; the guard's 16 bytes;
        on the device.
      batch: this device's rows, and the extra arguments.
      temporaries: see `forecast.TERMS`: copy, gradients, saved, loss, buffers, work; with offload
        also fetched (masters while the model uses them) and pieces (two, of what streams). Where
        the update holds more than forward and backward, see `update_forecast.Update`.
      host_states: in host memory: 8Ψ/N of Adam's state and 4Ψ/N of masters that rest there.
      host_saved: in host memory, from forward to backward: what a remat policy keeps there.
    """

    parameters: int
    optimizer_state: int
    batch: int
    temporaries: Mapping[str, int]
    host_states: int = 0
    host_saved: int = 0

    @property
    def host(self) -> int:
        """All that is in host memory."""
        return self.host_states + self.host_saved

    @property
    def terms(self) -> dict[str, int]:
        """Every term by name; those on the device add up to `total_bytes`."""
        own = {
            "parameters": self.parameters,
            "optimizer_state": self.optimizer_state,
            "batch": self.batch,
        }
        return {**own, **self.temporaries, "host": self.host}

    @property
    def alias_bytes(self) -> int:
        """Arguments that are donated, and whose memory the results take over."""
        return self.parameters + self.optimizer_state

    @property
    def argument_bytes(self) -> int:
        """What the compiled program takes as arguments; predicted exactly."""
        return self.alias_bytes + self.batch

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + sum(self.temporaries.values())
