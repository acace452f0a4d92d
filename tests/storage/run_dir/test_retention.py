"""``actor.keep_policies``: which policies are removed, what is recorded of them, and kills during the removal."""

import errno
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from megarl.commands import train as train_module
from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.storage import files
from megarl.storage.checked_json import write_checked
from megarl.storage.checkpoints import checkpoint_path
from megarl.storage.policies import PolicyInfo, read_info, write_info
from megarl.storage.run_dir import RunDir, retention
from megarl.storage.run_dir.retention import check_kept, remove_policies, removed, require_policy
from megarl.views.audit import check_policies
from megarl.views.audit.rollouts import StageTotals

STAGES = 6
LIVE = ("schedule.kind=live", "schedule.sync_every=2", "schedule.delay=5")


def create_or_resume(recipe, root, *settings):
    """Create a run, or resume it with these settings."""
    return RunDir.create(root, load_recipe(recipe, [f"schedule.stages={STAGES}", "eval.every=0", *settings]))


def make_run(recipe, root, *settings):
    """A run in its last stage: every stage has a policy and sealed rollouts, and there is no ``final/`` yet."""
    run = create_or_resume(recipe, root, *settings)
    for stage in run.stages():
        write_policy(stage)
        seal(stage)
    return run


def seal(stage):
    stage.rollouts.mkdir(parents=True, exist_ok=True)
    (stage.rollouts / "SEALED").touch()


def write_policy(stage):
    stage.policy.mkdir(parents=True)
    (stage.policy / "config.json").write_text("{}")
    (stage.policy / "model.safetensors").write_bytes(b"%d" % stage.number)
    write_info(stage.policy, PolicyInfo(stage.first_update, f"hash of {stage.number}"))


def kept(run):
    return [stage.number for stage in run.stages() if stage.policy.exists()]


@pytest.mark.parametrize(("keep", "stay"), [(1, [0, 4, 5]), (3, [0, 2, 3, 4, 5]), (4, None), (9, None), (None, None)])
def test_the_first_the_current_and_the_last_finished_stages_keep_their_policies(recipe, tmp_path, keep, stay):
    run = make_run(recipe, tmp_path / "run", *([] if keep is None else [f"actor.keep_policies={keep}"]))
    every = list(range(STAGES))
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == (stay or every)
    for stage in run.stages():
        gone = stage.number not in (stay or every)
        assert stage.removed_policy.exists() == gone
        assert (removed(stage) is not None) == gone
        if gone:
            found = removed(stage)
            assert (found.version, found.weights_hash) == (stage.first_update, f"hash of {stage.number}")
            assert found.files.keys() == {"config.json"}
        assert stage.is_trained() == (stage.number < STAGES - 1)


def test_policies_are_removed_one_stage_after_another(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=2")
    left = []
    for stage in [*run.stages(), run.end]:
        remove_policies(stage)
        left.append(kept(run))
    every = list(range(STAGES))
    assert left == [every] * 4 + [[0, 2, 3, 4, 5], [0, 3, 4, 5], [0, 4, 5]]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("count", range(1, 14))
def test_a_kill_at_any_step_leaves_a_run_that_continues(recipe, tmp_path, monkeypatch, count):
    """One call removes two policies; a step is a file or directory that is written, renamed or deleted."""
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=2")
    steps = [0]

    def step(function):
        def killed(*arguments, **options):
            steps[0] += 1
            if steps[0] == count:
                raise Killed
            return function(*arguments, **options)

        return killed

    def delete(path, ignore_errors=False):
        for file in sorted(Path(path).iterdir()) if Path(path).exists() else []:
            step(file.unlink)()
        if Path(path).exists():
            step(Path(path).rmdir)()

    with monkeypatch.context() as patch:
        patch.setattr(retention, "write_checked", step(retention.write_checked))
        patch.setattr(Path, "rename", step(Path.rename))
        patch.setattr(files.shutil, "rmtree", delete)
        try:
            remove_policies(run.stage(STAGES - 1))
            killed = False
        except Killed:
            killed = True
    assert killed == (count <= 2 * (1 + 1 + 4))
    for stage in run.stages():
        assert stage.policy.exists() or removed(stage).weights_hash == f"hash of {stage.number}"
        assert stage.is_trained() == (stage.number < STAGES - 1)
        if stage.policy.exists():
            assert read_info(stage.policy).files.keys() == {"config.json"} and len(list(stage.policy.iterdir())) == 3
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 3, 4, 5]
    assert not list(run.root.rglob(".*.tmp"))


def test_a_policy_that_waits_for_an_evaluation_is_kept_until_then(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1", "eval.every=1")
    for version in (run.stage(number).first_update for number in (0, 1, 2, 4, 5)):
        run.log_event("evaluation", stage=0, update=version, suite="heldout", accuracy=0.5)
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 3, 4, 5]
    run.log_event("evaluation", stage=3, update=run.stage(3).first_update, suite="heldout", accuracy=0.5)
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 4, 5]


def test_policies_that_engines_of_a_live_run_may_load_are_kept(recipe, tmp_path):
    """The last stage begins at update 30. Its first batches may come from policies 10, then 18 updates older."""
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1", *LIVE)
    assert run.stage(STAGES - 1).oldest_needed == 20
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 4, 5]
    shutil.rmtree(tmp_path / "run")
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1", *LIVE[:-1], "schedule.delay=9")
    assert run.stage(STAGES - 1).oldest_needed == 12
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 2, 3, 4, 5]


def test_policies_behind_links_and_those_without_a_readable_version_are_kept(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    run.stage(2).policy.rename(tmp_path / "origin")
    run.stage(2).policy.symlink_to(tmp_path / "origin")
    (run.stage(3).policy / "megarl.json").write_text("{")
    (run.stage(1).policy / "megarl.json").unlink()
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "origin/model.safetensors").exists()


def test_the_error_about_a_removed_policy_names_the_nearest_alternative(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    remove_policies(run.stage(STAGES - 1))
    assert require_policy(run.stage(4)) == run.stage(4).policy
    check_kept(run.end)
    with pytest.raises(UserError, match="final does not exist: optimize stage 5 first"):
        require_policy(run.end)
    checkpoint_path(run.stage(0).checkpoints, 6).mkdir(parents=True)
    checkpoint_path(run.stage(1).checkpoints, 4).mkdir(parents=True)
    again = f"`megarl export {run.root} --stage 0 --update 6 --output DIR` makes it again"
    with pytest.raises(UserError, match=again):
        check_kept(run.stage(1))
    nearest = "the nearest that still exists is .*stages/001/checkpoints/update_000004, after update 10 instead of 12"
    with pytest.raises(UserError, match=nearest):
        require_policy(run.stage(2))
    with pytest.raises(UserError, match="stages/004/policy, after update 24 instead of 18"):
        require_policy(run.stage(3))
    record = run.stage(3).removed_policy
    record.write_text(json.dumps({"version": 18}))
    with pytest.raises(UserError, match="removed_policy.json is damaged"):
        removed(run.stage(3))


def test_records_of_stages_whose_rollouts_were_deleted_by_hand_are_ignored(recipe, tmp_path):
    """Somebody deletes policies and rollouts from stage 2 on, to continue from stage 1, but leaves the records."""
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    remove_policies(run.stage(STAGES - 1))
    for stage in run.stages()[2:]:
        shutil.rmtree(stage.policy, ignore_errors=True)
        shutil.rmtree(stage.rollouts)
    assert run.stage(2).removed_policy.exists() and run.stage(3).removed_policy.exists()
    assert [stage.is_trained() for stage in run.stages()] == [True] + [False] * (STAGES - 1)
    assert [removed(stage) is not None for stage in run.stages()] == [False, True] + [False] * (STAGES - 2)
    with pytest.raises(UserError, match="stages/002/policy does not exist: optimize stage 1 first"):
        require_policy(run.stage(2))
    with pytest.raises(UserError, match="stages/001/policy was removed, as"):
        require_policy(run.stage(1))


def test_records_of_the_first_stage_and_of_the_end_are_ignored(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    remove_policies(run.stage(STAGES - 1))
    seal(run.end)
    for stage in (run.stage(0), run.end):
        shutil.copy(run.stage(1).removed_policy, stage.removed_policy)
    shutil.rmtree(run.base)
    assert not run.stage(STAGES - 1).is_trained()
    assert removed(run.stage(0)) is removed(run.end) is None


def test_train_starts_no_phase_for_a_stage_whose_policy_was_removed(recipe, tmp_path, monkeypatch):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    remove_policies(run.stage(STAGES - 1))
    for stage in run.stages()[2:]:
        shutil.rmtree(stage.directory)
    started = []
    monkeypatch.setattr(train_module, "check_run", lambda _: None)
    monkeypatch.setattr(train_module, "run_phase", lambda _, stage, name, count: started.append((stage.number, name)))
    with pytest.raises(UserError, match="stages/001/policy was removed, as"):
        train_module.train(Mock(), run)
    assert started == []


def test_lost_evaluations_are_repeated_only_for_policies_that_still_exist(recipe, tmp_path, monkeypatch):
    """The policies of stages 1 and 2 were removed and events.jsonl is gone: only the others are evaluated again."""
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=2", "eval.every=1")
    for stage in run.stages():
        run.log_event("evaluation", stage=stage.number, suite="heldout", accuracy=0.5)
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 3, 4, 5]
    run.events.unlink()
    run = RunDir.open(run.root)
    started = []
    monkeypatch.setattr(train_module, "check_run", lambda _: None)
    monkeypatch.setattr(train_module, "run_phase", lambda _, stage, name, count: started.append((stage.number, name)))
    train_module.train(Mock(), run, until=("rollout", STAGES - 1))
    assert started == [(number, "evaluate") for number in (0, 3, 4, 5)]


def remove(stage):
    """Remove a stage's policy and write its record, as `remove_policies` does, whatever the settings are."""
    write_checked(stage.removed_policy, vars(PolicyInfo(stage.first_update, f"hash of {stage.number}")))
    shutil.rmtree(stage.policy, ignore_errors=True)


def audit_policies(run):
    """(problems, notes) of the audit, without problems of checksums, since the policies here have made-up hashes."""
    notes = []
    found = check_policies(run, [StageTotals(stage.number) for stage in run.stages()], notes)
    return [problem for problem in found if "do not match their checksum" not in problem], notes


def test_the_audit_reports_policies_that_are_gone_without_a_record(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=2")
    (run.stage(1).policy / "megarl.json").unlink()  # so retention neither removes nor records this policy
    remove_policies(run.stage(STAGES - 1))
    shutil.rmtree(run.stage(1).policy)
    problems, notes = audit_policies(run)
    assert len(problems) == 1 and "stages/001/policy is gone, but stage 5 has begun" in problems[0]
    assert any(note.endswith("the policy of stage 2") for note in notes)
    for stage in (run.stage(0), run.stage(1), run.stage(4)):
        remove(stage)
    problems, notes = audit_policies(run)
    assert len(problems) == 1 and "stages/000/policy is gone, but stage 5 has begun" in problems[0]
    assert any(note.endswith("the policy of stages 1, 2, 4") for note in notes)


@pytest.mark.parametrize(
    "record",
    [
        {"weights_hash": 5},
        {"version": "6"},
        {"version": True},
        {"files": []},
        {"files": {"config.json": 5}},
    ],
)
def test_a_record_with_values_of_wrong_types_is_damaged(recipe, tmp_path, record):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    remove_policies(run.stage(STAGES - 1))
    assert audit_policies(run)[0] == []
    write_checked(run.stage(1).removed_policy, {**vars(removed(run.stage(1))), **record})
    assert len([one for one in audit_policies(run)[0] if "stages/001/removed_policy.json is damaged" in one]) == 1


def test_a_record_without_a_checksum_is_damaged(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    remove_policies(run.stage(STAGES - 1))
    run.stage(1).removed_policy.write_text(json.dumps(vars(removed(run.stage(1)))))
    with pytest.raises(UserError, match="it has no checksum"):
        removed(run.stage(1))


def leftover(run, number):
    """What a removal of the stage's policy leaves if it is cut short after the policy was renamed."""
    return run.stage(number).directory / ".policy.removed.tmp"


def test_a_file_that_cannot_be_deleted_yet_does_not_stop_the_run(recipe, tmp_path, monkeypatch):
    """On NFS a deleted file stays under another name while it is open. The next call deletes the rest."""
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    real = shutil.rmtree

    def busy(path, ignore_errors=False):
        if Path(path).exists() and not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", busy)
        remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 4, 5] and leftover(run, 3).exists()
    assert files.shutil.rmtree is real
    remove_policies(run.stage(STAGES - 1))
    assert not list(run.root.rglob(".policy.*"))


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_leftover_that_is_not_a_directory_is_deleted_too(recipe, tmp_path, kind):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    for number in (2, 4):  # a stage whose policy is removed, and one whose policy is kept
        if kind == "file":
            leftover(run, number).touch()
        else:
            leftover(run, number).symlink_to(tmp_path / ("other" if kind == "link" else "nothing"))
    remove_policies(run.stage(STAGES - 1))
    remove_policies(run.stage(0))
    assert kept(run) == [0, 4, 5] and (tmp_path / "other/file").exists()
    assert not list(run.root.glob("stages/*/.policy.*"))


def test_a_policy_that_cannot_be_renamed_is_kept_until_the_next_call(recipe, tmp_path, monkeypatch, capsys):
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    rename = Path.rename

    def refused(path, target):
        if path == run.stage(2).policy:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 2, 4, 5]
    assert "stages/002/policy ([actor] keep_policies): Perm" in capsys.readouterr().out
    assert removed(run.stage(2)) is None
    remove_policies(run.stage(STAGES - 1))
    assert kept(run) == [0, 4, 5]


def test_a_policy_behind_a_linked_stage_is_kept_and_one_of_a_linked_run_is_removed(recipe, tmp_path):
    other = make_run(recipe, tmp_path / "other")
    run = make_run(recipe, tmp_path / "run", "actor.keep_policies=1")
    shutil.rmtree(run.stage(2).directory)
    run.stage(2).directory.symlink_to(other.stage(2).directory)
    (tmp_path / "link").symlink_to(run.root)
    remove_policies(RunDir(tmp_path / "link", run.recipe).stage(STAGES - 1))
    assert kept(run) == [0, 2, 4, 5] and kept(other) == list(range(STAGES))
    assert not other.stage(2).removed_policy.exists()
