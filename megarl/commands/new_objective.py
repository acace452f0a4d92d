"""``megarl objective new``: the file of a new objective, with its test beside it, to be changed by its author."""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path

from megarl.errors import UserError
from megarl.storage.files import write_atomic

OBJECTIVE = '''"""The objective CLASS. In a recipe: [objective] path = "NAME.py:CLASS"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, clamp, rule, where
from megarl.objectives import Objective
from megarl.objectives.parts.fields import number


@rule()
def NAME(t: Token, s: Sequence, highest: Any) -> Outcome:
    """Value, its derivative with respect to the token's log-prob, whether the gradient survives, two flags."""
    weight = clamp(t.ratio, 0.0, highest)  # rho_t = pi(t) / pi_rollout(t); t.prefix_ratio is m_t rho_t
    value = weight * t.advantage * t.logprob
    return Outcome(value, where(t.clamped, 0.0, weight * t.advantage), ~t.clamped, t.ratio > highest, t.never)


@dataclass(frozen=True)
class CLASS(Objective):
    """objective_t = sg(min(rho_t, ratio_max)) A_t log pi(t): every token keeps its gradient, with a bounded weight.

    Change the rule and the settings. What no function of one token can compute, a method terms(self, batch,
    statistics) does instead of rule.
    """

    ratio_form: ClassVar[bool] = False  # the gradient flows through log pi, not through the ratio

    ratio_max: float = number(5.0, 1)  # the default and the least value; [objective] ratio_max = 3 sets it

    def rule(self, statistics: Any) -> Rule:
        return Rule(NAME, (self.ratio_max,), first="clip_fraction")
'''
TEST = '''"""CLASS by hand: run `python test_NAME.py`, or pytest."""

import torch
from NAME import CLASS

from megarl.batch import TokenBatch


def test_value_and_gradient_of_four_tokens() -> None:
    ratios = torch.tensor([1.0, 0.5, 2.0, 8.0])
    rollout = torch.full((4,), -2.0)
    logprobs = (rollout + ratios.log()).requires_grad_()
    batch = TokenBatch(
        logprobs=logprobs,
        rollout_logprobs=rollout,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),  # two responses of two tokens
        loss_mask=torch.tensor([True, True, True, True]),
        cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
    )
    terms = CLASS(ratio_max=5.0)(batch)
    weights = torch.tensor([1.0, 0.5, 2.0, 5.0])
    torch.testing.assert_close(terms.loss, -weights * batch.advantages * logprobs)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -weights * batch.advantages)  # none through the weights
    assert terms.kept.all()


if __name__ == "__main__":
    test_value_and_gradient_of_four_tokens()
    print("passed")
'''


def new_objective(name: str, folder: Path) -> str:
    """Write NAME.py and test_NAME.py into ``folder``; returns the lines to print. `UserError` if a file exists."""
    taken = keyword.iskeyword(name) or importlib.util.find_spec(name) is not None
    if not (name.isidentifier() and name.islower()) or taken:
        raise UserError(f"{name!r}: expected a name like soft_prefix that no module has: it becomes a file and a class")
    cls = "".join(word.capitalize() for word in name.split("_"))
    files = {folder / f"{name}.py": OBJECTIVE, folder / f"test_{name}.py": TEST}
    if there := [path for path in files if path.exists()]:
        raise UserError(f"{there[0]} exists already")
    for path, text in files.items():
        write_atomic(path, text.replace("CLASS", cls).replace("NAME", name))
    return "\n".join(
        [
            *(f"wrote   {path}" for path in files),
            f"test    python test_{name}.py",
            f"use     megarl train RECIPE.toml --run-dir DIR --set objective.path={name}.py:{cls}",
        ]
    )
