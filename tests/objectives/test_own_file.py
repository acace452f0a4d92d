"""Objectives and advantage functions in files of the user's own: the whole way, and the mistakes in them."""

from __future__ import annotations

import json
import re
import runpy
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megarl.advantages import group_advantages
from megarl.errors import UserError
from megarl.objectives import build_objective
from megarl.objectives.own import try_objective
from megarl.own_file import load
from megarl.recipe.load import load_recipe, override_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.run_dir import RunDir
from tests.helpers import ROOT, events, metrics
from tests.objectives.random_batches import random_batch
from tests.phases.commands import settings, succeed, train

RULE = (ROOT / "examples/own_objective/own_objective.py").read_text().replace("OwnObjective", "Mine")
QUIET = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from megarl.objectives import Objective, make_terms
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.ratios import log_ratio


@dataclass(frozen=True)
class Quiet(Objective):
    """rho A without the tokens whose log-ratio is above the batch's mean."""

    needs_statistics: ClassVar = True
    margin: float = number(0.0, 0)

    def statistics(self, batch, group=None, backend="torch"):
        l, _ = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        sums = torch.stack([l.double().sum(), batch.loss_mask.sum().double()])
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums[0] / sums[1].clamp(min=1)

    def terms(self, batch, statistics):
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        loud = l.detach() > statistics + self.margin
        value = torch.where(loud, 0, l.exp() * batch.advantages)
        terms = make_terms(self, batch, -value, ~loud & ~clamped, l, clamped, {})
        return terms.flagged("loud_fraction", loud, batch)


def halves(rewards):
    return 0.5 * (rewards - rewards.mean(1, keepdim=True))
'''
# the settings of every run here: two stages of two updates
SHORT = ("schedule.stages=2", "schedule.updates_per_stage=2", "actor.checkpoint_every=1", "actor.keep_checkpoints=2")


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(RULE)
    (path.parent / "quiet.py").write_text(QUIET)
    return path


def test_its_rule_on_the_default_kernels_and_beside_another_file_with_the_same_names(mine: Path) -> None:
    path, copy = f"{mine}:Mine", mine.with_name("copied.py")
    copy.write_text(RULE.replace("weight * t.advantage", "2 * weight * t.advantage"))
    batch = random_batch(1)
    one, other = build_objective(path, {})(batch, backend="cpp"), build_objective(f"{copy}:Mine", {})(batch)
    torch.testing.assert_close(2 * one.loss, other.loss)
    assert torch.equal(one.loss, build_objective(path, {})(batch).loss) and one.loss.abs().sum() > 0
    torch.testing.assert_close(one.loss, build_objective("cispo", {"eps_high": 4.0})(batch).loss)


QUANTITIES = """
def highest_ratio(l, batch, parameters):
    least = l.new_full((batch.cu_seqlens.numel() - 1,), -torch.inf)
    return Sequence(least.scatter_reduce(0, batch.sequence_ids, l, "amax").exp(), None)


def running_mean(l, batch, parameters):
    trained = torch.ones_like(l)
    return Sequence(prefix_log_ratio(l, batch) / prefix_log_ratio(trained, batch).clamp(min=1), None)


@rule("""


@pytest.mark.parametrize("quantity", ["highest_ratio", "running_mean, per_token=True"])
def test_a_quantity_of_its_own_is_one_function(quantity: str, tmp_path: Path) -> None:
    imports = "import torch\nfrom megarl.objectives.parts.prefix_ratio import prefix_log_ratio\n"
    text = RULE.replace("@rule(", QUANTITIES + quantity).replace("clamp(t.ratio,", "clamp(s.value,")
    (tmp_path / "mine.py").write_text(text.replace("from dataclasses", imports + "from dataclasses"))
    objective, batch = build_objective(f"{tmp_path}/mine.py:Mine", {"ratio_max": 1e9}), random_batch(1)
    try_objective(objective, "mine.py")
    lengths = batch.cu_seqlens.diff().tolist()
    l = torch.where(batch.loss_mask, batch.logprobs - batch.rollout_logprobs, 0).detach().split(lengths)
    trained = batch.loss_mask.split(lengths)
    expected = {
        "highest_ratio": [x.exp().max().expand_as(x) if len(x) else x for x in l],
        "running_mean": [
            (x.cumsum(0) / n.cumsum(0).clamp(min=1)).clamp(min=0) for x, n in zip(l, trained, strict=True)
        ],
    }[quantity.split(",")[0]]
    loss = -torch.cat(expected) * batch.advantages * batch.logprobs
    for backend in ("torch", "cpp"):
        found = objective(batch, backend=backend)
        torch.testing.assert_close(found.loss, torch.where(batch.loss_mask, loss, 0))


def test_a_run_on_an_objective_with_statistics_resumes_with_the_file_alone_and_branches(
    recipe: Path, mine: Path, tmp_path: Path
) -> None:
    """Started in the folder of the file, stopped after its first stage, and then in another folder."""
    run, branch = tmp_path / "run", tmp_path / "branch"
    own = (*SHORT, "objective.path=quiet.py:Quiet", "objective.margin=1e-6", "objective.advantage=quiet.py:halves")
    train(recipe, run, "--until", "optimize:0", *settings(*own), cwd=mine.parent)
    table = RunDir.open(run).recipe.objective
    assert (table.name, table.fields["margin"]) == ("Quiet", 1e-6)
    assert table.path == f"{mine.parent}/quiet.py:Quiet"
    train(run / "recipe.toml", run, cwd=tmp_path)
    assert [line["update"] for line in metrics(RunDir.open(run))] == [1, 2, 3, 4]
    assert 0 < metrics(RunDir.open(run))[1]["loud_fraction"] < 1
    report = (run / "report.html").read_text()
    assert "quiet.py:Quiet" in report and '"name": "loud"' in report
    assert succeed("audit", run).stdout.splitlines()[-1] == "everything that was checked agrees"
    rows = json.loads(succeed("what-if", run, "--stage", 0, "--update", 2, "--batches", 2, "--json").stdout)
    masked = {row["objective"]: row["masked"][0] for row in rows if "masked" in row}
    assert masked.keys() == {"m2po", "trm", "prefix_filter", "cppo", "Quiet"} and masked["Quiet"] > 0
    succeed("optimize", run, "--stage", 0, "--output", branch, *settings("objective.name=grpo"))
    assert RunDir.open(branch).recipe.objective.definition == "grpo"


def test_it_is_a_point_of_a_sweep(recipe: Path, mine: Path) -> None:
    table = f'''
recipe = "{recipe}"
stage = 0
set = {{ schedule = {{ stages = 1, updates_per_stage = 2 }} }}
[axes.objective]
grpo = {{ objective = {{ name = "grpo" }} }}
mine = {{ objective = {{ ratio_max = 2, path = "mine.py:Mine" }} }}
'''
    (mine.parent / "sweep.toml").write_text(table)
    assert len(json.loads(succeed("sweep", "sweep.toml", "--json", cwd=mine.parent).stdout)) == 2
    points = [next((mine.parent / "sweep" / name).glob("seed_*")) for name in ("grpo", "mine")]
    assert [RunDir.open(point).recipe.objective.fields.get("ratio_max") for point in points] == [None, 2.0]


def test_a_changed_file_is_refused_after_updates_and_taken_before_them(
    recipe: Path, mine: Path, tmp_path: Path
) -> None:
    own, root = tmp_path / "mine.py", tmp_path / "run"
    own.write_text(RULE)
    command = [recipe, root, *settings(*SHORT, f"objective.path={own}:Mine")]
    train(*command, "--until", "rollout:0")
    own.write_text(RULE + "# a comment\n")
    train(*command, "--until", "optimize:0")
    assert [e["settings"] for e in events(RunDir.open(root), "recipe_changed")] == [[f"{own}: another content"]]
    own.write_text(RULE + "# another\n")
    refused = train(*command, code=2)
    assert f"the objective file {own} has changed" in refused.stderr
    assert f"megarl optimize {root} --stage 0 --output" in refused.stderr
    assert "has changed since" in succeed("audit", root, code=1).stdout


def test_the_objective_of_the_examples_passes_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = re.findall(r"--set objective.path=(.+)", succeed("init", "own_objective", cwd=tmp_path).stdout)
    try_objective(build_objective(f"{tmp_path}/{path}", {}), f"{tmp_path}/{path}")
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path(f"{tmp_path}/test_own_objective.py", run_name="__main__")


OBJECTIVES = (ROOT / "docs/objectives.md").read_text()
DOCUMENTED = re.search(r"```python\n(def terms.*?)```", OBJECTIVES, re.DOTALL)[1]
EARLIER = textwrap.indent(re.search(r"```python\n(total.*?)```", OBJECTIVES, re.DOTALL)[1], " " * 8)
TERMS = f"""
from dataclasses import dataclass
import torch
from megarl.objectives import Objective, Terms, make_terms
@dataclass(frozen=True)
class Mine(Objective):
{textwrap.indent(DOCUMENTED, "    ")}"""


@pytest.mark.parametrize(
    ("text", "there", "instead", "message"),
    [
        (RULE, "class Mine", "clas Mine", "SyntaxError"),
        (RULE, "@dataclass(frozen=True)\nclass Mine(Objective)", "def Mine()", "expected a class that derives from"),
        (RULE, "@dataclass(frozen=True)\n", "", "needs the decorator"),
        (RULE, "def rule(self", "def rules(self", "neither a method rule"),
        (RULE, "    def rule(", "    def statistics(self, *_): ...\n\n    def rule(", "needs_statistics = True"),
        (RULE, " = number(5.0, 1)", "", "non-default argument 'ratio_max'"),
        (RULE, "where(t.clamped, 0.0, weight * t.advantage)", "value[:2]", "size"),
        (RULE, "return Outcome(", "Outcome(", "is a return missing?"),
        (RULE, "return Rule(", "Rule(", "must return Rule\\(FUNCTION"),
        (RULE, "@rule()\n", "", r"with a function that has @rule\(\)"),
        (RULE, ", highest)", ", highest) / 0.0", "the loss is not finite"),
        (TERMS, "", "", None),
        (TERMS, ", {})", ", {'mine': torch.ones(2)})", r"the metric 'mine' is not \(sum, count\)"),
        (TERMS, "make_terms(self, batch, loss, kept, l.detach(), torch.zeros_like(kept), {})",
         "Terms(loss, kept, {}, {})",
         "its metrics lack 'kept_fraction': return what megarl.objectives.make_terms makes"),
        (TERMS, "    l =", "    batch.advantages.mul_(2)\n        l =", "it changes the batch"),
        (TERMS, "torch.where(batch.loss_mask, batch.logprobs - batch.rollout_logprobs, 0.0)", "batch.logprobs",
         "the gradient is not finite"),
        (TERMS, "* batch.advantages", "@ batch.advantages", r"make_terms got loss \[\] and kept \[8\], expected \[8\]"),
        (TERMS, "        loss =", EARLIER + "        loss = earlier -", None),
        (TERMS, "torch.exp(l)", "torch.exp(l.cumsum(0))", "the loss of a response depends on another one"),
    ],
)  # fmt: skip
def test_objectives_as_documented_are_accepted_and_a_mistake_is_one_line(
    text, there, instead, message, tmp_path
) -> None:
    assert there in text
    (tmp_path / "mine.py").write_text(text.replace(there, instead, 1))
    path = f"{tmp_path}/mine.py:Mine"
    with nullcontext() if message is None else pytest.raises(UserError, match=message) as error:
        try_objective(build_objective(path, {}), path)
    assert message is None or "\n" not in str(error.value)


def test_a_mistake_in_an_objective_is_found_before_any_process(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RULE.replace("t.ratio, 0.0", "t.rato, 0.0"))
    wrong = settings("objective.path=mine.py:Mine")
    done = train(recipe, "run", *wrong, cwd=tmp_path, code=2)
    assert "no attribute 'rato'" in done.stderr and not (tmp_path / "run").exists()


def test_a_module_beside_the_file_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import beside_it")
    (tmp_path / "beside_it.py").touch()
    with pytest.raises(UserError, match=f"'beside_it' .*it lies beside the file: set PYTHONPATH={tmp_path}"):
        load(f"{tmp_path}/mine.py:mine", "objective.path")


def test_settings_of_two_objectives_do_not_mix(recipe: Path, mine: Path) -> None:
    own: Recipe = load_recipe(recipe, [f"objective.path={mine}:Mine", "objective.ratio_max=2"])
    assert override_recipe(own, [f"objective.path={mine}:Mine"]) == own
    assert override_recipe(own, ["objective.name=grpo"]) == load_recipe(recipe, ["objective.name=grpo"])
    with pytest.raises(UserError, match="did you mean 'ratio_max'"):
        override_recipe(own, ["objective.ratio_mx=1"])
    both = recipe.read_text().replace('"mu_grpo"', f'"grpo"\npath = "{mine}:Mine"')
    (recipe.parent / "both.toml").write_text(both)
    with pytest.raises(UserError, match="leave one out"):
        load_recipe(recipe.parent / "both.toml")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("rewards - rewards.mean(1, keepdim=True)", "it returned None; is a return missing"),
        ("return rewards / 0", "not finite"),
        ("return rewards.mean(1)", r"returned \[2\] for rewards \[2, 4\]"),
        ("return rewards.men(1)", r"no attribute 'men' \(mine.py, line 2\)"),
    ],
)
def test_mistakes_in_an_advantage_function(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(rewards):\n    {body}\n")
    with pytest.raises(UserError, match=message):
        group_advantages(torch.eye(2, 4), f"{tmp_path}/mine.py:mine")
