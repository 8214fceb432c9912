"""Writes a small fine-tuning dataset, made of CPython's help pages.

    python -m training.pairs FILE

Each line of FILE is a conversation in JSON: the user gives the start of a sentence, the assistant
its rest. No download is needed.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FEWEST, MOST = 40, 100  # characters of a sentence


def pairs() -> Iterator[dict[str, list[dict[str, str]]]]:
    """A conversation for each sentence of fitting length, each once, in the order of the text."""
    from pydoc_data.topics import topics

    known = set[str]()
    for name in sorted(topics):
        text = re.sub(r"\s+", " ", topics[name])
        for sentence in re.findall(r"[A-Z][^.]*\.(?= )", text):
            if FEWEST <= len(sentence) <= MOST and sentence not in known:
                known.add(sentence)
                first, rest = _halves(sentence)
                user, assistant = ({"role": r} for r in ("user", "assistant"))
                yield {"messages": [user | {"content": first}, assistant | {"content": rest}]}


def _halves(sentence: str) -> tuple[str, str]:
    cut = sentence.index(" ", len(sentence) // 3)
    return sentence[:cut], sentence[cut + 1 :]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="JSON Lines file to write.")
    file = parser.parse_args().file
    made = list(pairs())
    file.write_text("".join(json.dumps(pair) + "\n" for pair in made))
    print(f"{file}: {len(made):,} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
