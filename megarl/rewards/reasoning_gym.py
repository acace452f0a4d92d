"""The verifier that calls the scorer of the prompt's generator.

Some scorers of reasoning-gym 0.1.25 pass the response to Python's ``eval`` or to SymPy's ``parse_expr``, which also
evaluates. In their modules `literal` and `formula` stand in place of these, so that nothing but data reaches them. What
a formula costs is limited by `megarl.rewards.pool`.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import TAGGED, Verifier

EVALUATING = {
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),  # eval
    *("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"),  # SymPy
}
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
FUNCTIONS = {"sqrt", "exp", "log", "ln", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "Abs"}
CONSTANTS = {"E", "I", "pi"}
# what may stand around an answer: a fence, bold, code, quotes, a formula, a box
DRESS = re.compile(
    r'```\w*\n(.+)```|(\*\*|__|\$\$|[*`$"])(.+)\2|\\[(\[](.+)\\[)\]]|\\(?:boxed|text|textbf)\{(.+)\}|\u201c(.+)\u201d',
    re.DOTALL,
)
LAYERS = 4  # of it, at most
NUMBERS = re.compile(r"-?\d+(?:\.\d+)?")


def check(recipe: Recipe) -> None:
    """Raise `UserError` if prompts come from a file, which has no scorer."""
    for table in recipe.prompt_sources():
        if table.source == "file":
            raise UserError(f'reward.kind = "reasoning_gym" cannot score a file: {table.train}; use "exact" or "math"')


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return ReasoningGym(prompts.scorers)


class ReasoningGym:
    """Scores in [0, 1], with the partial credit of the generator's scorer."""

    def __init__(self, scorers: dict[str, Any]) -> None:
        self._scorers = scorers  # generator name -> data set
        evaluate_nothing()

    def score(self, prompt: Prompt, response: str) -> float:
        best = 0.0
        for answer in answers_in(response):
            best = max(best, self._score(prompt, answer))
            if best == 1.0:
                break
        return best

    def _score(self, prompt: Prompt, response: str) -> float:
        # that of a composite generator calls the one inside it that made this item
        scorer = self._scorers[prompt.entry["generator"]]
        try:
            if not _may_solve(prompt.entry, response):
                return 0.0
            score = float(scorer.score_answer(answer=response, entry=prompt.entry))
            return score if 0.0 <= score <= 1.0 else 0.0  # 0 for NaN, too
        except MemoryError:
            raise
        except (Exception, NotData):
            return 0.0  # some scorers, as of prime_factorization, raise on text that they cannot parse


def _may_solve(entry: Mapping[str, Any], answer: str) -> bool:
    """False for answers that solve nothing, but which scorers of reasoning_gym 0.1.25 take for right."""
    metadata = entry["metadata"]
    match metadata.get("source_dataset"):
        case "complex_arithmetic":  # every comparison with NaN is false
            return not re.search(r"(?i)(?<![a-z])nan(?![a-ik-z])", answer)
        case "number_sorting":  # it takes numbers that are off by up to 1
            ours, right = (list(map(float, NUMBERS.findall(text))) for text in (answer, str(entry["answer"])))
            return ours == right
        case "propositional_logic":  # a premise follows from the premises
            plain = [re.sub(r"[\s()]", "", text) for text in (answer, *metadata["premises"])]
            return plain[0] not in plain[1:]
        case "game_of_life_halting":  # "True" and "False" are compared by their truth values
            return answer.strip().lower() == str(entry["answer"]).lower()
        case "countdown" | "puzzle24" as game:  # a formula of the given numbers: not 0x2d, pi - pi, or 6 * 4 * 1 * 1
            numbers = sorted(map(int, re.findall(r"\d+", answer)))
            if re.fullmatch(r"[\d\s+\-*/().]+", answer) is None:
                return False
            return game == "countdown" or (numbers == sorted(metadata["numbers"]) and formula(answer) == 24)
    return True


class NotData(BaseException):
    """A response is neither a literal nor a formula. Not an `Exception`, which scorers would catch."""


def literal(text: str) -> Any:
    """In place of ``eval``: the value of a literal of Python, such as a list of lists of numbers."""
    try:
        return ast.literal_eval(text)
    except Exception as error:
        raise NotData from error


def formula(text: str, local_dict: dict[str, Any] | None = None, **options: Any) -> Any:
    """In place of SymPy's ``parse_expr``: the expression of a formula of numbers, symbols and elementary functions."""
    import sympy  # as the scorers' modules do

    def build(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int()) if not isinstance(node.value, bool):
                return sympy.Integer(node.value)
            case ast.Constant(value=float()):
                return sympy.Float(ast.get_source_segment(text, node))
            case ast.Name(id=name) if name in (local_dict or {}):
                return (local_dict or {})[name]
            case ast.Name(id=name) if name in CONSTANTS:
                return getattr(sympy, name)
            case ast.Name(id=name) if name.isalnum() and name not in FUNCTIONS:
                return sympy.Symbol(name)
            case ast.UnaryOp(op=ast.USub()):
                return -build(node.operand)
            case ast.UnaryOp(op=ast.UAdd()):
                return build(node.operand)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](build(node.left), build(node.right))
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                return getattr(sympy, name)(*map(build, node.args))
        raise NotData

    try:
        text = text.strip()
        return build(ast.parse(text, mode="eval").body)
    except Exception as error:
        raise NotData from error


def evaluate_nothing() -> None:
    """In this process, put `literal` and `formula` in place of what the scorers of `EVALUATING` evaluate text with."""
    from reasoning_gym.factory import DATASETS

    for generator in EVALUATING:
        names = vars(sys.modules[DATASETS[generator][0].__module__])
        names |= {"eval": literal, "parse_expr": formula}
        for name in {"sympy", "sp"} & names.keys():
            names[name] = types.SimpleNamespace(**vars(names[name]) | {"parse_expr": formula})


def answers_in(response: str) -> list[str]:
    """The answer of a response in the ways in which it may be meant: scorers take white space, bold or a final dot for
    a part of it, which they are of some answers.

    As with the library's `extract_answer` it stands in the last <answer>; else it is what follows any thoughts.
    """
    text = response.rpartition("</think>")[2]
    text = (TAGGED.findall(text) or [text])[-1]
    plain = text.strip()
    bare = _bare(plain.removesuffix("."))
    return list(dict.fromkeys((plain, text, _bare(plain), bare, bare.removesuffix("."))))


def _bare(text: str) -> str:
    for _ in range(LAYERS):
        if (found := DRESS.fullmatch(text)) and found.lastindex:
            text = found[found.lastindex].strip()
    return text
