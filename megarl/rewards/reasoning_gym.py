"""The verifier that calls the scorer of the prompt's generator, but keeps executable responses from it.

Some scorers of reasoning-gym 0.1.25 pass the response to Python's ``eval`` (string_insertion, spiral_matrix,
binary_matrix, n_queens) or to SymPy's ``parse_expr``, which evaluates too (countdown, puzzle24,
polynomial_multiplication, the integrations). They get only plain literals and plain formulas; any other response would
be wrong anyway and scores 0.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Verifier

EVAL_SCORERS = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
FORMULA_SCORERS = {
    "countdown",
    "puzzle24",
    "polynomial_multiplication",
    "simple_integration",
    "intermediate_integration",
}

LITERAL = re.compile(r"[\w\s\[\],'\"-]*")  # nested lists of words and numbers, but no calls, attributes or products
FUNCTIONS = {"sqrt", "exp", "log", "ln", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "Abs"}
FORMULA_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load)
LONGEST_FORMULA = 1000  # characters
LARGEST_POWER = 64


def check(recipe: Recipe) -> None:
    """Raise `UserError` if training or evaluation prompts come from a file, which has no scorer."""
    if recipe.data.files:
        raise UserError('reward.kind = "reasoning_gym" needs data.source = "reasoning_gym"')
    for suite in recipe.suites:
        if suite.data.source == "file":
            raise UserError(
                'reward.kind = "reasoning_gym" cannot score eval.source = "file": '
                f'{suite.data.train}; use "exact" or "math"'
            )


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return ReasoningGym(prompts.scorers)


class ReasoningGym:
    """Scores in [0, 1], with the partial credit of the generator's scorer."""

    def __init__(self, scorers: dict[str, Any]) -> None:
        self._scorers = scorers  # generator name -> data set

    def score(self, prompt: Prompt, response: str) -> float:
        # for a composite generator: the generator inside it that made this item
        source = prompt.entry["metadata"].get("source_dataset", prompt.entry["generator"])
        if source in EVAL_SCORERS and not LITERAL.fullmatch(response):
            return 0.0
        if source in FORMULA_SCORERS and not is_plain_formula(response):
            return 0.0
        try:
            score = float(self._scorers[prompt.entry["generator"]].score_answer(answer=response, entry=prompt.entry))
        except MemoryError:
            raise
        except Exception:
            return 0.0  # some scorers, as of prime_factorization, raise on text that they cannot parse
        return score if 0.0 <= score <= 1.0 else 0.0  # 0 for NaN, too


def is_plain_formula(text: str) -> bool:
    """Whether a text has only sums, products, small powers, elementary functions, numbers and one-letter symbols."""
    if len(text) > LONGEST_FORMULA:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(_plain(node) for node in ast.walk(tree))


def _plain(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS
        case ast.Constant():
            return _is_number(node)
        case ast.Name(id=name):
            return len(name) == 1 or name in FUNCTIONS
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            nested = any(isinstance(n, ast.Pow) for side in (left, right) for n in ast.walk(side))
            return not nested and _is_number(right) and abs(ast.literal_eval(right)) <= LARGEST_POWER
        case ast.BinOp(op=op):
            return isinstance(op, (ast.Add, ast.Sub, ast.Mult, ast.Div))
        case _:
            return isinstance(node, FORMULA_NODES)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)
