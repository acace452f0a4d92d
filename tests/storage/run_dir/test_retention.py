"""``actor.keep_policies``: which policies are removed, and what follows from it.

tests/phases/test_retention.py kills runs during removals.
"""

import errno
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from megarl.commands import train as train_module
from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.storage import files
from megarl.storage.policies import PolicyInfo, write_info
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.retention import remove_policies, require_policy

STAGES = 6
LIVE = ("schedule.kind=live", "schedule.sync_every=2")


@pytest.fixture
def make_run(recipe, tmp_path):
    """Makes a run in its last stage: every stage has a policy and sealed rollouts, and there is no ``final/`` yet."""

    def make(*settings, name="run"):
        wanted = [f"schedule.stages={STAGES}", "eval.every=0", *settings]
        run = RunDir.create(tmp_path / name, load_recipe(recipe, wanted))
        for stage in run.stages():
            stage.policy.mkdir(parents=True)
            (stage.policy / "config.json").write_text("{}")
            (stage.policy / "model.safetensors").write_bytes(b"%d" % stage.number)
            write_info(stage.policy, PolicyInfo(stage.first_update, f"hash of {stage.number}"))
            stage.rollouts.mkdir()
            (stage.rollouts / "SEALED").touch()
        return run

    return make


def kept(run):
    return [stage.number for stage in run.stages() if stage.policy.exists()]


@pytest.mark.parametrize(("keep", "stay"), [(1, [0, 4, 5]), (3, [0, 2, 3, 4, 5]), (None, list(range(STAGES)))])
def test_the_first_and_the_last_stages_keep_their_policies(make_run, keep, stay):
    run = make_run(*([] if keep is None else [f"actor.keep_policies={keep}"]))
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == stay
    for stage in run.stages():
        assert stage.policy_was_removed() == (stage.number not in stay)
        assert stage.is_trained() == (stage.number < STAGES - 1)


def test_a_policy_that_waits_for_an_evaluation_is_kept_until_then(make_run, monkeypatch):
    """If events.jsonl is lost, only the policies that still exist are evaluated again."""
    run = make_run("actor.keep_policies=1", "eval.every=1")
    for number in (0, 1, 2, 4, 5):
        run.log_event("evaluation", update=run.stage(number).first_update, suite="heldout", accuracy=0.5)
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 3, 4, 5]
    run.events.unlink()
    started = phases_started(monkeypatch)
    train_module.train(Mock(), RunDir.open(run.root), until=("rollout", STAGES - 1))
    assert started == [(number, "evaluate") for number in (0, 3, 4, 5)]


def phases_started(monkeypatch):
    """A list of (stage, phase) to which `train` adds what it would run."""
    started = []
    monkeypatch.setattr(train_module, "check_run", lambda _: None)
    monkeypatch.setattr(train_module, "run_phase", lambda _, stage, name, count: started.append((stage.number, name)))
    return started


@pytest.mark.parametrize(("delay", "oldest", "stay"), [(5, 20, [0, 4, 5]), (9, 12, [0, 2, 3, 4, 5])])
def test_policies_that_engines_of_a_live_run_may_load_are_kept(make_run, delay, oldest, stay):
    """The last stage begins at update 30. Its first batches may come from policies 10 or 18 updates older."""
    run = make_run("actor.keep_policies=1", *LIVE, f"schedule.delay={delay}")
    assert run.stage(STAGES - 1).oldest_needed == oldest
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == stay


def test_policies_behind_links_are_kept(make_run, tmp_path):
    run, other = make_run("actor.keep_policies=1"), make_run(name="other")
    run.stage(2).policy.rename(tmp_path / "origin")
    run.stage(2).policy.symlink_to(tmp_path / "origin")
    shutil.rmtree(run.stage(1).directory)
    run.stage(1).directory.symlink_to(other.stage(1).directory)
    remove_policies(run.end)
    assert kept(run) == [0, 1, 2, 5] and kept(other) == list(range(STAGES))
    assert (tmp_path / "origin/model.safetensors").exists()
    (tmp_path / "link").symlink_to(other.root)
    linked = RunDir(tmp_path / "link", run.recipe)
    remove_policies(linked.stage(STAGES - 1))
    assert kept(other) == [0, 4, 5]


def test_a_removed_policy_is_not_made_again_and_who_needs_it_learns_how_to_get_it(make_run, monkeypatch):
    run = make_run("actor.keep_policies=1")
    remove_policies(run.stage(STAGES - 1))
    assert [stage.number for stage in [*run.stages(), run.end] if stage.policy_was_removed()] == [1, 2, 3]
    assert require_policy(run.stage(4)) == run.stage(4).policy
    with pytest.raises(
        UserError, match=r"stages/003/policy was removed, by .* `megarl export .* --stage 2 --update 18"
    ):
        require_policy(run.stage(3))
    for stage in run.stages()[2:]:  # somebody deletes all later ones, to continue from stage 1
        shutil.rmtree(stage.policy, ignore_errors=True)
        shutil.rmtree(stage.rollouts)
    assert [stage.is_trained() for stage in run.stages()] == [False] * STAGES
    with pytest.raises(UserError, match="stages/002/policy does not exist: optimize stage 1 first"):
        require_policy(run.stage(2))
    shutil.rmtree(run.stage(1).rollouts)
    shutil.copytree(run.stage(0).policy, run.stage(3).policy)
    started = phases_started(monkeypatch)
    with pytest.raises(UserError, match="stages/001/policy was removed, by"):
        train_module.train(Mock(), run)
    assert started == []


def test_a_policy_that_cannot_be_renamed_or_deleted_yet_does_not_stop_the_run(make_run, monkeypatch, capsys):
    """On NFS a deleted file stays under another name while it is open. The next start deletes the rest."""
    run = make_run("actor.keep_policies=1")
    rename = Path.rename

    def busy(path, ignore_errors=False):
        if Path(path).exists() and not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    def refused(path, target):
        if path == run.stage(2).policy:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", busy)
        patch.setattr(Path, "rename", refused)
        remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 2, 4, 5] and (run.stage(3).directory / ".policy.removed.tmp").exists()
    assert "stages/002/policy ([actor] keep_policies): Perm" in capsys.readouterr().out
    for number in (0, STAGES - 1):
        remove_policies(run.stage(number))
    assert kept(run) == [0, 4, 5] and not list(run.root.rglob(".policy.*"))
