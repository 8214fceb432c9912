"""Schedules of pipelines in closed form: what idles, what is held, what is sent, and how late.

A pipeline cuts a model of L layers into p stages, one for each of p devices, and a batch into m
micro-batches; with interleaving a device has v chunks of L/(v·p) layers. N devices are N/p such
pipelines. Time is counted in passes of one micro-batch through all that a device has: F forward, B
for the gradients of the inputs, W for those of the weights, each of them 1 unless said otherwise
(the schedules that keep B and W together take 2 for both), so the work of a device is 3m. Sending
takes no time. A share of idle time here is idle / (idle + work), of the step; Megatron's papers
divide by the work alone. `tests/plan/pipeline_simulator.py` runs the schedules, and its counts are
these.
"""

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction

from zero_jax.plan import paper

WORD_BYTES = 2  # of a 16-bit parameter, gradient or activation, as in the paper
_WORK = 3  # F, B and W of a micro-batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule for p stages and m micro-batches.

    Attributes:
      name: as its paper has it.
      stages, micro_batches: p and m.
      idle: how long a device waits in a step.
      in_flight: activations that the device which holds most of them holds, in those of one
        micro-batch on one stage.
      hops: outputs and gradients of a micro-batch that the device which sends most of them sends
        to its neighbours.
      changes: what it asks of a model and of how it is trained.
      late: by how many updates a gradient is late, at most.
      versions: copies of its weights that a device keeps, the newest among them, at most.
      updates: of the weights, in m micro-batches.
      zero: the stage of ZeRO with which the copies of a stage of the model share its state.
    """

    name: str
    stages: int
    micro_batches: int
    idle: Fraction
    in_flight: Fraction
    hops: int
    changes: str
    late: int = 0
    versions: int = 1
    updates: int = 1
    zero: int = 0

    @property
    def idle_share(self) -> Fraction:
        """Of the time of a step."""
        return self.idle / (self.idle + _WORK * self.micro_batches)

    @property
    def idle_of_work(self) -> Fraction:
        """Of the time without idling, the "bubble time fraction" of arXiv:2104.04473."""
        return self.idle / (_WORK * self.micro_batches)

    def state_bytes(self, psi: float, replicas: int) -> float:
        """Model states at rest: of Ψ/p parameters, as ZeRO counts them, and of older weights.

        >>> [make(8, 32).state_bytes(8e9, 8) / 1e9 for make in (one_f_one_b, pipedream)]
        [16.0, 30.0]
        """
        states = paper.model_states(psi, replicas, self.zero, model_parallel=self.stages)
        return states + (self.versions - 1) * WORD_BYTES * psi / self.stages

    def parameter_words(self, psi: float, replicas: int) -> float:
        """What a device sends to copies of its stage in m micro-batches: 2Ψ/p for each update.

        Source: ZeRO (arXiv:1910.02054), section 7: an all-reduce; a ring's factor is left out.
        """
        shared = paper.words(self.zero) * self.updates if replicas > 1 else 0
        return shared * psi / self.stages

    def activation_words(self, values: int) -> int:
        """What it sends to its neighbours in m micro-batches, whose outputs have so many values."""
        return self.hops * self.micro_batches * values


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes.

    p-1 forward and p-1 backward passes are waited for: (p-1)/(m+p-1) of the step, and all m
    micro-batches are held. Source: GPipe (arXiv:1811.06965), section 2.3, which counts the share of
    the whole step and calls it negligible from m = 4p on; arXiv:2104.04473, section 2.2.1, the
    same as (p-1)/m of the work. What of a micro-batch is held is another matter: GPipe keeps
    inputs of stages alone and computes the rest again.

    >>> gpipe(8, 32).idle_share, gpipe(8, 32).idle_of_work, int(gpipe(8, 32).in_flight)
    (Fraction(7, 39), Fraction(7, 32), 32)
    """
    _at_least_one(stages=stages, micro_batches=micro_batches)
    return Schedule(
        name="GPipe",
        stages=stages,
        micro_batches=micro_batches,
        idle=Fraction(_WORK * (stages - 1)),
        in_flight=Fraction(micro_batches),
        hops=_hops(stages),
        changes="layers in stages of equal time",
    )


def one_f_one_b(stages: int, micro_batches: int, zero: int = 0) -> Schedule:
    """1F1B: as few forward passes ahead as keep the stages after busy, then one of each in turn.

    It idles as GPipe does and holds p micro-batches instead of m. Source: PipeDream-Flush
    (arXiv:2006.09503, where it is the alternative to two versions of the weights) and
    arXiv:2104.04473, section 2.2.1. With `zero` 1 the optimizer state of a stage is partitioned
    over its copies. Stages 2 and 3 are not offered: they sum or gather in every micro-batch.

    >>> one_f_one_b(8, 32).idle == gpipe(8, 32).idle, int(one_f_one_b(8, 32).in_flight)
    (True, 8)

    Raises:
      ValueError: no such degree, or another stage of ZeRO.
    """
    if zero not in (0, 1):
        raise ValueError(
            f"zero={zero}: a pipeline is counted with ZeRO 0 or 1, since 2 and 3 send in every "
            "micro-batch; take 1."
        )
    return dataclasses.replace(
        gpipe(stages, micro_batches),
        name="1F1B, ZeRO 1" if zero else "1F1B",
        in_flight=Fraction(min(stages, micro_batches)),
        zero=zero,
    )


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B: v chunks of layers a device, so a pass to wait for is 1/v as long.

    Waits are (p-1)/v passes, and everything between stages is sent v times as often. Source:
    arXiv:2104.04473, section 2.2.2, which needs m to be a multiple of p. Held are p + (p-1)/v, a
    factor of 1 + (p-1)/(p·v): arXiv:2205.05198, section 4.2.3, of Megatron's warm-up of
    2(p-i-1) + (v-1)p chunks on device i.

    >>> interleaved(8, 32, 2).idle / one_f_one_b(8, 32).idle, interleaved(8, 32, 2).in_flight
    (Fraction(1, 2), Fraction(23, 2))

    Raises:
      ValueError: no such degree, or m is no multiple of p.
    """
    _at_least_one(chunks=chunks)
    plain = one_f_one_b(stages, micro_batches)
    if micro_batches % stages:
        raise ValueError(
            f"micro_batches={micro_batches}: interleaved they go in groups of stages={stages}; "
            f"take a multiple of it, {stages * -(-micro_batches // stages)} say."
        )
    return dataclasses.replace(
        plain,
        name=f"interleaved, v={chunks}",
        idle=plain.idle / chunks,
        in_flight=min(Fraction(micro_batches), stages + Fraction(stages - 1, chunks)),
        hops=_hops(stages, chunks),
        changes="layers in p·v chunks of equal time",
    )


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """Zero bubble, of 1F1B's memory: B goes to the stage before at once, W waits for a gap.

    Waits are (p-1)(F + B - W), a third of 1F1B's, and p micro-batches are held (p-i+1 until their
    B and i-1 until their W on the i-th device, so fewer bytes after the first where W needs less).
    Source: Zero Bubble (arXiv:2401.10241), section 2.1, table 2, which holds where neither F nor B
    is shorter than W. With less than p micro-batches, for which the paper has no figure, 2p-1-m
    passes are waited for.

    >>> zb_h1(4, 8).idle, one_f_one_b(4, 8).idle
    (Fraction(3, 1), Fraction(9, 1))
    """
    plain = one_f_one_b(stages, micro_batches)
    return dataclasses.replace(
        plain,
        name="ZB-H1",
        idle=Fraction(max(stages - 1, 2 * stages - 1 - micro_batches)),
        changes="stages; backward in two passes, B and W",
    )


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """Zero bubble, of twice the memory: forward passes fill the wait for the first B too.

    (p-1)(F + B - 2W) are waited for, none here, and 2p-1 micro-batches are held. Counted is a
    device's wait between its own first and last pass of a step: device i ends i passes after the
    first, and begins the next step so. Where all must wait for a sum over stages before they
    update, a global norm say, p-1 passes idle, as many as with ZB-H1. Source: arXiv:2401.10241,
    sections 2.2 and 4, table 2. With less than 2p-1 micro-batches, for which the paper has no
    figure, 2p-1-m are waited for, and more before a norm.

    >>> zb_h2(8, 32).idle, int(zb_h2(8, 32).in_flight), zb_h2(8, 8).idle
    (Fraction(0, 1), 15, Fraction(7, 1))
    """
    plain = one_f_one_b(stages, micro_batches)
    return dataclasses.replace(
        plain,
        name="ZB-H2",
        idle=Fraction(max(0, 2 * stages - 1 - micro_batches)),
        in_flight=Fraction(min(micro_batches, 2 * stages - 1)),
        changes="as ZB-H1; an update that waits for no other stage",
    )


def pipedream(stages: int, micro_batches: int) -> Schedule:
    """PipeDream: 1F1B that never stops, with an update after every micro-batch.

    Nothing idles once it runs. The gradient of device i (from 0) is made with weights that
    p-1-i updates have changed since; so that F and B agree, p-i versions are kept. Copies of a
    stage sum their gradients in every micro-batch. Source: PipeDream (arXiv:1806.03377), sections
    3.3 and 3.4; of copies it has different numbers for each stage, here all have N/p.

    >>> pipedream(8, 32).idle, pipedream(8, 32).late, pipedream(8, 32).versions
    (Fraction(0, 1), 7, 8)
    """
    return dataclasses.replace(
        one_f_one_b(stages, micro_batches),
        name="PipeDream",
        idle=Fraction(0),
        late=stages - 1,
        versions=stages,
        in_flight=Fraction(stages),
        updates=micro_batches,
        changes="stages; an optimizer that bears late gradients",
    )


def fewest(
    make: Callable[[int], Schedule], step: int = 1, share: Fraction | float = Fraction(1, 10)
) -> int:
    """The fewest micro-batches, in steps, of which at most that share of a step idles.

    >>> fewest(lambda m: gpipe(8, m)), fewest(lambda m: interleaved(8, m, 2), step=8)
    (63, 32)

    Raises:
      ValueError: no number of micro-batches does that.
    """
    if not share > 0:
        raise ValueError(f"share={share}, but some time always idles: give 0.1 say.")
    return next(m for m in itertools.count(step, step) if make(m).idle_share <= share)


def _hops(stages: int, chunks: int = 1) -> int:
    """A device in the middle sends v outputs and v gradients; one at an end, one of those less."""
    return 0 if stages == 1 else 2 * chunks - (stages == 2)


def _at_least_one(**degrees: int) -> None:
    for name, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"{name}={degree}, but a pipeline has at least 1; 1 is none.")
