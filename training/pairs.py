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

SHORTEST, LONGEST = 40, 100  # characters of a sentence


def pairs() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yields a conversation for each sentence of fitting length, in the order of the text."""
    from pydoc_data.topics import topics

    text = "\n".join(re.sub(r"\s+", " ", topics[name]) for name in sorted(topics))
    for sentence in dict.fromkeys(re.findall(r"[A-Z][^.\n]*\.(?= )", text)):
        if SHORTEST <= len(sentence) <= LONGEST:
            middle = sentence.index(" ", len(sentence) // 3)
            parts = {"user": sentence[:middle], "assistant": sentence[middle + 1 :]}
            yield {"messages": [{"role": r, "content": part} for r, part in parts.items()]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="JSON Lines file to write.")
    file = parser.parse_args().file
    lines = [json.dumps(pair) + "\n" for pair in pairs()]
    file.write_text("".join(lines))
    print(f"{file}: {len(lines):,} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
