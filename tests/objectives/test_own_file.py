"""Objectives and advantage functions in files of the user's own: the whole way, and the mistakes in them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
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
from tests import helpers
from tests.helpers import ROOT, events, metrics
from tests.objectives.random_batches import random_batch

SOFT_PREFIX = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, exp, log, rule, where
from megarl.objectives import Objective, make_terms
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.ratios import log_ratio


@rule()
def soft_prefix(t: Token, s: Sequence, power: Any) -> Outcome:
    weight = t.ratio * exp(power * log(t.prefix_ratio / t.ratio))
    value = weight * t.advantage
    return Outcome(value, where(t.clamped, 0.0, value), ~t.clamped, t.never, t.never)


@dataclass(frozen=True)
class SoftPrefix(Objective):
    """m_t^power rho_t A_t."""

    power: float = number(0.5, 0, 1)

    def rule(self, statistics: Any) -> Rule:
        return Rule(soft_prefix, (self.power,))


@dataclass(frozen=True)
class MeanLogRatio:
    value: torch.Tensor


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
        return MeanLogRatio(sums[0] / sums[1].clamp(min=1))

    def terms(self, batch, statistics):
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        loud = l.detach() > statistics.value + self.margin
        value = torch.where(loud, 0, l.exp() * batch.advantages)
        terms = make_terms(self, batch, -value, ~loud & ~clamped, l, clamped, {})
        return terms.flagged("loud_fraction", loud, batch)


def halves(rewards):
    return 0.5 * (rewards - rewards.mean(1, keepdim=True))
'''
# the settings of every run here: two stages of two updates
SHORT = ("schedule.stages=2", "schedule.updates_per_stage=2", "actor.checkpoint_every=1", "actor.keep_checkpoints=2")


def megarl(*arguments: object, code: int = 0, cwd: Path = helpers.ROOT) -> subprocess.CompletedProcess[str]:
    done = helpers.megarl(*arguments, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOFT_PREFIX)
    return path


@pytest.fixture(scope="module")
def run(recipe: Path, mine: Path) -> Path:
    """A run on an objective with statistics and the advantage of the file, stopped after its first stage."""
    root = mine.parent / "run"
    own = (*SHORT, "objective.path=mine.py:Quiet", "objective.margin=1e-6", "objective.advantage=mine.py:halves")
    megarl("train", recipe, "--run-dir", root, "--until", "optimize:0", *sets(*own), cwd=mine.parent)
    return root


def test_its_rule_on_the_default_kernels_and_beside_another_file_with_the_same_names(mine: Path) -> None:
    path, copy = f"{mine}:SoftPrefix", mine.with_name("copied.py")
    copy.write_text(SOFT_PREFIX.replace("t.ratio * exp(", "2 * t.ratio * exp("))
    batch = random_batch(1)
    one, other = build_objective(path, {})(batch, backend="cpp"), build_objective(f"{copy}:SoftPrefix", {})(batch)
    torch.testing.assert_close(2 * one.loss, other.loss)
    assert torch.equal(one.loss, build_objective(path, {})(batch).loss) and one.loss.abs().sum() > 0
    minimum = build_objective(path, {"power": 1.0})(batch)
    torch.testing.assert_close(minimum.loss, build_objective("prefix_ratio_grpo", WIDE)(batch).loss)


WIDE = {"eps_low": 1.0, "eps_high": 1e9}


def test_the_run_resumes_from_another_directory_with_the_file_alone(run: Path, tmp_path: Path) -> None:
    settings = RunDir.open(run).recipe.objective
    assert (settings.name, settings.fields["margin"]) == ("Quiet", 1e-6)
    assert settings.path == f"{run.parent}/mine.py:Quiet"
    megarl("train", run / "recipe.toml", "--run-dir", run, cwd=tmp_path)
    assert [line["update"] for line in metrics(RunDir.open(run))] == [1, 2, 3, 4]
    assert 0 < metrics(RunDir.open(run))[1]["loud_fraction"] < 1
    report = (run / "report.html").read_text()
    assert "mine.py:Quiet" in report and '"name": "loud"' in report
    assert megarl("audit", run).stdout.splitlines()[-1] == "everything that was checked agrees"


def test_what_if_compares_it_with_the_others(run: Path) -> None:
    rows = json.loads(megarl("what-if", run, "--stage", 0, "--update", 2, "--batches", 2, "--json").stdout)
    masked = {row["objective"]: row["masked"][0] for row in rows if "masked" in row}
    assert masked.keys() == {"m2po", "trm", "prefix_filter", "cppo", "Quiet"} and masked["Quiet"] > 0


def test_it_is_a_point_of_a_sweep_and_a_setting_of_a_branch(run: Path, recipe: Path, mine: Path) -> None:
    table = f'''
recipe = "{recipe}"
stage = 0
set = {{ schedule = {{ stages = 1, updates_per_stage = 2 }} }}
[axes.objective]
grpo = {{ objective = {{ name = "grpo" }} }}
soft = {{ objective = {{ power = 1, path = "mine.py:SoftPrefix" }} }}
'''
    (mine.parent / "sweep.toml").write_text(table)
    rows = json.loads(megarl("sweep", "sweep.toml", "--json", cwd=mine.parent).stdout)
    assert len(rows) == 2
    points = [next((mine.parent / "sweep" / name).glob("seed_*")) for name in ("grpo", "soft")]
    assert [RunDir.open(point).recipe.objective.fields.get("power") for point in points] == [None, 1.0]
    branch = mine.parent / "branch"
    megarl("optimize", run, "--stage", 0, "--output", branch, *sets("objective.name=grpo"))
    assert RunDir.open(branch).recipe.objective.definition == "grpo"


def test_a_changed_file_is_refused_after_updates_and_taken_before_them(
    recipe: Path, mine: Path, tmp_path: Path
) -> None:
    own, root = tmp_path / "mine.py", tmp_path / "run"
    own.write_text(SOFT_PREFIX)
    command = ["train", recipe, "--run-dir", root, *sets(*SHORT, f"objective.path={own}:SoftPrefix")]
    megarl(*command, "--until", "rollout:0")
    own.write_text(SOFT_PREFIX + "# a comment\n")
    megarl(*command, "--until", "optimize:0")
    assert [e["settings"] for e in events(RunDir.open(root), "recipe_changed")] == [[f"{own}: another content"]]
    own.write_text(SOFT_PREFIX + "# another\n")
    refused = megarl(*command, code=2)
    assert f"the objective file {own} has changed" in refused.stderr
    assert f"megarl optimize {root} --stage 0 --output" in refused.stderr
    assert "has changed since" in megarl("audit", root, code=1).stdout


def test_the_objective_of_the_examples_passes_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = re.findall(r"--set objective.path=(.+)", megarl("init", "own_objective", cwd=tmp_path).stdout)
    try_objective(build_objective(f"{tmp_path}/{path}", {}), f"{tmp_path}/{path}")
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path(f"{tmp_path}/test_own_objective.py", run_name="__main__")
    file = tmp_path / "own_objective.py"
    file.write_text(file.read_text().replace("clamp(t.ratio, 0.0, highest)", "t.ratio"))
    del sys.modules["own_objective"]
    with pytest.raises(AssertionError):
        runpy.run_path(f"{tmp_path}/test_own_objective.py", run_name="__main__")


# what stands in the place of `weight = ...`, or of another line: what the message must say
WRONG = {
    "no file": (None, "mine.py:SoftPrefix", "there is no file"),
    "name": (SOFT_PREFIX, "mine.py:SoftPrefx", "has no 'SoftPrefx'"),
    "syntax": ("def f(:", "mine.py:SoftPrefix", "SyntaxError"),
    "import": ("import no_such_module", "mine.py:SoftPrefix", "No module named 'no_such_module' (mine.py, line 1)"),
    "function": (SOFT_PREFIX, "mine.py:halves", "expected a class that derives from"),
    "decorator": (SOFT_PREFIX.replace("@dataclass(frozen=True)\n", ""), "mine.py:SoftPrefix", "needs the decorator"),
    "method": (SOFT_PREFIX.replace("def rule(self", "def rules(self"), "mine.py:SoftPrefix", "neither a method rule"),
    "statistics": (
        SOFT_PREFIX.replace("    def rule(", "    def statistics(self, *_):\n        return 1\n\n    def rule(", 1),
        "mine.py:SoftPrefix",
        "has a method statistics, which is called only with needs_statistics = True",
    ),
    "default": (SOFT_PREFIX.replace(" = number(0.5, 0, 1)", ""), "mine.py:SoftPrefix", "non-default argument 'power'"),
    "raises": (SOFT_PREFIX.replace("t.prefix_ratio /", "t.prefix /"), "mine.py:SoftPrefix", "no attribute 'prefix'"),
    "shape": (SOFT_PREFIX.replace("where(t.clamped, 0.0, value)", "value[:2]"), "mine.py:SoftPrefix", "size"),
    "no return": (SOFT_PREFIX.replace("return Outcome(", "Outcome("), "mine.py:SoftPrefix", "is a return missing?"),
    "no rule": (SOFT_PREFIX.replace("return Rule(", "Rule("), "mine.py:SoftPrefix", "must return Rule(FUNCTION"),
    "no @rule": (SOFT_PREFIX.replace("@rule()\n", ""), "mine.py:SoftPrefix", "with a function that has @rule()"),
    "infinite": (SOFT_PREFIX.replace("weight = t.ratio", "weight = t.ratio / 0.0"), "mine.py:SoftPrefix", "not finite"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_an_objective_is_one_line(mistake: str, tmp_path: Path) -> None:
    text, path, message = WRONG[mistake]
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError) as error:
        try_objective(build_objective(f"{tmp_path}/{path}", {}), f"{tmp_path}/{path}")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_mistake_in_an_objective_is_found_before_any_process(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG["raises"][0])
    wrong = sets("objective.path=mine.py:SoftPrefix")
    done = megarl("train", recipe, "--run-dir", "run", *wrong, cwd=tmp_path, code=2)
    assert "no attribute 'prefix'" in done.stderr and not (tmp_path / "run").exists()
    done = megarl("train", recipe, "--run-dir", "run", *sets("objective.path=mine.py"), cwd=tmp_path, code=2)
    assert "expected FILE.py:CLASS" in done.stderr


OBJECTIVES = (ROOT / "docs/objectives.md").read_text()
DOCUMENTED = re.search(r"```python\n(def terms.*?)```", OBJECTIVES, re.DOTALL)[1]
EARLIER = textwrap.indent(re.search(r"```python\n(total.*?)```", OBJECTIVES, re.DOTALL)[1], "    ")


@pytest.mark.parametrize(
    ("there", "instead", "message"),
    [
        ("", "", None),
        (", {})", ", {'mine': torch.ones(2)})", r"the metric 'mine' is not \(sum, count\)"),
        ("make_terms(self, batch, loss, kept, l.detach(), torch.zeros_like(kept), {})", "Terms(loss, kept, {}, {})",
         "its metrics lack 'kept_fraction': return what megarl.objectives.make_terms makes"),
        ("    l =", "    batch.advantages.mul_(2)\n    l =", "it changes the batch, which others read after it"),
        ("torch.where(batch.loss_mask, batch.logprobs - batch.rollout_logprobs, 0.0)", "batch.logprobs", "finite"),
        ("* batch.advantages", "@ batch.advantages", r"make_terms got loss \[\] and kept \[8\], expected \[8\]"),
        ("    loss =", EARLIER + "    loss = earlier -", None),
        ("torch.exp(l)", "torch.exp(l.cumsum(0))", "the loss of a response depends on another one"),
    ],
)  # fmt: skip
def test_terms_as_documented_are_accepted_and_mistakes_in_them_are_found(there, instead, message, tmp_path) -> None:
    head = (
        "from dataclasses import dataclass\nimport torch\nfrom megarl.objectives import Objective, Terms, make_terms\n"
    )
    assert there in DOCUMENTED
    body = textwrap.indent(DOCUMENTED.replace(there, instead, 1) if there else DOCUMENTED, "    ")
    (tmp_path / "mine.py").write_text(f"{head}@dataclass(frozen=True)\nclass Mine(Objective):\n{body}")
    path = f"{tmp_path}/mine.py:Mine"
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        try_objective(build_objective(path, {}), path)


def test_a_module_beside_the_file_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import beside_it")
    (tmp_path / "beside_it.py").touch()
    with pytest.raises(UserError, match=f"'beside_it' .*it lies beside the file: set PYTHONPATH={tmp_path}"):
        load(f"{tmp_path}/mine.py:mine", "objective.path")


def test_settings_of_two_objectives_do_not_mix(recipe: Path, mine: Path) -> None:
    own: Recipe = load_recipe(recipe, [f"objective.path={mine}:SoftPrefix", "objective.power=0.25"])
    assert override_recipe(own, [f"objective.path={mine}:SoftPrefix"]) == own
    assert override_recipe(own, ["objective.name=grpo"]) == load_recipe(recipe, ["objective.name=grpo"])
    with pytest.raises(UserError, match="did you mean 'power'"):
        override_recipe(own, ["objective.powr=1"])
    (recipe.parent / "both.toml").write_text(
        recipe.read_text().split("[objective]")[0]
        + f'''
[objective]
name = "grpo"
path = "{mine}:SoftPrefix"
'''
    )
    with pytest.raises(UserError, match="leave one out"):
        load_recipe(recipe.parent / "both.toml")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("rewards - rewards.mean(1, keepdim=True)", "it returned None; is a return missing"),
        ("return rewards / 0", "not finite"),
        ("return rewards * 1e300", "not finite"),
        ("return rewards.mean(1)", r"returned \[2\] for rewards \[2, 4\]"),
        ("return rewards.men(1)", r"no attribute 'men' \(mine.py, line 2\)"),
    ],
)
def test_mistakes_in_an_advantage_function(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(rewards):\n    {body}\n")
    with pytest.raises(UserError, match=message):
        group_advantages(torch.eye(2, 4), f"{tmp_path}/mine.py:mine")
