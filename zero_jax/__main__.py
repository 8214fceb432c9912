"""Command line of zero_jax.

    zero_jax plan         predicts memory and communication of a run; no GPU needed
    zero_jax checkpoint   inspects, verifies and converts checkpoints
    zero_jax offload      checks CPU offload on this machine
    zero_jax doctor       prints a diagnostic report for bug reports
    zero_jax translate    translates a DeepSpeed or accelerate configuration

`zero_jax plan --help` describes a command. `python -m zero_jax.plan` is the same.
"""

import runpy
import sys

_COMMANDS = ("plan", "checkpoint", "offload", "doctor", "translate")


def main() -> int:
    """Runs the command that is named first; returns 2 if there is none."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in _COMMANDS:
        sys.argv[:2] = [f"{sys.argv[0]} {name}"]
        runpy.run_module(f"zero_jax.{name}", run_name="__main__", alter_sys=False)
        return 0
    print(__doc__)
    if name in ("-h", "--help"):
        return 0
    print(f"error: {name!r} is not one of {', '.join(_COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
