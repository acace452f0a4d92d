"""Random responses that are code, for scorers that evaluate.

``PYTHONHASHSEED=0 python -m tests.rewards.fuzz SECONDS SEED`` runs them.

Each response is drawn from a grammar of Python's expressions, and at least one part of it is no data: a call, a name of
the scorer, a comprehension, an attribute. So it must score 0, create no file, and change no later score.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BUILTINS = ("open", "eval", "exec", "compile", "__import__", "getattr", "setattr", "vars", "globals", "repr", "bool")
SYMPY = ("sympify", "S", "parse_expr", "Symbol", "Function", "Lambda", "lambdify", "Integer", "Rational", "Matrix")
STATE = (
    *("entry", "self", "answer", "oracle_answer", "__builtins__", "__class__", "self.config", "entry['answer']"),
    *("__builtins__['float']", "__builtins__['str']", "entry['metadata']", "self.score_answer", "os.environ", "print"),
)
ATTRIBUTES = ("__class__", "__globals__", "__subclasses__", "__dict__", "config", "update", "append", "func", "subs")
OPERATORS = ("+", "-", "*", "/", "**", "//", "%", "@", "|", "&", "<<", " or ", " and ", " in ", " is ", "==", "<")
BRACKETS = ("[{}]", "[[{}]]", "({},)", "{{{}: 1}}", "{{{}}}", "({})", "{}", " {}", "{}\n", "[{}, 1]", "[[1], [{}]]")


@dataclass(frozen=True)
class Grammar:
    """Draws responses. trace: the file that they try to create. answers: right answers, of which parts are used."""

    trace: Path
    answers: tuple[str, ...]

    def response(self, draw: random.Random) -> str:
        text = draw.choice(BRACKETS).format(self.code(draw, 3))
        if draw.random() < 0.2:
            text = draw.choice(("{} {}", "{}\n{}", "{}, {}", "[{}, {}]", "{}={}", "{};{}")).format(
                draw.choice(self.answers), text
            )
        return text

    def code(self, draw: random.Random, depth: int) -> str:
        """An expression that is no data, at most ``depth`` levels deep."""
        inner, other = (self.any(draw, depth - 1) for _ in range(2))
        if depth == 0:
            return draw.choice((f"open('{self.trace}', 'w')", f"{draw.choice(BUILTINS)}({draw.choice(STATE)})"))
        target = draw.choice((*STATE, "x", "_"))
        match draw.randrange(14):
            case 0:
                return f"{draw.choice((*BUILTINS, *SYMPY))}({inner}, {other!r})"
            case 1:
                return f"[{inner} for {target} in [{other}]]"
            case 2:
                return f"{{{inner}: 1 for {target} in [{other}] if {inner}}}"
            case 3:
                return f"(lambda {draw.choice('xy')}={inner}: {self.code(draw, depth - 1)})()"
            case 4:
                return f"({inner}).{draw.choice(ATTRIBUTES)}"
            case 5:
                return f"({inner}).{draw.choice(ATTRIBUTES)}({other})"
            case 6:
                return f"(entry := {inner})"
            case 7:
                return f"{self.code(draw, depth - 1)}{draw.choice(OPERATORS)}({other})"
            case 8:
                return f'f"{{{self.code(draw, 0)}}}"'
            case 9:
                return f"{draw.choice(SYMPY)}({self.code(draw, depth - 1)!r})"
            case 10:
                return f"[*{self.code(draw, depth - 1)}, *[{other}]]"
            case 11:
                return f"({self.code(draw, depth - 1)} if {inner} else {other})"
            case 12:
                return f"any({inner} for {target} in {self.code(draw, depth - 1)})"
            case _:
                return f"{draw.choice(STATE[:4])}[{self.code(draw, depth - 1)}]"

    def any(self, draw: random.Random, depth: int) -> str:
        """An expression, data or not."""
        if depth <= 0 or draw.random() < 0.5:
            return draw.choice(("1", "-2.5", "'x'", "[1]", "x", "()", "None", "9**9", "sqrt(2)", *STATE))
        return self.code(draw, depth)


def fuzz(score, right, rounds: Iterable[object], seed: int, batch: int = 40) -> int:
    """Score random responses, ``batch`` in each of the rounds; returns how many. AssertionError if one succeeds.

    score: (generator, response) -> its score. right: {generator: its right answer}.
    """
    draw, count = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        grammar = Grammar(Path(folder) / "trace", tuple(right.values()))
        for _ in rounds:
            generators = sorted(right)
            asked = [(draw.choice(generators), grammar.response(draw)) for _ in range(batch)]
            asked = [question for question in asked if question[1].strip() not in right.values()]
            honest = [(name, right[name]) for name in generators]
            for _ in range(2):  # in two orders
                order = [*asked, *honest]
                draw.shuffle(order)
                for name, response in order:
                    found, expected = score(name, response), float((name, response) in honest)
                    assert found == expected, f"{name} scores {response!r} {found}, expected {expected} (seed {seed})"
                assert not list(Path(folder).iterdir()), f"one of {asked} made a file (seed {seed})"
            count += len(asked)
    return count


def main() -> None:
    from megarl.data.prompts import build_prompts
    from megarl.rewards.reasoning_gym import EVALUATING, ReasoningGym
    from tests.data.prompt_sources import char_tokenizer, recipe

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = char_tokenizer(Path(folder))
        prompts = {
            name: build_prompts(recipe(name, heldout=1, max_prompt_tokens=10000), tokenizer) for name in EVALUATING
        }
    end = time.monotonic() + float(sys.argv[1])
    verifier = ReasoningGym({name: found.scorers[name] for name, found in prompts.items()})
    asked = {name: found.train(0) for name, found in prompts.items()}
    count = fuzz(
        lambda name, response: getattr(verifier.score(asked[name], response), "value", None),
        {name: prompt.answer for name, prompt in asked.items()},
        iter(lambda: time.monotonic() > end, True),
        int(sys.argv[2]),
    )
    print(f"{count} responses, each scored twice: all 0, no file, every right answer among them 1")


if __name__ == "__main__":
    main()
