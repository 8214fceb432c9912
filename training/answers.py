"""Positions of the assistant's answers in the text that a chat template writes.

An answer begins after the prompt of inference, `add_generation_prompt` included, and ends with the
text that closes its turn. Templates with {% generation %} blocks give these positions. For others
the conversation is rendered in parts, and again with a placeholder for each answer, because many
templates write a turn differently when others follow it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Message = Mapping[str, Any]
Messages = Sequence[Message]
Render = Callable[[Messages, bool], str]  # messages, add_generation_prompt
Integers = npt.NDArray[np.int64]
_PLACEHOLDER = "zq{}answerqz"  # no template changes it: letters and digits alone
_PLACEHOLDERS = re.compile("zq[0-9]+answerqz")
_TAIL = 8  # characters by which the end of a prompt is recognised


class Span(NamedTuple):
    """Characters of one answer in the rendered conversation.

    Attributes:
        start: Position of the first character.
        end: Position after the last one.
        ending: The text after `end` if the conversation ended there, if it differs from the text
            that follows. `end` may then include the first characters of the next turn, if both
            begin alike. Empty if the end is certain.
    """

    start: int
    end: int
    ending: str = ""


def answers_in(messages: Messages) -> list[int]:
    """Returns the indices of the assistant's messages."""
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


def tokens_in(span: Span, starts: Integers, ends: Integers) -> slice:
    """Returns the tokens of an answer: the first ends in it, the last starts in it.

    A token with the space before an answer and its first word belongs to the answer, because the
    model predicts it there.

    >>> starts, ends = np.array([0, 4, 7, 11]), np.array([4, 7, 11, 15])
    >>> tokens_in(Span(5, 11), starts, ends)
    slice(1, 3, None)
    """
    inside = (ends > span.start) & (starts < span.end)
    if span.ending:
        inside &= ends <= span.end
    tokens = np.flatnonzero(inside)
    return slice(int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else slice(0, 0)


def spans_of_marked(
    messages: Messages, marked: Sequence[Span], render: Render
) -> list[list[Span]] | None:
    """Assigns the {% generation %} blocks of a rendered conversation to its answers.

    Args:
        messages: The conversation.
        marked: Its blocks, in order. A template may write several blocks, or none, for an answer.
        render: Returns the text of messages, with or without the generation prompt.

    Returns:
        The blocks of each answer; None if a block belongs to no answer or to several.
    """
    answers = answers_in(messages)
    if len(marked) == len(answers):
        return [[span] for span in marked]
    full_text = render(messages, False)
    candidates: list[list[int]] = [[] for _ in marked]  # answers of each block
    for at in answers:
        start, end = _changed(full_text, render(_replaced(messages, [at]), False))
        for block, span in zip(candidates, marked, strict=True):
            if span.start <= end and start <= span.end:
                block.append(at)
    for block in reversed(candidates):  # a template may also mark the end of the full text
        if block:
            break
        block.append(answers[-1])
    if any(len(block) != 1 for block in candidates):
        return None
    pairs = list(zip(marked, candidates, strict=True))
    return [[span for span, block in pairs if block == [at]] for at in answers]


def spans_of(messages: Messages, full_text: str, render: Render) -> list[Span] | None:
    """Finds the answers in the text of a template that does not mark them.

    Args:
        messages: The conversation.
        full_text: Its text.
        render: Returns the text of messages, with or without the generation prompt.

    Returns:
        One span for each answer; None if one can't be located with certainty.
    """
    full = [at for at in answers_in(messages) if messages[at]["content"]]
    text = render(_replaced(messages, full), False) if full else ""
    # A template may leave out the text of a message that calls a tool, but not of others.
    written = [at for at in full if text.count(_PLACEHOLDER.format(at)) == 1]
    if any(at not in written and not messages[at].get("tool_calls") for at in full):
        return None
    # Text within an answer, such as thoughts, can change how a template writes it: where the
    # placeholders do not fit, the last answer keeps its text, and then all do.
    for places in dict.fromkeys([tuple(written), tuple(written[:-1]), ()]):
        spans = _located(messages, full_text, render, places)
        if spans is not None:
            return spans
    return None


def _located(
    messages: Messages, full_text: str, render: Render, places: Sequence[int]
) -> list[Span] | None:
    replaced = _replaced(messages, places)
    literals = _PLACEHOLDERS.split(render(replaced, False))
    gaps = match_between(literals, full_text) if len(literals) == len(places) + 1 else None
    if gaps is None:
        return None
    bases = [0, *(end for _, end in gaps)]  # where each literal begins in the full text
    contents = dict(zip(places, gaps, strict=True))
    spans = []
    for at in answers_in(messages):
        turn = _Turn(replaced, at, render, literals, bases)
        start = turn.start(full_text, contents.get(at))
        if start is None:
            return None
        end, ending = turn.end(full_text, at in contents)
        if end is None:
            return None
        spans.append(Span(start, max(start, end), ending))
    return spans


class _Turn:
    """One answer, with the rendered beginnings: before it, up to its prompt, and up to its end."""

    def __init__(
        self,
        messages: Messages,
        at: int,
        render: Render,
        literals: Sequence[str],
        bases: Sequence[int],
    ) -> None:
        self._literals, self._bases = literals, bases
        self._messages, self._at, self._render = messages, at, render
        self._before, self._asked = (self._beginning(prompt) for prompt in (False, True))
        self._until = render(messages[: at + 1], False)

    def _beginning(self, prompt: bool) -> str:
        try:
            return self._render(self._messages[: self._at], prompt)
        except ValueError:
            if self._at:
                raise
            return ""  # many templates do not take an empty conversation

    def start(self, full_text: str, content: tuple[int, int] | None) -> int | None:
        """Returns the position after the prompt; None if it is unknown."""
        prompt = self._asked[common_prefix(self._before, self._asked) :]
        place, rest = self._reached(self._asked)
        if content is not None:
            if not prompt:
                return self._after_spaces(full_text, content[0])
            if rest:
                literal = full_text[self._base(self._asked) : content[0]]
                if prompt in literal:
                    return content[0] - len(literal) + literal.rindex(prompt) + len(prompt)
        elif not prompt:
            return self._without_content(place, rest)
        # A prompt may open with thoughts that the text leaves out: it is followed while it agrees.
        return place if not rest or place > self._reached(self._before)[0] else None

    def end(self, full_text: str, has_content: bool) -> tuple[int | None, str]:
        """Returns the position after the text that closes the turn, and the ending (see `Span`)."""
        place, rest = self._reached(self._until)
        # Some templates close the last turn differently; the full text then ends with the rest.
        return (place if has_content or full_text.endswith(rest) else None), rest

    def _without_content(self, place: int, rest: str) -> int | None:
        """Returns the start of an answer without text in a template without a generation prompt."""
        if rest or self._messages[self._at]["content"]:
            return None
        full = self._render(_replaced(self._messages, [self._at])[: self._at + 1], False)
        header, placeholder, _ = full[len(self._asked) :].partition(_PLACEHOLDER.format(self._at))
        agrees = placeholder and self._until.startswith(self._asked + header)
        return place + (len(header) if agrees and header.strip() else 0)

    def _after_spaces(self, full_text: str, content: int) -> int:
        """Returns the start of an answer if the prompt ends before the spaces ahead of the text."""
        spaces = content - len(full_text[:content].rstrip())
        ends = range(content - spaces, content + 1)
        tail = _PLACEHOLDERS.split(self._asked)[-1][-_TAIL:]
        starts = (at for at in ends if (full_text[:at].endswith(tail) if tail else at == 0))
        return next(starts, content)

    def _reached(self, text: str) -> tuple[int, str]:
        """Returns the position up to which a beginning agrees with the full text, and its rest."""
        tail = _PLACEHOLDERS.split(text)[-1]
        count = common_prefix(tail, self._literals[self._index(text)])
        return self._base(text) + count, tail[count:]

    def _base(self, text: str) -> int:
        return self._bases[self._index(text)]

    @staticmethod
    def _index(text: str) -> int:
        return len(_PLACEHOLDERS.findall(text))


def match_between(literals: Sequence[str], full_text: str) -> list[tuple[int, int]] | None:
    """Finds the gaps between literals that make up a text, in linear time.

    None if the literals do not fit, or fit in two ways: the first matches from the left and the
    last ones from the right then differ.

    >>> match_between(["a:", ".b:", "."], "a:x.y.b:z.")
    [(2, 5), (8, 9)]
    >>> match_between(["", "-", ""], "x-y-z") is None
    True
    """
    if len(literals) == 1:
        return [] if literals[0] == full_text else None
    first, *inner, last = literals
    low, high = len(first), len(full_text) - len(last)
    if not full_text.startswith(first) or not full_text.endswith(last) or low > high:
        return None
    left = []
    for literal in inner:
        at = full_text.find(literal, low, high)
        if at < 0:
            return None
        left.append(at)
        low = at + len(literal)
    right = []
    end = high
    for literal in reversed(inner):
        end = full_text.rfind(literal, 0, end)
        right.append(end)
    if left != right[::-1]:
        return None
    starts = [len(first), *(at + len(literal) for at, literal in zip(left, inner, strict=True))]
    return list(zip(starts, [*left, high], strict=True))


def common_prefix(first: str, second: str) -> int:
    """Returns the number of characters that two texts begin with alike.

    >>> common_prefix("<|end|>", "<|user|>")
    2
    """
    if second.startswith(first):
        return len(first)
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _changed(first: str, second: str) -> tuple[int, int]:
    """Returns the part of the first text in which it differs from the second."""
    start = common_prefix(first, second)
    alike = common_prefix(first[start:][::-1], second[start:][::-1])
    return start, len(first) - alike


def _replaced(messages: Messages, places: Sequence[int]) -> list[Message]:
    """Returns the conversation with placeholders as the text of some messages."""
    changed = list(messages)
    for at in places:
        changed[at] = {**messages[at], "content": _PLACEHOLDER.format(at)}
    return changed
