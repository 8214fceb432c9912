"""Rendering of chat templates in a process with limits of time and memory."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 10  # of CPU time, for one text
TRIES = 3  # conversations in a row that may exceed a limit
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(Exception):
    """A template raises an error, or exceeds a limit."""


class Renderer:
    """Renders chat templates in a process that is started at the first use.

    Not safe for use by several threads at once.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._exceeded: dict[str, int] = {}  # by template, conversations in a row beyond a limit

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a conversation.

        Args:
            template: Source in Jinja.
            messages: The conversation, in the types of JSON.
            variables: Further variables of the template.
            marks: Find the {% generation %} blocks.

        Returns:
            The text, and start and end of each block in it (none without `marks`).

        Raises:
            TemplateError: The template raises an error, takes more than 10 s or 1 GB, or did so for
                three conversations in a row: further ones are not tried.
        """
        if self._exceeded.get(template, 0) >= TRIES:
            raise TemplateError(
                f"it exceeded {SECONDS} s or its memory limit for {TRIES} conversations in a row: "
                "use another template"
            )
        request = {"template": template, "messages": messages, "variables": variables}
        try:
            line = json.dumps({**request, "marks": marks}, default=str)
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"a message can't be passed to it: {error}") from error
        reply = self._request(line)
        if "limit" in reply:
            self._exceeded[template] = self._exceeded.get(template, 0) + 1
            raise TemplateError(
                f"it takes more than {reply['limit']} for one conversation: use another template"
            )
        self._exceeded.pop(template, None)
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply["text"], [(start, end) for start, end in reply["blocks"]]

    def _request(self, line: str) -> dict[str, Any]:
        for _ in range(2):  # again if something else ended the process
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                if answer := process.stdout.readline():
                    reply: dict[str, Any] = json.loads(answer)
                    return reply
            except BrokenPipeError:
                pass
            self._process = None
            if process.wait() == -signal.SIGXCPU:
                return {"limit": f"{SECONDS} s of CPU time"}
        raise TemplateError(f"its process exited with code {process.returncode}: see stderr")

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            if importlib.util.find_spec("jinja2") is None:
                raise TemplateError("jinja2 is not installed: pip install 'zero_jax[chat]'")
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="ascii",  # JSON with escapes
                start_new_session=True,
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # a request was not written yet
                continue
