"""docs/reading.md: everything that it names is there, and it says where the answers to ten questions are.

A reader who has the page alone should answer them from it and from the files that it names.
"""

import ast
import re

from tests.helpers import ROOT

PAGE = (ROOT / "docs/reading.md").read_text()
LINES = 300  # at most, for somebody's first hour
ANSWERS = (
    "megarl/commands/train.py: train",  # what decides whether a stage generates next, trains next, or is done
    "megarl/rollout/engine.py: response_seed",  # from what the seed of a response follows
    "megarl/rollout/builtin.py: _Decoder.sample",  # where a token gets the log-prob of all later ratios
    "megarl/phases/rollout_worker.py: RolloutWorker.check_drift",  # what notices weights of the stage before
    "megarl/storage/rollouts.py: RolloutWriter.append",  # from which moment on a group survives a loss of power
    "megarl/advantages.py: group_advantages",  # where a reward becomes an advantage
    "megarl/actor/packing.py: assign_groups",  # which micro-batch and rank get a response
    "megarl/actor/model.py: PolicyModel._postprocess",  # log-probs without logits of the whole vocabulary
    "megarl/actor/step.py: compute_gradients",  # by what the loss is divided
    "megarl/storage/metrics/__init__.py: MetricsWriter",  # why no update appears twice after a kill
)
REFERENCE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")


def is_defined(path: str, name: str) -> bool:
    """Whether the source of a module defines ``name``: a function, a class, a method or field of one, or a constant."""
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        if not (found := [node for node in body if part in names_of(node)]):
            return False
        body = getattr(found[0], "body", [])
    return True


def names_of(node: ast.stmt) -> set[str | None]:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {getattr(node, "name", None), *(target.id for target in targets if isinstance(target, ast.Name))}


def test_everything_that_the_page_names_is_there():
    references = REFERENCE.findall(PAGE)
    assert len(references) > 40 and not is_defined("megarl/storage/rollouts.py", "RolloutWriter.read")
    assert [f"{path}: {name}" for path, name in references if not is_defined(path, name)] == []


def test_the_page_says_where_the_answers_are_and_can_be_read_in_an_hour():
    assert [answer for answer in ANSWERS if f"`{answer}`" not in PAGE] == []
    assert len(PAGE.splitlines()) <= LINES
