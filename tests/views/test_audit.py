"""``megarl audit`` finds no problem in runs of every kind, and finds each planted fault, also where checksums agree."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest

from megarl.commands.one_phase import branch, changed_recipe
from megarl.recipe.load import override_recipe
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from megarl.views.audit.rollouts import versions_allowed
from tests.commands.stages.made_up import make_run
from tests.phases.commands import settings, succeed, train
from tests.views.audit_faults import FAULTS, RECOMPUTED, rewrite, updates_in_disorder
from tests.views.synthetic_run import make_recipe

EVERYTHING = 1000  # groups whose rewards and log-probs are recomputed: more than a stage has
SMALL = ("schedule.updates_per_stage=4", "actor.checkpoint_every=2")


@pytest.fixture(scope="module")
def staged(recipe):
    train(recipe, recipe.parent / "staged", *settings(*SMALL))
    return recipe.parent / "staged"


@pytest.fixture
def copy(staged, tmp_path):
    return shutil.copytree(staged, tmp_path / "run", symlinks=True)


def test_the_audit_of_a_staged_run_finds_no_problem(staged):
    found = audit(staged, EVERYTHING)
    assert (found.problems, found.notes) == ([], [])
    for row in found.stages:
        assert (row.generated, row.trained, row.not_chosen, row.pending, row.updates) == (16, 16, 0, 0, 4)
        assert row.tokens == row.trained_tokens > 0
    above, head, first, *_, end = found.table().splitlines()
    assert len(head) <= 80 and end == "everything that was checked agrees"
    assert above[: head.index("chosen") + 6].endswith("not") and first.split()[:3] == ["0", "16", "16"]


def test_groups_that_were_not_chosen_or_are_not_trained_yet_are_counted(recipe, tmp_path):
    """In a run whose stage is sealed but has no update, and in a branch of it."""
    run = make_run(recipe, tmp_path / "run", "rollout.oversample=2", chosen=[1, 2, 3, 5, 6, 9, 12, 15])
    made = branch(run.stage(0), tmp_path / "branch", changed_recipe(run.stage(0), ["objective.name=grpo"])).run
    for each in (run, made):
        found = audit(each.root, 0)
        row = found.stages[0]
        assert (row.generated, row.not_chosen, row.trained, row.pending) == (16, 8, 0, 8)
    assert found.problems == []


def test_the_command_exits_with_1_if_something_does_not_agree(staged, copy):
    assert json.loads(succeed("audit", staged, "--json", "--samples", 0).stdout)["problems"] == []
    updates_in_disorder(copy)
    assert "update 3 follows update 3" in succeed("audit", copy, "--samples", 0, code=1).stdout


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(copy, fault):
    fault(copy)
    problems = "\n".join(audit(copy, EVERYTHING if fault in RECOMPUTED else 0).problems)
    assert [said for said in FAULTS[fault] if said not in problems] == [], problems


@pytest.mark.parametrize(("every", "problems"), [(1000, 0), (3, 1)])
def test_a_token_whose_experts_were_tied_is_no_problem_and_many_are(copy, every, problems):
    """.05 nats more at the first token of the first of every so many responses of the first stage."""
    count = itertools.count()

    def changed(response):
        logprobs = response.rollout_logprobs.copy()
        logprobs[0] -= 0.05 * (next(count) % every == 0)
        return replace(response, rollout_logprobs=logprobs)

    rewrite(copy, lambda groups: [replace(g, responses=tuple(map(changed, g.responses))) for g in groups])
    assert next(count) > 3
    found = audit(copy, EVERYTHING).problems
    assert len(found) == problems and all("the log-probs of stage 0 are not its policy's" in said for said in found)


@pytest.mark.parametrize(
    ("lag", "allowed"),
    [("delay=1", [(0, 0), (4, 4), (6, 6), (12, 12)]), ("max_lag=3", [(0, 1), (4, 7), (5, 8), (12, 15)])],
)
def test_policy_versions_that_a_live_schedule_allows(tmp_path, lag, allowed):
    """For the groups of updates 2, 8, 9 and 16, with a new policy after every second one."""
    staged = make_recipe({"stages": 2, "updates_per_stage": 8, "prompts_per_update": 4})
    changes = ["schedule.kind=live", "schedule.sync_every=2", "eval.every=0", f"schedule.{lag}"]
    run = RunDir(tmp_path, override_recipe(staged, changes))
    assert [versions_allowed(run.stage(group // 32), group) for group in (5, 31, 32, 63)] == allowed
