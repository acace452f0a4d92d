"""docs/reading.md: everything that it names is there, and it says where the answers to ten questions are.

The questions were written before the page. A reader who has the page alone should answer them from it and from the
files that it names.
"""

import ast
import re

from tests.helpers import ROOT

PAGE = (ROOT / "docs/reading.md").read_text()
LINES = 300  # at most, for somebody's first hour
# question -> the file, and the name in it, where that happens
QUESTIONS = {
    "What decides whether a stage generates next, trains next, or is done?": "megarl/commands/train.py: train",
    "Two runs with the same recipe sample the same response. From what does its seed follow?": (
        "megarl/rollout/engine.py: response_seed"
    ),
    "Where does a token get the log-prob that all later ratios are computed against?": (
        "megarl/rollout/builtin.py: _Decoder.sample"
    ),
    "An engine still has the weights of the stage before. What notices it, and when?": (
        "megarl/phases/rollout_worker.py: RolloutWorker.check_drift"
    ),
    "The machine loses power. From which moment on is a group safe?": (
        "megarl/storage/rollouts.py: RolloutWriter.append"
    ),
    "Where does a reward become an advantage, and with which other rewards is it compared?": (
        "megarl/advantages.py: group_advantages"
    ),
    "Which micro-batch and which rank gets a response?": "megarl/actor/packing.py: assign_groups",
    "Where are log-probs computed without logits of the whole vocabulary ever being stored?": (
        "megarl/actor/model.py: PolicyModel._postprocess"
    ),
    "The loss is a sum over tokens. By what is it divided, and who counts that?": (
        "megarl/actor/step.py: compute_gradients"
    ),
    "What writes the line of metrics.jsonl, and why does no update appear twice after a kill?": (
        "megarl/storage/metrics/__init__.py: MetricsWriter"
    ),
}
REFERENCE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")


def is_defined(path: str, name: str) -> bool:
    """Whether the source of a module defines ``name``: a function, a class, a method or field of one, or a constant."""
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        found = [node for node in body if part in names_of(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_everything_that_the_page_names_is_there():
    references = REFERENCE.findall(PAGE)
    assert len(references) > 40 and not is_defined("megarl/storage/rollouts.py", "RolloutWriter.read")
    assert [f"{path}: {name}" for path, name in references if not (ROOT / path).is_file()] == []
    assert [f"{path}: {name}" for path, name in references if not is_defined(path, name)] == []


def test_the_page_says_where_the_answers_are_and_can_be_read_in_an_hour():
    assert [question for question, answer in QUESTIONS.items() if f"`{answer}`" not in PAGE] == []
    assert len(PAGE.splitlines()) <= LINES
