"""`megarl export` and `megarl eval` of a checkpoint."""

from safetensors.torch import load_file

from megarl.storage.run_dir import RunDir
from tests.helpers import events, megarl


def weights(directory):
    return load_file(directory / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_a_checkpoint_is_exported_and_evaluated_as_the_policy_that_the_run_exported(recipe, tmp_path):
    """The run exports and evaluates its policy after 4 of 6 updates by itself, too."""
    settings = ("schedule.stages=1", "eval.every_updates=4", "actor.checkpoint_every=4", "actor.keep_checkpoints=6")
    kept = tmp_path / "kept"
    made = megarl("train", recipe, "--run-dir", tmp_path / "run", *(w for s in settings for w in ("--set", s)))
    assert made.returncode == 0, made.stderr
    run = RunDir.open(tmp_path / "run")
    end = megarl("export", run.root, "--stage", 0, "--update", 6, "--output", tmp_path / "end")
    assert end.returncode == 0, end.stderr
    assert same(weights(tmp_path / "end"), weights(run.final))
    (event,) = [event for event in events(run, "evaluation") if event["update"] == 4]
    result = megarl("eval", run.root, "--stage", 0, "--update", 4, "--output", kept)
    assert result.returncode == 0, result.stderr
    assert f"avg@1 {event['accuracy']:.4f}" in result.stdout
    assert not same(weights(kept / "policies/stage_000_update_000004"), weights(run.final))
    again = megarl("export", run.root, "--stage", 0, "--update", 4, "--output", kept)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    for place, message in (((0, 3), "the policies after updates 0, 4, 6"), ((1, 0), "stages 0 to 0")):
        wrong = megarl("eval", run.root, "--stage", place[0], "--update", place[1])
        assert (wrong.returncode, message in wrong.stderr) == (2, True), wrong.stderr
