"""Process that renders chat templates within limits of CPU time, memory and file size.

A chat template is a program from a model's folder. Jinja's sandbox keeps it from reading files, but
not from nested loops or a text of many gigabytes: only the operating system bounds those. Requests
and replies are lines of JSON on stdin and stdout; the process ends with its stdin. It imports only
Jinja, so that it starts in about 0.1 s, and runs as a script.

The variables, filters and settings are those that transformers documents for chat templates.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

MEMORY = 2**30  # bytes beyond the process's own
CHARACTERS = 2**26  # of one text
JINJA = (3, 1, 6)  # the sandbox of older releases has known escapes
# Code points that are not characters mark the {% generation %} blocks in the text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Generation(jinja2.ext.Extension):
    """The block {% generation %} around the assistant's text; writes its positions if `marks`."""

    tags = {"generation"}
    marks = False

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body)
        return block.set_lineno(line)

    def _block(self, caller):
        text = caller()
        return f"{_OPEN}{text}{_CLOSE}" if Generation.marks else text


class Namespace(jinja2.utils.Namespace):
    """Variables of a template that outlive a loop; private names raise an error."""

    def __init__(*args, **names):
        self, *values = args
        for name in dict(*values, **names):
            Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, *values, **names)

    def __setitem__(self, name, value):
        Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't have the private {name!r}")


def environment():
    """Returns the sandbox in which templates run."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": Namespace,
        "dict": lambda *args, **names: dict(*args, **names),
    }
    return sandbox


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # The filter of Jinja escapes the characters of HTML.
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message):
    raise jinja2.exceptions.TemplateError(message)


def rendered(template, messages, variables, marks):
    """Returns a conversation's text, and [start, end] of each {% generation %} block in it."""
    Generation.marks = marks
    parts, size = [], 0
    variables = {"tools": None, "documents": None, **variables}
    variables["messages"] = [_plain(message) for message in messages]
    for part in template.generate(variables):
        parts.append(part)
        size += len(part)
        if size > CHARACTERS:
            raise MemoryError
    text = "".join(parts)
    return _unmarked(text) if marks else (text, [])


def _plain(message):
    """Removes null fields of a message, and gives its reasoning the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _unmarked(text):
    pieces, blocks, at = [], [], 0
    for number, part in enumerate(text.split(_OPEN)):
        inner, closed, rest = part.partition(_CLOSE)
        if number:
            blocks.append([at, at + len(inner)])
        elif closed:
            raise ValueError("the text has the code points U+FDD0 or U+FDD1")
        pieces += [inner, rest]
        at += len(inner) + len(rest)
    return "".join(pieces), blocks


def _limit(seconds):
    """Bounds the CPU time from now on; a signal ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main(seconds):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the parent
        signal.signal(number, signal.SIG_IGN)
    # Where /proc or a limit is missing (macOS), the CPU time still bounds a template.
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sandbox, templates = environment(), {}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            _limit(seconds)
            source = request.pop("template")
            if source not in templates:
                templates[source] = sandbox.from_string(source)
            text, blocks = rendered(templates[source], **request)
            reply = {"text": text, "blocks": blocks}
        except MemoryError:
            reply = {"limit": f"{MEMORY:.2g} bytes of memory or {CHARACTERS:.2g} characters"}
        except Exception as error:  # a template may raise any type
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < JINJA:
        sys.exit(
            f"jinja2 {jinja2.__version__} is too old for chat templates: install 3.1.6 or later"
        )
    main(int(sys.argv[1]))
