"""Trains a GPT with ZeRO: `python train.py`, and `python train.py --help` for what can be chosen.

It checks what it is given, says what it will do and what that costs in bytes per device, trains,
and ends with the held-out loss beside two marks from counts alone, and a sample. The program is in
`training/` (begin with `training/main.py`), the model in `models/`; what ZeRO is asked for is in
`training/trainer.py`.
"""

import os
import signal
import sys

from training.supervise import end_with_supervisor


def _end(*_: object) -> None:
    os.write(2, b"stopped before the run began\n")
    os._exit(130)


def _reserve_standard_streams() -> None:
    """Opens /dev/null for each standard stream that is closed: no other file gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end)  # the imports take seconds
    _reserve_standard_streams()
    end_with_supervisor()
    from training.main import entry

    sys.exit(entry())
