"""``megarl audit`` finds no problem in runs of every kind, and finds each planted fault, also where checksums agree."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest

from megarl.views.audit import audit
from tests.helpers import megarl
from tests.views.audit_faults import FAULTS, an_update_twice, rewrite

EVERYTHING = 1000  # groups whose rewards and log-probs are recomputed: more than a stage has
SMALL = ("schedule.updates_per_stage=4", "actor.checkpoint_every=2")
LIVE = ("schedule.kind='live'", "schedule.stages=1", "schedule.updates_per_stage=8", "schedule.sync_every=2")


def train(recipe, run, *settings):
    options = [part for setting in settings for part in ("--set", setting)]
    result = megarl("train", recipe, "--run-dir", run, *options)
    assert result.returncode == 0, result.stderr
    return run


@pytest.fixture(scope="module")
def own_recipe(recipe, tmp_path_factory):
    """A copy of the recipe, with a prompt file of its own, in another directory."""
    folder = tmp_path_factory.mktemp("audit")
    prompts = shutil.copy(recipe.parent / "prompts.jsonl", folder)
    text = recipe.read_text().replace(str(recipe.parent / "prompts.jsonl"), str(prompts))
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


@pytest.fixture(scope="module")
def staged(own_recipe):
    return train(own_recipe, own_recipe.parent / "staged", *SMALL)


@pytest.fixture(scope="module")
def live(recipe):
    return train(recipe, recipe.parent / "live", *LIVE, "schedule.delay=1", "eval.every=0", "actor.checkpoint_every=2")


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


def test_the_audit_of_a_branch_finds_no_problem(staged, tmp_path):
    result = megarl("optimize", staged, "--stage", "1", "--output", tmp_path / "branch", "--set", "objective.name=grpo")
    assert result.returncode == 0, result.stderr
    found = audit(tmp_path / "branch", EVERYTHING)
    assert found.problems == []
    assert [row.updates for row in found.stages] == [0, 4]


def test_groups_that_dynamic_sampling_did_not_choose_are_counted(recipe, tmp_path):
    oversampled = ("rollout.oversample=2", "schedule.stages=1", "eval.every=0", "rollout.groups_per_chunk=2")
    found = audit(train(recipe, tmp_path / "run", *SMALL, *oversampled), EVERYTHING)
    assert found.problems == []
    assert found.stages[0].generated == found.stages[0].trained + found.stages[0].not_chosen
    assert found.stages[0].trained == 16


def test_groups_that_are_not_trained_yet_are_pending(recipe, tmp_path):
    result = megarl("train", recipe, "--run-dir", tmp_path / "run", "--until", "rollout:0", "--set", SMALL[0])
    assert result.returncode == 0, result.stderr
    found = audit(tmp_path / "run", EVERYTHING)
    assert found.problems == []
    assert [(row.generated, row.pending) for row in found.stages] == [(16, 16), (0, 0)]


def test_the_command_exits_with_1_if_something_does_not_agree(staged, tmp_path):
    result = megarl("audit", staged, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["problems"] == []
    shutil.copytree(staged, tmp_path / "run")
    an_update_twice(tmp_path / "run")
    result = megarl("audit", tmp_path / "run")
    assert result.returncode == 1
    assert "update 3 follows update 3" in result.stdout


@pytest.mark.parametrize(("fault", "said"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_found(staged, tmp_path, fault, said):
    run = tmp_path / "run"
    shutil.copytree(staged, run, symlinks=True)
    fault(run)
    found = audit(run, EVERYTHING)
    assert [problem for problem in found.problems if said in problem], found.problems


@pytest.mark.parametrize(("every", "problems"), [(1000, 0), (3, 1)])
def test_a_token_whose_experts_were_tied_is_no_problem_and_many_are(staged, tmp_path, every, problems):
    """.05 nats more at the first token of the first of every so many responses of the first stage."""
    run = tmp_path / "run"
    shutil.copytree(staged, run, symlinks=True)
    count = itertools.count()

    def changed(response):
        logprobs = response.rollout_logprobs.copy()
        logprobs[0] -= 0.05 * (next(count) % every == 0)
        return replace(response, rollout_logprobs=logprobs)

    rewrite(run, lambda groups: [replace(g, responses=tuple(map(changed, g.responses))) for g in groups])
    assert next(count) > 3
    found = audit(run, EVERYTHING).problems
    assert len(found) == problems and all("the log-probs of stage 0 are not its policy's" in said for said in found)


def test_a_policy_version_that_the_schedule_does_not_allow_is_found(live, tmp_path):
    """The groups of a live run's first shard get policy versions that are newer by 2 than the schedule allows."""
    run = tmp_path / "run"
    shutil.copytree(live, run, symlinks=True)

    def newer(groups):
        return [
            replace(g, responses=tuple(replace(r, policy_version=r.policy_version + 2) for r in g.responses))
            for g in groups
        ]

    rewrite(run, newer)
    problems = audit(run, 0).problems
    assert [problem for problem in problems if "the schedule allows 0 to 0" in problem], problems
    assert [problem for problem in problems if "staleness" in problem], problems
