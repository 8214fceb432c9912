"""Floating-point operations of a compiled program, counted in its text.

Two for each multiply-add of a matrix product or a convolution, also inside fusions, loops (times
their trips) and library calls such as attention; elementwise work is not counted. XLA's own count
is empty for GPU programs that were compiled without a GPU.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from zero_jax.hlo.hlo_text import Computation, Instruction, Program
from zero_jax.names import FURTHER_DOCUMENTS

Cost: TypeAlias = tuple[float, ...]
_GEMM = re.compile(r"__cublas\$|__onednn\$matmul|__triton_gemm")
_CONVOLUTION = re.compile(r"__cudnn\$conv")
_ATTENTION = re.compile(r"__cudnn\$fmha")
_NO_WORK = re.compile(r"AllocateBuffer$")


class Totals:
    """Adds up a cost: loops times their trips, of a conditional the most expensive branch.

    `cost` is that of an instruction with all that it calls, and None for one that costs as much as
    what it calls. Branches are compared by its first number. `nothing` is as many zeros.
    """

    def __init__(self, cost: Callable[[Instruction], Cost | None], nothing: Cost):
        self._cost, self._nothing = cost, nothing
        self.computation = functools.cache(self._computation)

    def _computation(self, computation: Computation) -> Cost:
        """Returns the cost of one run of a computation."""
        return self._sum((self.instruction(i), 1) for i in computation.instructions.values())

    def instruction(self, i: Instruction) -> Cost:
        """Returns the cost of one run; raises ValueError for a loop of unknown length."""
        cost = self._cost(i)
        if cost is not None:
            return cost
        inside = [(self.computation(called), times) for called, times in i.calls]
        if i.kind == "conditional":
            return max((cost for cost, _ in inside), default=self._nothing)
        if any(times is None and any(cost) for cost, times in inside):
            if FURTHER_DOCUMENTS in i.op_name:
                return self._nothing  # see `Flops.documents`
            raise ValueError(
                f"the loop {i.name} has no trip count in the program, so its cost is unknown: "
                "use a loop of fixed length (jax.lax.scan)"
            )
        return self._sum((cost, times or 0) for cost, times in inside)

    def _sum(self, parts: Iterable[tuple[Cost, int]]) -> Cost:
        total = self._nothing
        for cost, times in parts:
            total = tuple(a + times * b for a, b in zip(total, cost, strict=True))
        return total


class Flops(Totals):
    """Counts a program's FLOPs: of all products, and of those in fp8."""

    def __init__(self, program: Program):
        super().__init__(_products, (0, 0))
        self.program = program

    def total(self) -> int:
        """Returns the FLOPs of one run on one device, or raises ValueError if they are unknown."""
        return int(self.computation(self.program.entry)[0])

    def count(self, i: Instruction) -> int:
        """Returns the FLOPs of one run of an instruction, with all that it calls."""
        return int(self.instruction(i)[0])

    def uncounted(self) -> tuple[str, ...]:
        """Returns the library calls whose work is not counted, such as other kernels."""
        calls = {i.target for i in self._library_calls()}
        known = (_GEMM, _CONVOLUTION, _ATTENTION, _NO_WORK)
        return tuple(sorted(t for t in calls if not any(kind.search(t) for kind in known)))

    def documents(self) -> int:
        """Returns the documents of a packed row in one call of cuDNN's attention; 0 without calls.

        They are counted as one document, and the loop over further ones as none.
        """
        calls = (i for i in self._library_calls() if _ATTENTION.search(i.target))
        counts = (_setting(i, r'"max_seg_per_batch": *"?(\d+)') for i in calls)
        return max((int(count) for count in counts if count != "1"), default=0)

    def _library_calls(self) -> Iterable[Instruction]:
        computations = self.program.computations.values()
        instructions = (i for c in computations for i in c.instructions.values())
        return (i for i in instructions if i.kind == "custom-call")


def _products(i: Instruction) -> Cost | None:
    """Returns the FLOPs of a product or a library call; None for other instructions."""
    if i.kind not in ("dot", "convolution", "custom-call"):
        return None
    if i.kind == "convolution" or _CONVOLUTION.search(i.target):
        return _convolution(i), 0
    if _ATTENTION.search(i.target):
        return _attention(i), 0
    if not is_product(i):
        return 0, 0  # named by `Flops.uncounted`
    if i.kind == "dot":
        contracting = i.attributes.get("lhs_contracting_dims", "")
    else:
        contracting = _setting(i, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    count = _dot(i, contracting)
    return count, count * is_fp8(i)


def is_product(i: Instruction) -> bool:
    """Returns whether an instruction is a product of two matrices."""
    return i.kind == "dot" or (i.kind == "custom-call" and bool(_GEMM.search(i.target)))


def is_fp8(i: Instruction) -> bool:
    """Returns whether both operands of a product have 8 bits."""
    return all(operand.arrays[0].dtype.startswith("f8") for operand in i.inputs[:2])


def _setting(i: Instruction, pattern: str) -> str:
    """Returns the part of a call's configuration that a pattern matches."""
    config = i.config.replace("\\", "")
    found = re.search(pattern, config)
    if found is None:
        raise ValueError(f"cannot read {pattern} of {i.name}: {config[:200]}")
    return found[1]


def _attention(i: Instruction) -> int:
    """Two products of queries and keys that a mask leaves, and five in the backward pass.

    There the scores are computed again, as by all kernels of this kind.
    """
    sizes = _setting(i, r'"intermediate_tensor_shape".*?"dimensions": *\[([^\]]*)\]')
    batch, heads, queries, keys = map(int, re.findall(r"\d+", sizes))
    pairs = queries * keys
    if "CAUSAL" in _setting(i, r'"mask_type": *"(\w+)"'):
        window = int(_setting(i, r'"sliding_window_length": *"?(\d+)')) or keys
        seen = min(window, keys, queries)  # by one query at most
        pairs = queries * seen - seen * (seen - 1) // 2
    products = 5 if "Backward" in i.target else 2
    return products * 2 * batch * heads * pairs * i.inputs[0].arrays[0].dims[-1]


def _result(i: Instruction) -> tuple[int, ...]:
    """Returns the dims of its result, which a start wraps as ((operands), result, context)."""
    return i.arrays[i.element(1).start if i.shape.startswith("((") else 0].dims


def _dot(i: Instruction, contracting: str) -> int:
    left = i.inputs[0].arrays[0].dims
    try:
        inner = math.prod(left[int(d)] for d in re.findall(r"\d+", contracting))
    except IndexError as error:
        raise ValueError(f"cannot read the contracted dims of {i.name}: {contracting}") from error
    return 2 * math.prod(_result(i)) * inner


def _convolution(i: Instruction) -> int:
    """Elements of the image side x elements of the kernel that each uses.

    The labels of cuDNN's two gradients are those of the forward convolution, whose output is their
    first operand (of the image's gradient) or their second (of the kernel's).
    """
    first, second = (operand.arrays[0].dims for operand in i.inputs[:2])
    image, kernel = _result(i), second
    if "convBackwardInput" in i.target:
        image = first
    elif "convBackwardFilter" in i.target:
        image, kernel = second, image
    labels = re.match(r"\w+_(\w+)->\w+", i.attributes.get("dim_labels", ""))
    if labels is None or len(labels[1]) != len(kernel):
        raise ValueError(f"cannot read the dims of the convolution {i.name}: {dict(i.attributes)}")
    outputs = kernel[labels[1].index("o")]
    return 2 * math.prod(image) * (math.prod(kernel) // max(outputs, 1))
