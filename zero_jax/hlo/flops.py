"""Floating point operations of a compiled program, counted in its text.

Two for each multiply-add of a matrix product or a convolution, also inside fusions, loops (times
their trips) and library calls; elementwise work is not counted. XLA's own count is empty for GPU
programs that were compiled without a GPU.
"""

import functools
import math
import re
from collections.abc import Sequence

from zero_jax.hlo.hlo_text import Computation, Instruction, Program
from zero_jax.hlo.trip_counts import trip_count

_GEMM = re.compile(r"__cublas\$|__onednn\$matmul|__triton_gemm")
_CONVOLUTION = re.compile(r"__cudnn\$conv")
_NO_WORK = re.compile(r"AllocateBuffer$")


class Flops:
    """Counts a program's FLOPs; every computation is looked at once."""

    def __init__(self, program: Program):
        self._program = program
        self.computation = functools.lru_cache(maxsize=None)(self._computation)

    def total(self) -> int:
        """FLOPs of one run on one device.

        Raises:
          ValueError: a loop with matrix products has an unknown trip count, or a product cannot
            be read.
        """
        return self.computation(self._program.entry)

    def uncounted(self) -> tuple[str, ...]:
        """Targets of library calls whose work is not counted (cuDNN's attention, kernels)."""
        calls = {
            i.attributes.get("custom_call_target", "").strip('"')
            for computation in self._program.computations.values()
            for i in computation.instructions.values()
            if i.opcode in ("custom-call", "custom-call-start")
        }
        known = (_GEMM, _CONVOLUTION, _NO_WORK)
        return tuple(sorted(t for t in calls if not any(kind.search(t) for kind in known)))

    def _computation(self, name: str) -> int:
        computation = self._program.computations[name]
        return sum(self.instruction(computation, i) for i in computation.instructions.values())

    def instruction(self, computation: Computation, i: Instruction) -> int:
        """FLOPs of one instruction, with all that it calls; of an asynchronous one at its start."""
        match i.opcode.removesuffix("-start"):
            case "dot":
                return _dot(computation, i)
            case "convolution":
                return _convolution(computation, i)
            case "while":
                return self._loop(computation, i)
            case "conditional":
                return max((self.computation(name) for name in i.called), default=0)
            case "custom-call":
                return _library_call(computation, i)
            case "reduce" | "all-reduce" | "reduce-scatter" | "scatter" | "sort" | "reduce-window":
                return 0  # they call a scalar function
        if i.opcode.endswith(("-update", "-done")):
            return 0
        return sum(self.computation(name) for name in i.called)

    def _loop(self, computation: Computation, i: Instruction) -> int:
        body = self.computation(i.attributes["body"].lstrip("%"))
        trips = trip_count(self._program, computation, i) if body else 0
        if trips is None:
            raise ValueError(
                f"the loop {i.name} has matrix products but no trip count in the program, so its "
                "FLOPs are unknown; use a loop of fixed length (jax.lax.scan)"
            )
        return trips * body


def _dims(shape: str) -> list[int]:
    """Dims of the first array in a shape: "(bf16[4,8]{1,0}, s8[16])" -> [4, 8]."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(d) for d in found[1].split(",")] if found and found[1] else []


def _result(i: Instruction) -> list[int]:
    """Dims of what it computes, which a start wraps as ((operands), result, context)."""
    return _dims(re.sub(r"^\(\(.*?\), ", "", i.shape) if i.opcode.endswith("-start") else i.shape)


def _product_flops(operand_dims: Sequence[int], contracting: str, i: Instruction) -> int:
    try:
        inner = math.prod(operand_dims[int(d)] for d in re.findall(r"\d+", contracting))
    except IndexError as error:
        raise ValueError(f"cannot read the contracted dims of {i.name}: {contracting}") from error
    return 2 * math.prod(_result(i)) * inner


def _dot(computation: Computation, i: Instruction) -> int:
    left = _dims(computation.instructions[i.operands[0]].shape)
    return _product_flops(left, i.attributes.get("lhs_contracting_dims", ""), i)


def _convolution(computation: Computation, i: Instruction) -> int:
    """Elements of the image side x elements of the kernel that each sees.

    The labels of cuDNN's two gradients are those of the forward convolution, whose output is their
    first operand (of the image's gradient) or their second (of the kernel's).
    """
    first, second = (_dims(computation.instructions[name].shape) for name in i.operands[:2])
    image, kernel = _result(i), second
    if "convBackwardInput" in (target := i.attributes.get("custom_call_target", "")):
        image = first
    elif "convBackwardFilter" in target:
        image, kernel = second, image
    labels = re.match(r"\w+_(\w+)->\w+", i.attributes.get("dim_labels", ""))
    if labels is None or len(labels[1]) != len(kernel):
        raise ValueError(f"cannot read the dims of the convolution {i.name}: {dict(i.attributes)}")
    outputs = kernel[labels[1].index("o")]
    return 2 * math.prod(image) * (math.prod(kernel) // max(outputs, 1))


def _library_call(computation: Computation, i: Instruction) -> int:
    target = i.attributes.get("custom_call_target", "")
    if _GEMM.search(target):
        config = i.attributes.get("backend_config", "").replace("\\", "")
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', config)
        if found is None:
            raise ValueError(f"cannot read the contracted dims of {i.name}: {config[:200]}")
        left = _dims(computation.instructions[i.operands[0]].shape)
        return _product_flops(left, found[1], i)
    if _CONVOLUTION.search(target):
        return _convolution(computation, i)
    return 0  # named by `Flops.uncounted`
