"""A whole run of adapters: killed and continued, exported from its checkpoints, and what it cannot do."""

import pytest

from tests.helpers import megarl, read_lines
from tests.phases.test_kill import assert_same_run, kill_at, moments

LORA = ("--set", "actor.lora.rank=4", "--set", "optimizer.lr=2e-3", "--set", "eval.every=0")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    result = megarl("train", recipe, "--run-dir", run, *LORA)
    assert result.returncode == 0, result.stderr
    return run


@pytest.mark.crash
def test_a_killed_run_ends_with_the_same_bytes(undisturbed, recipe, tmp_path):
    killed = tmp_path / "killed"
    for stage, moment in ((0, "between checkpoints"), (0, "export"), (1, "last checkpoint under way")):
        kill_at(*moments(stage)[moment], recipe, killed, *LORA)
    result = megarl("train", recipe, "--run-dir", killed)
    assert result.returncode == 0, result.stderr
    assert_same_run(undisturbed, killed)


def test_the_engine_stores_with_merged_weights_what_the_actor_computes_with_adapters_beside_them(undisturbed):
    policies = [undisturbed / "stages/000/policy", undisturbed / "stages/001/policy", undisturbed / "final"]
    assert len({(policy / WEIGHTS).read_bytes() for policy in policies}) == 3
    begins = [update for update in read_lines(undisturbed / "metrics.jsonl") if update["staleness"] == 0]
    assert [update["stage"] for update in begins] == [0, 1]
    assert all(update["ratio/q100"] == pytest.approx(1, abs=1e-4) for update in begins)


def test_the_rehearsal_reads_back_what_a_checkpoint_has(recipe):
    result = megarl("doctor", "--recipe", recipe, *LORA)
    assert result.returncode == 0 and "an update, its export and a checkpoint passed" in result.stdout, result.stderr


@pytest.mark.parametrize("updates", [4, 6])
def test_the_policy_of_a_checkpoint_is_exported(undisturbed, tmp_path, updates):
    command = ("export", undisturbed, "--stage", 1, "--update", updates, "--output", tmp_path / "policy")
    result = megarl(*command)
    assert result.returncode == 0, result.stderr
    exported = (tmp_path / "policy" / WEIGHTS).read_bytes()
    assert (exported == (undisturbed / "final" / WEIGHTS).read_bytes()) == (updates == 6)
    assert exported != (undisturbed / "stages/001/policy" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("what-if", "{run}", "--stage", 0), "what-if compares gradients of all weights"),
        (
            ("optimize", "{run}", "--stage", 1, "--output", "{new}", "--set", "actor.lora.rank=2"),
            "stage 1 begins with the optimizer of updates before",
        ),
        (("train", "{recipe}", "--run-dir", "{new}", "--continue-from", "{run}"), "optimizer is of adapters"),
        (
            ("train", "{recipe}", "--run-dir", "{new}", "--set", "actor.lora.rank=999"),
            "rank = 999 is more than the rank",
        ),
    ],
)
def test_what_adapters_cannot_do_is_said_before_anything_starts(undisturbed, recipe, tmp_path, command, message):
    places = {"run": undisturbed, "new": tmp_path / "new", "recipe": recipe}
    result = megarl(*(str(part).format(**places) for part in command))
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "new/logs").exists()
