"""What retention takes away: set aside by a rename, then deleted.

A folder that is deleted file by file is half there when its process is killed, and still has the
name of a checkpoint. Once it is set aside it has none.
"""

import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable

FOLDER = ".discarded"


def clear(directory: pathlib.Path) -> None:
    """Deletes what was set aside in the directory of a run; says so if it can't."""
    try:
        shutil.rmtree(directory / FOLDER)
    except FileNotFoundError:
        pass
    except OSError as error:
        print(f"checkpoints that were discarded are still there: {error}", file=sys.stderr)


def clear_after(busy: Callable[[], bool], directory: pathlib.Path) -> threading.Thread:
    """The same beside training, when a save is over and has set aside what it lets go."""

    def work() -> None:
        while busy():
            time.sleep(0.05)
        clear(directory)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
