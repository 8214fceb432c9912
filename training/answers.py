"""Positions of the assistant's answers in the text that a chat template writes.

An answer begins after the prompt of inference, `add_generation_prompt` included, and ends with the
text that closes its turn. Templates with {% generation %} blocks give these positions. For others
the conversation is rendered again with marks around each answer, and in parts, because many
templates write a turn differently when others follow it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from training.records import Message, Messages

Render = Callable[[Messages, bool], str]  # messages, add_generation_prompt
Integers = npt.NDArray[np.int64]
# Answer n is written between marks 2 n and 2 n + 1. A text has none of these code points, which are
# not characters, and templates pass them on.
_MARK = re.compile("\ufdd0([0-9]+)\ufdd1")


class Span(NamedTuple):
    """Characters of one answer in the rendered conversation."""

    start: int
    end: int
    # Text after `end` if the conversation ended there, where another text follows. `end` may then
    # include the first characters of the next turn, if both begin alike.
    ending: str = ""


class Marked(NamedTuple):
    """A text without its marks, and the position of each mark that occurs once."""

    text: str
    marks: dict[int, int]

    def reached(self, beginning: Marked) -> tuple[int, str]:
        """Returns the position up to which a beginning agrees with this text, and its rest."""
        # From the end of the last answer on that is marked in both.
        both = [number for number in beginning.marks if number % 2 and number in self.marks]
        skipped, base = (beginning.marks[max(both)], self.marks[max(both)]) if both else (0, 0)
        tail = beginning.text[skipped:]
        count = common_prefix(tail, self.text[base:])
        return base + count, tail[count:]


def answers_in(messages: Messages) -> list[int]:
    """Returns the indices of the assistant's messages."""
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


def tokens_in(span: Span, starts: Integers, ends: Integers) -> slice:
    """Returns the tokens of an answer: the first ends in it, the last starts in it.

    A token may have the space before an answer and its first word: the model predicts it there.
    """
    inside = (ends > span.start) & (starts < span.end)
    if span.ending:
        inside &= ends <= span.end
    tokens = np.flatnonzero(inside)
    return slice(int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else slice(0, 0)


def spans_of(
    messages: Messages, full_text: str, blocks: Sequence[Span] | None, render: Render
) -> list[list[Span]] | None:
    """Finds the spans of each answer in the text of a conversation; None if that is not certain.

    `blocks` are its {% generation %} blocks, several or none for an answer; None if the template
    has none.
    """
    answers = answers_in(messages)
    if blocks is not None:
        # Where the text changes with an answer. A block after the last answer ends the
        # conversation, and one with several answers is of no certain one.
        texts = (render(_marked(messages, [at]), False) for at in answers)
        begins = [common_prefix(full_text, text) for text in texts]
        groups: list[list[Span]] = [[] for _ in answers]
        for block in blocks:
            if sum(block.start <= begin < block.end for begin in begins) > 1:
                return None
            groups[max(0, sum(begin <= block.end for begin in begins) - 1)].append(block)
        return groups
    full = [at for at in answers if messages[at]["content"].strip()]
    # Marks can change how a template writes a message, such as one without text or with thoughts.
    # Where the text is another one, fewer answers have marks.
    for places in dict.fromkeys([tuple(answers), tuple(full), tuple(full[:-1]), ()]):
        marked = _marked(messages, places)
        whole = _unmarked(render(marked, False))
        # A template may leave out the text of a message that calls a tool, but not of others.
        unwritten = [at for at in full if at in places and 2 * at + 1 not in whole.marks]
        if not all(messages[at].get("tool_calls") for at in unwritten):
            return None
        if whole.text == full_text:
            spans = [_span(marked, at, whole, render) for at in answers]
            if None not in spans:
                return [[span] for span in spans if span is not None]
    return None


def _span(messages: Messages, at: int, whole: Marked, render: Render) -> Span | None:
    """Returns an answer with the text that closes its turn; None if it can't be located."""

    def beginning(count: int, prompt: bool) -> Marked:
        try:
            return _unmarked(render(messages[:count], prompt))
        except ValueError:
            if count:
                raise
            return Marked("", {})  # many templates do not take an empty conversation

    before, asked, until = beginning(at, False), beginning(at, True), beginning(at + 1, False)
    end, ending = whole.reached(until)
    # Some templates close the last turn differently; the full text then ends with the rest.
    if 2 * at + 1 not in whole.marks and not whole.text.endswith(ending):
        return None
    prompt = asked.text[common_prefix(before.text, asked.text) :]
    start, rest = whole.reached(asked)
    content = whole.marks.get(2 * at)
    if content is not None:
        start = min(start, content)
        header = whole.text[start:content]
        if rest and prompt in header:
            start, rest = start + header.rindex(prompt) + len(prompt), ""
    if prompt:
        # It may open with thoughts that the text leaves out: it is followed while it agrees.
        if rest and start <= whole.reached(before)[0]:
            return None
    elif content is not None:  # text before the content is a header of the turn, except for spaces
        start = content if header.strip() else start
    elif rest or (not messages[at].get("tool_calls") and messages[at]["content"].strip()):
        return None
    return Span(start, max(start, end), ending)


def common_prefix(first: str, second: str) -> int:
    """Returns the number of characters that two texts begin with alike."""
    sizes = range(1, min(len(first), len(second)) + 1)
    return bisect.bisect_left(sizes, True, key=lambda size: first[:size] != second[:size])


def _marked(messages: Messages, places: Sequence[int]) -> list[Message]:
    """Returns the conversation with marks around the text of some messages, but not its spaces."""
    changed = list(messages)
    for at in places:
        text = messages[at]["content"]
        core = text.strip()
        before, _, after = text.partition(core) if core else (text, "", "")
        marked = f"{before}\ufdd0{2 * at}\ufdd1{core}\ufdd0{2 * at + 1}\ufdd1{after}"
        changed[at] = {**messages[at], "content": marked}
    return changed


def _unmarked(text: str) -> Marked:
    """Removes the marks of a text."""
    places: dict[int, list[int]] = {}
    removed = 0
    for mark in _MARK.finditer(text):
        places.setdefault(int(mark[1]), []).append(mark.start() - removed)
        removed += len(mark[0])
    return Marked(_MARK.sub("", text), {n: at[0] for n, at in places.items() if len(at) == 1})
