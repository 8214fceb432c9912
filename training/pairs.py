"""Writes a small fine-tuning dataset, made of CPython's help pages.

    python -m training.pairs FILE

Each line of FILE is a conversation in JSON: the user gives the start of a sentence, the assistant
its rest. No download is needed.
"""

import argparse
import json
import re
from pathlib import Path

SHORTEST, LONGEST = 40, 100  # characters of a sentence


def main() -> None:
    from pydoc_data.topics import topics

    parser = argparse.ArgumentParser("python -m training.pairs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", type=Path, help="JSON Lines file to write.")
    file, lines = parser.parse_args().file, []
    text = "\n".join(re.sub(r"\s+", " ", topics[name]) for name in sorted(topics))
    for sentence in dict.fromkeys(re.findall(r"[A-Z][^.\n]*\.(?= )", text)):
        if SHORTEST <= len(sentence) <= LONGEST:
            middle = sentence.index(" ", len(sentence) // 3)
            parts = {"user": sentence[:middle], "assistant": sentence[middle + 1 :]}
            messages = [{"role": role, "content": part} for role, part in parts.items()]
            lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))
    print(f"{file}: {len(lines):,} conversations")


if __name__ == "__main__":
    main()
