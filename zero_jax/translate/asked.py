"""What a file asks for, in the words of zero_jax: every reader makes one of these."""

import dataclasses

# Stands for how many devices share the batch, where a file does not say.
SHARES = "D"


@dataclasses.dataclass(frozen=True)
class Tx:
    """An optimizer.

    Attributes:
      call: the Python that makes it, of a rate called `lr`.
      name: what `train.py --optimizer` calls it; None if it has no such one.
      weight_decay: of `train.py`; None if the file leaves it open.
      masked: whether `decayed` of zero_jax.models.optimizers says what decays.
      differs: what `train.py` has otherwise than the file.
    """

    call: str
    name: str | None = None
    weight_decay: float | None = None
    masked: bool = False
    differs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rate:
    """A learning rate.

    Attributes:
      lines: Python that gives `lr` its value, a number or a function of the step.
      peak: its largest value, for `train.py --lr`.
      warmup: steps in which it rises.
      steps: steps after which the run ends.
      cosine: whether it falls as that of `train.py` does, from a rise that is linear.
    """

    lines: tuple[str, ...]
    peak: float
    warmup: int | None = None
    steps: int | None = None
    cosine: bool = False


@dataclasses.dataclass(frozen=True)
class Asked:
    """All that `make_mesh`, `Zero`, optax and `train.py` are told.

    Attributes:
      stage, compute, reduce, gather, scatter, remat, offload, states: as `Zero` has them.
      sequence_parallel, hierarchical: as `Zero` has them.
      initial_scale, growth_interval: of the loss scale; None for what `Precision` has.
      devices: N, all of them; None where the file does not say.
      model, experts, replica: sizes of axes of the mesh; the other devices are on `data`.
      group: devices of a replica, where a file says that in place of how many replicas there are.
      batch: rows of a step; rows: of a micro-batch on one device; parts: micro-batches of a step.
      clip: largest norm of the gradient; 0 never clips.
      tx, rate: None where the file names none.
      train: further words of `train.py`.
    """

    stage: int = 0
    compute: str = "fp32"
    reduce: str = "fp32"
    gather: str | None = None
    scatter: str | None = None
    initial_scale: float | None = None
    growth_interval: int | None = None
    remat: str = "none"
    offload: str | None = None
    states: str = "fp32"
    sequence_parallel: bool = False
    hierarchical: bool = False
    devices: int | None = None
    model: int = 1
    experts: int = 1
    replica: int = 1
    group: int | None = None
    batch: int | None = None
    rows: int | None = None
    parts: int | None = None
    clip: float = 0.0
    tx: Tx | None = None
    rate: Rate | None = None
    train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.devices is None:
            return
        others = self.model * self.experts * self.replica
        if self.devices < 1 or self.devices % others:
            raise ValueError(
                f"{self.devices} devices do not go up in {self._axes} = {others}: say how many "
                "there are by --devices N"
            )
        if self.group is not None and self.devices // self.model % self.group:
            raise ValueError(
                f"{self.devices // self.model} devices do not go up in groups of {self.group}: say "
                "how many there are by --devices N"
            )

    @property
    def _axes(self) -> str:
        sizes = {"replica": self.replica, "experts": self.experts, "model": self.model}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"

    @property
    def shares(self) -> int | None:
        """D: how many devices have rows of their own; None where N is not known."""
        return None if self.devices is None else self.devices // self.model

    @property
    def replicas(self) -> int | None:
        """R; None where only the devices of a replica are known, and N is not."""
        if self.group is None:
            return self.replica
        return None if self.shares is None else self.shares // self.group

    def mesh(self) -> str | None:
        """The words of `train.py --mesh`; None where N is not known."""
        if self.devices is None:
            return None
        sizes = {"replica": self.replicas or 1, "experts": self.experts, "model": self.model}
        data = self.devices
        for size in sizes.values():
            data //= size
        parts = [f"{name}={size}" for name, size in sizes.items() if size > 1 and name != "model"]
        parts.append(f"data={data}")
        return ",".join([*parts, f"model={self.model}"] if self.model > 1 else parts)

    def micro_batches(self) -> int | str:
        """k, or a term of D where that is needed.

        Raises:
          ValueError: the batch is not made of such micro-batches.

        >>> Asked(batch=256, rows=8).micro_batches()
        '32 // D'
        >>> Asked(batch=256, rows=8, devices=4).micro_batches()
        8
        """
        if self.parts is not None or self.batch is None or self.rows is None:
            self._check_parts()
            return self.parts or 1
        if self.batch % self.rows:
            raise ValueError(f"a batch of {self.batch} is not made of {self.rows} rows a device")
        times = self.batch // self.rows
        if self.shares is None:
            return 1 if times == 1 else f"{times} // {SHARES}"
        if times % self.shares:
            raise ValueError(
                f"a batch of {self.batch} is not made of {self.rows} rows on each of {self.shares} "
                "devices: say how many there are by --devices N"
            )
        return times // self.shares

    def _check_parts(self) -> None:
        shares = (self.parts or 1) * (self.shares or 1)
        if self.batch is not None and self.batch % shares:
            raise ValueError(
                f"a batch of {self.batch} does not go up in {self.parts or 1} micro-batches on "
                f"{self.shares or 1} devices: take a multiple of {shares}"
            )

    def global_batch(self) -> int | str | None:
        """Rows of a step, a term of D where that is needed, None where the file is silent.

        >>> Asked(rows=8, parts=3).global_batch(), Asked(rows=8, parts=3, devices=4).global_batch()
        ('24 * D', 96)
        """
        if self.batch is not None or self.rows is None:
            return self.batch
        rows = self.rows * (self.parts or 1)
        return f"{rows} * {SHARES}" if self.shares is None else rows * self.shares
