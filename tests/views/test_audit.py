"""``megarl audit`` finds no problem in sound runs, and each planted fault, also where checksums agree."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest

from megarl.commands.one_phase import branch, changed_recipe
from megarl.views.audit import audit
from tests.commands.stages.made_up import make_run
from tests.phases.commands import settings, succeed, train
from tests.views.audit_faults import FAULTS, RECOMPUTED, of_version, rewrite, updates_in_disorder

EVERYTHING = 1000  # groups whose rewards and log-probs are recomputed: more than a stage has
SMALL = ("schedule.updates_per_stage=4", "actor.checkpoint_every=2")
LIVE = ("schedule.kind='live'", "schedule.stages=1", "schedule.updates_per_stage=8")
LIVE += ("schedule.sync_every=2", "schedule.delay=1")


@pytest.fixture(scope="module")
def staged(recipe):
    train(recipe, recipe.parent / "staged", *settings(*SMALL))
    return recipe.parent / "staged"


@pytest.fixture(scope="module")
def live(recipe):
    train(recipe, recipe.parent / "live", *settings(*LIVE, "eval.every=0", "actor.checkpoint_every=2"))
    return recipe.parent / "live"


@pytest.fixture
def copy(staged, tmp_path):
    """A copy of the staged run that a test may damage."""
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


def test_the_audit_of_a_live_run_finds_no_problem(live):
    found = audit(live, EVERYTHING)
    assert found.problems == []
    assert [note for note in found.notes if "several policies" not in note] == []
    assert (found.stages[0].trained, found.stages[0].pending) == (32, 0)


def test_groups_that_were_not_chosen_or_are_not_trained_yet_are_counted(recipe, tmp_path):
    """In a run whose stage is sealed but has no update, and in a branch of it."""
    run = make_run(recipe, tmp_path / "run", "rollout.oversample=2", chosen=[1, 2, 3, 5, 6, 9, 12, 15])
    made = branch(run.stage(0), tmp_path / "branch", changed_recipe(run.stage(0), ["objective.name=grpo"])).run
    for each in (run, made):
        found = audit(each.root, 0)
        row = found.stages[0]
        assert (row.generated, row.not_chosen, row.trained, row.pending) == (16, 8, 0, 8)
    assert found.problems == []


def test_the_command_exits_with_1_if_something_does_not_agree(copy):
    assert json.loads(succeed("audit", copy, "--json", "--samples", 0).stdout)["problems"] == []
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


def test_a_policy_version_that_the_schedule_does_not_allow_is_found(live, tmp_path):
    """The groups of a live run's first shard get policy versions that are newer by 2 than the schedule allows."""
    run = shutil.copytree(live, tmp_path / "run", symlinks=True)
    rewrite(run, lambda groups: [of_version(g, g.responses[0].policy_version + 2) for g in groups])
    problems = audit(run, 0).problems
    assert [problem for problem in problems if "the schedule allows 0 to 0" in problem], problems
    assert [problem for problem in problems if "staleness" in problem], problems
