"""The prompts and rewards of the recipes beside this file. Run it to write the prompt files, to
`examples/smollm2` below the working directory.

Instructions are of the kind of IFEval (arXiv 2311.07911): whether a response follows one is checked by a few lines of
code, and nothing else about the response counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUTPUT = Path("examples/smollm2")
# name -> (what the user asks for, whether a response does it)
INSTRUCTIONS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "at most ten words": ("Answer in at most 10 words.", lambda text: 0 < len(text.split()) <= 10),
    "no commas": ("Do not use any commas.", lambda text: "," not in text),
    "three bullets": ('Answer with exactly 3 bullet points that begin with "* ".', lambda text: bullets(text) == 3),
    "a title": (
        "Begin your answer with a title in double angular brackets, such as <<title>>.",
        lambda text: re.match(r"<<[^<>\n]+>>", text) is not None,
    ),
    "no the": ('Do not use the word "the".', lambda text: re.search(r"\bthe\b", text.lower()) is None),
}
WORDS = 40, 60  # of a paragraph
TOPICS = (  # separated by spaces
    "cats dogs bees birds fish horses whales ants trees roses rivers mountains deserts islands volcanoes glaciers rain "
    "snow wind clouds storms winter summer sunrise stars comets planets gravity light sound magnets batteries bridges "
    "castles trains bicycles boats airplanes clocks maps books letters music drums guitars painting theatre chess "
    "football running swimming cooking bread cheese apples coffee tea chocolate salt sugar sleep dreams memory "
    "laughter friendship schools markets money farms gardens forests beaches lighthouses museums libraries paper gold"
)
QUESTIONS = ("What should I know about {}?", "Tell me something about {}.", "Why do people care about {}?")


def bullets(text: str) -> int:
    """The number of bullet points; 0 if there is anything else."""
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) if all(line.startswith("* ") for line in lines) else 0


def first_number(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1 if the response begins with the right number."""
    found = re.match(r"\s*(-?\d+)", response)
    return float(found is not None and found[1] == str(row["answer"]))


def follows(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1 if the response follows the instruction that the row names."""
    return float(INSTRUCTIONS[row["answer"]][1](response.strip()))


def paragraph(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1 for one paragraph whose number of words is within the limits."""
    text = response.strip()
    return float("\n" not in text and WORDS[0] <= len(text.split()) <= WORDS[1])


def sums() -> list[tuple[str, str]]:
    """Every sum and difference of two numbers of one digit, and its result."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return [(f"{a} + {b}", str(a + b)) for a, b in pairs] + [(f"{a} - {b}", str(a - b)) for a, b in pairs]


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write prompts and answers as JSON lines."""
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    questions = [question.format(topic) for topic in TOPICS.split() for question in QUESTIONS]
    asked = [(f"{question} {INSTRUCTIONS[name][0]}", name) for question in questions for name in INSTRUCTIONS]
    write(OUTPUT / "instructions.jsonl", asked)
    write(OUTPUT / "sums.jsonl", sums())
    wanted = f"Write one paragraph of {WORDS[0]} to {WORDS[1]} words."
    write(OUTPUT / "paragraphs.jsonl", [(f"{question} {wanted}", wanted) for question in questions])


if __name__ == "__main__":
    main()
