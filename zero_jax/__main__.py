"""`zero_jax plan ...`: the commands of all packages under one name.

    zero_jax plan         what a run will hold and send, before hardware is rented
    zero_jax checkpoint   looks at checkpoints, checks them, and trades with others
    zero_jax offload      is offload right on this machine?
    zero_jax doctor       what a report of a fault should say about the machine
    zero_jax translate    translates a DeepSpeed or accelerate configuration

`python -m zero_jax.plan ...` is the same as `zero_jax plan ...`.
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
    print(f"error: {name!r} is none of {', '.join(_COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
