"""Rendering of chat templates in a process with limits of time and memory.

A chat template is a program from a model's folder. The sandbox of transformers keeps it from
reading files, but not from nested loops or a text of many gigabytes: only the operating system
bounds those. This file is also the script of that process. Requests and replies are lines of JSON
on its stdin and stdout; it ends with its stdin.
"""

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 10  # of CPU time, for one text
TRIES = 3  # conversations in a row that may exceed a limit
MEMORY = 2**30  # bytes beyond the process's own
CHARACTERS = 2**26  # of one text
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


class Renderer:
    """Renders chat templates in a process that is started at the first use; one thread uses it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._exceeded: dict[str, int] = {}  # by template, conversations in a row beyond a limit

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Returns a conversation's text, and the places of its {% generation %} blocks.

        Without such blocks in the template the places are None. Raises ValueError if the template
        raises an error, takes more than 10 s or 1 GB, or did so for three conversations in a row:
        further ones are not tried.
        """
        exceeded = self._exceeded.get(template, 0)
        if exceeded >= TRIES:
            raise ValueError(
                f"{TRIES} conversations in a row exceeded {SECONDS} s or its memory limit: use "
                "another template"
            )
        marks = _GENERATION.search(template) is not None
        request = {**variables, "chat_template": template, "conversations": [messages]}
        request["return_assistant_tokens_mask"] = marks
        reply = self._request(json.dumps([SECONDS, request], default=str))
        self._exceeded[template] = exceeded + 1 if "limit" in reply else 0
        if "limit" in reply:
            limit = f"{reply['limit']} for one conversation"
            raise ValueError(f"it takes more than {limit}: use another template")
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["text"], [(start, end) for start, end in reply["blocks"]] if marks else None

    def _request(self, line: str) -> dict[str, Any]:
        for _ in range(2):  # again if something else ended the process
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line + "\n")
                process.stdin.flush()
                if answer := process.stdout.readline():
                    reply: dict[str, Any] = json.loads(answer)
                    return reply
            self._process = None
            if process.wait() == -signal.SIGXCPU:
                return {"limit": f"{SECONDS} s of CPU time"}
        raise ValueError(f"its process exited with code {process.returncode}: see stderr")

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="ascii",  # JSON with escapes
            start_new_session=True,
        )
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(OSError):  # a request was not written yet
        process.communicate()


def _serve() -> None:
    """Answers requests until stdin ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the parent
        signal.signal(number, signal.SIG_IGN)
    # Where /proc or a limit is missing (macOS), the CPU time still bounds a template.
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for line in sys.stdin:
        try:
            seconds, request = json.loads(line)
            used = resource.getrusage(resource.RUSAGE_SELF)
            soft = int(used.ru_utime + used.ru_stime) + 1 + seconds  # SIGXCPU ends the process
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
            (text,), blocks = render_jinja_template(**request)
            if len(text) > CHARACTERS:
                raise MemoryError
            answer = json.dumps({"text": text, "blocks": blocks[0] if blocks else []})
        except MemoryError:
            limit = f"{MEMORY:.2g} bytes of memory or {CHARACTERS:.2g} characters"
            answer = json.dumps({"limit": limit})
        except Exception as error:  # a template may raise any type
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})
        print(answer, flush=True)


if __name__ == "__main__":
    _serve()
