"""Whole runs with ``actor.keep_policies``: kills during a removal, audits, and commands that need a removed policy."""

import shutil

import pytest

from megarl.storage.policies import read_info
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from tests.helpers import megarl
from tests.phases.commands import settings, succeed, train
from tests.phases.test_kill import assert_same_weights, kill_at, metrics_of

pytestmark = pytest.mark.crash

SMALL = ("schedule.stages=5", "schedule.updates_per_stage=2", "actor.checkpoint_every=1", "eval.prompts=4")
KEEP = ("actor.keep_policies=1", "actor.keep_stages=3")


@pytest.fixture(scope="module")
def keeps_all(recipe, tmp_path_factory):
    """A run that keeps all policies."""
    root = tmp_path_factory.mktemp("everything") / "run"
    train(recipe, root, *settings(*SMALL))
    return RunDir.open(root)


@pytest.fixture(scope="module")
def keeps_one(recipe, tmp_path_factory):
    """The same run with ``keep_policies = 1``, killed during removals and at the moments when it held most."""
    root, command = tmp_path_factory.mktemp("kept") / "run", settings(*SMALL, *KEEP)
    removals = (
        r"replace .*stages/001/policy .*stages/001/\.policy\.removed\.tmp",
        r"open .*stages/001/\.policy\.removed\.tmp",
    )
    for removal in removals:
        kill_at(removal, 1, recipe, root, *command)
        assert RunDir.open(root).stage(0).is_trained()
    moments = (r"open .*stages/004/checkpoints/\.update_000002\..*\.tmp/.metadata", r"replace .*\.tmp .*/final")
    for moment in moments:  # first a checkpoint is being written, then a policy
        kill_at(moment, 1, recipe, root, *command)
    train(recipe, root, *command)
    return RunDir.open(root)


def test_a_run_that_removes_policies_ends_with_the_same_bytes(keeps_all, keeps_one):
    run = keeps_one
    assert metrics_of(run.root) == metrics_of(keeps_all.root)
    assert_same_weights(run.final, keeps_all.final)
    assert_same_weights(run.best, keeps_all.best)
    assert [stage.number for stage in run.stages() if stage.policy.exists()] == [0, 4]
    assert not [path for path in run.root.rglob(".*.tmp") if "logs" not in path.parts]


def test_the_audit_notes_removed_policies_and_reports_lost_ones(keeps_all, keeps_one, tmp_path):
    found = audit(keeps_one.root, 1000)
    assert found.problems == []
    assert any("removed ([actor] keep_policies)" in note and "stages 1, 2, 3" in note for note in found.notes)
    shutil.copytree(keeps_all.root, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/stages/002/policy")
    assert any("stages/002/policy is gone" in problem for problem in audit(tmp_path / "run", 0).problems)


def test_a_removed_policy_is_exported_again_from_the_checkpoint_of_its_last_update(keeps_all, keeps_one, tmp_path):
    run = keeps_one

    def samples(*options, code=0):
        return succeed("samples", run.root, "--tokens", "ratio", "--stage", 2, *options, code=code).stderr

    command = f"megarl export {run.root} --stage 2 --update 6 --output DIR"
    said = f"stages/003/policy was removed, by [actor] keep_policies or by hand; `{command}` makes it"
    assert said in samples(code=2)
    succeed(*command.replace("DIR", str(tmp_path / "again")).split()[1:])
    assert read_info(tmp_path / "again").weights_hash == read_info(keeps_all.stage(3).policy).weights_hash
    for policy in (tmp_path / "again", "8"):
        samples("--policy", policy)
    assert f"megarl export {run.root} --stage 1 --update 4" in samples("--policy", 4, code=2)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("optimize", "{run}", "--stage", 2, "--output", "{new}"), "keep_policies or by hand; `megarl export"),
        (("export", "{run}", "--stage", 2, "--update", 4, "--output", "{new}"), "these updates of the run only: 5, 6;"),
        (("what-if", "{run}", "--stage", 2, "--update", 4), "keep_policies determine which are kept"),
    ],
)
def test_commands_that_need_a_removed_policy_are_refused(keeps_one, tmp_path, command, words):
    places = {"run": keeps_one.root, "new": tmp_path / "new"}
    result = megarl(*(str(part).format(**places) for part in command))
    assert result.returncode == 2 and words in result.stderr, result.stderr
    assert not (tmp_path / "new").exists()


def test_what_if_works_without_the_first_policy_of_the_stage(keeps_all, keeps_one):
    command = ("--stage", 3, "--update", 7, "--batches", 2, "--json")
    one, other = (succeed("what-if", run.root, *command) for run in (keeps_all, keeps_one))
    assert one.stdout == other.stdout


def test_keep_policies_applies_to_a_finished_run(keeps_all, recipe, tmp_path):
    """The setting may change at any time. A ``final/`` that is lost is exported again without the removed policies."""
    root = tmp_path / "run"
    shutil.copytree(keeps_all.root, root)
    command = settings(*SMALL, "actor.keep_policies=1")
    train(recipe, root, *command)
    run = RunDir.open(root)
    assert [stage.number for stage in run.stages() if stage.policy.exists()] == [0, 4]
    shutil.rmtree(run.final)
    train(recipe, root, *command)
    assert_same_weights(run.final, keeps_all.final)
