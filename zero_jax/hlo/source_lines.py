"""Where an instruction of a compiled program comes from, as XLA kept it in the program's text."""

import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

_LIBRARY = f"{pathlib.Path(__file__).parents[1]}/"


class Frame(NamedTuple):
    """A line of source and the frame that called it (0: none)."""

    file: str
    line: int
    parent: int


def frames_of(text: str) -> dict[int, Frame]:
    """The tables of source lines at the head of a module; {} where there are none."""
    head = text.partition("\n%")[0].partition("\nENTRY ")[0]
    named = head.partition("\nFileNames\n")[2].partition("\n\n")[0]
    files = dict(re.findall(r'(\d+) "(.*)"', named))
    places = {
        key: (files[file], int(line))
        for key, file, line in re.findall(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", head)
    }
    frames = re.findall(r"(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", head)
    # XLA prints the parent plus one, so that a frame without one names itself or 1.
    return {int(key): Frame(*places[place], int(parent) - 1) for key, place, parent in frames}


def source_of(metadata: str, frames: Mapping[int, Frame]) -> str:
    """The line that an instruction's metadata point to, "models/gpt.py:120"; "" if to none.

    The innermost line that is in no installed package and not ours, else the innermost.
    """
    if old := re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata):
        return f"{_short(old[1])}:{old[2]}"
    found = re.search(r"stack_frame_id=(\d+)", metadata)
    at = int(found[1]) if found else 0
    lines: list[Frame] = []
    while at in frames and len(lines) < len(frames):
        lines.append(frames[at])
        at = frames[at].parent
    own = [f for f in lines if not _is_library(f.file)]
    return next((f"{_short(f.file)}:{f.line}" for f in (*own, *lines)), "")


def _is_library(file: str) -> bool:
    """Whether a file is an installed package's or ours; the models are somebody's own."""
    ours = file.startswith(_LIBRARY) and not file.startswith(f"{_LIBRARY}models/")
    return ours or "-packages" in file or file.startswith("<frozen ")


def _short(path: str) -> str:
    """The last folder and the file."""
    return "/".join(re.split(r"[/\\]", path)[-2:])
